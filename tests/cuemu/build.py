"""Compiles a .cu file for the CPU with g++ and launches its kernels.

    mod = compile_cu(path, names=["copy<float>"])
    report = mod.launch("copy<float>", grid=(4, 1, 1), block=(128, 1, 1), args=[struct_bytes])

A kernel's arguments are bytes, one object per parameter. Pointers inside them are addresses of host
memory (`array.ctypes.data`); `device_array` allocates as a device does, 256-byte aligned.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import struct
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cuemu import toolchain
from cuemu.source import Sources, collect
from cuemu.toolchain import HERE, BuildError

RUNGS = HERE.parent.parent / "src" / "gemmule" / "rungs" / "_cuda"


class EmulationError(RuntimeError):
    """A kernel did what a device forbids; `kind` names it, the text says where."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


@dataclass(frozen=True)
class Report:
    """What a launch counted. `shared_*` are zero unless compiled with bank_conflicts=True."""

    barriers: int
    exchanges: int
    async_copies: int
    mma_ops: int
    shared_ideal: int
    shared_wavefronts: int
    switches: int

    @property
    def bank_conflicts(self) -> int:
        """Passes over shared memory beyond the fewest that the requests need."""
        return self.shared_wavefronts - self.shared_ideal


class _Late(ctypes.Structure):
    _fields_ = (("to", ctypes.c_void_p), ("from_", ctypes.c_void_p), ("bytes", ctypes.c_ulonglong))


MOST_LATE = 4


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("cluster", ctypes.c_uint * 3),
        ("smem", ctypes.c_uint),
        ("seed", ctypes.c_uint),
        ("cooperative", ctypes.c_uint),
        ("eager", ctypes.c_uint),
        ("late_count", ctypes.c_uint),
        ("late", _Late * MOST_LATE),
        ("timeout_s", ctypes.c_double),
    )


_COUNTERS = tuple(Report.__dataclass_fields__)


class _Report(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_char * 32),
        ("text", ctypes.c_char * 2000),
        *((name, ctypes.c_longlong) for name in _COUNTERS),
    )


class Module:
    """The compiled kernels of one .cu file. One launch runs at a time."""

    def __init__(self, library: Path, names: Sequence[str]) -> None:
        self._library = ctypes.CDLL(str(library))
        self._index = {name: i for i, name in enumerate(names)}
        self._lock = threading.Lock()

    def launch(
        self,
        name: str,
        *,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[bytes],
        smem: int = 0,
        cluster: tuple[int, ...] = (1, 1, 1),
        seed: int = 0,
        cooperative: bool = False,
        eager: bool = False,
        late: Sequence[tuple[int, int, int]] = (),
        timeout_s: float = 60.0,
    ) -> Report:
        """Run one kernel to its end; `grid` counts blocks, `timeout_s` is CPU time.

        seed 0 runs threads and blocks in order, any other seed in an order of its own; where its
        bit 1 is set, a warp gets as far as it can before another one runs.
        cooperative keeps all blocks resident together, as a grid-wide barrier needs. Copies by
        cp.async take effect when they are waited for, with `eager` when they are issued: a device
        may do either. late: (address, source, bytes) of what the grid before this one writes; it is
        copied there when a thread waits for that grid (ptx::pdl_wait), and not before.
        Raises EmulationError where the kernel does what a device forbids.
        """
        if name not in self._index:
            raise ValueError(f"{name!r} was not compiled; compiled: {sorted(self._index)}")
        i = self._index[name]
        config = _Config(
            _triple(grid),
            _triple(block),
            _triple(cluster),
            smem,
            seed,
            cooperative,
            eager,
            len(late),
            (_Late * MOST_LATE)(*(_Late(*one) for one in late)),
            timeout_s,
        )
        sizes = (ctypes.c_longlong * max(1, len(args)))(*(len(a) for a in args))
        held = [ctypes.create_string_buffer(a, max(1, len(a))) for a in args]
        pointers = (ctypes.c_void_p * max(1, len(args)))(*(ctypes.addressof(b) for b in held))
        report = _Report()
        with self._lock:
            bad = self._library[f"cuemu_launch_{i}"](
                ctypes.byref(config), sizes, len(args), pointers, ctypes.byref(report)
            )
        if bad:
            want = [self._library[f"cuemu_size_{i}"](j) for j in range(32)]
            raise ValueError(
                f"{name!r} takes parameters of {[w for w in want if w >= 0]} bytes, "
                f"given were {[len(a) for a in args]}"
            )
        if report.kind:
            raise EmulationError(report.kind.decode(), report.text.decode(errors="replace"))
        return Report(*(getattr(report, counter) for counter in _COUNTERS))

    def argument_bytes(self, name: str) -> int:
        """Return the size of a kernel's first parameter, its argument struct."""
        return self.parameter_bytes(name)[0]

    def parameter_bytes(self, name: str) -> list[int]:
        """Return the size of each of a kernel's parameters."""
        size = self._library[f"cuemu_size_{self._index[name]}"]
        return list(itertools.takewhile(lambda found: found >= 0, map(size, itertools.count())))


def _triple(size: tuple[int, ...]) -> ctypes.Array[ctypes.c_uint]:
    padded = (*size, 1, 1, 1)[:3]
    if len(size) > 3 or any(d < 0 for d in padded):
        raise ValueError(f"given {size}, required up to three sizes >= 0")
    return (ctypes.c_uint * 3)(*padded)


def device_array(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """Return an array of 0xFF bytes, 256-byte aligned and of exact size, as a device allocates.

    The exact size lets AddressSanitizer see the first byte past its end.
    """
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    libc = ctypes.CDLL(None)
    address = ctypes.c_void_p()
    wanted = ctypes.c_size_t(max(1, size))
    if libc.posix_memalign(ctypes.byref(address), ctypes.c_size_t(256), wanted):
        raise MemoryError(f"cannot allocate {size} bytes")
    assert address.value is not None
    owner = _Allocation(address.value)
    buffer = (ctypes.c_ubyte * size).from_address(address.value)
    buffer._owner = owner  # type: ignore[attr-defined]
    array = np.ctypeslib.as_array(buffer) if size else np.empty(0, np.uint8)
    array.fill(0xFF)
    return array.view(dtype).reshape(shape)


_MAP = struct.Struct("<QQIII3I3I4xQQ")
_MAGIC = 0x70616D5F756D6563
SWIZZLES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}


def tensor_map(
    array: npt.NDArray[np.generic], box: tuple[int, ...], swizzle: str = "none"
) -> bytes:
    """Return the 128 bytes that stand for a CUtensorMap of a 2-D or 3-D array in the emulator.

    box has the array's order, outermost first; the rules of cuTensorMapEncodeTiled are checked.
    """
    rank, item = array.ndim, array.itemsize
    if rank not in (2, 3) or len(box) != rank:
        raise ValueError(f"given a {rank}-D array and box {box}, required 2-D or 3-D and as many")
    if array.strides[-1] != item or any(s % 16 or s <= 0 for s in array.strides[:-1]):
        raise ValueError(f"given strides {array.strides}, required ({item}) and multiples of 16")
    if array.ctypes.data % 16:
        raise ValueError("given an address that is not a multiple of 16; use device_array")
    inner, limit = box[-1] * item, {"none": 1 << 30, "128B": 128, "64B": 64, "32B": 32}[swizzle]
    if any(not 1 <= b <= 256 for b in box) or inner % 16 or inner > limit:
        raise ValueError(
            f"given box {box} ({inner} bytes wide), required 1..256, width % 16 == 0, "
            f"width <= {limit} for swizzle {swizzle}"
        )
    dims = [*reversed(array.shape), 1][:3]
    boxes = [*reversed(box), 1][:3]
    strides = [*reversed(array.strides[:-1]), 0][:2]
    return tensor_record(array.ctypes.data, item, rank, swizzle, [*dims, *boxes], strides)


def tensor_record(
    address: int,
    itemsize: int,
    rank: int,
    swizzle: str,
    sizes: Sequence[int],
    strides: Sequence[int],
) -> bytes:
    """Return the record of a tensor map, unchecked.

    sizes: three of the tensor, then three of the box; strides: in bytes, of dimensions 1 and 2.
    """
    packed = _MAP.pack(_MAGIC, address, itemsize, rank, SWIZZLES[swizzle], *sizes, *strides)
    return packed.ljust(128, b"\0")


class _Allocation:
    """Frees a posix_memalign block when the last view of it goes."""

    def __init__(self, address: int) -> None:
        self._address = ctypes.c_void_p(address)

    def __del__(self) -> None:
        ctypes.CDLL(None).free(self._address)


def to_device(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return a copy allocated by `device_array`."""
    copy = device_array(array.shape, array.dtype)
    copy[...] = array
    return copy


def _wrapper(sources: Sources, path: Path, names: Sequence[str]) -> str:
    lines = ['#include "cuemu.h"', f'#line 1 "{path}"', sources.text, '#line 1 "launchers"']
    export = 'extern "C" __attribute__((visibility("default"))) int'
    for i, name in enumerate(names):
        lines.append(
            f"{export} cuemu_launch_{i}(const cuemu::Config* c, const long long* s, int n, "
            f"void** a, cuemu::Report* r) {{ return cuemu::launch({name}, c, s, n, a, r); }}\n"
            f"{export} cuemu_size_{i}(int i) {{ return cuemu::parameter_size({name}, i); }}"
        )
    return "\n".join(lines) + "\n"


def compile_cu(
    path: str | Path,
    names: Sequence[str],
    include: Sequence[str | Path] = (),
    defines: Sequence[str] = (),
    asan: bool = False,
    bank_conflicts: bool = False,
) -> Module:
    """Compile the kernels `names` (name expressions, as NVRTC takes them) of a .cu file.

    The library is cached on disk by the digest of all sources, flags and the compiler.
    asan: for use inside `cuemu.asan` only. bank_conflicts: count passes over shared memory, slower.
    Raises BuildError with g++'s messages.
    """
    path = Path(path)
    if asan and "libasan" not in os.environ.get("LD_PRELOAD", ""):
        raise BuildError("asan=True works in a process started by cuemu.asan.run only")
    own = [HERE, path.resolve().parent, RUNGS]
    folders = [*own, *(Path(p) for p in include)]
    sources = collect(path, folders)
    mode, chosen = toolchain.flags(asan, bank_conflicts), [f"-D{d}" for d in defines]
    key = "\0".join(
        [sources.digest, toolchain.machine(), *mode, *chosen, *map(str, folders), *names]
    )
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    library = toolchain.cache_dir() / f"{path.stem}-{digest}.so"
    with toolchain.one_maker(library) as missing:
        if missing:
            text = _wrapper(sources, path.resolve(), names)
            shared = toolchain.prepared(mode)
            _build(library, text, sources.headers, [*mode, *chosen], [shared, *folders])
    return Module(library, names)


def _build(
    library: Path, text: str, headers: dict[str, str], flags: list[str], folders: list[Path]
) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as scratch_name:
        scratch = Path(scratch_name)
        (scratch / "kernel.cpp").write_text(text, encoding="utf-8")
        for name, header in headers.items():
            (scratch / name).write_text(header, encoding="utf-8")
        made = scratch / "kernel.o"
        command = toolchain.compiler(flags, [*folders[:1], scratch, *folders[1:]])
        toolchain.run([*command, "-c", "kernel.cpp", "-o", made.name], scratch)
        objects = [made.name, str(folders[0] / "runtime.o")]
        toolchain.run(toolchain.linker("kernel.so", objects), scratch)
        (scratch / "kernel.so").replace(library)
    toolchain.prune(library.parent)
