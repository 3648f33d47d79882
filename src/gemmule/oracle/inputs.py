"""Inputs for the oracle: cases, operands that lie among NaNs, and outputs between canaries.

Operands are cut out of larger buffers whose other bytes are NaN (0xFF in every float format; 0x7F
for integers), so that a kernel which reads beside its operand spoils its result. The output lies
in such a buffer too, poisoned itself, and the bytes around it must survive.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmule.core.problem import COMPLEX, INTEGERS, Problem, numpy_dtype
from gemmule.oracle.values import float_values, integer_values, nonfinite_values, quantized_values
from gemmule.quant.matrix import QuantizedMatrix

Array: TypeAlias = NDArray[Any]

KINDS = ("integers", "normal", "scaled", "cancel", "nonfinite")
VIEWS = ("contiguous", "padded", "sliced", "strided", "reversed", "loose")
GUARD_BYTES = 64
_LARGEST_KEPT = 1 << 20  # bytes; larger buffers are remembered by their digest


@dataclass(frozen=True, slots=True)
class Case:
    """One test: a problem, what its numbers are like, the seed, and how the operands lie.

    kind: ``integers`` (sums that are exact in accumulator and result), ``normal``, ``scaled``
    (rows, columns and the summed axis scaled by powers of two), ``cancel`` (sums near zero of
    large terms), ``nonfinite`` (NaN and Inf; the first seeds place one at a time).

    view: ``contiguous`` (leading strides as short as `problem.alignment` allows), ``padded``
    (longer), ``sliced`` (starting one element later), ``strided`` (every second element on each
    axis), ``reversed`` (negative strides), ``loose`` (axes of one element, which are never walked,
    with strides that break every alignment). The last three also apply to vectors and the output.
    """

    problem: Problem
    kind: str = "integers"
    seed: int = 0
    view: str = "contiguous"


@dataclass(frozen=True, slots=True)
class Frame:
    """An array cut out of a larger buffer of bytes, all others of which hold `pattern`."""

    buffer: NDArray[np.uint8]
    array: Array
    pattern: int

    def intact_around(self) -> bool:
        """Tell whether every byte outside the array still holds the pattern."""
        if self.array.size == 0:
            return bool((self.buffer == self.pattern).all())
        low, high = np.lib.array_utils.byte_bounds(self.array)
        start = int(self.buffer.__array_interface__["data"][0])
        outside = self.buffer[: low - start], self.buffer[high - start :]
        if not all((part == self.pattern).all() for part in outside):
            return False
        if self.array.nbytes == high - low:
            return True
        copy = self.buffer.copy()
        place = int(self.array.__array_interface__["data"][0]) - start
        twin = np.ndarray(self.array.shape, self.array.dtype, copy, place, self.array.strides)
        twin[...] = np.full(self.array.itemsize, self.pattern, np.uint8).view(self.array.dtype)
        return bool((copy == self.pattern).all())


@dataclass(frozen=True, slots=True)
class Inputs:
    """Operands of one case and the place for its result.

    a: ``(m, n)`` or ``(m, k)``, with a leading batch axis unless batch is 1 or `shared_a`; or a
    `QuantizedMatrix`. b: x ``(n,)`` or B ``(k, n)``, alike. out: poisoned, ``(m,)`` or ``(m, n)``,
    with a leading batch axis when batch is not 1. Of a grouped product: ``(m, k)``,
    ``(batch, k, n)`` (of codes a matrix of ``batch n`` rows of k) and ``(m, n)``, and `ends`, where
    each expert's rows end, as int32.
    `exact_below` says, for kind ``integers``, which integers an accumulator must hold for every sum
    to be exact.
    """

    case: Case
    a: Any
    b: Any
    out: Array
    exact_below: float
    frames: tuple[Frame, ...] = field(repr=False)
    fingerprints: tuple[bytes, ...] = field(repr=False)
    ends: Array | None = None

    @property
    def largest_product(self) -> float:
        """Bound on one product of kind ``integers``; quantised: scale 2, code 255, operand 3."""
        return 64.0 if self.case.problem.quant is None else 2.0 * 255.0 * 3.0

    def side_effects(self) -> str:
        """Return what was written where nothing may be written, or ``""``."""
        held = self.b if isinstance(self.b, QuantizedMatrix) else self.a
        if self.fingerprints != _fingerprints(held, self.frames[1:]):
            return "an input was modified"
        if not self.frames[0].intact_around():
            return "bytes outside the output were written"
        return ""

    def poison(self) -> None:
        """Fill the output with its poison again (NaN, or bytes 0x7F), and the bytes around it."""
        self.frames[0].buffer[:] = self.frames[0].pattern


def make_inputs(
    problem: Problem,
    kind: str = "integers",
    seed: int = 0,
    view: str = "contiguous",
    *,
    accumulator: str | None = None,
) -> Inputs:
    """Make the operands of one case, the same for the same arguments.

    accumulator: for kind ``integers``, the narrowest float that partial sums must stay exact in;
    by default `problem.accumulate`, else float32 (float64 for float64 results). Problems of
    integer dtypes have kind ``integers`` only, with values from the whole range of the dtype.

    Raises ValueError for an unknown kind or view, or one that the dtypes do not have.

    >>> inputs = make_inputs(Problem("matvec", m=2, n=3), "integers", seed=1)
    >>> inputs.a.shape, inputs.b.shape, inputs.out.shape, bool(np.isnan(inputs.out).all())
    ((2, 3), (3,), (2,), True)
    """
    case = Case(problem, kind, seed, view)
    _check_case(case)
    rng = np.random.Generator(np.random.SFC64(seed))
    shape_a, shape_b, shape_out = shapes(problem)
    b_matrix_shape = (*shape_b, 1) if problem.op == "matvec" else shape_b
    exact_below = 0.0
    a_values: Any
    if problem.quant is not None and problem.op == "grouped":
        return _grouped_codes(case, rng)
    if problem.quant is not None:
        a_values, b_values, exact_below = quantized_values(rng, problem, kind, b_matrix_shape)
    elif problem.out in INTEGERS:
        a_values, b_values = integer_values(rng, problem, shape_a, b_matrix_shape)
    else:
        a_values, b_values, exact_below = float_values(
            rng, problem, kind, shape_a, b_matrix_shape, accumulator or problem.accumulate
        )
    if kind == "nonfinite":
        a_values, b_values = nonfinite_values(rng, problem, seed, a_values, b_values)
    b_values = b_values[..., 0] if problem.op == "matvec" else b_values

    out = lay_out(shape_out, problem, "out", view)
    b = lay_out(shape_b, problem, "b", view)
    b.array[...] = b_values
    frames: tuple[Frame, ...] = (out, b)
    if problem.quant is None:
        a = lay_out(shape_a, problem, "a", view)
        a.array[...] = a_values
        a_values = a.array
        frames = (out, b, a)
    ends = None
    if problem.op == "grouped":
        frames = (*frames, among_poison(group_ends(rng, problem.m, problem.batch)))
        ends = frames[-1].array
    marks = _fingerprints(a_values, frames[1:])
    return Inputs(case, a_values, b.array, out.array, exact_below, frames, marks, ends)


def _grouped_codes(case: Case, rng: np.random.Generator) -> Inputs:
    """Make the operands of a grouped product of codes: the columns of each expert are its rows."""
    problem = case.problem
    rows, columns = problem.batch * problem.n, problem.m
    turned = replace(problem, op="matmul", m=rows, n=columns, batch=1)
    seen = replace(turned, a=problem.b, b=problem.a)
    codes, values, exact_below = quantized_values(rng, seen, case.kind, (problem.k, columns))
    if case.kind == "nonfinite":
        codes, values = nonfinite_values(rng, seen, case.seed, codes, values)
    shape_a, _, shape_out = shapes(problem)
    a = lay_out(shape_a, problem, "a", case.view)
    out = lay_out(shape_out, problem, "out", case.view)
    a.array[...] = values.T
    frames = (out, a, among_poison(group_ends(rng, problem.m, problem.batch)))
    marks = _fingerprints(codes, frames[1:])
    ends = frames[-1].array
    return Inputs(case, a.array, codes, out.array, exact_below, frames, marks, ends)


def group_ends(rng: np.random.Generator, tokens: int, experts: int) -> Array:
    """Return where each expert's rows end: even or skewed, in one group, or in a few of them.

    Now and then the last group ends before the tokens do.
    """
    style = int(rng.integers(5))
    weights = rng.random(experts) ** (1, 4, 1, 1, 12)[style]
    if style == 2 and experts:  # all in one group
        weights = np.eye(1, experts, int(rng.integers(experts)))[0]
    if style == 3:  # most groups are empty
        weights *= rng.random(experts) < 0.2
    used = tokens if rng.integers(4) else int(rng.integers(tokens + 1))
    whole = float(weights.sum())
    sizes = rng.multinomial(used, weights / whole) if whole > 0 else np.zeros(experts, np.int64)
    return np.asarray(np.cumsum(sizes), np.int32)


def among_poison(values: Array) -> Frame:
    """Return a copy of a vector whose buffer holds large numbers before and behind it."""
    buffer = np.full(values.nbytes + 2 * GUARD_BYTES + 64, 0x7F, np.uint8)
    base = GUARD_BYTES + -(int(buffer.__array_interface__["data"][0]) + GUARD_BYTES) % 64
    array: Array = np.ndarray(values.shape, values.dtype, buffer, base)
    array[...] = values
    return Frame(buffer, array, 0x7F)


def shapes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of A, of x or B, and of the result, with their batch axes."""
    if problem.op == "grouped":
        m, n, k = problem.m, problem.n, problem.k
        return (m, k), (problem.batch, k, n), (m, n)
    lead = () if problem.batch == 1 else (problem.batch,)
    lead_a = () if problem.shared_a else lead
    lead_b = () if problem.shared_b else lead
    if problem.op == "matvec":
        return (*lead_a, problem.m, problem.n), (*lead_b, problem.n), (*lead, problem.m)
    m, n, k = problem.m, problem.n, problem.k
    return (*lead_a, m, k), (*lead_b, k, n), (*lead, m, n)


def _check_case(case: Case) -> None:
    problem = case.problem
    if case.kind not in KINDS:
        raise ValueError(f"kind is {case.kind!r}; it must be one of {', '.join(KINDS)}.")
    if case.view not in VIEWS:
        raise ValueError(f"view is {case.view!r}; it must be one of {', '.join(VIEWS)}.")
    if problem.out in INTEGERS and case.kind != "integers":
        raise ValueError(f"kind is {case.kind!r}, but integer dtypes have kind 'integers' only.")
    if problem.out in COMPLEX and case.kind == "nonfinite":
        raise ValueError("kind 'nonfinite' is not defined for complex dtypes; use a real dtype.")
    batched = problem.batch != 1 and problem.op != "grouped"
    if problem.quant is not None and batched and not problem.shared_a:
        raise ValueError("a quantised matrix is shared by its batch; set shared_a=True.")


def lay_out(shape: tuple[int, ...], problem: Problem, name: str, view: str) -> Frame:
    """Return an array cut out of a buffer full of poison, lying as the problem and the view say.

    name: which array of the problem it is, ``a``, ``b`` or ``out``.
    """
    dtype_name, layout = getattr(problem, name), getattr(problem, f"layout_{name}")
    dtype = numpy_dtype(dtype_name)
    item = dtype.itemsize
    matrix = name == "a" or problem.op != "matvec"
    column_major = matrix and layout == "col"
    memory = (*shape[:-2], shape[-1], shape[-2]) if column_major else shape
    step = 2 if view in ("strided", "reversed") or (matrix and layout == "strided") else 1
    unit = max(problem.alignment, item)
    extra = 2 * unit if view == "padded" and matrix and name != "out" else 0
    strides = _strides(memory, item * step, unit, extra, step if matrix else 1)
    last = sum((size - 1) * stride for size, stride in zip(memory, strides, strict=True))
    nbytes = 0 if 0 in memory else last + item
    # One allocation in front, one alignment's worth, guards on both sides.
    buffer = np.empty(nbytes + 2 * GUARD_BYTES + 64 + 16 + item, np.uint8)
    pattern = 0x7F if dtype_name in INTEGERS else 0xFF
    buffer.fill(pattern)
    base = GUARD_BYTES + -(int(buffer.__array_interface__["data"][0]) + GUARD_BYTES) % 64
    base += unit if unit < 16 else 0  # exactly as aligned as the problem says, not more
    base += item if view == "sliced" else 0
    array: Array = np.ndarray(memory, dtype, buffer, base, strides)
    array = array.swapaxes(-1, -2) if column_major else array
    if view == "reversed":
        array = array[..., ::-1, ::-1] if matrix else array[..., ::-1]
    if view == "loose":
        array = _loose(array)
    return Frame(buffer, array, pattern)


def _strides(
    memory: tuple[int, ...], inner: int, unit: int, extra: int, row_step: int
) -> tuple[int, ...]:
    """Return byte strides, the last axis stepping by `inner`, the others aligned to `unit`."""
    strides = [inner]
    extent = memory[-1] * inner + extra
    for size in reversed(memory[:-1]):
        stride = max(-(-extent // unit) * unit, inner) * row_step
        row_step = 1
        strides.insert(0, stride)
        extent = max(size, 1) * stride
    return tuple(strides)


def _loose(array: Array) -> Array:
    """Return the array with odd strides, each another, along its axes of one element."""
    strides = [
        array.itemsize * (3 + 2 * axis) if size == 1 else step
        for axis, (size, step) in enumerate(zip(array.shape, array.strides, strict=True))
    ]
    known = array.view(np.uint8) if array.itemsize == 1 else array  # as_strided knows no float8
    return np.lib.stride_tricks.as_strided(known, array.shape, strides).view(array.dtype)


def _fingerprints(a: Any, frames: tuple[Frame, ...]) -> tuple[bytes, ...]:
    """Return the bytes (or, where they are many, a digest of them) of every input buffer."""
    buffers = [frame.buffer for frame in frames]
    if isinstance(a, QuantizedMatrix):
        parts = (a.codes, a.scales, a.zeros, a.perm)
        buffers += [np.ascontiguousarray(p).view(np.uint8) for p in parts if p is not None]
    return tuple(_fingerprint(buffer) for buffer in buffers)


def _fingerprint(buffer: NDArray[np.uint8]) -> bytes:
    if buffer.nbytes <= _LARGEST_KEPT:
        return buffer.tobytes()
    return hashlib.blake2b(buffer.data).digest()


def natural_alignment(problem: Problem) -> int:
    """Return the largest power of two, at most 16, that divides every packed leading stride.

    That is the alignment which operands without any padding have, when their buffers start at
    multiples of 16 bytes.
    """
    sizes = [problem.reduction if problem.layout_a == "row" else problem.m]
    names = [problem.a]
    if problem.op != "matvec":
        sizes.append(problem.n if problem.layout_b == "row" else problem.k)
        names.append(problem.b)
        sizes.append(problem.n if problem.layout_out == "row" else problem.m)
        names.append(problem.out)
    elif problem.batch != 1:
        sizes += [problem.n, problem.m]
        names += [problem.b, problem.out]
    pairs = list(zip(sizes, names, strict=True))
    if problem.quant is not None:
        pairs = [pair for pair in pairs if not pair[1].startswith(("uint", "float4", "float8"))]
    extents = [size * numpy_dtype(name).itemsize for size, name in pairs]
    return math.gcd(16, *extents)
