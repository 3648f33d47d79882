"""Operand sets on a GPU: made there from random numbers, and results judged there.

Judging is by double sums that a plain kernel of the lab computes from the same operands, held
against the bound that the rung's arithmetic implies; the oracle on the host would need minutes for
the sizes that are measured. (The oracle has proved the rung before; this tells that it is also
right at this size.) Quantised matrices are quantised on the GPU, and the ends of their results are
judged by the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import gemmule as gm
from gemmule.backends.cuda import driver, launch_args
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.problem import ITEMSIZE, UNIT_ROUNDOFF, Problem
from gemmule.core.rung import Arithmetic, Params
from gemmule.oracle.bounds import Magnitudes, result_error, sum_error
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.rungs._cuda.geometry import CTYPE
from gemmule.timing.machine import Rotation, rotation
from gemmule_lab.bench.suites import CODED, Product
from gemmule_lab.ceilings.device import filled
from gemmule_lab.kernels.launch import Kernels
from gemmule_lab.verify import check

ALIGNMENT = 256
CACHES = 4.0  # caches' worth of other bytes between two uses of a set
MOST_SETS = 4096
SAMPLED = 8  # rows and columns of a matrix product that are judged
SAMPLED_ROWS = 32  # at either end of the result of a quantised one


@dataclass(frozen=True, slots=True)
class OperandSet:
    """One product's operands and its own result, side by side in one allocation.

    a: (rows, columns), by rows or by columns, or a `QuantizedMatrix` there; b: a vector, or a
    matrix (columns, width); out: as the product.
    """

    a: Any
    b: DeviceArray
    out: DeviceArray

    def operands(self, op: str) -> tuple[Any, Any]:
        """Return the operands in the public function's order."""
        return (self.b, self.a) if op == "vecmat" else (self.a, self.b)


def shapes_of(op: str, shape: tuple[int, int], width: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of matrix, other operand and result of a product over a (rows, columns)."""
    rows, columns = shape
    return {
        "matvec": (shape, (columns,), (rows,)),
        "vecmat": (shape, (rows,), (columns,)),
        "matmul": (shape, (columns, width), (rows, width)),
    }[op]


def make_sets(
    op: str,
    shape: tuple[int, int],
    dtype: str,
    *,
    width: int = 1,
    ordinal: int = 0,
    seed: int = 0,
    column_major: bool = False,
) -> tuple[list[OperandSet], Rotation]:
    """Return enough operand sets that every read is a cold one, and the rotation they make.

    Half of the free memory at most is taken; where that is too little the rotation is not cold.
    """
    shapes = shapes_of(op, shape, width)
    itemsize = ITEMSIZE[dtype]
    sizes = [
        -(-int(np.prod(s, dtype=np.int64)) * itemsize // ALIGNMENT) * ALIGNMENT for s in shapes
    ]
    free_bytes, _ = driver.memory_bytes(ordinal)
    l2_bytes = driver.device_info(ordinal).l2_bytes
    turn = rotation(
        sum(sizes), l2_bytes, factor=CACHES, memory_bytes=free_bytes // 2, most_sets=MOST_SETS
    )
    block = filled(turn.bytes // itemsize, dtype, ordinal, seed)
    sets = [
        OperandSet(*_cut(block, block.pointer + index * sum(sizes), shapes, sizes))
        for index in range(turn.sets)
    ]
    if column_major:
        sets = [replace(one, a=_by_columns(one.a)) for one in sets]
    return sets, turn


def _by_columns(matrix: DeviceArray) -> DeviceArray:
    """Return the memory of a matrix seen as one of the same shape that lies by columns."""
    rows, columns = matrix.shape
    return DeviceArray(
        matrix.pointer, (rows, columns), (1, rows), matrix.dtype, matrix.ordinal, matrix
    )


def _cut(
    block: DeviceArray, start: int, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]
) -> list[DeviceArray]:
    found = []
    for shape, size in zip(shapes, sizes, strict=True):
        strides = (shape[1], 1) if len(shape) == 2 else (1,)
        found.append(DeviceArray(start, shape, strides, block.dtype, block.ordinal, block))
        start += size
    return found


def judge(
    op: str, one: OperandSet, problem: Problem, arithmetic: Arithmetic, params: Params
) -> float:
    """Return the largest error of ``one.out`` over its bound; ArithmeticError when it exceeds 1.

    Every element of a vector is judged, of a matrix eight random rows and columns.
    """
    if op != "matmul":
        matrix = one.a.T if op == "vecmat" else one.a
        sums, sizes = reference(matrix, one.b)
        return _largest(one.out.to_host(), sums, sizes, problem, arithmetic, params)
    result = one.out.to_host()
    rows, columns = result.shape  # the problem may be of the transposes
    rng = np.random.default_rng(0)
    worst = 0.0
    for row in {0, rows - 1, *map(int, rng.integers(0, rows, SAMPLED - 2))}:
        found = reference(one.b.T, _line(one.a, row))
        worst = max(worst, _largest(result[row], *found, problem, arithmetic, params))
    for column in {0, columns - 1, *map(int, rng.integers(0, columns, SAMPLED - 2))}:
        found = reference(one.a, _line(one.b.T, column))
        worst = max(worst, _largest(result[:, column], *found, problem, arithmetic, params))
    return worst


def _line(matrix: DeviceArray, row: int) -> DeviceArray:
    """Return one row of a matrix as a vector, a view."""
    row_step, column_step = matrix.strides
    start = matrix.pointer + row * row_step * ITEMSIZE[matrix.dtype]
    return DeviceArray(
        start, (matrix.shape[1],), (column_step,), matrix.dtype, matrix.ordinal, matrix
    )


def reference(matrix: DeviceArray, vector: DeviceArray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of a x and of |a| |x| over every row, in double, as host arrays."""
    rows, columns = matrix.shape
    by_rows = matrix.strides[1] == 1
    stem = "reference_rows" if by_rows else "reference_columns"
    name = f"{stem}<{CTYPE[matrix.dtype]}, {CTYPE[vector.dtype]}>"
    sums = DeviceArray.empty((rows,), "float64", matrix.ordinal)
    sizes = DeviceArray.empty((rows,), "float64", matrix.ordinal)
    arguments = launch_args.GEMV.pack(
        matrix.pointer,
        vector.pointer,
        sums.pointer,
        sizes.pointer,
        rows,
        columns,
        1,
        *matrix.strides,
        0,
        vector.strides[0],
        0,
        1,
        0,
        1.0,
        0.0,
    )
    per_block, threads = (8, 256) if by_rows else (64, 64)
    kernels = Kernels("operands.cu", (name,), matrix.ordinal)
    kernels.run(name, arguments, blocks=-(-rows // per_block), threads=threads)
    return sums.to_host(), sizes.to_host()


def _largest(
    result: np.ndarray,
    sums: np.ndarray,
    sizes: np.ndarray,
    problem: Problem,
    arithmetic: Arithmetic,
    params: Params,
) -> float:
    nothing = np.zeros((1, 1))
    reference_error = 2.0 * problem.reduction * UNIT_ROUNDOFF["float64"]
    magnitudes = Magnitudes(nothing, nothing, sizes, reference_error)
    if arithmetic.inputs is not None or arithmetic.activations_bits is not None:
        raise ValueError("rungs that round their operands first are judged by the oracle alone.")
    error = sum_error(problem, arithmetic, params, magnitudes)
    bound = result_error(problem, arithmetic, np.abs(sums), error)
    off = np.abs(result.astype(np.float64) - sums)
    wrong = ~(off <= bound)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ArithmeticError(
            f"{problem.describe()}: {wrong.sum():,} of {wrong.size:,} elements are wrong; element "
            f"{at} is {result[at]}, the truth {sums[at]:.9g}, and {bound[at]:.3g} the bound."
        )
    return float((off / np.maximum(bound, np.finfo(np.float64).tiny)).max(initial=0.0))


def make_coded_sets(product: Product, ordinal: int, seed: int) -> tuple[list[OperandSet], Rotation]:
    """Return enough operand sets that every read is a cold one, and the rotation they make.

    All of them have the same numbers, each in memory of its own. Half of the free memory at most is
    taken; where that is too little the rotation is not cold.
    """
    form = CODED[product.format]
    rows, columns = product.shape
    weights = filled(rows * columns, form.dtype, ordinal, seed)
    steps = (columns, 1)
    matrix = DeviceArray(weights.pointer, product.shape, steps, form.dtype, ordinal, weights)
    inner, outer = (rows, columns) if product.op == "vecmat" else (columns, rows)

    def made() -> OperandSet:
        coded = gm.quantize(
            matrix, bits=form.bits, group_size=form.group_size, symmetric=form.group_size == -1
        )
        right = filled(inner * product.width, form.dtype, ordinal, seed + 1)
        result = DeviceArray.empty((outer * product.width,), form.dtype, ordinal)
        return OperandSet(coded, _shaped(product, right, inner), _shaped(product, result, outer))

    first = made()
    nbytes = first.a.nbytes + ITEMSIZE[form.dtype] * (inner + outer) * product.width
    free_bytes, _ = driver.memory_bytes(ordinal)
    l2_bytes = driver.device_info(ordinal).l2_bytes
    turn = rotation(
        nbytes, l2_bytes, factor=CACHES, memory_bytes=free_bytes // 2, most_sets=MOST_SETS
    )
    return [first, *(made() for _ in range(turn.sets - 1))], turn


def _shaped(product: Product, flat: DeviceArray, length: int) -> DeviceArray:
    """Return a block of numbers as a vector, or as a matrix of the product's width by columns."""
    if product.op != "matmul":
        return flat
    shape, steps = (length, product.width), (1, length)
    return DeviceArray(flat.pointer, shape, steps, flat.dtype, flat.ordinal, flat)


def judge_coded(op: str, one: OperandSet, plan: gm.Plan) -> float:
    """Return the largest error over its bound; ArithmeticError when it exceeds 1.

    Judged are the first and the last rows of a result; of ``x Q`` those of the first and the last
    groups of columns.
    """
    host = one.a.to(layout="row").to("cpu", layout="row")
    right, result = one.b.to_host(), one.out.to_host()
    worst = 0.0
    for last in (False, True):
        part, where = _end_columns(host, last) if op == "vecmat" else _end_rows(host, last)
        left, other = (right, part) if op == "vecmat" else (part, right)
        found = np.ascontiguousarray(result[where])
        verdict = check.judge(op, left, other, found, check.Rounding.of(plan))
        if not verdict.ok:
            raise ArithmeticError(f"{plan.problem.describe()}: {verdict.text}")
        worst = max(worst, verdict.ratio)
    return worst


def _end_rows(host: QuantizedMatrix, last: bool) -> tuple[QuantizedMatrix, slice]:
    where = slice(-SAMPLED_ROWS, None) if last else slice(SAMPLED_ROWS)
    parts = [None if part is None else np.asarray(part)[where] for part in _parts_of(host)]
    return _part_of(host, parts, host.stored_shape[1]), where


def _end_columns(host: QuantizedMatrix, last: bool) -> tuple[QuantizedMatrix, slice]:
    """Return the first or the last group of columns; all of them where rows are one group."""
    columns = host.stored_shape[1]
    width = columns if host.group_size in (None, -1) else int(host.group_size or 1)
    if width >= columns:
        return host, slice(None)
    cuts = (width * host.bits // 8, 1, 1)
    parts = [
        None if part is None else np.asarray(part)[:, slice(-cut, None) if last else slice(cut)]
        for part, cut in zip(_parts_of(host), cuts, strict=True)
    ]
    where = slice(-width, None) if last else slice(width)
    return _part_of(host, parts, width), where


def _parts_of(host: QuantizedMatrix) -> tuple[Any, Any, Any]:
    return host.codes, host.scales, host.zeros


def _part_of(host: QuantizedMatrix, parts: Sequence[Any], columns: int) -> QuantizedMatrix:
    codes, scales, zeros = parts
    return QuantizedMatrix.from_parts(
        np.ascontiguousarray(codes),
        np.ascontiguousarray(scales),
        None if zeros is None else np.ascontiguousarray(zeros),
        shape=(codes.shape[0], columns),
        bits=host.bits,
        group_size=host.group_size,
    )
