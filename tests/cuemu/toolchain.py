"""g++ for the emulator: where it and the CUDA headers are, its flags, and a folder of what it made.

Whatever is made is named by a digest of all that it depends on, is made by one process while others
wait for it, and appears whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
_CHECKS = "alignment,bounds,shift-exponent"


class BuildError(RuntimeError):
    """g++ or the CUDA headers are missing, or the source does not compile."""


def cuda_include_dirs() -> list[Path]:
    """Return the folders of cuda_fp16.h and its companions: the header wheels, else CUDA_HOME."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    candidates = [root / part / "include" for root in roots for part in ("cu13", "cuda_runtime")]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            candidates.append(Path(os.environ[variable]) / "include")
    candidates.append(Path("/usr/local/cuda/include"))
    for folder in candidates:
        if (folder / "cuda_fp16.h").is_file() and (folder / "crt" / "host_defines.h").is_file():
            return [folder, *(d for d in (folder / "cccl",) if d.is_dir())]
    raise BuildError(
        "cuda_fp16.h was not found; install nvidia-cuda-runtime, nvidia-cuda-crt and "
        "nvidia-cuda-cccl (extra `dev`), or set CUDA_HOME"
    )


def missing_tools() -> str | None:
    """Return why kernels cannot be compiled here, or None where they can."""
    if shutil.which("g++") is None:
        return "g++ is not installed"
    try:
        cuda_include_dirs()
    except BuildError as error:
        return str(error)
    return None


@functools.cache
def machine() -> str:
    """Return what a binary depends on beyond its source: compiler, CPU features, our headers."""
    version = subprocess.run(["g++", "-v"], capture_output=True, text=True, check=True).stderr
    cpu = Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0]
    hasher = hashlib.sha256((version + cpu).encode())
    for header in sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")]):
        hasher.update(header.read_bytes())
    for folder in cuda_include_dirs():
        hasher.update(str(folder).encode())
    return hasher.hexdigest()


def cache_dir() -> Path:
    """Return a folder that only this user can write, since what lies there is loaded and run."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "gemmule-cuemu"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"{folder} must belong to this user and be writable by no other")
    return folder


@functools.cache
def poison() -> tuple[str, ...]:
    """Return the option that fills registers nobody wrote; g++ has it from version 12 on.

    Each byte becomes 0xFE, so that floats are -1.7e38, doubles -5e303 and integers far below zero.
    """
    found = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True, check=True)
    return ("-ftrivial-auto-var-init=pattern",) if int(found.stdout.split(".")[0]) >= 12 else ()


def flags(asan: bool, bank_conflicts: bool) -> list[str]:
    """Return g++'s options but for macros and folders: one of three sets."""
    flags = ["-std=c++17", "-march=native", "-fno-strict-aliasing", "-ffp-contract=fast", "-fPIC"]
    flags += ["-fvisibility=hidden", "-fno-gnu-unique", "-fwrapv", "-w", "-pipe", *poison()]
    if asan:
        flags += ["-O1", "-g1", "-fno-omit-frame-pointer", f"-fsanitize=address,{_CHECKS}"]
    elif bank_conflicts:
        # The instrumentation of -fsanitize=thread calls us for every access; no library is linked.
        # Splitting structures would turn one 16-byte access into four of 4 bytes.
        flags += ["-O1", "-fno-tree-sra", "-fno-ipa-sra", "-fsanitize=thread", "-DCUEMU_BANKS=1"]
    else:
        # Kernels run for less time than they compile, and compile in less if a check ends all.
        flags += ["-Og", f"-fsanitize={_CHECKS}", f"-fno-sanitize-recover={_CHECKS}"]
    return flags


@contextlib.contextmanager
def one_maker(made: Path) -> Iterator[bool]:
    """Yield whether a file must be made; other processes that want it wait until it is."""
    if not made.is_file():
        with made.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield not made.is_file()
            finally:
                Path(lock.name).unlink(missing_ok=True)
    else:
        yield False
    with contextlib.suppress(OSError):
        os.utime(made)  # its last use, for prune


def prepared(mode: list[str]) -> Path:
    """Return a folder with what every build under these flags shares, made once.

    That is ``runtime.o``, the part of the emulator that depends on no kernel, and cuemu.h compiled,
    which g++ finds as ``cuemu.h.gch`` in the first folder that it searches for headers.
    """
    digest = hashlib.sha256("\0".join([machine(), *mode]).encode()).hexdigest()[:32]
    folder = cache_dir() / f"shared-{digest}"
    folder.mkdir(exist_ok=True)
    wanted = {"runtime.o": ("runtime.cpp", ["-c"])}
    if mode == flags(asan=False, bank_conflicts=False):  # the others have one build or two
        # Every launch runs it, and its checks come back where no thread runs.
        wanted["runtime.o"] = ("runtime.cpp", ["-O2", f"-fsanitize-recover={_CHECKS}", "-c"])
        wanted["cuemu.h.gch"] = ("cuemu.h", ["-x", "c++-header"])
    for name, (source, kind) in wanted.items():
        with one_maker(folder / name) as missing:
            if missing:
                with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
                    run([*compiler(mode, []), *kind, str(HERE / source), "-o", name], Path(scratch))
                    (Path(scratch) / name).replace(folder / name)
    return folder


def compiler(flags: list[str], folders: list[Path]) -> list[str]:
    """Return the beginning of a command; the CUDA headers come after `folders`."""
    if (reason := missing_tools()) is not None:
        raise BuildError(reason)
    own = [f"-I{d}" for d in folders]
    return ["g++", *flags, *own, *(f"-isystem{d}" for d in cuda_include_dirs())]


def linker(made: str, objects: list[str]) -> list[str]:
    """Return a command that makes a shared library, by the linker that takes a third of the time.

    Without the thread and undefined-behaviour libraries: their entry points are the emulator's own.
    """
    quick = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []
    return ["g++", "-shared", *quick, "-o", made, *objects, "-lrt"]


def run(command: list[str], folder: Path) -> None:
    """Run g++ in a folder; BuildError with its messages where it fails."""
    # g++ under AddressSanitizer, which a child of cuemu.asan preloads, takes four times as long.
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        command, cwd=folder, env=plain, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BuildError(f"g++ failed:\n{done.stderr[:6000]}")


def prune(folder: Path) -> None:
    """Delete kernels not used for two weeks, and what they share, which is large, after a day."""
    for pattern, days in (("*.so", 14), ("shared-*/*", 1)):
        for old in folder.glob(pattern):
            with contextlib.suppress(OSError):  # another process may have deleted it
                if old.stat().st_mtime < time.time() - days * 86400:
                    old.unlink()
