"""The operator ``torch.ops.gemmule.quantized_linear``: a tensor by a quantised matrix's tensors.

What runs, what it looks like, its gradients and its batches. `gemmule.torch.linear` has the layers.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from gemmule.core.canonical import DEFAULT
from gemmule.dispatch.torch import TensorCall
from gemmule.dispatch.torch_repeats import REPEATS, form, seen
from gemmule.frameworks.operators import register
from gemmule.general import product
from gemmule.plan import resolve
from gemmule.quant import checks, rounding
from gemmule.quant.cuda import fragment_order
from gemmule.quant.library import closed
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.torch.replacing import version

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
    if codes.is_meta:
        raise TypeError(
            "the layer's codes lie on the device meta, which holds no data. Fill it first: "
            'load_state_dict(..., assign=True), or .to_empty(device="cpu") and load_state_dict.'
        )
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
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, version(tensor)


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
    y: torch.Tensor = _product(op, a, b, bias)
    return y.reshape(*given.shape[:-1], *y.shape) if alone else y


def _product(op: str, a: Any, b: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """Return a product and the bias, by one launch where a kernel adds it; PyTorch need not know.

    By the call that served operands like these before, else by that of their plan, else by the
    general path.
    """
    name = f"{op} of a layer" if bias is None else f"{op} and a bias"
    y: Any = REPEATS.again(name, a, b, bias)
    if y is not None:
        return y
    seen_a, seen_b = seen(a), seen(b)
    if seen_a is not None and seen_b is not None and seen_a[3] == seen_b[3]:
        plan = resolve(op, form(seen_a), form(seen_b), None, f"cuda:{seen_a[3]}", DEFAULT)
        if isinstance(plan.fast_path, TensorCall):
            call = plan.fast_path.inside if bias is None else plan.fast_path.adding
            y = call(a, b, bias)
            if y is not None:
                REPEATS.keep(name, (a, b, bias), call)
                return y
    if bias is not None:
        return _product(op, a, b, None).add_(bias.detach())
    return product(op, a, b, None, DEFAULT)


def _check_rank(x: torch.Tensor) -> None:
    if x.ndim == 0:
        raise ValueError("x is 0-D, but a layer takes vectors: x (..., in_features)")


def _check_bias(bias: torch.Tensor, outer: int) -> None:
    if bias.shape != (outer,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, but must be ({outer},)")


def _fake(x: torch.Tensor, *parts: Any) -> torch.Tensor:
    _check_rank(x)
    rows, columns, transposed = parts[4], parts[5], len(parts) > 8 and parts[8]
    inner, outer = (rows, columns) if transposed else (columns, rows)
    if x.shape[-1] != inner:
        raise ValueError(f"x has {x.shape[-1]} columns, but the layer takes {inner}")
    if len(parts) > 9 and parts[9] is not None:
        _check_bias(parts[9], outer)
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
        back = of_bias = None
        if grad is None:
            return (None,) * 11
        if ctx.needs_input_grad[0]:
            back = _multiply(grad, *ctx.saved_tensors, *ctx.form, not ctx.transposed)
        if ctx.of_bias is not None and ctx.needs_input_grad[-1]:
            of_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.of_bias)
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


_LIBRARY.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("quantized_linear", run, _key)
torch.library.register_fake("gemmule::quantized_linear", _fake, lib=_LIBRARY)
register(_LIBRARY, "quantized_linear", _differentiable)
