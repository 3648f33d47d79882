"""Peers: other people's implementations, given our operands, checked, then timed beside ours.

A peer says which problems it serves, prepares itself outside the timed call (packing weights is its
own affair), and is refused when it does not compute A B on random rectangular operands: a library
that is handed row-major data and computes B A or a transpose looks fast and right on symmetric
ones.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from gemmule.core.problem import UNIT_ROUNDOFF, Problem, numpy_dtype
from gemmule.quant.matrix import QuantizedMatrix
from gemmule_lab.records.environment import version_of

CHECK_ROWS, CHECK_COLUMNS = 192, 7
CHECK_REDUCTION = 256  # a multiple of every block that peers pack weights in


@dataclass(frozen=True, slots=True)
class Prepared:
    """A peer made ready for one set of operands: `call()` computes, `result()` shows the outcome.

    `result` returns an array of shape (m,) or (m, n); reading it is not part of the timed call.
    """

    call: Callable[[], object]
    result: Callable[[], np.ndarray]


Copies: TypeAlias = Callable[[Problem, Any, Any], Callable[[], Prepared]]


@dataclass(frozen=True, slots=True)
class Peer:
    """Somebody else's implementation, on ``cpu`` or on ``cuda``.

    absent(): the reason it cannot run here, or None. refuses(problem): why it does not serve a
    problem, or None. prepare(problem, A, B): A is an array in the problem's layout or a
    `QuantizedMatrix` in layout ``row``, B the vector (n,) or the matrix (k, n); peers on a GPU also
    take arrays that lie there. mode(): its floating-point mode, threads and version in words.
    activation_bits: what the right-hand operand is rounded to first, None when it is not.
    copies(problem, A, B): of peers with weights in memory of their own; converts them once and
    returns what makes the peer ready on one more copy each time it is called (`packing`).
    stand_in(A): the matrix of another format that the peer multiplies by in place of A, where it
    cannot take A: it is checked against that one, and its time says nothing of A's own format.
    own_bytes(problem): what one call reads.
    """

    name: str
    backend: str
    absent: Callable[[], str | None]
    refuses: Callable[[Problem], str | None]
    prepare: Callable[[Problem, Any, Any], Prepared]
    mode: Callable[[], str]
    activation_bits: int | None = None
    copies: Copies | None = None
    stand_in: Callable[[QuantizedMatrix], QuantizedMatrix] | None = None
    own_bytes: Callable[[Problem], int] = lambda problem: problem.compulsory_bytes


@dataclass(frozen=True, slots=True)
class Absence:
    """A peer that takes no part, and why.

    refused: it does not serve the problem, as it may others. more: how far from it.
    """

    name: str
    reason: str
    refused: bool = False
    more: str = ""


def packing(name: str, copies: Copies, **fields: Any) -> Peer:
    """Return a peer of the CPU that packs weights into memory of its own."""
    return Peer(name, "cpu", prepare=lambda *given: copies(*given)(), copies=copies, **fields)


def module_missing(*modules: str) -> str | None:
    """Return which of `modules` are not installed, in words, or None."""
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    return f"{' and '.join(missing)} not installed" if missing else None


def release(*packages: str) -> str:
    """Return the version of the first of these packages that is installed."""
    return next(filter(None, map(version_of, packages)), "of unknown version")


def plain_refusal(
    problem: Problem, dtypes: Sequence[str], *, strided: bool = False, batches: bool = False
) -> str | None:
    """Return why a peer for one plain dtype does not serve a problem, or None.

    strided: whether it takes operands without a unit stride; batches: whole ones of matrices.
    """
    if problem.quant is not None:
        return "it takes no quantised matrix"
    if not problem.a == problem.b == problem.out:
        return f"it does not mix {problem.a}, {problem.b} and {problem.out}"
    if problem.a not in dtypes:
        return f"it is not timed in {problem.a}"
    if not strided and "strided" in (problem.layout_a, problem.layout_b):
        return "it needs a unit stride"
    whole = problem.op == "matmul" and not (problem.shared_a or problem.shared_b)
    if problem.batch != 1 and not (batches and whole):
        return "of batches at most whole ones of matrices are given to it"
    return None


def result_shape(problem: Problem) -> tuple[int, ...]:
    """Return the shape of a result."""
    shape = (problem.m,) if problem.op == "matvec" else (problem.m, problem.n)
    return shape if problem.batch == 1 else (problem.batch, *shape)


def check(peer: Peer, problem: Problem, *, seed: int = 0) -> str | None:
    """Return why the peer computes something else than A B, or None when it is right.

    Rectangular operands of the problem's dtypes, layouts and quantisation, of small integers whose
    sums are exact in any order, so the result must equal the float64 one (rounded once, where the
    result is a half). Peers that round activations meet normal numbers and the bound that follows
    from their step instead. An exception of the peer counts as refusal.
    """
    small = small_problem(problem)
    a, b = check_operands(small, seed, exact=peer.activation_bits is None)
    left = as_float64(a if peer.stand_in is None else peer.stand_in(a))
    right = b.astype(np.float64)
    truth = left @ right
    allowed = UNIT_ROUNDOFF.get(small.out, 0.0) * np.abs(truth)
    if peer.activation_bits is not None:
        half_step = np.abs(right).max() / (2 ** (peer.activation_bits - 1) - 1) / 2
        sizes = np.abs(left) @ np.abs(right)
        steps = np.abs(left).sum(axis=1).reshape(-1, *[1] * (right.ndim - 1))
        # Operands and scales in float32, summed in any order, besides the activations' steps.
        allowed += 1.01 * half_step * steps + 2 * small.reduction * 2.0**-24 * sizes
    try:
        prepared = peer.prepare(small, a, b)
        prepared.call()
        result = np.asarray(prepared.result())
    except Exception as error:  # whatever a foreign library raises is a reason, not our failure
        return f"failed its check: {type(error).__name__}: {str(error)[:200]}"
    if result.shape != truth.shape:
        return f"failed its check: shape {result.shape} instead of {truth.shape}"
    wrong = ~(np.abs(result.astype(np.float64) - truth) <= allowed)
    if not wrong.any():
        return None
    return f"failed its check: {wrong.sum()} of {wrong.size} elements differ from A B"


def small_problem(problem: Problem) -> Problem:
    """Return the rectangular problem that stands for `problem` in a check."""
    sizes = {"m": CHECK_ROWS, "n": CHECK_REDUCTION, "k": 1}
    if problem.op == "matmul":
        sizes = {"m": CHECK_ROWS, "k": CHECK_REDUCTION, "n": min(CHECK_COLUMNS, problem.n)}
    return replace(problem, batch=1, **sizes)  # type: ignore[arg-type]


def check_operands(problem: Problem, seed: int, *, exact: bool) -> tuple[Any, np.ndarray]:
    """Return random A and B of a problem; `exact`: small integers whose sums round nowhere."""
    rng = np.random.default_rng(seed)
    width = 1 if "bfloat16" in (problem.a, problem.b, problem.out) or problem.quant else 3
    low = 0 if "uint" in problem.b else -width

    def numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
        if exact:
            return rng.integers(low, width + 1, shape).astype(numpy_dtype(dtype))
        return rng.standard_normal(shape).astype(numpy_dtype(dtype))

    reduction = problem.reduction
    shape = (reduction,) if problem.op == "matvec" else (reduction, problem.n)
    b = in_layout(numbers(shape, problem.b), problem.layout_b)
    if problem.quant is not None:
        return _quantized(problem, rng), b
    return in_layout(numbers((problem.m, reduction), problem.a), problem.layout_a), b


def _quantized(problem: Problem, rng: np.random.Generator) -> QuantizedMatrix:
    """Return random codes with scales that are powers of two and integer zero points."""
    spec = problem.codes
    from gemmule.quant.layouts import pack_nibbles

    rows, columns = problem.m, problem.reduction
    if spec.transposed:
        rows, columns = columns, rows
    codes = rng.integers(0, 1 << spec.bits, (rows, columns)).astype(np.uint8)
    per_row = 1 if spec.group_size in (None, -1) else -(-columns // int(spec.group_size or 1))
    groups = (1, 1) if spec.group_size is None else (rows, per_row)
    scales = 2.0 ** rng.integers(-3, 1, groups)
    zeros = rng.integers(0, 1 << spec.bits, groups).astype(np.float32)
    return QuantizedMatrix.from_parts(
        codes if spec.bits == 8 else pack_nibbles(codes),
        scales.astype(numpy_dtype(spec.scale_dtype)),
        zeros if spec.has_zeros else None,
        shape=(rows, columns),
        bits=spec.bits,
        group_size=spec.group_size,
        transposed=spec.transposed,
    )


def in_layout(array: np.ndarray, layout: str) -> np.ndarray:
    """Return `array` with the same values, lying as `layout` says."""
    if array.ndim < 2 or layout == "row":
        return np.ascontiguousarray(array)
    if layout == "col":
        return np.asfortranarray(array)
    wide = np.zeros((2 * array.shape[0], 2 * array.shape[1]), array.dtype)
    view = wide[::2, ::2]
    view[...] = array
    return view


def as_float64(a: Any) -> np.ndarray:
    """Return a matrix, quantised or not, in float64."""
    widened: np.ndarray
    widened = a.dequantize("float64") if isinstance(a, QuantizedMatrix) else a.astype(np.float64)
    return widened


def grouped_parts(q: QuantizedMatrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the stored matrix's codes, and scales and zero points as they are: one a group."""
    from gemmule.quant.layouts import unpack_nibbles

    plain = q.to(layout="row").to("cpu", layout="row")  # a GPU puts its own in order
    columns = plain.stored_shape[1]
    codes = plain.codes if plain.bits == 8 else unpack_nibbles(plain.codes, columns)
    scales = np.asarray(plain.scales, np.float32)
    zeros = np.full_like(scales, 1 << (plain.bits - 1)) if plain.zeros is None else plain.zeros
    return codes, scales, np.asarray(zeros, np.float32)
