"""`PreparedMatrix`: an operand in the form that products read, made once for many of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gemmule.arrays import packing
from gemmule.arrays.packing import Planes
from gemmule.backends.cuda.arrays import form_of
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.operand import Factor, Form, Operand
from gemmule.core.packing import Ready
from gemmule.core.problem import ITEMSIZE, layout_of

Array = np.ndarray[Any, Any]
Held = Array | DeviceArray


class PreparedMatrix(Factor):
    """A copy of a matrix, and beside it what rungs otherwise make of it in every product.

    `gemmule.prepare` makes one. It stands where the array would, on one side of matrix products
    (`side`; `T` stands on the other), beside arrays of any library on the same device. It holds no
    reference to the array that it was made from: changes of that do not reach it. Never written.

    shape, ndim, dtype (a name), device and nbytes (all that is held) are the usual ones; `rungs`
    names the rungs that read a packed form, `reason` says why there are no others. On the host a
    packed form serves one side: `T` reads the array, and ``T.T`` what was packed.

    >>> import numpy as np, gemmule as gm
    >>> P = gm.prepare(np.eye(2, dtype=np.float32))
    >>> P.shape, P.dtype, P.device, P.nbytes
    ((2, 2), 'float32', 'cpu', 16)
    >>> np.ones((1, 2), np.float32) @ P
    array([[1., 1.]], dtype=float32)
    """

    __slots__ = ("_packed", "_place", "_turned", "array", "form", "ready", "reason", "signature")

    def __init__(
        self,
        array: Held,
        dtype: str,
        side: str,
        packed: Mapping[str, DeviceArray | Planes],
        reason: str = "no rung that plans choose for it reads a packed form",
    ) -> None:
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
        self.array, self.reason, self._packed = array, "" if packed else reason, dict(packed)
        self._turned: PreparedMatrix | None = None
        planes = int(np.prod(array.shape[:-2], dtype=np.int64))
        beside = sum(one.nbytes for one in _apart(packed) if one is not array)
        self.ready = Ready(side, tuple(packed), planes, _spanned_bytes(array, dtype), beside)
        if isinstance(array, DeviceArray):
            form = form_of(array.pointer, array.shape, array.strides, dtype)
            pointer, device = array.pointer, array.device
        else:
            steps = tuple(step // array.itemsize for step in array.strides)
            form = Form(array.shape, steps, dtype, min(array.itemsize, 16))
            pointer, device = int(array.__array_interface__["data"][0]), "cpu"
        self.form = form._replace(ready=self.ready)
        self._place = pointer, device
        self.signature: Any = None  # by which fast paths know it, once they met it

    @property
    def operand(self) -> Operand:
        """It as an operand, made anew: one that was kept would keep the memory in a circle."""
        pointer, device = self._place
        return Operand(self.array, pointer, self.form, device, "gemmule", self)

    def packed(self, rung: str) -> DeviceArray | Planes:
        """Return what a rung of `rungs` reads; KeyError for another."""
        return self._packed[rung]

    def address(self, rung: str) -> int:
        """Return where on the device a rung of `rungs` finds its packed form."""
        held = self._packed[rung]
        return held.pointer if isinstance(held, DeviceArray) else held[0].at

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape, batch axes first."""
        return self.form.shape

    @property
    def ndim(self) -> int:
        """Number of axes, at least 2."""
        return len(self.shape)

    @property
    def dtype(self) -> str:
        """Name of the elements' dtype."""
        return self.form.dtype

    @property
    def is_cuda(self) -> bool:
        """Whether it lies on a GPU."""
        return self.device != "cpu"

    @property
    def device(self) -> str:
        """Where it lies: ``"cpu"`` or ``"cuda:N"``."""
        return self._place[1]

    @property
    def side(self) -> str:
        """Where it stands in products: ``"right"`` (B) or ``"left"`` (A)."""
        return self.ready.side

    @property
    def rungs(self) -> tuple[str, ...]:
        """Names of the rungs that find it packed."""
        return self.ready.rungs

    @property
    def nbytes(self) -> int:
        """Bytes held: the copy, and what was packed beside it, be it for the other side."""
        beside = self.ready.packed if self._turned is None else self._turned.ready.packed
        return self.ready.own + beside

    @property
    def T(self) -> PreparedMatrix:
        """The transpose, for the other side, in the same memory; of a batch, of each entry."""
        if self._turned is not None:
            return self._turned
        array = self.array
        side = "left" if self.side == "right" else "right"
        if isinstance(array, DeviceArray):
            turned = array.mT
            packed = {name: turned if one is array else one for name, one in self._packed.items()}
            return PreparedMatrix(turned, self.dtype, side, packed, self.reason)
        reason = "what is packed of it serves the other side" if self._packed else self.reason
        other = PreparedMatrix(array.swapaxes(-1, -2), self.dtype, side, {}, reason)
        other._turned = self
        return other

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return the matrix as a NumPy array: on the host a read-only view, from a GPU a copy."""
        if not isinstance(self.array, DeviceArray):
            return np.array(self.array, dtype=dtype, copy=copy)
        if copy is False:
            raise ValueError("the matrix lies on a GPU, so an array of it is a copy.")
        return self.array.to_host().astype(dtype or self.dtype, copy=False)

    def __copy__(self) -> PreparedMatrix:
        """Return the same matrix: it is never written."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedMatrix:
        """Return the same matrix: it is never written."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse on a GPU; on the host what was packed is made anew, for the processor there."""
        if isinstance(self.array, DeviceArray):
            raise TypeError(
                f"a matrix prepared on {self.device} cannot be pickled. Pickle the array that it "
                "was made from, and prepare that again where it is read."
            )
        if self._turned is not None:
            return _transposed, (self._turned,)
        by_columns = layout_of(self.form.shape[-2:], self.form.strides[-2:]) == "col"
        rows = self.array.swapaxes(-1, -2) if by_columns else self.array
        return _prepared_again, (rows, by_columns, self.side, self.rungs)

    def __repr__(self) -> str:
        packed = ", ".join(self.rungs) or "no rung"
        return (
            f"PreparedMatrix(shape={self.shape}, dtype={self.dtype}, device={self.device}, "
            f"side={self.side}, packed for {packed}, {self.nbytes:,} bytes)"
        )


def _apart(packed: Mapping[str, DeviceArray | Planes]) -> list[Any]:
    """Return the pieces of memory of packed forms, each once, whichever rungs share it."""
    pieces: dict[int, Any] = {}
    for held in packed.values():
        for one in (held,) if isinstance(held, DeviceArray) else [one.memory for one in held]:
            pieces[id(one)] = one
    return list(pieces.values())


def _transposed(matrix: PreparedMatrix) -> PreparedMatrix:
    return matrix.T


def _prepared_again(
    rows: Array, by_columns: bool, side: str, rungs: tuple[str, ...]
) -> PreparedMatrix:
    """Return a pickled matrix: another processor may pack it otherwise, or for other rungs."""
    array = rows.swapaxes(-1, -2) if by_columns else rows
    packed = packing.on_host(array, side, None, rungs)
    return PreparedMatrix(array, array.dtype.name, side, packed)


def _spanned_bytes(array: Held, dtype: str) -> int:
    """Return the bytes that an array's elements span, gaps between its lines included."""
    if 0 in array.shape:
        return 0
    if isinstance(array, DeviceArray):
        reach = sum((s - 1) * t for s, t in zip(array.shape, array.strides, strict=True))
        return int(reach + 1) * ITEMSIZE[dtype]
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(high) - int(low)
