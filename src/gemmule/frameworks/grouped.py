"""Grouped products as PyTorch traces, differentiates and batches them.

`gemmule.grouped_matmul` comes through here by itself where its tensors ask for it. Rows behind the
last end are zeros here, in results and in gradients, so that nothing undefined flows into a graph.
"""

from __future__ import annotations

from typing import Any

import torch

from gemmule import general
from gemmule.core.canonical import Options
from gemmule.core.grouped import check_shapes, dtype_of
from gemmule.frameworks.autograd import autocast
from gemmule.frameworks.operators import LIBRARY, alone, refuse_out, register
from gemmule.grouped import grouped_product
from gemmule.quant.stack import QuantizedStack


def through(a: Any, w: Any, ends: Any, out: Any, options: Options) -> Any:
    """Return the product by the operator; beside a stack of codes without gradients."""
    refuse_out("grouped_matmul", a, w, out)
    if options.rung is not None:
        raise ValueError(
            f"grouped_matmul was given rung={options.rung!r} with tensors that require a gradient, "
            "are traced, or lie under torch.vmap or autocast, where the operator chooses. Leave it "
            "away, or call under torch.no_grad()."
        )
    dtype = None if options.out_dtype is None else getattr(torch, options.out_dtype)
    if isinstance(w, QuantizedStack):
        return _beside_stack(autocast(a)[0], w, ends, out, options)
    a, w = autocast(a, w)
    if out is not None:
        return general.untraced(grouped_product, a, w, ends, out, options)
    return torch.ops.gemmule.grouped_matmul.default(a, w, ends, out_dtype=dtype)


def _beside_stack(a: Any, stack: QuantizedStack, ends: Any, out: Any, options: Options) -> Any:
    if a.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "grouped_matmul was given a QuantizedStack with a tensor that requires a gradient, "
            "which such products do not have. Call it under torch.no_grad()."
        )
    return general.untraced(grouped_product, a, stack, ends, out, options)


# ---- what runs ----------------------------------------------------------------------------------
def _kernel(a: Any, w: Any, ends: Any, *, out_dtype: Any = None) -> Any:
    check_shapes(tuple(a.shape), tuple(w.shape), tuple(ends.shape))
    result = a.new_zeros((a.shape[0], w.shape[2]), dtype=out_dtype)
    options = Options(out_dtype=_name(result.dtype))
    return general.untraced(grouped_product, a, w, ends, result, options)


def _outer_kernel(a: Any, grad: Any, ends: Any) -> Any:
    """Return ``a[rows of e].T @ grad[rows of e]`` for each expert e: (experts, k, n).

    The ends are read on the host, which waits for them.
    """
    found = a.new_zeros((ends.shape[0], a.shape[1], grad.shape[1]))
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            rows = slice(begin, end)
            general.product("matmul", a[rows].T, grad[rows], found[expert], Options())
        begin = max(begin, end)
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fake(a: Any, w: Any, ends: Any, *, out_dtype: Any = None) -> Any:
    """Return what a result looks like, by shapes and dtypes alone; raises as the product would."""
    if not a.device == w.device == ends.device:
        raise TypeError(
            f"A lies on {a.device}, W on {w.device} and offsets on {ends.device}; all must lie on "
            "one device. Move them first."
        )
    shape_a, shape_w, shape_ends = (tuple(t.shape) for t in (a, w, ends))
    check_shapes(shape_a, shape_w, shape_ends)
    given = None if out_dtype is None else _name(out_dtype)
    dtypes = _name(a.dtype), _name(w.dtype), _name(ends.dtype)
    dtype = getattr(torch, dtype_of(*dtypes, given))
    return a.new_empty((shape_a[0], shape_w[2]), dtype=dtype)


def _outer_fake(a: Any, grad: Any, ends: Any) -> Any:
    return a.new_empty((ends.shape[0], a.shape[1], grad.shape[1]))


# ---- gradients ----------------------------------------------------------------------------------
class _Grouped(torch.autograd.Function):  # type: ignore[misc]
    """The operator as PyTorch differentiates it, in both directions, and takes batches of it."""

    @staticmethod
    def forward(a: Any, w: Any, ends: Any, dtype: Any) -> Any:
        return torch.ops.gemmule.grouped_matmul.default(a, w, ends, out_dtype=dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        a, w, ends, ctx.dtype = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, w, ends)
        ctx.save_for_forward(a, w, ends)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        """A's gradient is grouped too; that of a matrix sums outer products of its rows."""
        if grad is None:
            return (None,) * 4
        a, w, ends = ctx.saved_tensors
        grad, of_a, of_w = grad.to(a.dtype), None, None
        if ctx.needs_input_grad[0]:
            of_a = torch.ops.gemmule.grouped_matmul.default(grad, w.mT, ends)
        if ctx.needs_input_grad[1]:
            of_w = torch.ops.gemmule.grouped_outer.default(a, grad, ends)
        return of_a, of_w, None, None

    @staticmethod
    def jvp(ctx: Any, of_a: Any, of_w: Any, *others: Any) -> Any:
        a, w, ends = ctx.saved_tensors
        terms = [] if of_a is None else [_Grouped.apply(of_a, w, ends, ctx.dtype)]
        if of_w is not None:
            terms.append(_Grouped.apply(a, of_w, ends, ctx.dtype))
        return sum(terms[1:], start=terms[0])

    @staticmethod
    def vmap(info: Any, dims: Any, a: Any, w: Any, ends: Any, dtype: Any) -> Any:
        return _each(info, dims, (a, w, ends), lambda *one: _Grouped.apply(*one, dtype)), 0


class _Outer(torch.autograd.Function):  # type: ignore[misc]
    """The matrices' gradient, differentiable again."""

    @staticmethod
    def forward(a: Any, grad: Any, ends: Any) -> Any:
        return torch.ops.gemmule.grouped_outer.default(a, grad, ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, of_w: Any) -> tuple[Any, ...]:
        """Row i of `a` met row i of `grad` in its expert's matrix: each meets the other there."""
        if of_w is None:
            return (None,) * 3
        a, grad, ends = ctx.saved_tensors
        of_a = of_grad = None
        if ctx.needs_input_grad[0]:
            of_a = torch.ops.gemmule.grouped_matmul.default(grad, of_w.mT, ends)
        if ctx.needs_input_grad[1]:
            of_grad = torch.ops.gemmule.grouped_matmul.default(a, of_w, ends)
        return of_a, of_grad, None

    @staticmethod
    def jvp(ctx: Any, of_a: Any, of_grad: Any, *others: Any) -> Any:
        a, grad, ends = ctx.saved_tensors
        terms = [] if of_a is None else [_Outer.apply(of_a, grad, ends)]
        if of_grad is not None:
            terms.append(_Outer.apply(a, of_grad, ends))
        return sum(terms[1:], start=terms[0])

    @staticmethod
    def vmap(info: Any, dims: Any, *operands: Any) -> Any:
        return _each(info, dims, operands, _Outer.apply), 0


def _each(info: Any, dims: Any, operands: tuple[Any, ...], one: Any) -> Any:
    """Return a batch of results, one by one: each entry may have offsets of its own."""
    moved = [t if d is None else t.movedim(d, 0) for t, d in zip(operands, dims, strict=False)]
    # Of integers, as offsets are, a product takes but what lies in one piece.
    moved = [t if t.is_floating_point() else t.contiguous() for t in moved]
    batched = [d is not None for d in dims[: len(operands)]]
    results = []
    for i in range(info.batch_size):
        pairs = zip(moved, batched, strict=True)
        results.append(one(*(t[i] if is_batched else t for t, is_batched in pairs)))
    return torch.stack(results)


def _define() -> None:
    tags = (torch.Tag.pt2_compliant_tag,)
    operands = "Tensor A, Tensor W, Tensor offsets"
    LIBRARY.define(
        f"grouped_matmul({operands}, *, ScalarType? out_dtype=None) -> Tensor", tags=tags
    )
    LIBRARY.define("grouped_outer(Tensor A, Tensor grad, Tensor offsets) -> Tensor", tags=tags)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl("grouped_matmul", _kernel, key)
        LIBRARY.impl("grouped_outer", _outer_kernel, key)
    torch.library.register_fake("gemmule::grouped_matmul", _fake, lib=LIBRARY)
    torch.library.register_fake("gemmule::grouped_outer", _outer_fake, lib=LIBRARY)

    def apply(a: Any, w: Any, ends: Any, *, out_dtype: Any = None) -> Any:
        return _Grouped.apply(a, w, ends, out_dtype)

    plain = alone(_Grouped, lambda a, w, ends, dtype: _kernel(a, w, ends, out_dtype=dtype))
    outer = alone(_Outer, _outer_kernel)
    register(
        LIBRARY,
        "grouped_matmul",
        _kernel,
        apply,
        lambda a, w, ends, *, out_dtype=None: plain(a, w, ends, out_dtype),
    )
    register(LIBRARY, "grouped_outer", _outer_kernel, _Outer.apply, outer)


_define()
