"""Operands of a tuning run on the host or on a device, and the clock that times work there.

A `Place` puts arrays that were laid out on the host (see `gemmule.oracle.inputs`) where the back
end reads them, brings results back, and names the clock that times work there.
"""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmule.arrays import interop, transfer
from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.canonical import Call
from gemmule.core.memory import available_bytes
from gemmule.core.operand import Operand, View
from gemmule.core.problem import COMPLEX, INTEGERS, Problem, numpy_dtype
from gemmule.oracle.inputs import (
    Frame,
    Inputs,
    among_poison,
    lay_out,
    natural_alignment,
    shapes,
)
from gemmule.oracle.values import quantized_values
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.stack import QuantizedStack
from gemmule.timing.clock import Clock, HostClock
from gemmule.timing.machine import last_level_cache_bytes

Array: TypeAlias = NDArray[Any]
Part: TypeAlias = Frame | QuantizedMatrix | QuantizedStack

# A prime, so that a matrix filled by repeating a block of this many numbers has no two rows alike.
BLOCK = 1_000_003
SOME_CODES = 1 << 17  # as many weights are quantised; search for the best scales takes long
ASSUMED_CACHE_BYTES = 256 << 20
_PLACE = 256


@dataclass(frozen=True, slots=True)
class Host:
    """Operands on the host: a frame's matrix A (or a QuantizedMatrix), its B or x, its result.

    Of a grouped product A, the matrices of the experts (or a stack of codes), where each expert's
    rows end, and the result.
    """

    a: Frame | QuantizedMatrix
    b: Frame | QuantizedStack
    out: Frame
    ends: Frame | None = None

    def parts(self) -> tuple[Part, ...]:
        """Return them in the order in which runs take them."""
        between = () if self.ends is None else (self.ends,)
        return self.a, self.b, *between, self.out

    def arrays(self) -> tuple[Any, ...]:
        """Return the parts as arrays, codes as they are."""
        return tuple(one.array if isinstance(one, Frame) else one for one in self.parts())


class Place:
    """Where operands lie, and the clock that times work there: the host's memory.

    caches: bytes that have to pass between two cold reads.
    """

    clock: Clock
    caches: int

    def spare_bytes(self) -> int:
        """Return how many bytes a run may take: half of what is available now."""
        return available_bytes() // 2

    def put(self, part: Part, *, copy: bool) -> Operand:
        """Return the part as an operand here; without `copy`, the host's own memory may serve.

        A copy lies at the same address modulo 256.
        """
        if not isinstance(part, Frame):
            return interop.unwrap(deepcopy(part) if copy else part, "a matrix of codes")
        return interop.unwrap(_twin(part).array if copy else part.array, "operand")

    def copies(self, part: Part, count: int) -> list[Operand]:
        """Return the part as so many operands in memory of their own, but for the first."""
        return [self.put(part, copy=i > 0) for i in range(count)]

    def fetch(self, operand: Operand, frame: Frame) -> None:
        """Bring what lies around and in `operand` back into the frame, if it lies elsewhere."""

    def send(self, frame: Frame, operand: Operand) -> None:
        """Overwrite what lies around and in `operand` by the frame, if it lies elsewhere."""

    def wait(self) -> None:
        """Return when all work is done; DeviceError where some of it failed."""

    def wall(self) -> float:
        """Return wall time in seconds, by which first calls are judged hopeless or not."""
        return time.perf_counter()


class HostPlace(Place):
    """Memory of the host."""

    def __init__(self) -> None:
        self.clock: Clock = HostClock()
        self.caches = 2 * (last_level_cache_bytes() or ASSUMED_CACHE_BYTES)


class DeviceMemory(Place):
    """Memory of one CUDA device, on which nothing is timed."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal

    def spare_bytes(self) -> int:
        """Return half of the device's free memory."""
        return driver.memory_bytes(self.ordinal)[0] // 2

    def put(self, part: Part, *, copy: bool) -> Operand:
        """Return a copy on the device, at the host's address modulo 256."""
        if not isinstance(part, Frame):
            stack = part if isinstance(part, QuantizedStack) else None
            matrix = part if isinstance(part, QuantizedMatrix) else part.matrix
            moved = transfer.to_device(matrix, f"cuda:{self.ordinal}", keep_layout=True)
            held = moved if stack is None else replace(stack, matrix=moved)
            return interop.unwrap(held, "a matrix of codes")
        block = DeviceArray.empty((part.buffer.nbytes + _PLACE,), "uint8", self.ordinal)
        start = block.pointer + (_address(part.buffer) - block.pointer) % _PLACE
        array, size = part.array, part.array.itemsize
        there = DeviceArray(
            start + _address(array) - _address(part.buffer),
            array.shape,
            tuple(step // size for step in array.strides),
            array.dtype.name,
            self.ordinal,
            block,
        )
        operand = device_arrays.from_own(there)
        self.send(part, operand)
        return operand

    def copies(self, part: Part, count: int) -> list[Operand]:
        """Return them in one block of memory, or one for each array of a quantised matrix."""
        first = self.put(part, copy=False)
        if isinstance(part, Frame):
            start = self._start(first, part)
            others = self._repeated(first.array, start, part.buffer.nbytes, count - 1)
            return [first, *map(device_arrays.from_own, others)]
        held = first.array
        matrix = held.matrix if isinstance(held, QuantizedStack) else held
        arrays = {
            name: self._repeated(one, one.pointer, one.nbytes, count - 1)
            for name in ("codes", "scales", "zeros", "perm")
            if (one := getattr(matrix, name)) is not None
        }
        found = [first]
        for own in zip(*arrays.values(), strict=True):
            copy = replace(matrix, **dict(zip(arrays, own, strict=True)))
            made = replace(held, matrix=copy) if isinstance(held, QuantizedStack) else copy
            found.append(interop.unwrap(made, "a matrix of codes"))
        return found

    def _repeated(self, array: DeviceArray, start: int, nbytes: int, count: int) -> list[Any]:
        """Return copies of an array and of all `nbytes` around it, from `start` on.

        They lie behind each other in one block: a copy is much cheaper than memory of its own.
        """
        if count == 0:
            return []
        step = -(-nbytes // _PLACE) * _PLACE
        block = DeviceArray.empty((count * step + _PLACE,), "uint8", self.ordinal)
        first = block.pointer + (start - block.pointer) % _PLACE
        driver.copy(first, start, nbytes, self.ordinal, 0)
        made = 1
        while made < count:
            more = min(made, count - made)
            driver.copy(first + made * step, first, more * step, self.ordinal, 0)
            made += more
        form = array.shape, array.strides, array.dtype, self.ordinal, block
        inside = first + array.pointer - start
        return [DeviceArray(inside + i * step, *form) for i in range(count)]

    def fetch(self, operand: Operand, frame: Frame) -> None:
        """Copy the whole buffer around the operand into the frame."""
        here, there = _address(frame.buffer), self._start(operand, frame)
        driver.copy(here, there, frame.buffer.nbytes, self.ordinal, 0)

    def send(self, frame: Frame, operand: Operand) -> None:
        """Copy the frame's whole buffer over that around the operand."""
        here, there = _address(frame.buffer), self._start(operand, frame)
        driver.copy(there, here, frame.buffer.nbytes, self.ordinal, 0)

    def _start(self, operand: Operand, frame: Frame) -> int:
        return operand.pointer - (_address(frame.array) - _address(frame.buffer))

    def wait(self) -> None:
        """Wait for all work on the device."""
        driver.synchronize(self.ordinal)


class DevicePlace(DeviceMemory):
    """Memory of one CUDA device, and the clock there."""

    def __init__(self, ordinal: int, cache_bytes: int) -> None:
        from gemmule.backends.cuda.graph_clock import GraphClock

        super().__init__(ordinal)
        self.clock: Clock = GraphClock(ordinal)
        self.caches = 4 * cache_bytes


def place_of(device: str, cache_bytes: int) -> Place:
    """Return the place that a device name means: ``cpu``, ``cuda`` or ``cuda:<number>``."""
    if device == "cpu":
        return HostPlace()
    return DevicePlace(device_arrays.ordinal_named(device), cache_bytes)


def of_inputs(inputs: Inputs) -> Host:
    """Return the oracle's inputs as host operands."""
    out, *rest = inputs.frames
    if inputs.ends is None:
        return Host(inputs.a if len(rest) == 1 else rest[1], rest[0], out)
    *between, ends = rest
    if isinstance(inputs.b, QuantizedMatrix):
        stack = QuantizedStack.from_matrix(inputs.b, inputs.case.problem.batch)
        return Host(between[0], stack, out, ends)
    return Host(between[1], between[0], out, ends)


def random_operands(problem: Problem, seed: int) -> Host:
    """Return operands to time: normal numbers (integers from their whole range), packed rows.

    Tokens choose experts evenly, as the rungs' expected times have it.
    """
    rng = np.random.default_rng(seed)
    ends = None
    if problem.op == "grouped":
        sizes = rng.multinomial(problem.m, np.full(problem.batch, 1 / problem.batch))
        ends = among_poison(np.cumsum(sizes).astype(np.int32))
    shape_a, shape_b, shape_out = shapes(problem)
    out = _packed(shape_out, problem, "out")
    if problem.op == "grouped" and problem.quant is not None:
        stack = QuantizedStack.from_matrix(_codes(_turned(problem), rng), problem.batch)
        return Host(_floats(problem, "a", shape_a, rng), stack, out, ends)
    coded = problem.quant is not None
    a = _codes(problem, rng) if coded else _floats(problem, "a", shape_a, rng)
    return Host(a, _floats(problem, "b", shape_b, rng), out, ends)


def _floats(problem: Problem, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Frame:
    """Return an operand of random numbers, ``a`` or ``b``, packed."""
    frame = _packed(shape, problem, name)
    block = _random(rng, getattr(problem, name), min(BLOCK, frame.array.size))
    frame.array[...] = np.resize(block, frame.array.shape)
    return frame


def _packed(shape: tuple[int, ...], problem: Problem, name: str) -> Frame:
    """Return an array that begins as those of allocators do, at a multiple of 64 bytes.

    Unless its problem is aligned worse than its strides are: then where it begins is what is so.
    """
    frame = lay_out(shape, problem, name, "contiguous")
    if problem.alignment < natural_alignment(problem):
        return frame
    array, start = frame.array, _address(frame.array)
    begin = start - start % 64 - _address(frame.buffer)
    moved: Array = np.ndarray(array.shape, array.dtype, frame.buffer, begin, array.strides)
    return Frame(frame.buffer, moved, frame.pattern)


def _turned(problem: Problem) -> Problem:
    """Return the product whose matrix A has the columns of all experts as its rows."""
    rows = problem.batch * problem.n
    return replace(problem, op="matmul", m=rows, n=1, batch=1, a=problem.b, b=problem.a)


def _codes(problem: Problem, rng: np.random.Generator) -> QuantizedMatrix:
    """Return a matrix of random codes; of a large one the first rows are repeated."""
    spec, side = problem.codes, "m"
    sides = problem.reduction, problem.m
    stored, columns = sides if spec.transposed else sides[::-1]
    count = min(stored, SOME_CODES // max(columns, 1) | 1)  # odd, as no tile is
    if spec.transposed:
        side = "n" if problem.op == "matvec" else "k"
    some: dict[str, Any] = {"quant": replace(spec, layout="row"), side: count}
    few = replace(problem, **some)
    made, _, _ = quantized_values(rng, few, "normal", (few.reduction, 1))
    rows = np.arange(stored) % max(count, 1)
    parts = {"codes": made.codes[rows], "stored_shape": (stored, columns)}
    for name in ("scales", "zeros"):
        part = getattr(made, name)
        if part is not None and spec.group_size is not None:
            parts[name] = part[rows]
    whole = replace(made, **parts)
    return whole if spec.layout == "row" else whole.to(layout=spec.layout)


def _random(rng: np.random.Generator, name: str, count: int) -> Array:
    dtype: Any = numpy_dtype(name)
    if name in INTEGERS:
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, count, dtype=dtype.type, endpoint=True)
    values: Array = rng.standard_normal(count)
    if name in COMPLEX:
        values = values + 1j * rng.standard_normal(count)
    return values.astype(dtype)


def canonical_call(problem: Problem, host: Host) -> Call:
    """Return the canonical call over these operands as they lie."""
    a, b, *_, out = host.arrays()
    return call_over(problem, a, b, out)


def call_over(
    problem: Problem,
    left: Array | QuantizedMatrix | QuantizedStack,
    right: Array | QuantizedMatrix | QuantizedStack,
    result: Array,
) -> Call:
    """Return the canonical call over these very arrays, at the strides that they have."""
    if isinstance(left, QuantizedMatrix | QuantizedStack):
        a = View((problem.m, problem.reduction), (0, 0))
    else:
        a = _view(left)
    if isinstance(right, QuantizedMatrix | QuantizedStack):
        return Call(problem.op, problem, a, View((0, 0, 0), (0, 0, 0)), _view(result), result.shape)
    b, out = _view(right), _view(result)
    if problem.batch > 1 and problem.op != "grouped":
        rank = 2 if problem.op == "matvec" else 3
        a, b = _batched(a, 3, problem.batch), _batched(b, rank, problem.batch)
    return Call(problem.op, problem, a, b, out, out.shape)


def _view(array: Array) -> View:
    return View(array.shape, tuple(step // array.itemsize for step in array.strides))


def _batched(view: View, rank: int, batch: int) -> View:
    """Give a shared operand the batch axis, with a stride of zero."""
    if len(view.shape) == rank:
        return view
    return View((batch, *view.shape), (0, *view.strides))


def put_all(place: Place, host: Host, *, copy: bool) -> tuple[Operand, ...]:
    """Put all parts somewhere, the result last."""
    return tuple(place.put(part, copy=copy) for part in host.parts())


def nbytes(host: Host) -> int:
    """Return the bytes of all buffers of one set."""
    return sum(int(p.buffer.nbytes if isinstance(p, Frame) else p.nbytes) for p in host.parts())


def _twin(frame: Frame) -> Frame:
    """Return a copy of a frame in memory of its own, at the same address modulo 256."""
    size = frame.buffer.nbytes
    block = np.empty(size + _PLACE, np.uint8)
    start = (_address(frame.buffer) - _address(block)) % _PLACE
    buffer = block[start : start + size]
    buffer[:] = frame.buffer
    array: Array = np.ndarray(
        frame.array.shape,
        frame.array.dtype,
        buffer,
        _address(frame.array) - _address(frame.buffer),
        frame.array.strides,
    )
    return Frame(buffer, array, frame.pattern)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
