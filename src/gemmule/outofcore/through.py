"""Host operands multiplied on a GPU: in one piece where they are small, else panel by panel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gemmule.arrays import transfer
from gemmule.arrays.interop import check_out, mark_written, to_kind, unwrap, unwrap_all
from gemmule.backends.cuda.arrays import ordinal_named
from gemmule.core import memory
from gemmule.core.canonical import Options, canonical
from gemmule.core.operand import Form, Operand, deciding
from gemmule.core.problem import numpy_dtype
from gemmule.dispatch.batches import AXES
from gemmule.outofcore import products
from gemmule.outofcore.tiling import PANEL_BYTES
from gemmule.plan import resolve

Array = np.ndarray[Any, Any]
Pair = tuple[Operand, Operand]
Scale = tuple[complex, complex]
PLAIN: Scale = (1.0, 0.0)


def through_device(
    op: str,
    pair: Pair,
    out: Operand | None,
    device: str,
    options: Options,
    scale: Scale = PLAIN,
) -> Any:
    """Multiply host operands on a GPU and return a host array of their library.

    With `out` the result is alpha * product + beta * out, in place; scale: alpha and beta, checked.
    """
    device = f"cuda:{ordinal_named(device)}"
    call = canonical(op, pair[0].form, pair[1].form, None, options)
    dtype = call.problem.out
    if out is not None:
        check_out(out, call.out_shape, dtype, list(pair))
        target = out.array
    else:
        size = math.prod(call.out_shape) * numpy_dtype(dtype).itemsize
        memory.require(size, "the result")
        target = np.empty(call.out_shape, numpy_dtype(dtype))
    _multiply(op, pair, target, device, replace(options, out_dtype=dtype), scale)
    if out is not None:
        mark_written(out)
        return out.original
    return to_kind(unwrap(target, "result"), deciding(*pair))


@dataclass(frozen=True, eq=False, repr=False)
class HostPlan:
    """A product of host operands on a GPU, decided once and callable many times; frozen.

    ``plan(A, x)`` takes host operands of the planned forms and gives a host array; others raise
    ValueError. `explain()` tells how the product is cut, and what goes over the link.
    """

    op: str
    forms: tuple[Form, Form]
    device: str
    options: Options
    explanation: str

    def __repr__(self) -> str:
        return f"HostPlan({self.explanation.splitlines()[0][11:]}: through {self.device})"

    def explain(self) -> str:
        """Return what runs where, how it is cut, and the bytes that are copied."""
        return self.explanation

    def __call__(self, a: Any, b: Any, /, *, out: Any = None) -> Any:
        """Compute the planned product of `a` and `b`, into `out` where given."""
        left, right, target = unwrap_all(a, b, ("the first operand", "the second operand"), out)
        if (left.form, right.form) != self.forms:
            planned, given = (
                " and ".join(f"{form.dtype} {form.shape} of strides {form.strides}" for form in two)
                for two in (self.forms, (left.form, right.form))
            )
            raise ValueError(f"this plan is for {planned}; given were {given}. Plan anew.")
        return through_device(self.op, (left, right), target, self.device, self.options)


def planned(op: str, pair: Pair, device: str, options: Options) -> HostPlan:
    """Return the plan of a product of host operands on a GPU."""
    device = f"cuda:{ordinal_named(device)}"
    forms = pair[0].form, pair[1].form
    call = canonical(op, *forms, None, options)
    named = replace(options, out_dtype=call.problem.out)
    target = np.broadcast_to(np.zeros((), numpy_dtype(call.problem.out)), call.out_shape)
    seen, two, part = op, pair, target
    text = ""
    if call.outer == () and products.wanted(pair, options, ordinal_named(device)):
        seen, two, part = _as_matrices(op, pair, target, named)
        if part.ndim == (2 if seen == "matmul" else 1):
            text = products.blocked(seen, two, device, named).explain()
    if not text:
        moved = sum(products.nbytes_of(one) for one in pair)
        text = (
            f"problem    {call.problem.describe()}\ndevice     {device}, operands on the host\n"
            f"copies     {moved:,} bytes in, {target.size * target.itemsize:,} out; one entry of "
            "a batch, or some, after the other where they are large"
        )
    return HostPlan(op, forms, device, options, text)


def _multiply(
    op: str, pair: Pair, target: Array, device: str, options: Options, scale: Scale
) -> None:
    """Compute into the host array `target`, whose dtype `options` name."""
    if target.size == 0:
        return
    if not products.wanted(pair, options, ordinal_named(device)):
        _in_one_piece(op, pair, target, device, options, scale)
        return
    op, pair, target = _as_matrices(op, pair, target, options)
    if target.ndim == (2 if op == "matmul" else 1):
        products.multiply(op, pair, target, device, options, scale)
        return
    for part, piece in _parts(op, pair, target):
        _multiply(op, part, piece, device, options, scale)


def _in_one_piece(
    op: str, pair: Pair, target: Array, device: str, options: Options, scale: Scale
) -> None:
    """Copy in, compute, copy out."""
    named = options.rung is not None  # its own layout is what such a rung is asked about
    left, right = (
        unwrap(transfer.to_device(one.array, device, keep_layout=named), "operand") for one in pair
    )
    alpha, beta = scale
    if beta == 0:
        plan = resolve(op, left.form, right.form, None, left.device, options)
        target[...] = plan.execute(left, right, None, alpha, beta).to_host()
        return
    there = unwrap(transfer.to_device(target, device), "out")  # added to before it is rounded
    plan = resolve(op, left.form, right.form, there.form, left.device, options)
    target[...] = plan.execute(left, right, there, alpha, beta).to_host()


def _as_matrices(op: str, pair: Pair, target: Array, options: Options) -> tuple[str, Pair, Array]:
    """See products with 1-D operands, and one matrix by many vectors, as what panels know."""
    left, right = pair
    if op == "matmul" and len(right.form.shape) == 1:
        if len(left.form.shape) == 1:
            return "matvec", (unwrap(left.array[None, :], "operand"), right), target.reshape(1)
        op = "matvec"
    elif op == "matmul" and len(left.form.shape) == 1:
        op = "vecmat"
    if options.batch_invariant:
        return _by_vectors(op, pair, target)
    if op == "matvec" and len(left.form.shape) == 2 and len(right.form.shape) > 1:
        vectors = _flat(right.array, target)
        if vectors is not None:
            return "matmul", (left, unwrap(vectors[0].T, "operand")), vectors[1].T
    if op == "vecmat" and len(right.form.shape) == 2 and len(left.form.shape) > 1:
        vectors = _flat(left.array, target)
        if vectors is not None:
            return "matmul", (unwrap(vectors[0], "operand"), right), vectors[1]
    return op, pair, target


def _by_vectors(op: str, pair: Pair, target: Array) -> tuple[str, Pair, Array]:
    """See a matmul as a batch of products with vectors: those of `Options.batch_invariant`."""
    left, right = pair
    if op != "matmul":
        return op, pair, target
    if left.form.quant is not None:
        columns = np.swapaxes(right.array, -1, -2)
        return "matvec", (left, unwrap(columns, "operand")), np.swapaxes(target, -1, -2)
    if len(right.form.shape) > 2:
        right = unwrap(right.array[..., None, :, :], "operand")
    return "vecmat", (left, right), target


def _flat(vectors: Array, target: Array) -> tuple[Array, Array] | None:
    """Return vectors and results as rows of matrices; None where the results do not lie so."""
    try:
        seen = np.reshape(target, (-1, target.shape[-1]), copy=False)
    except ValueError:  # the axes do not lie behind each other
        return None
    return vectors.reshape(-1, vectors.shape[-1]), seen


def _parts(op: str, pair: Pair, target: Array) -> Iterator[tuple[Pair, Array]]:
    """Yield products of fewer entries of the first batch axis, small ones several at a time."""
    axes = target.ndim - (2 if op == "matmul" else 1)
    count = target.shape[0]
    arrays: list[Array | None] = []
    for one, own in zip(pair, AXES[op], strict=True):
        if one.form.quant is not None:
            arrays.append(None)
            continue
        batch, array = target.shape[:axes], one.array
        arrays.append(np.broadcast_to(array, (*batch, *array.shape[array.ndim - own :])))
    nbytes = max(array.nbytes for array in arrays if array is not None) // count
    together = min(count // 2, PANEL_BYTES // max(1, 2 * nbytes))
    for first in range(0, count, max(1, together)):
        index = first if together <= 1 else slice(first, first + together)
        left, right = (
            one if array is None else unwrap(array[index], "operand")
            for one, array in zip(pair, arrays, strict=True)
        )
        yield (left, right), target[index]
