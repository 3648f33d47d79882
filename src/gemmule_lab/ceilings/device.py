"""Ceilings of a GPU, measured in the run that uses them: read, copy, multiply-add, tensor cores.

Each ceiling is the best of several ways to reach it; every way's figure is kept. Reading and
copying go over arrays of many times the L2. All data are normal random numbers: zeros would let
the chip draw less power and clock higher than real operands do.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gemmule.backends.cuda import driver
from gemmule.backends.cuda import launch as cuda_launch
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.backends.cuda.graph_clock import GraphClock
from gemmule.core.rung import Machine
from gemmule.storage import ceilings as stored_ceilings
from gemmule.timing.sampler import Budget, Entry, sample
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


@dataclass(frozen=True, slots=True)
class Shape:
    """One way to reach a ceiling: how it is launched, and what a launch does."""

    name: str
    launch: Callable[[int], None]
    amount: float


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
    clock = GraphClock(ordinal)
    groups = dict(_groups(buffer, machine))
    share = max_seconds / len(groups)
    found = {
        name: _best(name, shapes, clock, share, machine.units, seed)
        for name, shapes in groups.items()
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


def _groups(buffer: DeviceArray, machine: Machine) -> Iterator[tuple[str, list[Shape]]]:
    kernels = Kernels("ceilings.cu", tuple(_names(machine)), buffer.ordinal)
    yield "read", list(_read_shapes(kernels, buffer, machine.units))
    yield "copy", list(_copy_shapes(kernels, buffer, machine.units))
    for ctype, dtype in (("float", "float32"), ("double", "float64")):
        yield f"fma {dtype}", list(_fma_shapes(kernels, buffer, machine.units, ctype))
    yield "tensor bfloat16", list(_tensor_shapes(kernels, buffer, machine))


def _names(machine: Machine) -> Iterator[str]:
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


def _read_shapes(kernels: Kernels, buffer: DeviceArray, units: int) -> Iterator[Shape]:
    for streams, unroll in SHAPES:
        # Whole passes only, so that no load needs a predicate.
        vectors = buffer.nbytes // 16 // (streams * unroll * THREADS) * (streams * unroll * THREADS)
        arguments = ARGUMENTS.pack(buffer.pointer, buffer.pointer, vectors)
        for words, blocks in _grids(vectors // streams, units, unroll * THREADS):
            name = f"read_streams<{streams}, {unroll}>"
            launch = kernels.bind(name, arguments, blocks=blocks)
            title = f"{streams} streams a thread, {unroll} loads of 16 bytes each, {words}"
            yield Shape(title, launch, 16.0 * vectors)


def _copy_shapes(kernels: Kernels, buffer: DeviceArray, units: int) -> Iterator[Shape]:
    half = buffer.nbytes // 2
    for unroll in COPIES:
        vectors = half // 16 // (unroll * THREADS) * (unroll * THREADS)
        arguments = ARGUMENTS.pack(buffer.pointer, buffer.pointer + half, vectors)
        for words, blocks in _grids(vectors, units, unroll * THREADS):
            launch = kernels.bind(f"copy_vectors<{unroll}>", arguments, blocks=blocks)
            yield Shape(f"{unroll} vectors of 16 bytes, {words}", launch, 32.0 * vectors)


def _fma_shapes(kernels: Kernels, buffer: DeviceArray, units: int, ctype: str) -> Iterator[Shape]:
    steps = STEPS[ctype]
    arguments = ARGUMENTS.pack(buffer.pointer, buffer.pointer, steps)
    for blocks in (4 * units, 8 * units):
        launch = kernels.bind(f"multiply_add<{ctype}, {CHAINS}>", arguments, blocks=blocks)
        amount = 2.0 * CHAINS * steps * THREADS * blocks
        yield Shape(f"{CHAINS} chains, {blocks // units} blocks a multiprocessor", launch, amount)


def _tensor_shapes(kernels: Kernels, buffer: DeviceArray, machine: Machine) -> Iterator[Shape]:
    units = machine.units
    data = filled(1 << 20, "bfloat16", buffer.ordinal, 1)
    steps = STEPS["tensor"]
    arguments = ARGUMENTS.pack(data.pointer, data.pointer, steps)
    for blocks in (units, 2 * units):
        launch = kernels.bind(f"tensor_warp<{CHAINS}>", arguments, blocks=blocks)
        amount = 4096.0 * CHAINS * steps * THREADS / 32 * blocks
        yield _keeping(Shape(f"mma.sync, {blocks // units} blocks", launch, amount), data)
    if _has_wgmma(machine):
        launch = kernels.bind(
            f"tensor_warpgroup<{TENSOR_STAGES}>",
            ARGUMENTS.pack(data.pointer, data.pointer, steps),
            blocks=units,
            smem=TENSOR_STAGES * TENSOR_STAGE_BYTES,
        )
        amount = 2.0 * 128 * 256 * 64 * TENSOR_STAGES * steps * units
        yield _keeping(Shape("wgmma 64 x 256 x 16, 2 warpgroups", launch, amount), data)


def _keeping(shape: Shape, data: DeviceArray) -> Shape:
    """Return the shape with its launch holding on to the memory it reads."""

    def launch(stream: int, _alive: DeviceArray = data) -> None:
        shape.launch(stream)

    return Shape(shape.name, launch, shape.amount)


def _best(
    name: str, shapes: list[Shape], clock: GraphClock, max_seconds: float, units: int, seed: int
) -> Ceiling:
    def runs(shape: Shape) -> Entry:
        return Entry(shape.name, lambda _: shape.launch(clock.stream))

    timed = sample(
        [runs(shape) for shape in shapes],
        clock,
        Budget(max_seconds=max_seconds, min_blocks=6, max_blocks=8),
        seed=seed,
    )
    rates = {s.name: s.amount / timed[s.name].median * 1e-9 for s in shapes}
    winner = max(rates, key=lambda title: rates[title])
    unit = "GB/s" if name in ("read", "copy") else "GFLOP/s"
    return Ceiling(name, rates[winner], unit, winner, units, rates)


def summary(ceilings: Mapping[str, Ceiling]) -> list[str]:
    """Return one line a ceiling: its value and the way that reached it."""
    return [
        f"{name}: {ceiling.value:,.0f} {ceiling.unit} ({ceiling.shape})"
        for name, ceiling in ceilings.items()
    ]
