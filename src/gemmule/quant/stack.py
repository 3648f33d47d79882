"""Stacks of quantised matrices, one for each expert, whose codes lie behind each other.

`quantize_experts` makes one of a 3-D weight. It is one `QuantizedMatrix` that holds the columns of
every expert's matrix as rows of codes, so there is one copy, one file and one move to a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.problem import FLOAT4, ITEMSIZE
from gemmule.core.words import Bits, Float4, Method, ScaleDtype
from gemmule.quant import float4, float8, library, places
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.quantize import float_coded, quantize


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
        return cls(_read_there(held, held.device), experts)

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
        """Return the stack on another device, such as ``"cuda"`` or ``"cpu"``.

        4-bit floats stay what they are where kernels that read them are proved; elsewhere they
        become 8-bit codes of the same weights on the way to a GPU, as those of a matrix do.
        """
        return replace(self, matrix=places.on(_read_there(self.matrix, device), device))

    def __len__(self) -> int:
        """Experts."""
        return self.experts

    def __getitem__(self, expert: int) -> QuantizedMatrix:
        """Return one expert's matrix (k, n), a view of the same codes.

        On a GPU it is a copy where its codes would not begin as kernels want them.
        """
        if not -self.experts <= expert < self.experts:
            raise IndexError(f"expert {expert} of {self.experts}")
        _, k, n = self.shape
        first, held = expert % self.experts * n, self.matrix
        found = {
            name: _rows(getattr(held, name), first, n) for name in ("codes", "scales", "zeros")
        }
        if any(isinstance(part, DeviceArray) and part.pointer % 16 for part in found.values()):
            return held[first : first + n].T
        return replace(held, stored_shape=(n, k), error=None, **found).T

    def dequantize(self, dtype: str = "float32") -> Any:
        """Return all matrices as floats, (experts, k, n): a view of columns that lie along k."""
        experts, k, n = self.shape
        floats = self.matrix.dequantize(dtype)
        if isinstance(floats, DeviceArray):
            return floats.view((experts, k, n), (n * k, 1, k))
        return floats.reshape(experts, n, k).swapaxes(1, 2)

    def __repr__(self) -> str:
        return f"QuantizedStack(shape={self.shape}, of={self.matrix!r})"


def _read_there(matrix: QuantizedMatrix, device: str) -> QuantizedMatrix:
    """Return the matrix in codes that grouped products read on a device, where it lies."""
    form = FLOAT4.get(matrix.scale_dtype)
    if form is None or device == "cpu":
        return matrix
    if places.reads_floats(form, library.mover(device)[0], experts=True):
        return matrix
    return float4.widened(matrix.to("cpu", "row")).to(matrix.device, "row")


def _rows(part: Any, first: int, count: int) -> Any:
    """Return rows of a part of a matrix, in its memory."""
    if not isinstance(part, DeviceArray):
        return None if part is None else part[first : first + count]
    begin = first * part.strides[0] * ITEMSIZE[part.dtype]
    return part.view((count, *part.shape[1:]), part.strides, begin)


def quantize_experts(
    W: Any,
    bits: Bits = 4,
    group_size: int = 128,
    symmetric: bool = False,
    scale_dtype: ScaleDtype = "float32",
    *,
    method: Method = "rtn",
    format: Float4 | Literal["float8"] | None = None,  # noqa: A002  as `quantize` has it
) -> QuantizedStack:
    """Quantise the matrices of a mixture of experts, on the device where they lie.

    W : array (experts, k, n) of NumPy, PyTorch, CuPy or JAX. Groups run along k, the summed axis.
    Weights kept as (experts, n, k), as transformers does, are passed transposed and are then read
    where they lie; others are copied once into that order. group_size: a positive int, or -1 for
    one group a column. format: as `quantize` has it, or ``"float8"``: codes are e4m3 numbers, in
    groups of any size, with scales of `scale_dtype`. All else is as `quantize` has it.

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
    if format == "float8":
        made = float8.coded(rows, group_size, scale_dtype)
    elif format is None:
        made = quantize(rows, bits, group_size, symmetric, scale_dtype, method=method)
    else:
        made = float_coded(rows, format, method, matrices=experts)
    return QuantizedStack.from_matrix(made, experts)
