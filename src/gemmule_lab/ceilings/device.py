"""Ceilings of a GPU, measured in the run that uses them: read, copy, multiply-add, tensor cores.

Each ceiling is the best of several ways to reach it; every way's figure is kept. Reading and
copying go over arrays of many times the L2. All data are normal random numbers: zeros would let
the chip draw less power and clock higher than real operands do.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from gemmule.backends.cuda import driver
from gemmule.backends.cuda import launch as cuda_launch
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.backends.cuda.graph_clock import GraphClock
from gemmule.core.rung import Machine
from gemmule.storage import ceilings as stored_ceilings
from gemmule.timing.sampler import Budget
from gemmule_lab.ceilings.best import Way, best
from gemmule_lab.kernels.launch import Kernels
from gemmule_lab.records.rows import Ceiling

ARGUMENTS = struct.Struct("<QQq")
FILL = struct.Struct("<QqQ")
THREADS = 256
MOST_BYTES = 2 << 30
SHAPES = ((1, 8), (4, 1), (4, 2), (4, 4))  # streams, loads under way of each
COPIES = (2, 4, 8)
STEPS = {"float": 8192, "double": 4096, "tensor": 2048, "stages": 4}
CHAINS = 8
TENSOR_STAGES = 4
TENSOR_STAGE_BYTES = (2 * 64 + 256) * 128  # tiles of A and B, 64 bfloat16 along k


def measure_ceilings(
    ordinal: int = 0, *, max_seconds: float = 8.0, seed: int = 0, store: bool = True
) -> dict[str, Ceiling]:
    """Measure a GPU's ceilings: ``read`` and ``copy`` in GB/s, the others in GFLOP/s.

    ``fma float32``, ``fma float64``: multiply-adds on the plain pipes; ``tensor bfloat16``: tensor
    cores summing in float32, by mma.sync and where the chip has it by wgmma. Copying counts bytes
    read and bytes written. store: keep the read rate in the cache folder, where plans of this
    device find it. DeviceError when the device is absent or its memory is full.
    """
    machine = cuda_launch.CudaBackend().machine(f"cuda:{ordinal}")
    free_bytes, _ = driver.memory_bytes(ordinal)
    nbytes = min(MOST_BYTES, free_bytes // 4) >> 20 << 20
    buffer = filled(nbytes // 4, "float32", ordinal, seed)
    data = filled(1 << 20, "bfloat16", ordinal, 1)
    clock = GraphClock(ordinal)
    kernels = Kernels("ceilings.cu", tuple(kernel_names(machine)), ordinal)
    units = machine.units
    groups: dict[str, Iterator[_Launch]] = {
        "read": _reads(buffer, units),
        "copy": _copies(buffer, units),
        "fma float32": _multiply_adds(buffer, units, "float"),
        "fma float64": _multiply_adds(buffer, units, "double"),
        "tensor bfloat16": _tensor_cores(data, machine),
    }
    budget = Budget(max_seconds=max_seconds / len(groups), min_blocks=6, max_blocks=8)
    found = {
        name: best(name, _ways(kernels, launches, clock.stream, units), clock, budget, seed)
        for name, launches in groups.items()
    }
    if store:
        stored_ceilings.save(machine, found["read"].value * 1e9)
    return found


def filled(
    count: int, dtype: str, ordinal: int, seed: int, *, uniform: bool = False
) -> DeviceArray:
    """Return a new device vector of random numbers of a floating dtype.

    They are normal, or uniform in [0, 1).
    """
    from gemmule.rungs._cuda.geometry import CTYPE

    array = DeviceArray.empty((count,), dtype, ordinal)
    kernel = f"fill_{'uniform' if uniform else 'normal'}<{CTYPE[dtype]}>"
    blocks = 16 * driver.device_info(ordinal).multiprocessors
    arguments = FILL.pack(array.pointer, count, seed << 40)
    Kernels("operands.cu", (kernel,), ordinal).run(kernel, arguments, blocks=blocks)
    return array


@dataclass(frozen=True, slots=True)
class _Launch:
    """One way to reach a ceiling: how a kernel is launched, and what a launch does."""

    title: str
    kernel: str
    operands: tuple[int, int, int]
    blocks: int
    amount: float
    smem: int = 0


def _ways(kernels: Kernels, launches: Iterator[_Launch], stream: int, units: int) -> Sequence[Way]:
    found = []
    for one in launches:
        arguments = ARGUMENTS.pack(*one.operands)
        launch = kernels.bind(one.kernel, arguments, blocks=one.blocks, smem=one.smem)
        found.append(Way(one.title, partial(launch, stream), one.amount, units))
    return found


def kernel_names(machine: Machine) -> Iterator[str]:
    """Yield the kernels that measure the ceilings of a device."""
    yield from (f"read_streams<{streams}, {unroll}>" for streams, unroll in SHAPES)
    yield from (f"copy_vectors<{unroll}>" for unroll in COPIES)
    yield from (f"multiply_add<{ctype}, {CHAINS}>" for ctype in ("float", "double"))
    yield f"tensor_warp<{CHAINS}>"
    if _has_wgmma(machine):
        yield f"tensor_warpgroup<{TENSOR_STAGES}>"


def _has_wgmma(machine: Machine) -> bool:
    return machine.arch == "sm_90a"


def _grids(vectors: int, units: int, per_block: int) -> Iterator[tuple[str, int]]:
    yield "8 blocks a multiprocessor", 8 * units
    yield "32 blocks a multiprocessor", 32 * units
    yield "one pass", -(-vectors // per_block)


def _reads(buffer: DeviceArray, units: int) -> Iterator[_Launch]:
    for streams, unroll in SHAPES:
        # Whole passes only, so that no load needs a predicate.
        step = streams * unroll * THREADS
        vectors = buffer.nbytes // 16 // step * step
        operands = buffer.pointer, buffer.pointer, vectors
        for words, blocks in _grids(vectors // streams, units, unroll * THREADS):
            title = f"{streams} streams a thread, {unroll} loads of 16 bytes each, {words}"
            kernel = f"read_streams<{streams}, {unroll}>"
            yield _Launch(title, kernel, operands, blocks, 16.0 * vectors)


def _copies(buffer: DeviceArray, units: int) -> Iterator[_Launch]:
    half = buffer.nbytes // 2
    for unroll in COPIES:
        vectors = half // 16 // (unroll * THREADS) * (unroll * THREADS)
        operands = buffer.pointer, buffer.pointer + half, vectors
        for words, blocks in _grids(vectors, units, unroll * THREADS):
            title = f"{unroll} vectors of 16 bytes, {words}"
            yield _Launch(title, f"copy_vectors<{unroll}>", operands, blocks, 32.0 * vectors)


def _multiply_adds(buffer: DeviceArray, units: int, ctype: str) -> Iterator[_Launch]:
    steps, kernel = STEPS[ctype], f"multiply_add<{ctype}, {CHAINS}>"
    operands = buffer.pointer, buffer.pointer, steps
    for blocks in (4 * units, 8 * units):
        amount = 2.0 * CHAINS * steps * THREADS * blocks
        title = f"{CHAINS} chains, {blocks // units} blocks a multiprocessor"
        yield _Launch(title, kernel, operands, blocks, amount)


def _tensor_cores(data: DeviceArray, machine: Machine) -> Iterator[_Launch]:
    units, steps = machine.units, STEPS["tensor"]
    operands = data.pointer, data.pointer, steps
    for blocks in (units, 2 * units):
        amount = 4096.0 * CHAINS * steps * THREADS / 32 * blocks
        title = f"mma.sync, {blocks // units} blocks"
        yield _Launch(title, f"tensor_warp<{CHAINS}>", operands, blocks, amount)
    if _has_wgmma(machine):
        kernel, smem = f"tensor_warpgroup<{TENSOR_STAGES}>", TENSOR_STAGES * TENSOR_STAGE_BYTES
        amount = 2.0 * 128 * 256 * 64 * TENSOR_STAGES * steps * units
        title = "wgmma 64 x 256 x 16, 2 warpgroups"
        yield _Launch(title, kernel, operands, units, amount, smem)
