"""From a .cu file to a cubin: NVRTC through cuda.core, with a disk cache.

A cubin is built for one exact architecture (``sm_90a``), and PTX (``compute_80``) for all from one
on: the driver translates it where it is loaded. Neither needs a GPU or a driver to build, and both
are cached under a digest of everything they depend on: the source, every header beside it, the
toolkit headers' place and version, the compiler's version, the name expressions and the options.
The cache folder holds code and is trusted, so it must be the user's own with mode 0700; an entry
whose checksum does not fit is a miss.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import struct
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemmule.backends.cuda import ptx
from gemmule.core.architectures import is_ptx
from gemmule.core.rung import HEADERS_FOLDER
from gemmule.core.waiting import Wait
from gemmule.errors import INSTALL, CompileError, GemmuleWarning
from gemmule.settings import cache_folder
from gemmule.storage.atomic import write_atomically

SCHEMA = 2
_OPTIONS: dict[str, Any] = {
    "std": "c++17",
    "device_as_default_execution_space": False,
    "ptxas_options": "-v",
    "no_display_error_number": True,
}
MAX_ENTRY_BYTES = 64 * 2**20
_WAIT = Wait("CUDA kernels", "gemmule warm --device cuda")
SYSTEM_SHARED = 1024  # of each block's shared memory


@dataclass(frozen=True, slots=True)
class Module:
    """Compiled code: the cubin or PTX, and each kernel's name expression with its symbol."""

    cubin: bytes
    symbols: dict[str, str]

    def digest(self) -> str:
        """Return the SHA-256 of the cubin, the key of its proof."""
        return hashlib.sha256(self.cubin).hexdigest()

    @property
    def is_ptx(self) -> bool:
        """Whether it is PTX: what its kernels need of a chip only the driver knows."""
        return self.cubin.endswith(b"\0") and b"\n.version" in self.cubin


def compile_file(
    path: Path, names: tuple[str, ...], arch: str, defines: tuple[str, ...] = ()
) -> Module:
    """Return the module of `path` with the kernels `names` instantiated, from cache if it can be.

    names are C++ name expressions such as ``thread_per_row<float, float, float, 128>``; arch is
    ``sm_90a`` or the like, or ``compute_80`` for PTX. Raises CompileError with the compiler's
    words, or DeviceError-free CompileError naming the missing package when NVRTC is not installed.
    """
    names, defines = tuple(dict.fromkeys(names)), tuple(defines)
    key = cubin_key(path, names, arch, defines)
    entry = _entry(key)
    cached = _read(entry) if entry is not None else None
    if cached is not None:
        return cached
    with _WAIT.measured():
        module, _ = build(path, names, arch, defines)
    if entry is not None:
        _write(entry, module)
    return module


def build(
    path: Path, names: tuple[str, ...], arch: str, defines: tuple[str, ...] = ()
) -> tuple[Module, str]:
    """Compile without the cache; return the module and ptxas' report of registers and spills."""
    core = cuda_core()
    options = core.ProgramOptions(
        name=path.name,  # the folder must not leak into the cubin, its digest is a key
        arch=arch,
        include_path=[str(HEADERS_FOLDER), *(str(p) for p in include_folders())],
        define_macro=list(defines) or None,
        **_OPTIONS,
    )
    log = io.StringIO()
    try:
        if is_ptx(arch):
            return Module(*ptx.compiled(path.read_text(), path.name, _given(options), names)), ""
        program = core.Program(path.read_text(), code_type="c++", options=options)
        code = program.compile("cubin", name_expressions=names, logs=log)
    except Exception as error:
        text = f"{log.getvalue()}\n{error}".strip()
        raise CompileError(
            f"NVRTC {compiler_version()} could not compile {path.name} for {arch} "
            f"({', '.join(names)}): {_first_error(text)} The whole log is in .log.",
            log=text,
        ) from None
    symbols = {name: _text(code.symbol_mapping[name]) for name in names}
    return Module(bytes(code.code), symbols), log.getvalue()


def _given(options: Any) -> list[bytes]:
    """Return the options of a program as NVRTC takes them, less what only machine code has."""
    return [one for one in options.as_bytes("nvrtc") if not one.startswith(b"--ptxas-options")]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror\b.*:", line)]
    return (errors or lines[-1:] or ["no message"])[0] + "."


_importing = threading.Lock()  # cuda.core swaps modules while it is imported


@functools.cache
def cuda_core() -> Any:
    """Return NVIDIA's package that compiles; CompileError, with what to do, where it is absent."""
    try:
        with _importing:
            from cuda import core
            from cuda.bindings import nvrtc

            nvrtc.nvrtcVersion()
    except Exception as error:
        raise CompileError(
            f"CUDA kernels need NVRTC and cuda-core, and they could not be loaded ({error}). "
            f"Install them: {INSTALL['cuda13']}."
        ) from None
    return core


@functools.cache
def compiler_version() -> str:
    """Return NVRTC's exact version, such as ``13.0.88``, or its major.minor where unpackaged."""
    from importlib import metadata  # late, as it brings forty modules

    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    for package in ("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{major}"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if version.startswith(f"{major}.{minor}."):
            return version
    return f"{major}.{minor}"


@functools.cache
def known_architectures() -> tuple[int, ...]:
    """Return the compute capabilities that NVRTC here compiles for; none where it does not load."""
    try:
        cuda_core()
    except CompileError:
        return ()
    from cuda.bindings import nvrtc

    _, numbers = nvrtc.nvrtcGetSupportedArchs()
    return tuple(numbers)


@functools.cache
def include_folders() -> tuple[Path, ...]:
    """Return the folders with cuda_fp16.h and its kin: the pip package's, else CUDA_HOME's."""
    from importlib import metadata

    candidates: list[Path] = []
    for package in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        candidates += [Path(str(f.locate())).parent for f in files if f.name == "cuda_fp16.h"]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            candidates.append(Path(os.environ[variable]) / "include")
    candidates.append(Path("/usr/local/cuda/include"))
    for folder in candidates:
        if (folder / "cuda_fp16.h").is_file():
            nested = folder / "cccl"
            return (folder, nested) if nested.is_dir() else (folder,)
    raise CompileError(
        "the CUDA headers (cuda_fp16.h) were not found in pip's nvidia-cuda-runtime, in CUDA_HOME "
        f"or in /usr/local/cuda. Install them: {INSTALL['cuda13']}."
    )


@functools.cache
def headers_version() -> str:
    """Return the toolkit headers' package version, or the folder they come from."""
    from importlib import metadata

    for package in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    return str(include_folders()[0])


def recipe() -> str:
    """Return what cubins depend on beyond their source, names, defines and architecture."""
    return json.dumps([compiler_version(), headers_version(), _OPTIONS])


def cubin_key(path: Path, names: tuple[str, ...], arch: str, defines: tuple[str, ...]) -> str:
    """Return a digest of all that decides what a kernel compiles to."""
    digest = hashlib.sha256()
    for text in (
        str(SCHEMA),
        arch,
        *names,
        *defines,
        compiler_version(),
        headers_version(),
        headers_digest(),
    ):
        digest.update(text.encode() + b"\0")
    digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def headers_digest() -> str:
    """Return a digest of the headers that kernels may include."""
    digest = hashlib.sha256()
    for header in sorted(HEADERS_FOLDER.glob("*.cuh")):
        text = header.read_bytes()
        digest.update(f"{header.name} {len(text)}\0".encode() + text)
    return digest.hexdigest()


def _entry(key: str) -> Path | None:
    folder = trusted_folder(cache_folder() / "cubin")
    return None if folder is None else folder / f"{key}.cubin"


@functools.cache
def trusted_folder(folder: Path) -> Path | None:
    """Create the cache folder, or warn once and go without where it cannot be trusted."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise OSError("it is a symbolic link, another user's, or writable by others")
        if not os.access(folder, os.W_OK):
            raise OSError("it is not writable")
    except OSError as error:
        warnings.warn(
            f"compiled kernels are not cached in {folder}: {error}. Set GEMMULE_CACHE to a "
            "private folder.",
            GemmuleWarning,
            stacklevel=2,
        )
        return None
    return folder


def _read(entry: Path) -> Module | None:
    """Return a cache entry whose checksum fits: its line, one of JSON with symbols, the cubin.

    The checksum covers the symbols too: a damaged one could name another kernel of the cubin.
    """
    try:
        if entry.stat().st_size > MAX_ENTRY_BYTES:
            return None
        digest, _, content = entry.read_bytes().partition(b"\n")
        if digest != hashlib.sha256(content).hexdigest().encode():
            return None
        head, _, cubin = content.partition(b"\n")
        symbols = json.loads(head)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(symbols, dict) or not all(isinstance(s, str) for s in symbols.values()):
        return None
    return Module(cubin, symbols)


def _write(entry: Path, module: Module) -> None:
    content = json.dumps(module.symbols).encode() + b"\n" + module.cubin
    digest = hashlib.sha256(content).hexdigest().encode()
    write_atomically(entry, digest + b"\n" + content)


def static_shared(module: Module) -> dict[str, int]:
    """Return the bytes of static shared memory of each kernel, by name expression.

    They are the size of a section of the cubin (an ELF file), which kernels without any lack. Where
    another section tells of memory that the system keeps (compute capability 9.0 on), they begin
    behind it.
    """
    sizes = _sections(module.cubin)
    kept = SYSTEM_SHARED if ".nv.shared.reserved.0" in sizes else 0
    return {
        name: max(0, sizes.get(f".nv.shared.{symbol}", 0) - kept)
        for name, symbol in module.symbols.items()
    }


@functools.lru_cache(maxsize=64)
def _sections(cubin: bytes) -> dict[str, int]:
    """Return the sizes of an ELF file's sections by name; none of anything else."""
    if cubin[:5] != b"\x7fELF\x02":  # 64 bits
        return {}
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<I4x16xQQ", cubin, start + size * i) for i in range(count)]
    names = headers[names_at][1]
    found = {}
    for name, _, nbytes in headers:
        first = names + name
        found[cubin[first : cubin.index(0, first)].decode()] = nbytes
    return found


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas says of one kernel."""

    symbol: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


def resources(report: str) -> Iterator[Resources]:
    """Yield the registers, spills, stack and static shared memory of every kernel in a report."""
    pattern = re.compile(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)",
        re.S,
    )
    for match in pattern.finditer(report):
        symbol, stack, stores, loads, registers, rest = match.groups()
        shared = re.search(r"(\d+) bytes smem", rest)
        yield Resources(
            symbol,
            int(registers),
            int(stores) + int(loads),
            int(stack),
            int(shared.group(1)) if shared else 0,
        )
