"""Checks without a reference: rearranged operands, and Freivalds' random check of large products.

The metamorphic checks take ``multiply(A, B) -> C`` and compare bit for bit, which small integers
always allow (`inputs.make_inputs` with kind ``integers``) and other floats wherever the
order of additions does not depend on the place; else give `slack`, the distance that is allowed
elementwise (twice `judge.tolerance`, since both sides may be off).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmule.core.problem import COMPLEX, INTEGERS, UNIT_ROUNDOFF, Problem
from gemmule.core.rung import Arithmetic, Params
from gemmule.oracle.bounds import Magnitudes, result_error, sum_error
from gemmule.oracle.inputs import Inputs
from gemmule.oracle.judge import Verdict

Array: TypeAlias = NDArray[Any]
Doubles: TypeAlias = NDArray[np.float64]
Multiply: TypeAlias = Callable[[Array, Array], Array]

_BLOCK = 1 << 22  # elements converted at once


def batch_is_loop(multiply: Multiply, a: Array, b: Array, slack: Doubles | None = None) -> Verdict:
    """Compare a batched product ``(..., m, k) (..., k, n)`` with its products one by one."""
    together = multiply(a, b)
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    alone = np.empty_like(together)
    a, b = (np.broadcast_to(v, (*batch, *v.shape[-2:])) for v in (a, b))
    for index in np.ndindex(*batch):
        alone[index] = multiply(a[index], b[index])
    return _same("batch = loop", together, alone, slack)


def view_is_copy(multiply: Multiply, a: Array, b: Array, slack: Doubles | None = None) -> Verdict:
    """Compare the product of views with that of packed copies."""
    copy_a, copy_b = (np.array(v, order="C", copy=True) for v in (a, b))
    return _same("view = copy", multiply(a, b), multiply(copy_a, copy_b), slack)


def transpose_swaps(
    multiply: Multiply, a: Array, b: Array, slack: Doubles | None = None
) -> Verdict:
    """Compare ``(A B)^T`` with ``B^T A^T``, both operands of two or more dimensions."""
    direct, swapped = multiply(a, b), multiply(b.swapaxes(-1, -2), a.swapaxes(-1, -2))
    return _same("(AB)^T = B^T A^T", direct, swapped.swapaxes(-1, -2), slack)


def rows_permute(
    multiply: Multiply, a: Array, b: Array, seed: int = 0, slack: Doubles | None = None
) -> Verdict:
    """Compare the product of A's rows in another order with the product's rows in that order."""
    order = np.random.default_rng(seed).permutation(a.shape[-2])
    moved = multiply(np.ascontiguousarray(a[..., order, :]), b)
    axis = -1 if moved.ndim < a.ndim else -2  # a matvec's result has one axis less
    whole = np.take(multiply(a, b), order, axis=axis)
    allowed = None if slack is None else np.take(slack, order, axis=axis)
    return _same("rows permute", moved, whole, allowed)


def scaling_is_exact(
    multiply: Multiply, a: Array, b: Array, exponent_a: int = 3, exponent_b: int = -2
) -> Verdict:
    """Compare ``(2^i A)(2^j B)`` with ``2^(i+j) A B``; nothing may over- or underflow."""
    scale_a, scale_b = (np.asarray(2.0**e) for e in (exponent_a, exponent_b))
    scaled = multiply((a * scale_a).astype(a.dtype), (b * scale_b).astype(b.dtype))
    plain = multiply(a, b)
    wanted = (plain * np.asarray(2.0 ** (exponent_a + exponent_b))).astype(plain.dtype)
    return _same("power-of-two scaling", scaled, wanted, None)


def _same(name: str, left: Array, right: Array, slack: Doubles | None) -> Verdict:
    kind = "metamorphic"
    if left.shape != right.shape or left.dtype != right.dtype:
        text = f"{name}: {left.dtype} {left.shape} on one side, {right.dtype} {right.shape} on the"
        return Verdict(False, math.inf, (), f"{text} other", kind)
    if slack is None:
        bits = f"V{left.itemsize}"
        pair = [np.ascontiguousarray(v) for v in (left, right)]
        if pair[0].tobytes() == pair[1].tobytes():
            return Verdict(True, 0.0, (), f"{name}: bitwise equal", kind)
        wrong = pair[0].view(bits).reshape(left.shape) != pair[1].view(bits).reshape(left.shape)
        ratio = math.inf
    else:
        wide = np.complex128 if left.dtype.kind == "c" else np.float64
        with np.errstate(invalid="ignore", divide="ignore"):
            distance = np.abs(left.astype(wide) - right.astype(wide))
            wrong = ~((distance <= slack) | (left == right))
            ratios = np.where(left == right, 0.0, distance / slack)
        ratio = float(np.max(np.where(np.isnan(ratios), np.inf, ratios), initial=0.0))
        if not wrong.any():
            return Verdict(True, ratio, (), f"{name}: {ratio:.3g} of the slack", kind)
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    count = np.count_nonzero(wrong)
    text = f"{name}: {left[place]} against {right[place]} at {place}; {count} elements differ"
    return Verdict(False, ratio, place, text, kind)


def freivalds(
    inputs: Inputs,
    arithmetic: Arithmetic,
    params: Params,
    c: Array,
    *,
    rounds: int = 8,
    exact: bool = False,
) -> Verdict:
    """Check ``C = A B`` in O(m k + k n + m n) a round: ``C v`` against ``A (B v)``, v random signs.

    c: ``(m, n)``; the operands neither batched nor quantised nor complex; v follows from the
    case's seed. exact: the operands are small integers (kind ``integers``), so nothing may differ:
    then one wrong element is always found, and more in one row with probability at least
    ``1 - 2^-rounds``. Integer dtypes are always exact. Otherwise each row may differ by the sum of
    its elements' bounds, which hides errors below that sum: use it beside full checks of some rows.

    Raises ValueError where the operands do not fit, or where exact sums may leave float64.
    """
    problem, a, b = inputs.case.problem, inputs.a, inputs.b
    if problem.quant is not None or problem.out in COMPLEX or {a.ndim, b.ndim, c.ndim} != {2}:
        raise ValueError(
            "freivalds checks one real, unquantised product of 2-D arrays; "
            f"got {problem.describe()} with shapes {a.shape}, {b.shape}, {c.shape}. "
            "Check batches entry by entry, quantised products with oracle.judge."
        )
    if inputs.case.kind == "nonfinite":
        raise ValueError(
            "freivalds sums rows of C, which NaN and infinities make NaN; got operands of the kind "
            "nonfinite. Check them with oracle.judge."
        )
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; at least one round is needed.")
    wide: Any = np.float64
    if problem.out in INTEGERS:
        wide = np.uint64 if problem.out == "uint64" else np.int64
    rng = np.random.default_rng(inputs.case.seed)
    v = (2 * rng.integers(0, 2, (b.shape[1], rounds)) - 1).astype(wide)
    inner = _product(b, v)
    if problem.out in INTEGERS:
        return _residual(_product(c, v), _product(a, inner), np.zeros((a.shape[0], 1)))
    ones = np.ones((b.shape[1], 1))
    sizes = [_product(a, _product(b, ones, size=True), size=True), _product(c, ones, size=True)]
    if exact and not max(float(s.max(initial=0.0)) for s in sizes) < 2.0**53:
        raise ValueError("these sums may exceed 2^53, where float64 is no longer exact.")
    allowed = np.zeros((a.shape[0], 1))
    if not exact:
        allowed = _row_bound(problem, arithmetic, params, a, b, sizes)
    return _residual(_product(c, v), _product(a, inner), allowed)


def _row_bound(
    problem: Problem,
    arithmetic: Arithmetic,
    params: Params,
    a: Array,
    b: Array,
    sizes: list[Doubles],
) -> Doubles:
    """Return the sum of each row's bounds, from row sums of ``|A||B|`` and ``|C|``.

    What a bound has in subnormals does not scale with the summed B, so it is counted n times.
    """
    n = b.shape[1]
    total, found = sizes
    reference_error = (a.shape[1] + 2 * n) * 2.0**-52
    b_sums = _product(b, np.ones((n, 1)), size=True)
    # Row blocks keep the float64 copy of A small; only input rounding needs A itself.
    error = np.empty_like(total)
    for rows in _row_blocks(a):
        size_a = np.abs(a[rows].astype(np.float64))
        summed = Magnitudes(size_a, b_sums, total[rows], reference_error)
        nothing = Magnitudes(size_a, b_sums * 0.0, total[rows] * 0.0, 0.0)
        error[rows] = sum_error(problem, arithmetic, params, summed)
        error[rows] += n * sum_error(problem, arithmetic, params, nothing)
    u = UNIT_ROUNDOFF[problem.out]
    bound = result_error(problem, arithmetic, found / (1.0 - u), error)
    bound += n * result_error(problem, arithmetic, found * 0.0, error * 0.0)
    widened: Doubles = bound + reference_error * found
    return widened


def _residual(left: Array, right: Array, allowed: Doubles) -> Verdict:
    with np.errstate(invalid="ignore", divide="ignore"):
        if left.dtype.kind == "f":
            distance = np.abs(left - right)
        else:
            distance = (left != right).astype(np.float64)
        good = distance <= allowed
        ratios = np.where(distance == 0.0, 0.0, distance / allowed)
    ratio = float(np.max(np.where(np.isnan(ratios), np.inf, ratios), initial=0.0))
    rows = np.flatnonzero(~good.all(axis=1))
    if len(rows) == 0:
        return Verdict(True, ratio, (), f"residual {ratio:.3g} of its bound", "freivalds")
    text = f"row {rows[0]} of C v differs from A (B v); {len(rows)} rows do"
    return Verdict(False, ratio, (int(rows[0]),), text, "freivalds")


def _row_blocks(a: Array) -> Iterator[slice]:
    step = max(1, _BLOCK // max(1, a.shape[1]))
    for start in range(0, a.shape[0], step):
        yield slice(start, start + step)


def _product(a: Array, v: Array, *, size: bool = False) -> Array:
    """Return ``A @ V`` (``|A| @ V`` with `size`) in V's dtype, converting A block by block."""
    result = np.empty((a.shape[0], v.shape[1]), v.dtype)
    for rows in _row_blocks(a):
        block = a[rows].astype(v.dtype)
        result[rows] = (np.abs(block) if size else block) @ v
    return result
