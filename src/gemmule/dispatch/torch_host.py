"""The fast path of PyTorch's tensors on the host: that of arrays, over the memory of the tensors.

Products of tensors, and of one and a quantised matrix, are those of NumPy's views of them, whose
calls are bound (`gemmule.dispatch.host`): 7 us beside the kernel where the general path takes 24.
"""

from __future__ import annotations

from typing import Any

import torch

from gemmule.arrays.interop import array_of, tensor_of
from gemmule.core.problem import DTYPES
from gemmule.quant.library import refuse_without_data
from gemmule.quant.matrix import QuantizedMatrix

_KINDS = (torch.Tensor, torch.nn.Parameter)
_NAMES = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}


def arrays(a: Any, b: Any) -> tuple[Any, Any] | None:
    """Return operands with arrays in the place of tensors, or None: they are for the general path.

    So are vectors' products with vectors, which are numbers, and kinds of tensor that PyTorch has
    to know of. TypeError and ValueError for tensors without memory of their own.
    """
    left, right = _array(a, "A"), _array(b, "b")
    if left is None or right is None or (left is a and right is b):
        return None
    return None if left.ndim < 2 and right.ndim < 2 else (left, right)


def _array(operand: Any, argument: str) -> Any | None:
    if type(operand) not in _KINDS:
        return operand if type(operand) is QuantizedMatrix and operand.device == "cpu" else None
    name = _NAMES.get(operand.dtype)
    if name is None or not operand.is_cpu or operand.is_neg() or operand.is_conj():
        return None
    refuse_without_data(torch, operand, argument)
    return array_of(torch, operand, name, argument)


def tensor(array: Any) -> torch.Tensor:
    """Return a tensor over an array's memory."""
    return tensor_of(torch, array)
