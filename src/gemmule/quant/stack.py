"""Stacks of quantised matrices, one for each expert, whose codes lie behind each other.

`quantize_experts` makes one of a 3-D weight. It is one `QuantizedMatrix` that holds the columns of
every expert's matrix as rows of codes, so there is one copy, one file and one move to a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from gemmule.core.words import Bits, Method, ScaleDtype
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.quantize import quantize


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class QuantizedStack:
    """Matrices ``W[e]`` of shape (k, n) in codes, for `gemmule.grouped_matmul`.

    matrix: of shape (experts n, k): row ``e n + j`` is column j of expert e, and groups run along
    k. Made by `quantize_experts` or `from_matrix`. ``stack[e]`` is one expert's matrix.

    >>> import gemmule as gm, numpy as np
    >>> stack = gm.quantize_experts(np.ones((4, 64, 6), np.float32), bits=4, group_size=32)
    >>> stack.shape, stack[1].shape, stack.matrix.shape
    ((4, 64, 6), (64, 6), (24, 64))
    """

    matrix: QuantizedMatrix
    experts: int

    @classmethod
    def from_matrix(cls, matrix: QuantizedMatrix, experts: int) -> Self:
        """Return the stack of `experts` matrices whose columns are a matrix's rows, in turn.

        ValueError for rows that do not divide, a transposed or permuted matrix, or one scale for
        all of it.
        """
        rows = matrix.shape[0]
        if experts < 0 or (rows % experts if experts else rows):
            raise ValueError(f"{rows} rows are no {experts} experts of as many columns each.")
        if matrix.transposed or matrix.perm is not None or matrix.group_size is None:
            raise ValueError(
                "a stack holds matrices that are not transposed or permuted, with a scale for each "
                f"group or row; given was {matrix!r}."
            )
        held = matrix if matrix.layout == "row" else matrix.to(layout="row")
        return cls(held, experts)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, k, n)."""
        rows, k = self.matrix.shape
        return self.experts, k, rows // self.experts if self.experts else 0

    @property
    def ndim(self) -> int:
        """3."""
        return 3

    @property
    def device(self) -> str:
        """Where the codes lie."""
        return self.matrix.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points together."""
        return self.matrix.nbytes

    def to(self, device: str) -> Self:
        """Return the stack on another device, such as ``"cuda"`` or ``"cpu"``."""
        return replace(self, matrix=self.matrix.to(device, layout="row"))

    def __len__(self) -> int:
        """Experts."""
        return self.experts

    def __getitem__(self, expert: int) -> QuantizedMatrix:
        """Return one expert's matrix (k, n); on the host a view of the same codes."""
        if not -self.experts <= expert < self.experts:
            raise IndexError(f"expert {expert} of {self.experts}")
        first = expert % self.experts * self.shape[2]
        rows, held = slice(first, first + self.shape[2]), self.matrix
        if held.device != "cpu":
            return held[rows].T
        zeros = None if held.zeros is None else held.zeros[rows]
        shape = (self.shape[2], self.shape[1])
        parts = {"codes": held.codes[rows], "scales": held.scales[rows], "zeros": zeros}
        return replace(held, stored_shape=shape, error=None, **parts).T

    def dequantize(self, dtype: str = "float32") -> Any:
        """Return all matrices as floats, (experts, k, n): a view of columns that lie along k."""
        experts, k, n = self.shape
        return self.matrix.dequantize(dtype).reshape(experts, n, k).swapaxes(1, 2)

    def __repr__(self) -> str:
        return f"QuantizedStack(shape={self.shape}, of={self.matrix!r})"


def quantize_experts(
    W: Any,
    bits: Bits = 4,
    group_size: int = 128,
    symmetric: bool = False,
    scale_dtype: ScaleDtype = "float32",
    *,
    method: Method = "rtn",
) -> QuantizedStack:
    """Quantise the matrices of a mixture of experts, on the device where they lie.

    W : array (experts, k, n) of NumPy, PyTorch, CuPy or JAX. Groups run along k, the summed axis.
    Weights kept as (experts, n, k), as transformers does, are passed transposed and are then read
    where they lie; others are copied once into that order. group_size: a positive int, or -1 for
    one group a column. All else is as `quantize` has it.

    Raises as `quantize` does; ValueError for anything but three dimensions.

    >>> import numpy as np
    >>> quantize_experts(np.ones((2, 32, 3), np.float32), bits=8, group_size=32).shape
    (2, 32, 3)
    """
    shape = tuple(getattr(W, "shape", ()))
    if len(shape) != 3 or not hasattr(W, "swapaxes"):
        raise ValueError(
            f"quantize_experts takes an array (experts, k, n); got a {type(W).__qualname__} of "
            f"shape {shape}. A matrix goes to gemmule.quantize."
        )
    experts, k, n = shape
    rows = W.swapaxes(1, 2).reshape(experts * n, k)
    made = quantize(rows, bits, group_size, symmetric, scale_dtype, method=method)
    return QuantizedStack.from_matrix(made, experts)
