"""Products of tensors met before: found by the matrix's shape, confirmed by PyTorch's own guard.

To tell tensors apart by their attributes, and look a call up by what they say, takes the host 2 us
more than a guard, which compares with what was met and says yes or no. A quantised matrix has a
signature that is kept with it, so that the guard has the tensor beside it to look at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gemmule.core.caches import table
from gemmule.dispatch.torch_codes import known
from gemmule.dispatch.torch_launch import Product, guards
from gemmule.quant.matrix import QuantizedMatrix

_Tensor, _dual = torch.Tensor, torch.autograd.forward_ad
_is_compiling = torch.compiler.is_compiling
MOST = 4096


class Met:
    """Bound calls of plain tensors, and of one beside a quantised matrix, by what tells them apart.

    That is the operation, the shape of the matrix, or a quantised one's signature and the tensor's
    shape, and whether out was given. A guard knows one set of dtypes, shapes, strides, devices and
    flags; operands with the same key and another set take its place. What it does not see is asked
    here: forward differentiation, and tracing by torch.compile. It keeps no reference to the
    tensors.
    """

    def __init__(self) -> None:
        self._calls: dict[Any, tuple[Callable[..., bool], Product]] = table()

    def again(self, op: str, a: Any, b: Any, out: Any) -> Any | None:
        """Return the product of operands like some met before, or None: nothing was done."""
        if _is_compiling() or _dual._current_level >= 0:
            return None
        if type(a) is _Tensor and type(b) is _Tensor:
            met = self._calls.get((op, (a if op == "matvec" else b).shape, out is None))
            if met is None or not (met[0](a, b) if out is None else met[0](a, b, out)):
                return None
            return met[1](a, b, out)
        key = _beside(op, a, b, out)
        met = None if key is None else self._calls.get(key)
        if met is None:
            return None
        x = b if type(b) is _Tensor else a
        return met[1](a, b, out) if (met[0](x) if out is None else met[0](x, out)) else None

    def keep(self, op: str, operands: tuple[Any, Any, Any], trusted: Product) -> None:
        """Remember the bound call of operands that it just multiplied."""
        a, b, out = operands
        tensors = [one for one in (a, b) if type(one) is _Tensor]
        both = len(tensors) == 2
        shape = (a if op == "matvec" else b).shape
        key: Any = (op, shape, out is None) if both else _beside(op, a, b, out)
        if key is None or any(one.requires_grad for one in tensors):
            return  # a guard that was made under no_grad would let a gradient be lost later
        if len(self._calls) >= MOST:
            self._calls.clear()
        same = guards(*tensors) if out is None else guards(*tensors, out)
        self._calls[key] = (same, trusted)


def _beside(op: str, a: Any, b: Any, out: Any) -> Any | None:
    """Return the key of a quantised matrix on a device and a plain tensor, None for all else."""
    if type(a) is QuantizedMatrix and type(b) is _Tensor:
        signature = a.kept(known).signature
        return None if signature is None else (op, signature, b.shape, out is None)
    if type(b) is QuantizedMatrix and type(a) is _Tensor:
        signature = b.kept(known).signature
        return None if signature is None else (op, a.shape, signature, out is None)
    return None
