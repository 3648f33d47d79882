"""Judging grouped products with what surrounds them: indices, weights of slots, and a gate.

The bound of the grouped product within goes on through what comes behind it. With g and u off by
dg and du, ``silu(g) u`` is off by at most ``1.1 |u| dg + |silu(g)| du + 1.1 dg du``, as the slope
of silu is below 1.1, and by the roundings of its own evaluation; a weighted sum by the weighted
errors of its terms and a rounding for each product and addition.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmule.core.grouped import Routed
from gemmule.core.problem import UNIT_ROUNDOFF, Problem, numpy_dtype
from gemmule.core.rung import Arithmetic, Params
from gemmule.oracle.bounds import SMALLEST, overflow_threshold
from gemmule.oracle.judge import Verdict, tolerance
from gemmule.oracle.truth import grouped_reference

Array: TypeAlias = NDArray[Any]
Doubles: TypeAlias = NDArray[np.float64]

SLOPE = 1.1  # of silu, at most
TINY = 2.0**-1022
GATE_ROUNDINGS = 8  # an exponential within two, a sum, a quotient, a product


def judge_routed(
    about: Routed,
    problem: Problem,
    arithmetic: Arithmetic,
    params: Params,
    operands: tuple[Array, Any, Array | None, Array | None, Array | None],
    found: Array,
) -> Verdict:
    """Judge a result: form, then every element.

    operands: A, W, indices, weights and offsets, finite. problem: of the product within, on rows in
    order; arithmetic, params: of the rung that computes it. Rows behind the last of the offsets are
    not looked at.
    """
    if found.shape != about.shape or found.dtype != numpy_dtype(about.out):
        text = f"the result is {found.dtype} {found.shape}; it must be {about.out} {about.shape}"
        return Verdict(False, math.inf, (), text, "form")
    a, w, indices, weights, ends = operands
    last = about.slots
    if ends is not None:
        last = int(ends[-1]) if len(ends) else 0
        order, limits, rows = np.arange(last), ends, a
    elif indices is not None:
        flat = indices.reshape(-1)
        each = [np.flatnonzero(flat == expert) for expert in range(about.experts)]
        order = np.concatenate([*each, np.zeros(0, np.int64)]).astype(np.int64)
        limits = np.cumsum([len(one) for one in each]).astype(np.int64)
        by_slot = np.broadcast_to(
            a if a.ndim == 3 else a[:, None], (*indices.shape, about.k)
        ).reshape(about.slots, about.k)
        rows = by_slot[order]
    else:
        raise ValueError("a product is found by indices or by offsets; neither was given.")
    truth = grouped_reference(problem, rows, w, limits)
    bound = tolerance(problem, arithmetic, params, truth)
    u = UNIT_ROUNDOFF[about.sums]
    values, error = np.asarray(truth.values, np.float64), bound + u * np.abs(truth.values)
    if about.gated:
        values, error = _gated(values, error, about.columns, u)
    slots, off = (np.zeros((last, about.columns)) for _ in range(2))
    slots[order], off[order] = values, error
    out = found.astype(np.float64).reshape(-1, about.columns)[:last]
    if weights is not None and indices is not None:
        inside = (indices >= 0) & (indices < about.experts)
        share = np.where(inside, weights, 0).astype(np.float64)[..., None]
        terms = share * slots.reshape(*indices.shape, about.columns)
        sizes = np.abs(terms).sum(axis=1)
        slots = terms.sum(axis=1)
        off = (np.abs(share) * off.reshape(*indices.shape, about.columns)).sum(axis=1)
        off += (about.top_k + 2) * u * (sizes + off)
        out = out.reshape(slots.shape)
    allowed = off + UNIT_ROUNDOFF[about.out] * (np.abs(slots) + off)
    allowed += (about.top_k + 3) * SMALLEST[about.out]
    return within(out, slots, allowed, about.out)


def within(out: Doubles, values: Doubles, allowed: Doubles, dtype: str) -> Verdict:
    """Judge finite results by how far each may be off; what overflows may be infinite."""
    with np.errstate(invalid="ignore"):
        distance = np.abs(out - values)
    beyond = np.abs(values) + allowed >= overflow_threshold(dtype)  # it may be infinite
    wrong = ~((distance <= allowed) | (beyond & (out == np.copysign(np.inf, values))))
    if not wrong.any():
        ratio = float((distance / np.maximum(allowed, TINY))[~beyond].max(initial=0.0))
        return Verdict(True, ratio, (), f"largest error is {ratio:.3g} of its bound", "bound")
    place = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    text = (
        f"[{', '.join(map(str, place))}] is {out[place]}, must be {values[place]:.9g} within "
        f"{allowed[place]:.3g}; {int(wrong.sum())} of {wrong.size} elements wrong"
    )
    return Verdict(False, math.inf, tuple(map(int, place)), text, "bound")


def _gated(values: Doubles, error: Doubles, columns: int, u: float) -> tuple[Doubles, Doubles]:
    """Return ``silu(gates) * ups`` and how far it may be off."""
    gates, ups = values[:, :columns], values[:, columns:]
    of_gates, of_ups = error[:, :columns], error[:, columns:]
    with np.errstate(over="ignore"):
        silu = gates / (1.0 + np.exp(-gates))
    result = silu * ups
    off = SLOPE * of_gates * np.abs(ups) + np.abs(silu) * of_ups + SLOPE * of_gates * of_ups
    # Where exp overflows in the sums' dtype silu is nothing, and was less than its least number.
    tiny = 2.0**-100 * (np.abs(ups) + of_ups)
    return result, off + GATE_ROUNDINGS * u * (np.abs(result) + off) + tiny
