"""Products as PyTorch differentiates and batches them: gradients, `torch.vmap`, autocast.

A public function comes through here by itself where its tensors ask for it: `dispatch.tracked`
says when, `through` calls the operator.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from gemmule import general
from gemmule.arrays.prepared import PreparedMatrix
from gemmule.core.canonical import NAMES, Options
from gemmule.dispatch.batches import aligned
from gemmule.dispatch.tracked import handled, recorded
from gemmule.frameworks.operators import (
    alone,
    call,
    kernel,
    refuse_out,
    register,
    register_out,
)
from gemmule.quant.library import refuse_sparse
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.shards import QuantizedShards
from gemmule.quant.stack import QuantizedStack


def through(op: str, a: Any, b: Any, out: Any, options: Options) -> Any:
    """Return the product by the operator, that with a quantised matrix by its own rule."""
    if any(isinstance(operand, QuantizedShards) for operand in (a, b)) or (
        sharded(a, b) and any(isinstance(operand, QuantizedMatrix) for operand in (a, b))
    ):
        return _by_parts(op, a, b, out, options)
    if isinstance(a, QuantizedMatrix) or isinstance(b, QuantizedMatrix):
        refuse_out(op, a, b, out)
        return general.untraced(_beside, op, a, b, out, options)
    if isinstance(a, PreparedMatrix) or isinstance(b, PreparedMatrix):
        raise ValueError(
            f"{op} was given a prepared matrix with a tensor that requires a gradient, is traced, "
            "or lies under torch.vmap or autocast; products with one have no gradient. Call under "
            "torch.no_grad(), or give the matrix itself."
        )
    given = {"rung": options.rung, "accumulate": options.accumulate}
    named = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if named:
        raise ValueError(
            f"{op} was given {', '.join(named)} with tensors that require a gradient, are traced, "
            "or lie under torch.vmap or autocast, where the operator chooses. Leave it away, or "
            "call under torch.no_grad()."
        )
    dtype = None if options.out_dtype is None else getattr(torch, options.out_dtype)
    chosen = {"precision": options.precision, "batch_invariant": options.batch_invariant}
    return product(op, a, b, out, out_dtype=dtype, **chosen)


def _beside(op: str, a: Any, b: Any, out: Any, options: Options) -> Any:
    """Return the product of a quantised matrix and a tensor that PyTorch has to know of."""
    if out is not None:
        return general.product(op, a, b, out, options)
    if recorded():
        raise ValueError(
            f"{op} was given a QuantizedMatrix in a graph that PyTorch records, where its product "
            "would be a constant: a matrix is no tensor. Trace a QuantLinear.from_matrix(Q)."
        )
    return beside_matrix(op, *autocast(a, b), options=options)


def _by_parts(op: str, a: Any, b: Any, out: Any, options: Options) -> Any:
    """Return the product of a quantised matrix, or of parts of one, and a DTensor."""
    from gemmule.frameworks import dtensor as dtensor

    if out is not None:
        raise ValueError(f"{op} of DTensors takes no out=; use what it returns.")

    def multiply(left: Any, right: Any) -> Any:
        return beside_matrix(op, left, right, options=options)

    a, b = autocast(a, b)
    return dtensor.quantized(op, a, b, multiply)


def product(op: str, a: Any, b: Any, out: Any = None, **options: Any) -> Any:
    """Return the operator's product, under `torch.func` too, operands cast as autocast has it."""
    a, b = autocast(a, b)
    for operand, name in zip((a, b), NAMES[op], strict=True):
        refuse_sparse(operand, name)
    if sharded(a, b):
        from gemmule.frameworks import dtensor as dtensor  # its import registers the rules
    if out is not None:
        return call(op, a, b, out=out, **options)
    return call(op, a, b, **options)


def sharded(*tensors: Any) -> bool:
    """Whether one of the tensors is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


def autocast(*operands: Any) -> list[Any]:
    """Return operands as PyTorch's own products take them: floats but float64 in its dtype."""
    return [_cast(operand) if _is_cast(operand) else operand for operand in operands]


def _is_cast(operand: Any) -> bool:
    if not isinstance(operand, torch.Tensor) or not operand.is_floating_point():
        return False
    kind = operand.device.type
    within = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    return bool(within and operand.dtype != torch.float64)


def _cast(tensor: Any) -> Any:
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


# ---- gradients --------------------------------------------------------------------------------
def _kept(options: Any) -> dict[str, Any]:
    """Return the options that products of gradients share; the dispatcher leaves out defaults."""
    return {"precision": options.get("precision", "float32")} | {
        k: v for k, v in options.items() if k == "batch_invariant"
    }


def _matvec_backward(ctx: Any, grad: Any) -> tuple[Any, Any]:
    """A's gradient is grad x^T, summed over the vectors it met; x's is A^H grad."""
    A, x = ctx.saved_tensors
    wants_A, wants_x = ctx.needs_input_grad[:2]
    grad_A = _outer(grad, x.conj(), A, ctx.options) if wants_A else None
    grad_x = _like(product("vecmat", grad, A.conj(), **ctx.options), x) if wants_x else None
    return grad_A, grad_x


def _vecmat_backward(ctx: Any, grad: Any) -> tuple[Any, Any]:
    """A's gradient is x grad^T, summed over the vectors it met; x's is conj(A) grad."""
    x, A = ctx.saved_tensors
    wants_x, wants_A = ctx.needs_input_grad[:2]
    grad_A = _outer(x.conj(), grad, A, ctx.options) if wants_A else None
    grad_x = _like(product("matvec", A.conj(), grad, **ctx.options), x) if wants_x else None
    return grad_x, grad_A


def _matmul_backward(ctx: Any, grad: Any) -> tuple[Any, Any]:
    """A's gradient is grad B^H and B's is A^H grad, summed over the axes that were broadcast."""
    A, B = ctx.saved_tensors
    wants_A, wants_B = ctx.needs_input_grad[:2]
    left = A if A.ndim > 1 else A.unsqueeze(0)
    right = B if B.ndim > 1 else B.unsqueeze(-1)
    grad = grad if B.ndim > 1 else grad.unsqueeze(-1)
    grad = grad if A.ndim > 1 else grad.unsqueeze(-2)
    grad_A = grad_B = None
    if wants_A:
        grad_A = _like(product("matmul", grad, right.mH, **ctx.options), left).reshape(A.shape)
    if wants_B:
        grad_B = _outer(left.conj(), grad, right, ctx.options, rows=True).reshape(B.shape)
    return grad_A, grad_B


def _outer(left: Any, right: Any, like: Any, options: Any, *, rows: bool = False) -> Any:
    """Return the sum of outer products of the vectors (or rows) of two tensors, as `like` needs it.

    A matrix that met many vectors gets one product with a long sum, not a sum of many products.
    """
    precision = options["precision"]
    if not rows:
        left, right = left.unsqueeze(-2), right.unsqueeze(-2)
    if like.ndim == 2 and not sharded(left, right):  # shards of uneven sizes are not flattened
        batch = torch.broadcast_shapes(left.shape[:-1], right.shape[:-1])
        count = math.prod(batch)
        left = left.expand(*batch, left.shape[-1]).reshape(count, left.shape[-1])
        right = right.expand(*batch, right.shape[-1]).reshape(count, right.shape[-1])
    return _like(product("matmul", left.mT, right, precision=precision), like)


def _like(grad: Any, tensor: Any) -> Any:
    """Return a gradient summed to a tensor's shape, in its dtype."""
    return grad.sum_to_size(tensor.shape).to(tensor.dtype)


BACKWARD = {"matvec": _matvec_backward, "vecmat": _vecmat_backward, "matmul": _matmul_backward}


class _Bilinear(torch.autograd.Function):  # type: ignore[misc]
    """An operator as PyTorch differentiates it, in both directions, and takes batches of it."""

    @staticmethod
    def forward(a: Any, b: Any, op: str, options: dict[str, Any]) -> Any:
        return call(op, a, b, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        a, b, ctx.op, ctx.given = inputs
        ctx.set_materialize_grads(False)
        ctx.options = _kept(ctx.given)
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 4
        return (*BACKWARD[ctx.op](ctx, grad), None, None)

    @staticmethod
    def jvp(ctx: Any, of_a: Any, of_b: Any, *others: Any) -> Any:
        return tangent(ctx, of_a, of_b, lambda a, b: _Bilinear.apply(a, b, ctx.op, ctx.given))

    @staticmethod
    def vmap(info: Any, dims: Any, a: Any, b: Any, op: str, options: dict[str, Any]) -> Any:
        return _batched(op, dims[:2], a, b, lambda a, b: _Bilinear.apply(a, b, op, options)), 0


def tangent(ctx: Any, of_a: Any, of_b: Any, multiply: Any) -> Any:
    """Return the tangent of a product, linear in both operands, by theirs; None stands for zeros.

    ctx: holds both operands.
    """
    a, b = ctx.saved_tensors[:2]
    terms = [] if of_a is None else [multiply(of_a, b)]
    if of_b is not None:
        terms.append(multiply(a, of_b))
    return sum(terms[1:], start=terms[0])


def _batched(op: str, dims: Any, a: Any, b: Any, multiply: Any) -> Any:
    """Return the products of a batch whose axis lies at dims of each operand, along axis 0."""
    moved = [t if d is None else t.movedim(d, 0) for t, d in zip((a, b), dims, strict=True)]
    shapes, extra = aligned(op, [t.shape for t in moved], [d is not None for d in dims])
    pairs = zip(moved, shapes, strict=True)
    result = multiply(*(t.reshape(s) if isinstance(t, torch.Tensor) else t for t, s in pairs))
    for axis in extra:
        result = result.squeeze(axis)
    return result


class Held:
    """Codes on their way through PyTorch, which would ask them themselves what to do with them."""

    def __init__(self, own: QuantizedMatrix | QuantizedStack) -> None:
        self.own: Any = own
        self.shape = own.shape


def beside_matrix(op: str, *pair: Any, options: Options) -> Any:
    """Return the product of a quantised matrix and a tensor, differentiable in the tensor."""
    held = (Held(one) if isinstance(one, QuantizedMatrix) else one for one in pair)
    return (_Quantized.apply if handled() else _quantized_alone)(*held, op, options)


class _Quantized(torch.autograd.Function):  # type: ignore[misc]
    """A matrix that is held by a tensor: linear in the tensor."""

    @staticmethod
    def forward(a: Any, b: Any, op: str, options: Options) -> Any:
        a, b = (one.own if isinstance(one, Held) else one for one in (a, b))
        return general.product(op, a, b, None, options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        a, b, ctx.op, ctx.options = inputs
        ctx.first = isinstance(a, Held)
        held, x = (a, b) if ctx.first else (b, a)
        ctx.matrix, ctx.shape, ctx.dtype = held.own, x.shape, x.dtype

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        """The tensor's gradient is a product with the matrix turned."""
        op = {"matmul": "matmul", "matvec": "vecmat", "vecmat": "matvec"}[ctx.op]
        matrix = ctx.matrix.T if op == "matmul" else ctx.matrix
        pair = (matrix, grad) if ctx.first == (op == "matmul") else (grad, matrix)
        found = beside_matrix(op, *pair, options=Options()).sum_to_size(ctx.shape).to(ctx.dtype)
        return (None, found, None, None) if ctx.first else (found, None, None, None)

    @staticmethod
    def jvp(ctx: Any, of_a: Any, of_b: Any, *others: Any) -> Any:
        pair = (ctx.matrix, of_b) if ctx.first else (of_a, ctx.matrix)
        return beside_matrix(ctx.op, *pair, options=ctx.options)

    @staticmethod
    def vmap(info: Any, dims: Any, a: Any, b: Any, op: str, options: Options) -> Any:
        return _batched(op, dims[:2], a, b, lambda a, b: _Quantized.apply(a, b, op, options)), 0


_quantized_alone = alone(_Quantized, _Quantized.forward)


def _differentiable(op: str) -> Any:
    return lambda a, b, **options: _Bilinear.apply(a, b, op, options)


def _plainly(op: str) -> Any:
    compute = kernel(op)
    apply = alone(_Bilinear, lambda a, b, _, options: compute(a, b, **options))
    return lambda a, b, **options: apply(a, b, op, options)


for _op in NAMES:
    register(_op, kernel(_op), _differentiable(_op), _plainly(_op))
    register_out(f"{_op}_out")
