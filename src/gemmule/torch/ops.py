"""The products as operators of PyTorch: for `torch.compile`, `torch.export` and autograd.

``import gemmule.torch.ops`` defines ``torch.ops.gemmule.matvec``, ``vecmat`` and ``matmul``, and
with the suffix ``_out`` the forms that write into a given tensor. The functions of this module call
them. Each operator runs the public function of the same name, so what is computed, its dtype rules
and its errors are those of `gemmule.matvec` and its siblings; `gemmule.matvec` itself never comes
through here. Gradients are products again, computed by the same operators, so they can be
differentiated in turn.

>>> import torch, gemmule.torch.ops as ops
>>> ops.matvec(torch.eye(2), torch.tensor([2.0, 3.0]))
tensor([2., 3.])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gemmule import api, lookup
from gemmule.core.problem import check_dtype, matmul_shape, matvec_shape, result_dtype

NAMES = lookup.NAMES  # operator -> the names of its operands, in order
_OPTIONS = 'ScalarType? out_dtype=None, str precision="float32", bool batch_invariant=False'
_LIBRARY = torch.library.Library("gemmule", "DEF")


def matvec(
    A: torch.Tensor,
    x: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str = "float32",
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return ``A x``: A (..., m, n), x (..., n), result (..., m), as `gemmule.matvec` computes it.

    Differentiable in A and x, unless `out` is given; `out` must not overlap an input. Shapes,
    dtypes, options and errors are those of `gemmule.matvec`. A gradient has the dtype of what it
    belongs to. Under torch.compile the call stays in the graph.

    >>> import torch, gemmule.torch.ops as ops
    >>> x = torch.ones(2, requires_grad=True)
    >>> ops.matvec(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), x).sum().backward()
    >>> x.grad
    tensor([4., 6.])
    """
    return _call("matvec", A, x, out, out_dtype, precision, batch_invariant)


def vecmat(
    x: torch.Tensor,
    A: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str = "float32",
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return ``x A``: x (..., m), A (..., m, n), result (..., n). As `matvec` otherwise.

    >>> import torch, gemmule.torch.ops as ops
    >>> ops.vecmat(torch.tensor([1.0, 10.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([31., 42.])
    """
    return _call("vecmat", x, A, out, out_dtype, precision, batch_invariant)


def matmul(
    A: torch.Tensor,
    B: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str = "float32",
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return ``A B`` by the array-API rules of `gemmule.matmul`. As `matvec` otherwise.

    >>> import torch, gemmule.torch.ops as ops
    >>> ops.matmul(torch.eye(2), torch.ones(3, 2, 4)).shape
    torch.Size([3, 2, 4])
    """
    return _call("matmul", A, B, out, out_dtype, precision, batch_invariant)


def _call(
    op: str, a: Any, b: Any, out: Any, out_dtype: Any, precision: str, batch_invariant: bool
) -> Any:
    operators = torch.ops.gemmule
    options = {
        "out_dtype": out_dtype,
        "precision": precision,
        "batch_invariant": batch_invariant,
    }
    if out is None:
        return getattr(operators, op).default(a, b, **options)
    getattr(operators, f"{op}_out").default(a, b, out=out, **options)
    return out


# ---- what runs -------------------------------------------------------------------------------
def _kernel(op: str) -> Callable[..., Any]:
    multiply = getattr(api, op)

    def run(a: Any, b: Any, **options: Any) -> Any:
        return multiply(a, b, **options)

    return run


def _out_kernel(op: str) -> Callable[..., None]:
    multiply = getattr(api, op)

    def run(a: Any, b: Any, *, out: Any, **options: Any) -> None:
        if torch.is_grad_enabled() and any(t.requires_grad for t in (a, b, out)):
            raise ValueError(
                f"{op} was given out= and a tensor that requires a gradient; a result written into "
                "a given tensor has none. Leave out= away, or call it under torch.no_grad()."
            )
        multiply(a, b, out=out, **options)

    return run


# ---- what it will look like: shapes and dtypes alone --------------------------------------------
def _result(op: str, a: Any, b: Any, out_dtype: Any) -> tuple[tuple[Any, ...], torch.dtype]:
    """Return shape and dtype of a product; sizes may be symbols. Raises as the product would."""
    if a.device != b.device:
        raise TypeError(
            f"{NAMES[op][0]} lies on {a.device} and {NAMES[op][1]} on {b.device}; both must lie on "
            "one device. Move one of them first."
        )
    given = [check_dtype(_name(t.dtype), name) for t, name in zip((a, b), NAMES[op], strict=True)]
    dtype = result_dtype(given[0], given[1], None if out_dtype is None else _name(out_dtype))
    return _shape(op, a.shape, b.shape), getattr(torch, dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(op: str, a: Any, b: Any) -> tuple[Any, ...]:
    if op == "vecmat":
        return _shape("matvec", (*b[:-2], b[-1], b[-2]) if len(b) >= 2 else b, a)
    if op == "matvec":
        core = matvec_shape(tuple(a[-2:]), tuple(b[-1:]))
        return (*_batch(op, a[:-2], b[:-1]), *core)
    if not a or not b:
        raise ValueError(f"matmul does not take 0-D operands; got shapes {a} and {b}.")
    left, right = a if len(a) > 1 else (1, *a), b if len(b) > 1 else (*b, 1)
    rows, columns = matmul_shape(tuple(left[-2:]), tuple(right[-2:]))
    core = ((rows,) if len(a) > 1 else ()) + ((columns,) if len(b) > 1 else ())
    return (*_batch(op, left[:-2], right[:-2]), *core)


def _batch(op: str, left: Any, right: Any) -> tuple[Any, ...]:
    try:
        return tuple(torch.broadcast_shapes(left, right))
    except RuntimeError:
        raise ValueError(
            f"{op}: batch dimensions {tuple(left)} and {tuple(right)} do not broadcast together; "
            "each pair must be equal, or one of them 1."
        ) from None


def _fake(op: str) -> Callable[..., Any]:
    def look(a: Any, b: Any, *, out_dtype: Any = None, **options: Any) -> Any:
        shape, dtype = _result(op, a, b, out_dtype)
        return a.new_empty(shape, dtype=dtype)

    return look


def _out_fake(op: str) -> Callable[..., None]:
    def look(a: Any, b: Any, *, out: Any, out_dtype: Any = None, **options: Any) -> None:
        shape, dtype = _result(op, a, b, out_dtype)
        if tuple(out.shape) != shape:
            raise ValueError(f"out has shape {tuple(out.shape)}; the result has shape {shape}.")
        if out.dtype != dtype:
            raise TypeError(
                f"out has dtype {out.dtype}; the result has dtype {dtype}. "
                "Pass an out of that dtype, or out_dtype= to choose another."
            )

    return look


# ---- gradients --------------------------------------------------------------------------------
def _remember(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = {k: keyword_only_inputs[k] for k in ("precision", "batch_invariant")}


def _matvec_backward(ctx: Any, grad: Any) -> tuple[Any, Any]:
    """A's gradient is grad x^T, summed over the vectors it met; x's is A^H grad."""
    A, x = ctx.saved_tensors
    wants_A, wants_x = ctx.needs_input_grad[:2]
    grad_A = _outer(grad, x.conj(), A, ctx.options) if wants_A else None
    grad_x = _like(vecmat(grad, A.conj(), **ctx.options), x) if wants_x else None
    return grad_A, grad_x


def _vecmat_backward(ctx: Any, grad: Any) -> tuple[Any, Any]:
    """A's gradient is x grad^T, summed over the vectors it met; x's is conj(A) grad."""
    x, A = ctx.saved_tensors
    wants_x, wants_A = ctx.needs_input_grad[:2]
    grad_A = _outer(x.conj(), grad, A, ctx.options) if wants_A else None
    grad_x = _like(matvec(A.conj(), grad, **ctx.options), x) if wants_x else None
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
        grad_A = _like(matmul(grad, right.mH, **ctx.options), left).reshape(A.shape)
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
    if like.ndim == 2:
        batch = torch.broadcast_shapes(left.shape[:-1], right.shape[:-1])
        count = math.prod(batch)
        left = left.expand(*batch, left.shape[-1]).reshape(count, left.shape[-1])
        right = right.expand(*batch, right.shape[-1]).reshape(count, right.shape[-1])
    return _like(matmul(left.mT, right, precision=precision), like)


def _like(grad: Any, tensor: Any) -> Any:
    """Return a gradient summed to a tensor's shape, in its dtype."""
    return grad.sum_to_size(tensor.shape).to(tensor.dtype)


def _define() -> None:
    """Define and implement the operators on every device of the package."""
    backward = {"matvec": _matvec_backward, "vecmat": _vecmat_backward, "matmul": _matmul_backward}
    for op, (a, b) in NAMES.items():
        name = f"gemmule::{op}"
        tags = (torch.Tag.pt2_compliant_tag,)
        operands = f"Tensor {a}, Tensor {b}, *"
        _LIBRARY.define(f"{op}({operands}, {_OPTIONS}) -> Tensor", tags=tags)
        _LIBRARY.define(f"{op}_out({operands}, Tensor(a!) out, {_OPTIONS}) -> ()", tags=tags)
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(op, _kernel(op), key)
            _LIBRARY.impl(f"{op}_out", _out_kernel(op), key)
        torch.library.register_fake(name, _fake(op), lib=_LIBRARY)
        torch.library.register_fake(f"{name}_out", _out_fake(op), lib=_LIBRARY)
        torch.library.register_autograd(name, backward[op], setup_context=_remember, lib=_LIBRARY)


_define()
