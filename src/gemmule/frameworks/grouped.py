"""Grouped products as PyTorch traces, differentiates and batches them.

`gemmule.grouped_matmul` comes through here by itself where its tensors ask for it. Rows behind the
last end are zeros here, in results and in gradients, so that nothing undefined flows into a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gemmule import general
from gemmule.core.canonical import DEFAULT, Options
from gemmule.core.grouped import Routing, check_shapes, dtype_of, groups, routed
from gemmule.core.operand import Form
from gemmule.dispatch.tracked import handled, recorded
from gemmule.frameworks.autograd import Held, autocast, sharded, tangent
from gemmule.frameworks.operators import alone, define, dtype_name, refuse_out, register
from gemmule.grouped import of_tensors
from gemmule.quant.stack import QuantizedStack
from gemmule.routed import routed_product


def through(
    a: Any, w: Any, ends: Any, out: Any, options: Options, routing: Routing | None = None
) -> Any:
    """Return the product by the operator; with a stack of codes its gradient reaches A alone."""
    refuse_out("grouped_matmul", a, w, out)
    if options.rung is not None:
        raise ValueError(
            f"grouped_matmul was given rung={options.rung!r} with tensors that require a gradient, "
            "are traced, or lie under torch.vmap or autocast, where the operator chooses. Leave it "
            "away, or call under torch.no_grad()."
        )
    dtype = None if options.out_dtype is None else getattr(torch, options.out_dtype)
    if sharded(a, w):
        from gemmule.frameworks import grouped_dtensor as dtensor

        a, w = autocast(a, w)
        return dtensor.product(a, w, ends, out, dtype, routing)
    if isinstance(w, QuantizedStack):
        (a,) = autocast(a)
        return _beside_stack(a, w, ends, out, options, routing)
    a, w = autocast(a, w)
    if out is not None:
        return _computed(a, w, ends, out, options, routing)
    if routing is None:
        return torch.ops.gemmule.grouped_matmul.default(a, w, ends, out_dtype=dtype)
    given = routing.indices, routing.weights, ends, routing.epilogue
    return torch.ops.gemmule.routed_matmul.default(a, w, *given, out_dtype=dtype)


def _computed(
    a: Any, w: Any, ends: Any, out: Any, options: Options, routing: Routing | None
) -> Any:
    return general.untraced(routed_product, a, w, ends, out, options, routing)


def _beside_stack(
    a: Any, stack: QuantizedStack, ends: Any, out: Any, options: Options, routing: Routing | None
) -> Any:
    if out is not None:
        return _computed(a, stack, ends, out, options, routing)
    if recorded():
        raise ValueError(
            "grouped_matmul was given a QuantizedStack in a graph that PyTorch records, where its "
            "product would be a constant: a stack is no tensor. Trace a gemmule.torch.QuantStack."
        )
    apply = _OfStack.apply if handled() else _of_stack_alone
    dtype = None if options.out_dtype is None else getattr(torch, options.out_dtype)

    def multiply(a: Any, ends: Any, dtype: Any) -> Any:
        return general.untraced(apply, a, ends, False, dtype, Held(stack))

    if routing is None:
        return multiply(a, ends, dtype)
    return composed(multiply, a, stack.experts, routing, ends, dtype)


# ---- what runs ----------------------------------------------------------------------------------
def _kernel(a: Any, w: Any, ends: Any, *, out_dtype: Any = None) -> Any:
    check_shapes(tuple(a.shape), tuple(w.shape), tuple(ends.shape))
    result = a.new_zeros((a.shape[0], w.shape[2]), dtype=out_dtype)
    options = DEFAULT if result.dtype == a.dtype else Options(out_dtype=dtype_name(result.dtype))
    if a.is_cuda and general.untraced(of_tensors, a, w, ends, options, result) is not None:
        return result
    return general.untraced(routed_product, a, w, ends, result, options)


def _outer_kernel(a: Any, grad: Any, ends: Any) -> Any:
    """Return ``a[rows of e].T @ grad[rows of e]`` for each expert e: (experts, k, n).

    Of bfloat16 on Hopper by PyTorch's own product, whatever the ends say; else these are read on
    the host, which waits for them.
    """
    if _has_outer(a, grad) and ends.shape[0]:
        limits = ends.clamp(0, a.shape[0]).cummax(0).values
        return torch.nn.functional.grouped_mm(a.mT, grad, offs=limits)
    found = a.new_zeros((ends.shape[0], a.shape[1], grad.shape[1]))
    for expert, rows in groups(ends.tolist()):
        general.product("matmul", a[rows].T, grad[rows], found[expert], Options())
    return found


def _has_outer(a: Any, grad: Any) -> bool:
    """Whether PyTorch multiplies these, of whole 16 bytes, without the host."""
    whole = all(
        one.dtype == torch.bfloat16
        and one.is_cuda
        and 0 not in one.shape
        and one.stride(1) == 1
        and not (one.stride(0) % 8 or one.shape[1] % 8 or one.data_ptr() % 16)
        for one in (a, grad)
    )
    if not whole or not hasattr(torch.nn.functional, "grouped_mm"):  # since PyTorch 2.10
        return False
    return bool(torch.cuda.get_device_capability(a.device) == (9, 0))


def _fake(a: Any, w: Any, ends: Any, *, out_dtype: Any = None) -> Any:
    """Return what a result looks like, by shapes and dtypes alone; raises as the product would."""
    if not a.device == w.device == ends.device:
        raise TypeError(
            f"A lies on {a.device}, W on {w.device} and offsets on {ends.device}; all must lie on "
            "one device. Move them first."
        )
    shape_a, shape_w, shape_ends = (tuple(t.shape) for t in (a, w, ends))
    check_shapes(shape_a, shape_w, shape_ends)
    given = dtype_name(out_dtype)
    dtypes = dtype_name(a.dtype), dtype_name(w.dtype), dtype_name(ends.dtype)
    dtype = getattr(torch, dtype_of(*dtypes, given))
    return a.new_empty((shape_a[0], shape_w[2]), dtype=dtype)


def _outer_fake(a: Any, grad: Any, ends: Any) -> Any:
    return a.new_empty((ends.shape[0], a.shape[1], grad.shape[1]))


# ---- with a stack of codes ----------------------------------------------------------------------
def stack_product(a: Any, ends: Any, transposed: bool, dtype: Any, stack: QuantizedStack) -> Any:
    """Return rows by the matrices of a stack; transposed: by their transposed ones.

    With those, as gradients have them, the ends are read on the host, which waits.
    """
    result = a.new_zeros((a.shape[0], stack.shape[1 if transposed else 2]), dtype=dtype)
    if not transposed:
        options = Options(out_dtype=dtype_name(result.dtype))
        return general.untraced(routed_product, a, stack, ends, result, options)
    for expert, rows in groups(ends.tolist()):
        options = Options(out_dtype=dtype_name(result.dtype))
        general.product("matmul", a[rows], stack[expert].T, result[rows], options)
    return result


def routed_stack(
    a: Any, stack: QuantizedStack, indices: Any, weights: Any, epilogue: str | None
) -> Any:
    """Return rows, found by indices, by the matrices of a stack; PyTorch learns nothing of it."""
    weights = None if weights is None else weights.detach()
    routing = Routing(indices, weights, epilogue)
    return general.untraced(routed_product, a.detach(), stack, None, None, DEFAULT, routing)


def _of_stack(a: Any, ends: Any, transposed: bool, dtype: Any, *held: Any) -> Any:
    if isinstance(held[0], Held):
        return stack_product(a.detach(), ends, transposed, dtype, held[0].own)
    given = a, ends, transposed, dtype, *held
    return torch.ops.gemmule.quantized_grouped.default(*given)


class _OfStack(torch.autograd.Function):  # type: ignore[misc]
    """Rows by a stack that is held as it is, or by its tensors: linear in the rows."""

    @staticmethod
    def forward(a: Any, ends: Any, transposed: bool, dtype: Any, *held: Any) -> Any:
        return _of_stack(a, ends, transposed, dtype, *held)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        a, ends, ctx.transposed, ctx.dtype, *held = inputs
        ctx.of_rows = a.dtype
        ctx.set_materialize_grads(False)
        tensors = [one if isinstance(one, torch.Tensor) else None for one in held]
        ctx.held = [None if isinstance(one, torch.Tensor) else one for one in held]
        ctx.save_for_backward(ends, *tensors)
        ctx.save_for_forward(ends, *tensors)

    @staticmethod
    def _again(ctx: Any, rows: Any, transposed: bool, dtype: Any) -> Any:
        ends, *tensors = ctx.saved_tensors
        held = (o if t is None else t for o, t in zip(ctx.held, tensors, strict=True))
        return _OfStack.apply(rows.to(ctx.of_rows), ends, transposed, dtype, *held)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        """Each row's gradient meets its matrix transposed."""
        if any(ctx.needs_input_grad[4:]):
            raise ValueError(
                "a derivative by scales or zero points of quantised weights is wanted, but they "
                "have none here. Call .requires_grad_(False) on them, or .detach()."
            )
        back = None if grad is None else _OfStack._again(ctx, grad, not ctx.transposed, None)
        return back, *(None,) * (3 + len(ctx.held))

    @staticmethod
    def jvp(ctx: Any, of_a: Any, *others: Any) -> Any:
        return None if of_a is None else _OfStack._again(ctx, of_a, ctx.transposed, ctx.dtype)

    @staticmethod
    def vmap(info: Any, dims: Any, a: Any, ends: Any, *others: Any) -> Any:
        operands = a, ends, *others
        return _each(info, dims, operands, _OfStack.apply), 0


_of_stack_alone = alone(_OfStack, _of_stack)


def register_of_stack(op: str, kernel: Callable[..., Any]) -> None:
    """Let an operator of a stack's tensors be differentiated; kernel: what it computes."""
    register(op, kernel, _OfStack.apply, alone(_OfStack, kernel))


# ---- rows that are not sorted, weights and gates ------------------------------------------------
def composed(
    multiply: Callable[[Any, Any, Any], Any],
    a: Any,
    experts: int,
    routing: Routing,
    ends: Any,
    dtype: Any,
) -> Any:
    """Return a product with what surrounds it as operations that PyTorch differentiates.

    multiply: ``(rows, ends, dtype)`` -> products of sorted rows, zeros behind the last end. What
    is returned, and in which dtypes sums are kept, is that of `gemmule.grouped_matmul`.
    """
    dtype = a.dtype if dtype is None else dtype
    indices, weights, epilogue = routing.indices, routing.weights, routing.epilogue
    plain = weights is None and epilogue is None
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    if indices is None:
        return _through_gate(multiply(a, ends, dtype if plain else wide), epilogue).to(dtype)
    tokens, top_k = indices.shape
    flat = indices.reshape(-1)
    named = (flat >= 0) & (flat < experts)
    expert, order = torch.sort(torch.where(named, flat, experts), stable=True)
    numbers = torch.arange(experts, device=flat.device, dtype=flat.dtype)
    ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)
    rows = a.flatten(0, 1)[order] if a.ndim == 3 else a[order // max(top_k, 1)]
    found = _through_gate(multiply(rows, ends, dtype if plain else wide), epilogue)
    slots = torch.arange(tokens * top_k, device=flat.device)
    found = found[torch.zeros_like(order).scatter(0, order, slots)]
    found = found.unflatten(0, (tokens, top_k))
    if weights is None:
        return found.to(dtype)
    shares = torch.where(named.view(tokens, top_k), weights, 0).to(wide)
    return (found * shares[..., None]).sum(1).to(dtype)


def _through_gate(sums: Any, epilogue: str | None) -> Any:
    if epilogue is None:
        return sums
    gates, ups = sums.chunk(2, -1)
    return torch.nn.functional.silu(gates) * ups


def routed_fake(a: Any, w: Any, routing: Routing, ends: Any, out_dtype: Any) -> Any:
    """Return what a result looks like, and raise as the product would.

    w: the shape and dtype of the experts' matrices; where these are codes, the dtype is that of A.
    """
    rows, matrices = _form(a), Form.packed(tuple(w[0]), dtype_name(w[1]))
    named = routing.indices, routing.weights, ends
    indices, weights, offsets = (None if one is None else _form(one) for one in named)
    around, options = (indices, weights, offsets), Options(out_dtype=dtype_name(out_dtype))
    about = routed(rows, matrices, around, routing.epilogue, options)
    return a.new_empty(about.shape, dtype=getattr(torch, about.out))


def _form(tensor: Any) -> Form:
    return Form(tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype), 16)


def _routing(indices: Any, weights: Any, ends: Any, epilogue: Any) -> tuple[Routing, Any]:
    return Routing(indices, weights, epilogue), ends


def _routed_kernel(a: Any, w: Any, *around: Any, out_dtype: Any = None) -> Any:
    options = DEFAULT if out_dtype is None else Options(out_dtype=dtype_name(out_dtype))
    routing, ends = _routing(*around)
    given = (one.detach() for one in (a, w))
    return general.untraced(routed_product, *given, ends, None, options, routing)


def _routed_composed(a: Any, w: Any, *around: Any, out_dtype: Any = None) -> Any:
    def multiply(rows: Any, ends: Any, dtype: Any) -> Any:
        return torch.ops.gemmule.grouped_matmul.default(rows, w, ends, out_dtype=dtype)

    return composed(multiply, a, w.shape[0], *_routing(*around), out_dtype)


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
        ends = ctx.saved_tensors[2]
        return tangent(ctx, of_a, of_w, lambda a, w: _Grouped.apply(a, w, ends, ctx.dtype))

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
        ends = ctx.saved_tensors[2]
        return tangent(ctx, of_a, of_grad, lambda a, grad: _Outer.apply(a, grad, ends))

    @staticmethod
    def vmap(info: Any, dims: Any, *operands: Any) -> Any:
        return _each(info, dims, operands, _Outer.apply), 0


def _each(info: Any, dims: Any, operands: tuple[Any, ...], one: Any) -> Any:
    """Return a batch of results, one by one: each entry may have offsets of its own."""
    moved = list(operands)
    for i, (operand, dim) in enumerate(zip(operands, dims, strict=False)):
        if dim is not None:  # others may be no tensors
            t = operand.movedim(dim, 0)
            # Of integers, as offsets are, a product takes but what lies in one piece.
            moved[i] = t if t.is_floating_point() else t.contiguous()
    batched = [d is not None for d in dims[: len(operands)]]
    results = []
    for i in range(info.batch_size):
        pairs = zip(moved, batched, strict=True)
        results.append(one(*(t[i] if is_batched else t for t, is_batched in pairs)))
    return torch.stack(results)


def _routed_look(a: Any, w: Any, *around: Any, out_dtype: Any = None) -> Any:
    return routed_fake(a, (w.shape, w.dtype), *_routing(*around), out_dtype)


def _define() -> None:
    operands = "Tensor A, Tensor W, Tensor offsets, *, ScalarType? out_dtype=None"
    define(f"grouped_matmul({operands}) -> Tensor", _kernel, _fake)
    outer = "grouped_outer(Tensor A, Tensor grad, Tensor offsets) -> Tensor"
    define(outer, _outer_kernel, _outer_fake)
    around = "Tensor? indices, Tensor? weights, Tensor? offsets, str? epilogue"
    routed = f"routed_matmul(Tensor A, Tensor W, {around}, *, ScalarType? out_dtype=None) -> Tensor"
    define(routed, _routed_kernel, _routed_look)

    def apply(a: Any, w: Any, ends: Any, *, out_dtype: Any = None) -> Any:
        return _Grouped.apply(a, w, ends, out_dtype)

    plain = alone(_Grouped, lambda a, w, ends, dtype: _kernel(a, w, ends, out_dtype=dtype))

    def plainly(a: Any, w: Any, ends: Any, *, out_dtype: Any = None) -> Any:
        return plain(a, w, ends, out_dtype)

    register("grouped_matmul", _kernel, apply, plainly)
    register("grouped_outer", _outer_kernel, _Outer.apply, alone(_Outer, _outer_kernel))
    register("routed_matmul", _routed_kernel, _routed_composed, _routed_composed)


_define()
