"""`prepare`: what products would do to the same operand each time, done once."""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from gemmule.arrays import packing
from gemmule.arrays.interop import unwrap
from gemmule.arrays.prepared import PreparedMatrix
from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.packed import making
from gemmule.core import memory
from gemmule.core.operand import Operand
from gemmule.core.packing import SIDES
from gemmule.core.problem import FLOATS, layout_of
from gemmule.quant.matrix import QuantizedMatrix


@overload
def prepare(
    B: QuantizedMatrix, /, *, side: str = ..., rung: str | None = ...
) -> QuantizedMatrix: ...
@overload
def prepare(B: Any, /, *, side: str = ..., rung: str | None = ...) -> PreparedMatrix: ...
def prepare(B: Any, /, *, side: str = "right", rung: str | None = None) -> Any:
    """Return B in the form that matrix products read, made once for many products.

    Parameters
    ----------
    B : array (..., k, n) of floats with any strides, or QuantizedMatrix.
    side : ``"right"`` for the second operand of `gemmule.matmul`, ``"left"`` for the first.
    rung : pack for this rung, whatever plans would choose (default: for those that they choose
        for 16 to 16,384 rows of the other operand).

    Returns
    -------
    PreparedMatrix, on B's device: a copy of B, contiguous and aligned, and beside it what rungs
    otherwise make of B in each call. It stands wherever B does, in `matmul`, ``@``, `gemm`, `plan`,
    and `vecmat` (a left one: `matvec`), with all their options. Of a QuantizedMatrix: the matrix in
    the layout that plans prefer on its device.

    Raises
    ------
    TypeError for other dtypes and for what is no array; ValueError for fewer than two axes, for an
    unknown side, and for a rung that packs nothing or does not take B; DeviceError where the device
    has no room; CompileError.

    Promised: a product has the bits that it has with a contiguous copy of B, in B's own order, in
    its place. What becomes of B afterwards has no effect. On the host a pickle of the result packs
    anew where it is read, for the rungs of that processor. On a GPU the work is done when `prepare`
    returns, so the result may be used on any stream, but no graph may be being captured. Not
    promised: gradients. It has none, and an operand beside it that asks for one is refused.

    >>> import numpy as np, gemmule as gm
    >>> B = np.array([[1.0, 2.0], [3.0, 4.0]])
    >>> P = gm.prepare(B)
    >>> B[:] = 0
    >>> np.eye(2) @ P
    array([[1., 2.],
           [3., 4.]])
    >>> P.shape, P.side, P.T.side
    ((2, 2), 'right', 'left')
    """
    if side not in SIDES:
        raise ValueError(f"side is {side!r}; it must be 'left' or 'right'.")
    if isinstance(B, QuantizedMatrix):
        return _quantized(B, rung)
    if isinstance(B, PreparedMatrix):
        raise TypeError("the matrix is prepared already; give the array that it was made from.")
    operand = unwrap(B, "B")
    form = operand.form
    if form.dtype not in FLOATS:
        raise TypeError(
            f"B has dtype {form.dtype}; prepared are {', '.join(FLOATS)}. Give products the array "
            "itself: they would do nothing with it more than once."
        )
    if len(form.shape) < 2:
        raise ValueError(
            f"B has shape {form.shape}; needed are two axes or more. A vector is read only once, "
            "so there is nothing to prepare."
        )
    made = _on_host if operand.device == "cpu" else _on_device
    return made(operand, side, rung)


def _quantized(Q: QuantizedMatrix, rung: str | None) -> QuantizedMatrix:
    if rung is not None:
        raise ValueError(
            f"rung={rung!r} was given with a quantised matrix, which has one layout for all rungs. "
            "Choose it with Q.to(layout=...), or leave rung away."
        )
    return Q if Q.device == "cpu" else Q.to(layout="mma16")


def _on_host(operand: Operand, side: str, rung: str | None) -> PreparedMatrix:
    array, form = operand.array, operand.form
    by_columns = layout_of(form.shape[-2:], form.strides[-2:]) == "col"
    memory.require(array.nbytes, "the copy of B")
    turned = array.swapaxes(-1, -2) if by_columns else array
    copy = np.array(turned, order="C", copy=True)
    copy = copy.swapaxes(-1, -2) if by_columns else copy
    return PreparedMatrix(copy, form.dtype, side, packing.on_host(copy, side, rung))


def _on_device(operand: Operand, side: str, rung: str | None) -> PreparedMatrix:
    ordinal, dtype = device_arrays.ordinal_of(operand), operand.form.dtype
    stream = device_arrays.current_stream(operand, ordinal)
    copy = making.copied(operand, stream)
    array, packed = packing.on_device(copy, dtype, side, rung, stream)
    driver.wait(stream, ordinal)
    return PreparedMatrix(array, dtype, side, packed)
