"""The products as operators of PyTorch: for `torch.compile`, `torch.export` and autograd.

``import gemmule.torch.ops`` defines ``torch.ops.gemmule.matvec``, ``vecmat`` and ``matmul``, and
with the suffix ``_out`` the forms that write into a given tensor. The functions of this module call
them. What each operator computes, its dtype rules and its errors are those of `gemmule.matvec` and
its siblings, which come through the operators by themselves where PyTorch has to know of a product:
where a gradient will be asked for, under tracing, `torch.vmap` and autocast. Gradients are products
again, computed by the same operators, so they can be differentiated in turn.

>>> import torch, gemmule.torch.ops as ops
>>> ops.matvec(torch.eye(2), torch.tensor([2.0, 3.0]))
tensor([2., 3.])
"""

from __future__ import annotations

import torch

from gemmule.frameworks.autograd import product


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
    named = {"out_dtype": out_dtype, "precision": precision, "batch_invariant": batch_invariant}
    return product("matvec", A, x, out, **named)


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
    named = {"out_dtype": out_dtype, "precision": precision, "batch_invariant": batch_invariant}
    return product("vecmat", x, A, out, **named)


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
    named = {"out_dtype": out_dtype, "precision": precision, "batch_invariant": batch_invariant}
    return product("matmul", A, B, out, **named)
