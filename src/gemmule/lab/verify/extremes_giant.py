"""Products over matrices of more than 2^31 elements that are zero almost everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gemmule as gm
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.problem import ITEMSIZE, numpy_dtype
from gemmule.core.rung import CudaRung, Signature
from gemmule.quant.matrix import QuantizedMatrix

# Multiples of 16, so that rows and columns begin at multiples of 16 bytes; the rows also of 3.
ROWS, COLUMNS, BATCH = 46_416, 46_512, 3
ELEMENTS = ROWS * COLUMNS
WIDTH = 16  # columns of a matmul's second operand
SPREAD = 211  # every so many columns of the last row hold a one: sums stay exact in halves

Point = tuple[int, int, int]  # row of the whole batch, column, value


def points() -> Iterator[Point]:
    """Yield the elements that are not zero: in the first row, at 2^31, and most in the last row."""
    yield 0, COLUMNS - 1, 1
    yield 2**31 // COLUMNS, 2**31 % COLUMNS, 2
    yield from ((ROWS - 1, column, 1) for column in range(0, COLUMNS - 1, SPREAD))
    yield ROWS - 1, COLUMNS - 1, 3


def expected(batch: int, x: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the product with x of shape (batch, columns), of shape (batch, rows / batch)."""
    y = np.zeros((batch, ROWS // batch), np.int64)
    for row, column, value in points():
        place = divmod(row, ROWS // batch)
        y[place] += value * x[place[0], column]
    return y


def multiply_giant(rung: CudaRung, signature: Signature, batch: int, ordinal: int = 0) -> str:
    """Multiply on the device by the public way; return what is wrong with the result, or ``""``."""
    a, b, out = signature
    matrix = _codes(a, ordinal) if rung.quantized else _matrix(rung, a, batch, ordinal)
    x = 1 + (np.arange(COLUMNS) + np.arange(batch)[:, None]) % 3
    truth: NDArray[Any] = expected(batch, x)
    if rung.op == "matmul":
        used = np.arange(WIDTH) % 2  # neighbouring columns differ
        x, truth = x[..., None] * used, truth[..., None] * used
    if batch == 1:
        x, truth = x[0], truth[0]
    by_columns = rung.op == "matmul" and "row" not in rung.layouts_b
    right = _placed(x.astype(numpy_dtype(b)), ordinal, by_columns=by_columns)
    result = _placed(np.full(truth.shape, 77, numpy_dtype(out)), ordinal)
    plan = gm.plan(rung.op, matrix, right, rung=rung.name)
    plan(matrix, right, out=result)
    driver.synchronize(ordinal)
    wrong = np.argwhere(result.to_host().astype(np.float64) != truth)
    if not len(wrong):
        return ""
    return f"{len(wrong):,} of {truth.size:,} results are wrong, the first at {tuple(wrong[0])}"


def _placed(host: NDArray[Any], ordinal: int, *, by_columns: bool = False) -> DeviceArray:
    """Return a copy of a host array of any rank; by_columns: with its last two axes swapped."""
    stored = np.ascontiguousarray(host.swapaxes(-1, -2) if by_columns else host)
    flat = DeviceArray.from_host(stored.reshape(-1), ordinal)
    steps = [step // stored.itemsize for step in stored.strides]
    if by_columns:
        steps[-2:] = steps[:-3:-1]
    return DeviceArray(flat.pointer, host.shape, tuple(steps), flat.dtype, ordinal, flat)


def _zeros(nbytes: int, ordinal: int) -> DeviceArray:
    block = DeviceArray.empty((nbytes,), "uint8", ordinal)
    with driver.on_device(ordinal):
        (code,) = driver.bindings().cuMemsetD8(block.pointer, 0, nbytes)
        driver.check((code,), "clearing memory")
    driver.synchronize(ordinal)
    return block


def _put(address: int, value: NDArray[Any], ordinal: int) -> None:
    driver.copy(address, value.ctypes.data, value.nbytes, ordinal, 0)


def _matrix(rung: CudaRung, dtype: str, batch: int, ordinal: int) -> DeviceArray:
    """Return the matrix, or the batch of its thirds, in the first layout of the rung."""
    rows, size = ROWS // batch, ITEMSIZE[dtype]
    block = _zeros(ELEMENTS * size, ordinal)
    steps = (COLUMNS, 1) if rung.layouts[0] == "row" else (1, rows)
    for row, column, value in points():
        third, within = divmod(row, rows)
        place = third * rows * COLUMNS + within * steps[0] + column * steps[1]
        _put(block.pointer + place * size, np.array([value], numpy_dtype(dtype)), ordinal)
    shape, strides = (rows, COLUMNS), steps
    if batch > 1:
        return DeviceArray(
            block.pointer, (batch, *shape), (rows * COLUMNS, *strides), dtype, ordinal, block
        )
    return DeviceArray(block.pointer, shape, strides, dtype, ordinal, block)


def _codes(dtype: str, ordinal: int) -> QuantizedMatrix:
    """Return the matrix as codes with scale 1 and zero point 0."""
    bits = 4 if dtype == "uint4" else 8
    row_bytes = COLUMNS * bits // 8
    block = _zeros(ROWS * row_bytes, ordinal)
    for row, column, value in points():
        byte = value << (4 * (column % 2)) if bits == 4 else value
        place = row * row_bytes + column * bits // 8
        _put(block.pointer + place, np.array([byte], np.uint8), ordinal)
    codes = DeviceArray(block.pointer, (ROWS, row_bytes), (row_bytes, 1), "uint8", ordinal, block)
    scales, zeros = (
        DeviceArray.from_host(np.full((1, 1), value, np.float32), ordinal) for value in (1, 0)
    )
    return QuantizedMatrix(
        codes=codes,
        scales=scales,
        zeros=zeros,
        perm=None,
        stored_shape=(ROWS, COLUMNS),
        bits=bits,
        group_size=None,
        device=f"cuda:{ordinal}",
    )
