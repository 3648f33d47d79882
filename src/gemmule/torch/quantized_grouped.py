"""The operators ``torch.ops.gemmule.quantized_grouped`` and ``quantized_routed``.

They multiply rows by a stack of matrices, given as its tensors: rows that are sorted, and rows that
are found by indices. What runs, what it looks like, gradients and batches; `gemmule.torch.experts`
has the modules.
"""

from __future__ import annotations

from typing import Any

import torch

from gemmule.core.grouped import Routing, check_shapes, dtype_of
from gemmule.frameworks import grouped
from gemmule.frameworks.operators import define, register
from gemmule.quant import rounding
from gemmule.quant.stack import QuantizedStack
from gemmule.torch.parts import StackShape, matrix_of

# codes (experts n, ..) of matrices (columns, n).
_HELD = (
    "Tensor codes, Tensor scales, Tensor? zeros, SymInt experts, SymInt columns, int bits, "
    "int? group_size"
)
_AROUND = "Tensor? indices, Tensor? weights, str? epilogue"


def _stack(held: tuple[Any, ...]) -> QuantizedStack:
    codes, scales, zeros, experts, columns, *form = held
    shape = StackShape(len(codes), columns, *form)
    return QuantizedStack(matrix_of((codes, scales, zeros, None), shape), experts)


def _shape(held: tuple[Any, ...]) -> tuple[int, int, int]:
    codes, experts, columns = held[0], held[3], held[4]
    return experts, columns, codes.shape[0] // experts if experts else 0


def _check_place(a: Any, *others: Any) -> None:
    for one in others:
        if one is not None and one.device != a.device:
            raise TypeError(
                f"A lies on {a.device}, and what it is multiplied by or with on {one.device}; all "
                "must lie on one device. Move them first."
            )


# ---- rows that are sorted -----------------------------------------------------------------------
def run(a: Any, ends: Any, transposed: bool, dtype: Any, *held: Any) -> torch.Tensor:
    """Return what the operator computes, of tensors that PyTorch need not know of."""
    return grouped.stack_product(a.detach(), ends, transposed, dtype, _stack(held))


def _fake(a: Any, ends: Any, transposed: bool, dtype: Any, *held: Any) -> Any:
    _check_place(a, ends, held[0])
    experts, inner, outer = _shape(held)
    if transposed:
        inner, outer = outer, inner
    check_shapes(tuple(a.shape), (experts, inner, outer), tuple(ends.shape))
    name = rounding.dtype_name(a)
    dtype_of(name, name, rounding.dtype_name(ends), None, coded=True)
    return a.new_empty((a.shape[0], outer), dtype=dtype)


# ---- rows that are found by indices -------------------------------------------------------------
def route(a: Any, indices: Any, weights: Any, epilogue: Any, *held: Any) -> torch.Tensor:
    """Return what the operator computes, of tensors that PyTorch need not know of."""
    found: torch.Tensor = grouped.routed_stack(a, _stack(held), indices, weights, epilogue)
    return found


def _route_composed(a: Any, indices: Any, weights: Any, epilogue: Any, *held: Any) -> Any:
    routing = Routing(indices, weights, epilogue)

    def multiply(rows: Any, ends: Any, dtype: Any) -> Any:
        return torch.ops.gemmule.quantized_grouped.default(rows, ends, False, dtype, *held)

    return grouped.composed(multiply, a, held[3], routing, None, None)


def _route_fake(a: Any, indices: Any, weights: Any, epilogue: Any, *held: Any) -> Any:
    _check_place(a, indices, weights, held[0])
    routing = Routing(indices, weights, epilogue)
    return grouped.routed_fake(a, (_shape(held), a.dtype), routing, None, None)


_SORTED = "Tensor A, Tensor offsets, bool transposed, ScalarType? out_dtype"
define(f"quantized_grouped({_SORTED}, {_HELD}) -> Tensor", run, _fake)
define(f"quantized_routed(Tensor A, {_AROUND}, {_HELD}) -> Tensor", route, _route_fake)
grouped.register_of_stack("quantized_grouped", run)
register("quantized_routed", route, _route_composed, _route_composed)
