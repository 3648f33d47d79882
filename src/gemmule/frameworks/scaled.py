"""Scaled products as PyTorch traces them; they have no derivatives.

`gemmule.matmul` with scales comes through here by itself where its tensors ask for it.
"""

from __future__ import annotations

from typing import Any

import torch

from gemmule import general, scaled
from gemmule.core.canonical import Options
from gemmule.frameworks.operators import define, dtype_name


def through(a: Any, b: Any, scale_a: Any, scale_b: Any, out: Any, options: Options) -> Any:
    """Return the scaled product by the operator; it takes neither `out` nor a named rung."""
    if out is not None or options.rung is not None:
        raise ValueError(
            "a scaled product of tensors that require a gradient, are traced, or lie under "
            "torch.vmap or autocast takes no out= and no rung=: its operator makes the result and "
            "chooses. Leave them away, or call under torch.no_grad()."
        )
    of_a, of_b = (_tensor(one, a) for one in (scale_a, scale_b))
    dtype = getattr(torch, options.out_dtype or scaled.OUTS[0])
    return torch.ops.gemmule.scaled_matmul.default(a, b, of_a, of_b, out_dtype=dtype)


def _tensor(scale: Any, like: Any) -> Any:
    if isinstance(scale, torch.Tensor):
        return scale
    return torch.full((1,), 1.0 if scale is None else scale, device=like.device)


def _kernel(a: Any, b: Any, scale_a: Any, scale_b: Any, *, out_dtype: Any = None) -> Any:
    options = Options(out_dtype=dtype_name(out_dtype))
    return general.untraced(scaled.scaled_product, a, b, scale_a, scale_b, None, options)


def _fake(a: Any, b: Any, scale_a: Any, scale_b: Any, *, out_dtype: Any = None) -> Any:
    """Return what a result looks like, by shapes and dtypes alone; raises as the product would."""
    shape = scaled.result_shape(a.shape, b.shape)
    for axis, scale in enumerate((scale_a, scale_b)):
        sizes = shape[axis], a.shape[1]
        scaled.check_scale(tuple(scale.shape), dtype_name(scale.dtype), sizes, axis)
    of_a, of_b = (dtype_name(one.dtype) for one in (a, b))
    dtype = scaled.result_dtype(of_a, of_b, dtype_name(out_dtype))
    return a.new_empty(shape, dtype=getattr(torch, dtype))


define(
    "scaled_matmul(Tensor A, Tensor B, Tensor scale_a, Tensor scale_b, *, "
    "ScalarType? out_dtype=None) -> Tensor",
    _kernel,
    _fake,
)
