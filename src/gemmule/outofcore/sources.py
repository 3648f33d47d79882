"""Operands on the host as panels: what is copied for one, and the operand it is on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from gemmule.arrays.interop import unwrap
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.operand import Operand
from gemmule.core.problem import ITEMSIZE
from gemmule.outofcore.pieces import Transfer
from gemmule.outofcore.staging import pinned
from gemmule.quant.matrix import QuantizedMatrix

Array = np.ndarray[Any, Any]
Window = tuple[slice, slice]  # rows and columns of a panel, within the operand seen as a matrix
ALIGNED = 64


class Source(Protocol):
    """An operand of a blocked product."""

    @property
    def slow_axis(self) -> int:
        """The axis along which its lines follow each other in memory, 0 or 1."""
        ...

    def bytes_of(self, rows: int, cols: int) -> int:
        """Return the bytes that a panel of this size takes on the device."""
        ...

    def transfers(self, window: Window, address: int) -> list[Transfer]:
        """Return what has to be copied for a panel that begins at an address."""
        ...

    def panel(self, window: Window, block: DeviceArray, offset: int) -> Operand:
        """Return the panel in a block of device memory as an operand."""
        ...


@dataclass(frozen=True, slots=True)
class Dense:
    """A matrix or vector; on the device its panels are closed up in the order it has here.

    matrix: 2-D, a vector as its one row or column; vector: what is multiplied is 1-D.
    """

    matrix: Array
    dtype: str
    vector: bool
    column_major: bool
    direct: bool

    @classmethod
    def of(cls, operand: Operand, ordinal: int, *, as_column: bool = False) -> Dense:
        """Return a host operand of one or two dimensions."""
        array = operand.array
        vector = array.ndim == 1
        if vector:
            array = array[:, None] if as_column else array[None, :]
        steps = [abs(step) for step in array.strides]
        turned = array.shape[1] == 1 if 1 in array.shape else steps[0] < steps[1]
        return cls(array, operand.form.dtype, vector, turned, pinned(operand.array, ordinal))

    @property
    def slow_axis(self) -> int:
        """The axis along which lines follow each other."""
        return 1 if self.column_major else 0

    def bytes_of(self, rows: int, cols: int) -> int:
        """Return the bytes that a panel of this size takes on the device."""
        return _whole(rows * cols * ITEMSIZE[self.dtype])

    def transfers(self, window: Window, address: int) -> list[Transfer]:
        """Return what has to be copied for a panel that begins at an address."""
        part = self.matrix[window]
        return [Transfer(part.T if self.column_major else part, address, self.direct)]

    def panel(self, window: Window, block: DeviceArray, offset: int) -> Operand:
        """Return the panel in a block of device memory as an operand."""
        rows, cols = self.matrix[window].shape
        shape: tuple[int, ...] = (rows, cols)
        strides: tuple[int, ...] = (1, rows) if self.column_major else (cols, 1)
        if self.vector:
            shape, strides = (rows * cols,), (1,)
        return on_device(block, offset, shape, strides, self.dtype)


@dataclass(frozen=True, slots=True)
class Coded:
    """A quantised matrix in panels of whole stored rows.

    matrix: on the host, in layout ``row``; its permutation goes along with every panel. direct: of
    each part, whether it lies in page-locked memory.
    """

    matrix: QuantizedMatrix
    perm: Any
    direct: tuple[bool, ...]

    @classmethod
    def of(cls, matrix: QuantizedMatrix, ordinal: int) -> Coded:
        """Return a quantised matrix on the host."""
        host = matrix.to(layout="row")
        perm = None if host.perm is None else DeviceArray.from_host(host.perm, ordinal)
        parts = (host.codes, host.scales, host.zeros)
        return cls(host, perm, tuple(pinned(one, ordinal) for one in parts if one is not None))

    @property
    def slow_axis(self) -> int:
        """The axis of the matrix along which stored rows follow each other."""
        return 1 if self.matrix.transposed else 0

    def bytes_of(self, rows: int, cols: int) -> int:
        """Return the bytes that a panel of this size takes on the device."""
        stored = cols if self.matrix.transposed else rows
        return sum(_whole(array.nbytes) for array in self._parts(slice(0, stored)))

    def transfers(self, window: Window, address: int) -> list[Transfer]:
        """Return what has to be copied for a panel that begins at an address."""
        found = []
        for array, direct in zip(self._parts(window[self.slow_axis]), self.direct, strict=True):
            found.append(Transfer(array, address, direct))
            address += _whole(array.nbytes)
        return found

    def panel(self, window: Window, block: DeviceArray, offset: int) -> Operand:
        """Return the panel in a block of device memory as an operand."""
        made = []
        rows = window[self.slow_axis]
        for array in self._parts(rows):
            part = on_device(block, offset, array.shape, (array.shape[1], 1), array.dtype.name)
            made.append(part.array)
            offset += _whole(array.nbytes)
        host = self.matrix
        count = len(range(*rows.indices(host.stored_shape[0])))
        panel = replace(
            host,
            codes=made[0],
            scales=made[1],
            zeros=made[2] if len(made) > 2 else None,
            perm=self.perm,
            stored_shape=(count, host.stored_shape[1]),
            device=block.device,
            error=None,
        )
        return unwrap(panel, "a panel")

    def _parts(self, rows: slice) -> list[Array]:
        """Return codes, scales and zero points of some stored rows."""
        host = self.matrix
        of_rows = slice(None) if host.group_size is None else rows
        parts = [host.codes[rows], host.scales[of_rows]]
        return parts if host.zeros is None else [*parts, host.zeros[of_rows]]


def on_device(
    block: DeviceArray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str
) -> Operand:
    """Return an array that lies in a block of device memory as an operand."""
    return unwrap(block.view(shape, strides, offset, dtype), "a panel")


def _whole(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
