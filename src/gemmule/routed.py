"""Grouped products with what surrounds them: indices, weights of slots, and a gate at the end.

Rows are put in the order of their experts, multiplied as `gemmule.grouped` does it, and delivered:
on a GPU by kernels of the caller's stream, on the host by NumPy with the same meaning.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np

from gemmule.arrays.interop import (
    check_out,
    check_same_kind,
    empty_like_kind,
    mark_written,
    quantized_form,
    to_kind,
    unwrap,
)
from gemmule.backends.cuda import launch_args
from gemmule.backends.cuda.grouped import GroupedLauncher
from gemmule.backends.cuda.routing import FEW_SLOTS, Given, RoutedLauncher
from gemmule.choose import suggestions
from gemmule.core.caches import remembered, table
from gemmule.core.canonical import DEFAULT, Options
from gemmule.core.choice import Choice
from gemmule.core.grouped import Around, Routed, Routing, routed
from gemmule.core.operand import Form, Operand
from gemmule.core.problem import ITEMSIZE, numpy_dtype
from gemmule.core.rung import ByIndex, CudaRung
from gemmule.grouped import (
    Bound,
    GroupedPlan,
    grouped_product,
    nobody,
    of_no_slots,
    resolve_grouped,
    unwrap_weights,
    written,
)
from gemmule.quant.stack import QuantizedStack
from gemmule.rungs._cuda.geometry import starts_early

Array = np.ndarray[Any, Any]
SAVED_S = 4e-6  # what two launches less are worth: one H200, November 2026


def routed_product(
    a: Any, w: Any, offsets: Any, out: Any, options: Options, routing: Routing | None = None
) -> Any:
    """Return the product of the user's operands; PyTorch learns nothing of it."""
    if routing is None:
        return grouped_product(a, w, offsets, out, options)
    if getattr(a, "is_cuda", False) and "torch" in sys.modules:
        result = of_tensors(a, w, offsets, options, routing, out)
        if result is not None:
            return result
    left, right = unwrap(a, "A"), unwrap_weights(w)
    check_same_kind(left, right, ("A", "W"))
    others: list[Operand | None] = []
    for one, name in (
        (routing.indices, "indices"),
        (routing.weights, "weights"),
        (offsets, "offsets"),
        (out, "out"),
    ):
        others.append(None if one is None else unwrap(one, name))
        if others[-1] is not None:
            check_same_kind(left, others[-1], ("A", name))
    indices, weights, ends, result = others
    around = tuple(None if one is None else one.form for one in others[:3])
    about, launch = _resolved(left.form, right.form, around, routing.epilogue, left.device, options)
    given = Given(left, right, indices, weights, ends)
    target = result
    if target is None:
        target = empty_like_kind(about.shape, about.out, left)
    else:
        held = [one for one in (left, right, indices, weights, ends) if one is not None]
        check_out(target, about.shape, about.out, held)
    if launch is not None:
        if 0 not in about.shape:
            if about.slots:
                launch(given, target)
            else:
                of_no_slots(target, left)
    else:
        _on_host(about, given, target.array, fresh=out is None, options=options)
    if result is None:
        return to_kind(target, left)
    mark_written(result)
    return result.original


_bound: dict[Any, Bound] = table()  # calls of tensors met before, by what tells those apart
MOST = 4096


def of_tensors(
    a: Any, w: Any, ends: Any, options: Options, routing: Routing, out: Any = None
) -> Any | None:
    """Return the product of PyTorch's CUDA tensors met before, or None: the general path has it."""
    torch = sys.modules["torch"]
    tensor, indices, weights = torch.Tensor, routing.indices, routing.weights
    if type(a) is not tensor:
        return None
    key: tuple[Any, ...] = a.dtype, a.shape, a.stride(), a.get_device(), routing.epilogue
    for one in (indices, weights, ends):
        if one is None:
            key += (None,)
        elif type(one) is tensor:
            key += one.dtype, one.shape, one.stride(), one.get_device()
        else:
            return None
    if type(w) is QuantizedStack:
        key += w.matrix.kept(quantized_form), w.experts, w.device
    elif type(w) is tensor or type(w) is torch.nn.Parameter:
        key += w.dtype, w.shape, w.stride(), w.get_device()
    else:
        return None
    if options is not DEFAULT:
        key += (options,)
    bound = _bound.get(key)
    if bound is None:
        if len(_bound) >= MOST:
            _bound.clear()
        bound = _bound[key] = _bound_call(a, w, ends, options, routing)
    if out is None:
        return bound.call(a, w, ends, indices, weights, None)
    return written(bound, (a, w, ends, indices, weights), out)


def _bound_call(a: Any, w: Any, ends: Any, options: Options, routing: Routing) -> Bound:
    """Return the call ``(a, w, ends, indices, weights, out)`` of operands like these."""
    from gemmule.dispatch.torch import extent, maker  # only where PyTorch is

    torch, ordinal = sys.modules["torch"], a.get_device()
    others = (routing.indices, routing.weights, ends)
    tensors = [one for one in (a, *others) if one is not None]
    there = {unwrap(one, "it").device for one in (*tensors, w)}
    if there != {f"cuda:{ordinal}"} or any(0 in one.shape for one in (*tensors, w)):
        return Bound(nobody)
    left, right = unwrap(a, "A"), unwrap_weights(w)
    around = tuple(None if one is None else unwrap(one, "it").form for one in others)
    # What plans are made for is alignment too: the least that is asked of each address below.
    aligned = left.form._replace(alignment=16), right.form._replace(alignment=16)
    about, launch = _resolved(*aligned, around, routing.epilogue, left.device, options)
    if launch is None or 0 in about.shape:
        return Bound(nobody)
    packed, dtype = Form.packed(about.shape, about.out), getattr(torch, about.out)
    fresh, start = maker(about.shape, dtype, ordinal), launch.starter(ordinal, packed)
    alone = launch.alone(ordinal, packed)
    memory = maker((launch.bytes,), torch.uint8, ordinal)
    device_of, stream_of = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
    coded = isinstance(w, QuantizedStack)

    def call(a: Any, w: Any, ends: Any, indices: Any, weights: Any, out: Any) -> Any | None:
        x = a.data_ptr()
        matrix = launch_args.packed_addresses(w.matrix) if coded else w.data_ptr()
        if (x if coded else x | matrix) & 15 or device_of() != ordinal or a.is_neg():
            return None
        if not coded and w.is_neg():
            return None
        if weights is not None and weights.is_neg():
            return None
        result = fresh() if out is None else out
        if alone is not None:
            at = (ends if indices is None else indices).data_ptr()
            pair = (matrix, x) if coded else (x, matrix)
            alone(stream_of(ordinal), *pair, result.data_ptr(), at)
            return result
        i, v, e = (0 if one is None else one.data_ptr() for one in (indices, weights, ends))
        work = memory()
        start(stream_of(ordinal), work.data_ptr(), x, matrix, i, v, e, result.data_ptr())
        return result

    of_w = right.form if right.form.quant is None else None
    given = left.form, of_w, around[2], *around[:2]
    extents = tuple(0 if form is None else extent(form) for form in given)
    return Bound(call, (dtype, about.shape, packed.strides, ordinal), extents, extent(packed))


@remembered(4096)
def _resolved(
    a: Form, w: Form, around: Around, epilogue: str | None, device: str, options: Options
) -> tuple[Routed, RoutedLauncher | None]:
    """Return what surrounds a product of operands of these forms, and on a GPU its launcher."""
    about = routed(a, w, around, epilogue, options)
    if device == "cpu":
        return about, None
    plan = plan_within(about, a, w, around[2], device, options)
    rows, sums = plan.forms[0], _rows(about.slots, about.n, about.sums)
    early, product = starts_early(plan.choice.machine), getattr(plan.run, "__self__", None)
    if not isinstance(product, GroupedLauncher):  # there is nothing to multiply
        product = None
    elif early and about.sorts:
        product = product.early()
    forms = rows, plan.ends, sums
    return about, RoutedLauncher(about, product, (a, around[0], around[1]), forms, early=early)


def plan_within(
    about: Routed, a: Form, w: Form, ends: Form | None, device: str, options: Options
) -> GroupedPlan:
    """Return the plan of the product of rows that are in order, whose sums are delivered."""
    rows = _rows(about.slots, about.k, a.dtype) if about.sorts else a
    limits = Form.packed((about.experts,), "int32") if ends is None else ends
    sums = _rows(about.slots, about.n, about.sums)
    given = replace(options, out_dtype=about.sums)
    plan = resolve_grouped(rows, w, limits, sums, device, given)
    alone = _alone(about, plan.choice) if about.sorts and options.rung is None else None
    if alone is None:
        return plan
    params = tuple(sorted(alone.params.items()))
    named = replace(given, rung=alone.rung.name, params=params)
    return resolve_grouped(rows, w, limits, sums, device, named)


def _alone(about: Routed, choice: Choice) -> Choice | None:
    """Return the choice of a rung that finds few rows itself, where that is the quicker.

    None where it is this choice, or there is none.
    """
    machine, best = choice.machine, choice.expected_s
    if about.slots > FEW_SLOTS or best is None or _finds_rows(about, choice):
        return None
    found = [c for c in suggestions(choice.call, machine) if _finds_rows(about, c)]
    first = min(found, key=lambda one: one.expected_s or 0.0, default=None)
    return first if first and (first.expected_s or 0.0) < best + SAVED_S else None


def _finds_rows(about: Routed, choice: Choice) -> bool:
    rung = choice.rung
    if not isinstance(rung, CudaRung) or rung.routed is None:
        return False
    way = ByIndex("int32", about.gated, about.out)
    return rung.routed(choice.problem, choice.params, choice.machine, way) is not None


def _rows(count: int, columns: int, dtype: str) -> Form:
    """Return the form of rows of which each begins at whole 16 bytes."""
    each = 16 // ITEMSIZE[dtype]
    return Form((count, columns), (max(-(-columns // each) * each, each), 1), dtype, 16)


def _on_host(about: Routed, given: Given, target: Array, *, fresh: bool, options: Options) -> None:
    """Write the product of host operands to `target`; rows of no group are zeros where fresh."""
    with np.errstate(over="ignore", invalid="ignore"):  # halves of sums beyond them are infinite
        _written(about, given, target, fresh=fresh, options=options)


def _written(about: Routed, given: Given, target: Array, *, fresh: bool, options: Options) -> None:
    choices = replace(options, out_dtype=about.sums)
    w = given.w.original if given.w.form.quant is not None else given.w.array
    if given.indices is None or given.ends is not None:
        ends = given.ends.array if given.ends is not None else None
        sums = grouped_product(given.a.array, w, ends, None, choices)
        last = int(ends[-1]) if ends is not None and ends.size else 0
        target[:last] = _through_gate(about, sums[:last])
        if fresh:
            target[last:] = 0
        return
    order, ends = in_order(given.indices.array, about.experts)
    a = given.a.array.reshape(about.slots, about.k) if given.a.array.ndim == 3 else given.a.array
    rows = a[order if given.a.array.ndim == 3 else order // max(about.top_k, 1)]
    sums = _through_gate(about, grouped_product(rows, w, ends, None, choices))
    slots = np.zeros((about.slots, about.columns), sums.dtype)
    slots[order] = sums
    by_token = slots.reshape(*given.indices.array.shape, about.columns)
    if given.weights is None:
        target[...] = by_token
        return
    total = np.zeros((len(by_token), about.columns), by_token.dtype)
    named = np.zeros(about.slots, bool)
    named[order] = True
    weights = np.where(named.reshape(given.weights.array.shape), given.weights.array, 0)
    for j in range(about.top_k):
        total += weights[:, j, None].astype(total.dtype) * by_token[:, j]
    target[...] = total


def in_order(indices: Array, experts: int) -> tuple[Array, Array]:
    """Return the slots that name an expert, by experts, and where each expert's end, as int32."""
    flat = indices.reshape(-1)
    named = np.flatnonzero((flat >= 0) & (flat < experts))
    order = named[np.argsort(flat[named], kind="stable")]
    counts = np.bincount(flat[order], minlength=experts) if experts else np.zeros(0, np.int64)
    return order, np.asarray(np.cumsum(counts), np.int32)


def _through_gate(about: Routed, sums: Array) -> Array:
    if not about.gated:
        return sums
    gates, ups = sums[:, : about.columns], sums[:, about.columns :]
    return np.asarray(gates / (1 + np.exp(-gates)) * ups, numpy_dtype(about.sums))
