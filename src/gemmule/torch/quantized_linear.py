"""The operator ``torch.ops.gemmule.quantized_linear``: a tensor by a quantised matrix's tensors.

What runs, what it looks like, its gradients and its batches. `gemmule.torch.linear` has the layers.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from gemmule import lookup
from gemmule.core.canonical import DEFAULT
from gemmule.dispatch.operators import refuse_forward
from gemmule.quant import checks, rounding
from gemmule.quant.cuda import fragment_order
from gemmule.quant.library import closed
from gemmule.quant.matrix import QuantizedMatrix

_LIBRARY = torch.library.Library("gemmule", "FRAGMENT")
_SCHEMA = (
    "quantized_linear(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? perm, "
    "SymInt rows, SymInt columns, int bits, int? group_size, bool transposed=False, "
    "Tensor? bias=None) -> Tensor"
)
_Four = tuple[Any, Any, Any, Any]
PARTS = ("codes", "scales", "zeros", "perm")
_matrices: dict[int, tuple[weakref.ref[torch.Tensor], Any, QuantizedMatrix]] = {}


def matrix_of(
    parts: tuple[torch.Tensor | None, ...],
    shape: tuple[int, int],
    bits: int,
    group_size: int | None,
) -> QuantizedMatrix:
    """Return the matrix that tensors stand for, checked once for as long as they do not change.

    What kernels keep of a matrix, such as another order of its codes, stays with it.
    """
    codes = parts[0]
    assert codes is not None  # noqa: S101  the schema has it so
    state = (*(_state(part) for part in parts), shape, bits, group_size)
    known = _matrices.get(id(codes))
    if known is not None and known[0]() is codes and known[1] == state:
        return known[2]
    # Detached: what the matrix holds must not keep the tensor itself alive.
    own: list[Any] = [None if p is None else closed(p.detach().contiguous()) for p in parts]
    arrays = own[0], own[1], own[2], own[3]
    if codes.is_cuda:
        rows = _on_device(parts, arrays, shape, bits, group_size)
        matrix = rows.to(layout=fragment_order.LAYOUT)  # a copy, which the fast kernels read
    else:
        matrix = QuantizedMatrix.from_parts(
            *arrays[:3], shape=shape, bits=bits, group_size=group_size, perm=arrays[3]
        )
    key = id(codes)
    reference = weakref.ref(codes, lambda _: _matrices.pop(key, None))
    _matrices[key] = (reference, state, matrix)
    return matrix


def _state(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, version


def _on_device(
    parts: tuple[Any, ...], arrays: _Four, shape: tuple[int, int], bits: int, group_size: int | None
) -> QuantizedMatrix:
    """Return a matrix on a GPU, of parts whose shapes, dtypes, places and order are checked."""
    m, n = shape
    count = (1, 1) if group_size is None else (m, rounding.group_count(n, group_size))
    wanted = ((m, -(-n * bits // 8)), count, count, (n,))
    dtypes = (("uint8",), checks.SCALE_DTYPES, ("float32",), ("int32",))
    for name, part, size, known in zip(PARTS, parts, wanted, dtypes, strict=True):
        if part is not None and (tuple(part.shape) != size or part.device != parts[0].device):
            raise ValueError(f"{name} has shape {tuple(part.shape)} on {part.device}, not {size}")
        if part is not None and rounding.dtype_name(part) not in known:
            raise TypeError(f"{name} has dtype {part.dtype}, but must be {' or '.join(known)}")
    perm = parts[3]
    if perm is not None and not torch.equal(perm.sort().values, torch.arange(n).to(perm)):
        raise ValueError(f"perm is no permutation of 0..{n - 1}")
    return QuantizedMatrix(
        *arrays,
        stored_shape=shape,
        bits=bits,
        group_size=group_size,
        device=arrays[0].device,
    )


def run(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
    rows: int,
    columns: int,
    bits: int,
    group_size: int | None,
    transposed: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what the operator computes, of tensors that PyTorch need not know of."""
    if bias is not None:
        _check_bias(bias, columns if transposed else rows)
    _check_rank(x)
    matrix = matrix_of((codes, scales, zeros, perm), (rows, columns), bits, group_size)
    given = x.detach()
    alone = given.ndim > 1 and given.numel() == given.shape[-1] > 0
    x = given.reshape(-1) if alone else given
    op, a, b = ("vecmat", x, matrix) if transposed else ("matvec", matrix, x)
    y: torch.Tensor = lookup.below(op, a, b, DEFAULT, bias)
    return y.reshape(*given.shape[:-1], *y.shape) if alone else y


def _check_rank(x: torch.Tensor) -> None:
    if x.ndim == 0:
        raise ValueError("x is 0-D, but a layer takes vectors: x (..., in_features)")


def _check_bias(bias: torch.Tensor, outer: int) -> None:
    if bias.shape != (outer,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, but must be ({outer},)")


def _fake(x: torch.Tensor, *parts: Any) -> torch.Tensor:
    refuse_forward("quantized_linear")
    _check_rank(x)
    rows, columns, transposed = parts[4], parts[5], len(parts) > 8 and parts[8]
    inner, outer = (rows, columns) if transposed else (columns, rows)
    if x.shape[-1] != inner:
        raise ValueError(f"x has {x.shape[-1]} columns, but the layer takes {inner}")
    if len(parts) > 9 and parts[9] is not None:
        _check_bias(parts[9], outer)
    return x.new_empty((*x.shape[:-1], outer))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[1:5])
    *ctx.form, bias = inputs[5:]
    ctx.of_bias = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x, ``grad W``, and of the bias; codes and scales have none."""
    *form, transposed = ctx.form
    back = of_bias = None
    if ctx.needs_input_grad[0]:
        parts = (*ctx.saved_tensors, *form, not transposed)
        back = torch.ops.gemmule.quantized_linear.default(grad, *parts)
    if ctx.of_bias is not None and ctx.needs_input_grad[-1]:
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.of_bias)
    return back, *(None,) * 9, of_bias


def are_batched(parts: Any) -> bool:
    """Whether `torch.func` looks at weights, as it does at those of several models at once."""
    return any(p is not None and torch._C._functorch.is_functorch_wrapped_tensor(p) for p in parts)


def _vmap(info: Any, dims: Any, x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, int]:
    """Vectors of a batch are one product; where weights or biases differ each is one."""
    operator = torch.ops.gemmule.quantized_linear.default
    if all(d is None for d in dims[1:]):
        return operator(x.movedim(dims[0], 0), *others), 0
    given = [
        [one if d is None else one.select(d, i) for one, d in zip((x, *others), dims, strict=True)]
        for i in range(info.batch_size)
    ]
    return torch.stack([operator(*each) for each in given]), 0


_LIBRARY.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("quantized_linear", run, _key)
torch.library.register_fake("gemmule::quantized_linear", _fake, lib=_LIBRARY)
torch.library.register_autograd(
    "gemmule::quantized_linear", _backward, setup_context=_remember, lib=_LIBRARY
)
torch.library.register_vmap("gemmule::quantized_linear", _vmap, lib=_LIBRARY)
