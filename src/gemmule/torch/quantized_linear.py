"""The operator ``torch.ops.gemmule.quantized_linear``: a tensor by a quantised matrix's tensors.

What runs, what it looks like, its gradients and its batches. `gemmule.torch.linear` has the layers.
"""

from __future__ import annotations

from typing import Any

import torch

from gemmule.backends.cpu.openmp import by_pytorch
from gemmule.core.canonical import DEFAULT
from gemmule.dispatch.torch import TensorCall
from gemmule.dispatch.torch_repeats import REPEATS, form, seen
from gemmule.dispatch.tracked import handled, recorded
from gemmule.frameworks.operators import alone, define, register
from gemmule.general import compiled, product
from gemmule.plan import resolve
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.torch.on_host import HostCalls
from gemmule.torch.parts import HELD, Held, Shape, matrix_of

_SCHEMA = (
    "quantized_linear(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? perm, "
    "SymInt rows, SymInt columns, int bits, int? group_size, bool transposed=False, "
    "Tensor? bias=None) -> Tensor"
)
_Tensor, _wants_gradients = torch.Tensor, torch.is_grad_enabled
_C = torch._C._functorch


def again(parts: Any, bias: Any, x: Any) -> torch.Tensor | None:
    """Return the product of a layer by the call that served one like it, or None.

    parts: codes, scales, zeros and perm by name. None where there is no such call, a part was
    replaced, or PyTorch has to know of the product: then nothing was done.
    """
    codes = parts["codes"]
    held = HELD.get(id(codes))
    if (
        held is None
        or type(x) is not _Tensor
        or not held.stands_for(codes, parts["scales"], parts["zeros"], parts["perm"])
    ):
        return None
    if _wants_gradients():
        if x.requires_grad:  # where autograd, and nothing else of PyTorch, has to know of it
            known = handled() or held.wants_gradients()
            return None if known else _differentiate_again(x, held, bias)
        if bias is not None and bias.requires_grad:
            return None
    if held.calls is not None:
        return held.calls.guarded(held.matrix, x, bias)
    call = REPEATS.calls.get((_LAYER, held.known.kind, x.shape, bias is None))
    return None if call is None or recorded() else call(held.known, x, bias)  # no guard sees that


_LAYER = "a layer"  # the name of its products among those that were served before
_INSIDE = {op: f"{op} in an operator" for op in ("matvec", "vecmat")}  # the same, without questions


def run(x: torch.Tensor, *given: Any) -> torch.Tensor:
    """Return what the operator computes, of tensors that PyTorch need not know of.

    given: codes, scales, zero points, perm; a `Shape`; then, unless they are left out, whether the
    matrix is transposed, and the bias.
    """
    parts, shape = given[:4], Shape(*given[4:8])
    transposed, bias = given[8:] + (False, None)[len(given) - 8 :]
    check(x, bias, shape.columns if transposed else shape.rows)
    matrix = matrix_of(parts, shape)
    return product_of(matrix, x.detach(), bias, "vecmat" if transposed else "matvec")


def product_of(
    matrix: QuantizedMatrix, x: Any, bias: Any, op: str = "matvec", *, asks: bool = False
) -> torch.Tensor:
    """Return a product of vectors, and the bias, by one launch where a kernel adds it.

    By the call that served operands like these before, else by that of their plan, else by the
    general path. PyTorch need not know of it; asks: whether `again` may serve those like it, and
    asks each time.
    """
    a, b = (x, matrix) if op == "vecmat" else (matrix, x)
    on_host = matrix.kept(HostCalls) if matrix.device == "cpu" else None
    if on_host is None:
        y = _on_device(op, a, b, bias, asks)
        if y is not None:
            return y
    elif not compiled():
        y = on_host.again(op, matrix, x)
        on_host.keep(op, matrix, x, asks=asks)
        if y is not None:
            return y if bias is None else y.add_(bias.detach())
    alone = x.ndim > 1 and x.numel() == x.shape[-1] > 0
    if alone:  # a single vector is multiplied as such
        a, b = (x.reshape(-1), matrix) if op == "vecmat" else (matrix, x.reshape(-1))
    if on_host is not None:
        y = by_pytorch(torch, product, op, a, b, None, DEFAULT)
    else:
        y = product(op, a, b, None, DEFAULT)
    y = y if bias is None else y.add_(bias.detach())
    return y.reshape(*x.shape[:-1], *y.shape) if alone else y


def _on_device(op: str, a: Any, b: Any, bias: Any, asks: bool) -> Any | None:
    """Return a product by a bound call, kept for others like it; None where there is none."""
    name = _LAYER if asks else _INSIDE[op]
    y = REPEATS.again(name, a, b, bias)
    if y is not None:
        return y
    seen_a, seen_b = seen(a), seen(b)
    if seen_a is None or seen_b is None or seen_a[3] != seen_b[3]:
        return None
    plan = resolve(op, form(seen_a), form(seen_b), None, f"cuda:{seen_a[3]}", DEFAULT)
    if not isinstance(plan.fast_path, TensorCall):
        return None
    call = plan.fast_path.bound(asks=asks, adds=bias is not None)
    y = call(a, b, bias)
    if y is not None:
        REPEATS.keep(name, (a, b, bias), call)
    return y


def check(x: torch.Tensor, bias: torch.Tensor | None, outer: int) -> None:
    """Raise ValueError for x without a dimension, or a bias that is not of `outer` numbers."""
    if bias is not None and bias.shape != (outer,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, but must be ({outer},)")
    if x.ndim == 0:
        raise ValueError("x is 0-D, but a layer takes vectors: x (..., in_features)")


def _fake(x: torch.Tensor, *parts: Any) -> torch.Tensor:
    rows, columns, transposed = parts[4], parts[5], len(parts) > 8 and parts[8]
    inner, outer = (rows, columns) if transposed else (columns, rows)
    check(x, parts[9] if len(parts) > 9 else None, outer)
    if x.shape[-1] != inner:
        raise ValueError(f"x has {x.shape[-1]} columns, but the layer takes {inner}")
    if parts[0].device != x.device:
        raise TypeError(f"x lies on {x.device}, the layer's codes on {parts[0].device}; move one.")
    return x.new_empty((*x.shape[:-1], outer))


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    """The operator as PyTorch differentiates it, in x and in the bias, and takes batches of it."""

    @staticmethod
    def forward(x: torch.Tensor, *others: Any) -> Any:
        return _multiply(x, *others)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[1:5])
        ctx.save_for_forward(*inputs[1:5])
        *ctx.form, ctx.transposed, bias = inputs[5:]
        ctx.of_bias = None if bias is None else bias.dtype
        ctx.shape, ctx.dtype = output.shape, output.dtype

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, ``grad W``, and of the bias."""
        _refuse_scales(ctx.needs_input_grad[2:4])
        back, of_bias = _gradients(ctx, grad)
        return back, *(None,) * 9, of_bias

    @staticmethod
    def jvp(ctx: Any, of_x: Any, *others: Any) -> Any:
        _refuse_scales(one is not None for one in others[1:3])
        of_bias = others[-1]
        if of_x is None:
            return None if of_bias is None else of_bias.to(ctx.dtype).expand(ctx.shape).clone()
        found = _multiply(of_x, *ctx.saved_tensors, *ctx.form, ctx.transposed)
        return found if of_bias is None else found + of_bias.to(found.dtype)

    @staticmethod
    def vmap(info: Any, dims: Any, x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, int]:
        """Vectors of a batch are one product; where weights or biases differ each is one."""
        if all(d is None for d in dims[1:]):
            return _multiply(x.movedim(dims[0], 0), *others), 0
        given = [
            [
                one if d is None else one.select(d, i)
                for one, d in zip((x, *others), dims, strict=True)
            ]
            for i in range(info.batch_size)
        ]
        return torch.stack([_multiply(*each) for each in given]), 0


class _LinearAgain(torch.autograd.Function):  # type: ignore[misc]
    """The same for a layer that multiplied before: a third of what it costs the host."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, held: Held, bias: Any) -> torch.Tensor:
        shape = held.state[-1]
        call = REPEATS.calls.get((_INSIDE["matvec"], held.known.kind, x.shape, bias is None))
        y = None if call is None else call(held.known, x, bias)
        if y is None:
            check(x, bias, shape.rows)
            y = product_of(held.matrix, x.detach(), bias)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(held.codes(), *held.others)
        ctx.form, ctx.transposed = shape, False
        ctx.of_bias = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        back, of_bias = _gradients(ctx, grad)
        return back, None, of_bias


# Nothing of torch.func is at work where it is called, which PyTorch's own `apply` would ask first.
_differentiate_again = super(torch.autograd.Function, _LinearAgain).apply


def _gradients(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x, ``grad W``, and of the bias, each where it is wanted."""
    back = of_bias = None
    if grad is None:
        return None, None
    if ctx.needs_input_grad[0]:
        saved = ctx.saved_tensors
        known = handled() or grad.requires_grad or any(map(_stands_for_others, (grad, *saved)))
        multiply: Any = _multiply if known else run
        back = multiply(grad, *saved, *ctx.form, not ctx.transposed)
    if ctx.of_bias is not None and ctx.needs_input_grad[-1]:
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.of_bias)
    return back, of_bias


def _stands_for_others(tensor: torch.Tensor | None) -> bool:
    """Tell whether a tensor is one of torch.func, which may be over, or of a batch of gradients."""
    if tensor is None:
        return False
    return bool(_C.is_functorch_wrapped_tensor(tensor) or _C.is_legacy_batchedtensor(tensor))


def _refuse_scales(wanted: Any) -> None:
    if any(wanted):
        raise ValueError(
            "a derivative by scales or zero points of quantised weights is wanted, but they have "
            "none here: x and the bias have. Call .requires_grad_(False) on them, or .detach()."
        )


def _multiply(*arguments: Any) -> torch.Tensor:
    found: torch.Tensor = torch.ops.gemmule.quantized_linear.default(*arguments)
    return found


def _differentiable(*given: Any) -> torch.Tensor:
    """Differentiate the operator; the dispatcher leaves out arguments that are their defaults."""
    found: torch.Tensor = _Linear.apply(*given, *(False, None)[len(given) - 9 :])
    return found


def _plainly(*given: Any) -> torch.Tensor:
    found: torch.Tensor = differentiable(*given, *(False, None)[len(given) - 9 :])
    return found


differentiable = alone(_Linear, run)  # of all arguments, where autograd alone has to know


define(_SCHEMA, run, _fake)
register("quantized_linear", run, _differentiable, _plainly)
