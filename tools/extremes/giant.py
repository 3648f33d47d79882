"""Products over matrices of more than 2^31 elements that are zero almost everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gemmule as gm
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.problem import ITEMSIZE, Problem, QuantSpec, numpy_dtype
from gemmule.core.rung import CudaRung, Signature
from gemmule.oracle.problems import make_problem
from gemmule.quant.matrix import QuantizedMatrix

# Rows and columns, multiples of 16, so that both begin at multiples of 16 bytes; a batch takes rows
# that it divides. The first that a rung takes: some are for short rows, or for few of them.
SIDES = ((46_416, 46_512), (44_739_264, 48), (48, 44_739_264), (32, 67_108_880))
BATCH = 3
WIDTH = 16  # columns of a matmul's second operand
ONES = 220  # so many columns of the last row hold a one: sums stay exact in halves

Point = tuple[int, int, int]  # row of the whole batch, column, value
Sides = tuple[int, int]


def sides_of(rung: CudaRung, signature: Signature, batch: int) -> Sides:
    """Return the rows of the whole batch and the columns; ValueError where a rung takes none."""
    for rows, columns in SIDES:
        if rows % batch == 0 and any(
            rung.refusal(p) is None for p in _problems(rung, signature, batch, rows, columns)
        ):
            return rows, columns
    raise ValueError(f"rung {rung.name} takes no matrix of more than 2^31 elements.")


def _problems(
    rung: CudaRung, signature: Signature, batch: int, rows: int, columns: int
) -> Iterator[Problem]:
    matvec = rung.op == "matvec"
    n, k = (columns, 1) if matvec else (WIDTH, columns)
    layout_b = "row" if matvec or "row" in rung.layouts_b else "col"
    layouts = {"layout_a": rung.layouts[0], "layout_b": layout_b}
    for quant in arrangements(signature) if rung.quantized else [None]:
        yield make_problem(
            rung.op, rows // batch, n, k, signature, batch=batch, quant=quant, **layouts
        )


def arrangements(signature: Signature) -> Iterator[QuantSpec]:
    """Yield how codes may lie: one scale and one zero point for the matrix, as rungs read it."""
    bits = 4 if signature[0] == "uint4" else 8
    for layout, transposed in itertools.product(("row", "mma16"), (False, True)):
        yield QuantSpec(bits, None, True, layout, "float32", transposed)


def arrangement(rung: CudaRung, signature: Signature, sides: Sides) -> QuantSpec:
    """Return how the codes of a giant lie so that the rung takes it; ValueError for no such way."""
    for problem in _problems(rung, signature, 1, *sides):
        if rung.refusal(problem) is None and problem.quant is not None:
            return problem.quant
    raise ValueError(f"rung {rung.name} takes no codes of {sides[0]} x {sides[1]}.")


def points(sides: Sides) -> Iterator[Point]:
    """Yield the elements that are not zero: in the first row, at 2^31, and most in the last row."""
    rows, columns = sides
    yield 0, columns - 1, 1
    yield 2**31 // columns, 2**31 % columns, 2
    spread = range(0, columns - 1, max(1, columns // ONES))
    yield from ((rows - 1, column, 1) for column in spread)
    yield rows - 1, columns - 1, 3


def expected(sides: Sides, batch: int, x: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the product with x of shape (batch, columns), of shape (batch, rows / batch)."""
    rows = sides[0]
    y = np.zeros((batch, rows // batch), np.int64)
    for row, column, value in points(sides):
        place = divmod(row, rows // batch)
        y[place] += value * x[place[0], column]
    return y


def multiply_giant(rung: CudaRung, signature: Signature, batch: int, ordinal: int = 0) -> str:
    """Multiply on the device by the public way; return what is wrong with the result, or ``""``."""
    a, b, out = signature
    sides = sides_of(rung, signature, batch)
    lying = (rung.layouts[0], a, batch)
    matrix: DeviceArray | QuantizedMatrix
    if rung.quantized:
        matrix = _codes(sides, arrangement(rung, signature, sides), ordinal)
    else:
        matrix = _matrix(sides, lying, ordinal)
    x = 1 + (np.arange(sides[1]) + np.arange(batch)[:, None]) % 3
    truth: NDArray[Any] = expected(sides, batch, x)
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


def _matrix(sides: Sides, lying: tuple[str, str, int], ordinal: int) -> DeviceArray:
    """Return the matrix, or the batch of its thirds; `lying` names layout, dtype and batch."""
    (layout, dtype, batch), columns = lying, sides[1]
    rows, size = sides[0] // batch, ITEMSIZE[dtype]
    block = _zeros(sides[0] * columns * size, ordinal)
    steps = (columns, 1) if layout == "row" else (1, rows)
    for row, column, value in points(sides):
        third, within = divmod(row, rows)
        place = third * rows * columns + within * steps[0] + column * steps[1]
        _put(block.pointer + place * size, np.array([value], numpy_dtype(dtype)), ordinal)
    shape, strides = (rows, columns), steps
    if batch > 1:
        return DeviceArray(
            block.pointer, (batch, *shape), (rows * columns, *strides), dtype, ordinal, block
        )
    return DeviceArray(block.pointer, shape, strides, dtype, ordinal, block)


def _codes(sides: Sides, spec: QuantSpec, ordinal: int) -> QuantizedMatrix:
    """Return the matrix as codes with scale 1 and zero point 0, stored as `spec` says."""
    (rows, columns), bits = sides[::-1] if spec.transposed else sides, spec.bits
    row_bytes = columns * bits // 8
    block = _zeros(rows * row_bytes, ordinal)
    for point in points(sides):
        row, column = point[1::-1] if spec.transposed else point[:2]
        byte = point[2] << (4 * (column % 2)) if bits == 4 else point[2]
        _put(block.pointer + row * row_bytes + column * bits // 8, np.array([byte], "u1"), ordinal)
    codes = DeviceArray(block.pointer, (rows, row_bytes), (row_bytes, 1), "uint8", ordinal, block)
    scales, zeros = (
        DeviceArray.from_host(np.full((1, 1), value, np.float32), ordinal) for value in (1, 0)
    )
    stored = QuantizedMatrix(
        codes=codes,
        scales=scales,
        zeros=zeros,
        perm=None,
        stored_shape=(rows, columns),
        bits=bits,
        group_size=None,
        device=f"cuda:{ordinal}",
    ).to(layout=spec.layout)
    return stored.T if spec.transposed else stored
