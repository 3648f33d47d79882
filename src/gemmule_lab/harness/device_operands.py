"""Operand sets on a GPU: made there from random numbers, and results judged there.

Judging is by double sums that a plain kernel of the lab computes from the same operands, held
against the bound that the rung's arithmetic implies; the oracle on the host would need minutes for
the sizes that are measured. (The oracle has proved the rung before; this tells that it is also
right at this size.) Quantised matrices are quantised on the GPU; of their products, and of those of
rungs that round their operands first, the oracle judges the ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import gemmule as gm
from gemmule.backends.cuda import driver, launch_args
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.problem import COMPLEX, FLOAT8, ITEMSIZE, UNIT_ROUNDOFF, Problem, numpy_dtype
from gemmule.core.rung import Arithmetic, Params
from gemmule.oracle.bounds import Magnitudes, result_error, sum_error
from gemmule.rungs._cuda.geometry import CTYPE
from gemmule.rungs._cuda.tiles import PARTS
from gemmule.timing.machine import Rotation, rotation
from gemmule_lab.ceilings.device import filled
from gemmule_lab.harness.operands import OperandSet, Sets, codes
from gemmule_lab.harness.products import FLOATS, Product
from gemmule_lab.kernels.launch import Kernels
from gemmule_lab.verify import check

ALIGNMENT = 256
CACHES = 4.0  # caches' worth of other bytes between two uses of a set
MOST_SETS = 4096
SAMPLED = 8  # rows and columns of a matrix product that are judged
SAMPLED_ROWS = 32  # at either end of a result that the oracle judges
SAMPLED_COLUMNS = 64  # of these


def device_sets(product: Product, ordinal: int = 0, *, seed: int = 0, warm: bool = False) -> Sets:
    """Return a product's operand sets on a GPU: one when warm, else as many as make reads cold.

    Half of the free memory at most is taken; where that is too little they are not called cold.
    Plain operands are cut out of one block of random numbers; sets of a quantised matrix all have
    the same numbers, each in memory of its own.
    """
    if product.form.bits is None:
        return _plain_sets(product, ordinal, seed, warm)
    make = _coded(product, ordinal, seed)
    first = make()
    nbytes = first.a.nbytes + sum(
        ITEMSIZE[one.dtype] * int(np.prod(one.shape)) for one in (first.b, first.out)
    )
    turn = _turn(nbytes, ordinal, warm)
    items = [first, *(make() for _ in range(turn.sets - 1))]
    return Sets(product.op, items, turn.cold, product.form.options)


def _turn(nbytes: int, ordinal: int, warm: bool) -> Rotation:
    if warm:
        return Rotation(1, nbytes, cold=False)
    free_bytes, _ = driver.memory_bytes(ordinal)
    l2_bytes = driver.device_info(ordinal).l2_bytes
    return rotation(
        nbytes, l2_bytes, factor=CACHES, memory_bytes=free_bytes // 2, most_sets=MOST_SETS
    )


def _plain_sets(product: Product, ordinal: int, seed: int, warm: bool) -> Sets:
    form = product.form
    shapes = (product.shape, product.other_shape, product.out_shape)
    dtypes = (form.dtype, form.dtype, form.out)
    sizes = [
        -(-int(np.prod(s, dtype=np.int64)) * ITEMSIZE[dtype] // ALIGNMENT) * ALIGNMENT
        for s, dtype in zip(shapes, dtypes, strict=True)
    ]
    turn = _turn(sum(sizes), ordinal, warm)
    block = _block(product, turn.bytes // ITEMSIZE[form.dtype], ordinal, seed)

    def cut(at: int) -> OperandSet:
        parts = []
        for shape, dtype, size in zip(shapes, dtypes, sizes, strict=True):
            steps = (shape[1], 1) if len(shape) == 2 else (1,)
            parts.append(DeviceArray(at, shape, steps, dtype, ordinal, block))
            at += size
        matrix = parts[0]
        if product.column_major:  # the same memory, seen as a matrix that lies by columns
            steps = (1, product.shape[0])
            matrix = DeviceArray(matrix.pointer, product.shape, steps, form.dtype, ordinal, block)
        return OperandSet(matrix.T if product.transposed else matrix, *parts[1:])

    items = [cut(block.pointer + index * sum(sizes)) for index in range(turn.sets)]
    return Sets(product.op, items, turn.cold, form.options)


def _block(product: Product, count: int, ordinal: int, seed: int) -> DeviceArray:
    dtype = product.form.dtype
    if dtype in FLOATS:
        return filled(count, dtype, ordinal, seed, uniform=product.uniform)
    if dtype in COMPLEX:
        parts = filled(2 * count, PARTS[dtype], ordinal, seed)
        return DeviceArray(parts.pointer, (count,), (1,), dtype, ordinal, parts)
    rng = np.random.default_rng(seed)
    if dtype in FLOAT8:
        numbers = rng.standard_normal(count, np.float32).astype(numpy_dtype(dtype))
    else:
        numbers = rng.integers(0, 100, count).astype(numpy_dtype(dtype))
    return DeviceArray.from_host(numbers, ordinal)


def _coded(product: Product, ordinal: int, seed: int) -> Callable[[], OperandSet]:
    """Return what makes one more set of a quantised matrix's product, always of equal numbers."""
    form, dtype, shape = product.form, product.form.dtype, product.shape
    bits = form.bits or 4
    random: Any = None
    if form.group_size is None:
        random = codes(np.random.default_rng(seed), shape, bits)
    else:
        weights = filled(shape[0] * shape[1], dtype, ordinal, seed)
        steps = (shape[1], 1)
        random = DeviceArray(weights.pointer, shape, steps, dtype, ordinal, weights)

    def made() -> OperandSet:
        if form.group_size is None:
            matrix = random.to(f"cuda:{ordinal}", layout="row")  # as the documents store codes
        else:
            symmetric = form.group_size == -1
            matrix = gm.quantize(
                random, bits, form.group_size, symmetric=symmetric, scale_dtype=form.scales
            )
        right = filled(int(np.prod(product.other_shape)), dtype, ordinal, seed + 1)
        result = DeviceArray.empty((int(np.prod(product.out_shape)),), dtype, ordinal)
        left = matrix.T if product.transposed else matrix
        return OperandSet(
            left, _by_columns(right, product.other_shape), _by_columns(result, product.out_shape)
        )

    return made


def _by_columns(flat: DeviceArray, shape: tuple[int, ...]) -> DeviceArray:
    """Return a block of numbers as a vector, or as a matrix that lies by columns."""
    if len(shape) == 1:
        return flat
    return DeviceArray(flat.pointer, shape, (1, shape[0]), flat.dtype, flat.ordinal, flat)


def in_floats(sets: Sets) -> Sets:
    """Return the same sets with the weights as floats of x's dtype in the place of codes."""
    items = []
    for one in sets.items:
        result = DeviceArray.empty((int(np.prod(one.out.shape)),), one.out.dtype, one.out.ordinal)
        dense = one.a.dequantize(one.b.dtype)
        items.append(OperandSet(dense, one.b, _by_columns(result, one.out.shape)))
    return Sets(sets.op, items, sets.cold)


def judged(op: str, one: OperandSet, plan: gm.Plan) -> float:
    """Return the largest error of a plan's result over its bound, by `judge` where that can.

    ArithmeticError where an error exceeds its bound.
    """
    choice = plan.choice
    arithmetic = choice.rung.arithmetic(choice.problem)
    rounded = arithmetic.inputs is not None or arithmetic.activations_bits is not None
    if rounded or not isinstance(one.a, DeviceArray) or one.a.dtype not in FLOATS:
        return judge_ends(op, one, plan)
    return judge(op, one, choice.problem, arithmetic, choice.params)


def judge(
    op: str, one: OperandSet, problem: Problem, arithmetic: Arithmetic, params: Params
) -> float:
    """Return the largest error of a result over its bound, as sums made on the GPU show it.

    ArithmeticError where an error exceeds its bound. Every element of a vector is judged, of a
    matrix eight random rows and columns.
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
    sums, sizes = (DeviceArray.empty((rows,), "float64", matrix.ordinal) for _ in range(2))
    pointers = (one.pointer for one in (matrix, vector, sums, sizes))
    steps = (*matrix.strides, 0, vector.strides[0], 0, 1, 0)
    arguments = launch_args.GEMV.pack(*pointers, rows, columns, 1, *steps, 1.0, 0.0)
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


def judge_ends(op: str, one: OperandSet, plan: gm.Plan) -> float:
    """Return the largest error over its bound in the ends of a result, which the oracle judges.

    ArithmeticError where an error exceeds its bound. Judged are the first and the last rows,
    on the host; of many columns some, the first and the last among them.
    """
    a, b, result = _on_host(one.a), one.b.to_host(), one.out.to_host()
    if op == "matmul" and b.shape[1] > SAMPLED_COLUMNS:
        columns = np.linspace(0, b.shape[1] - 1, SAMPLED_COLUMNS).astype(int)
        b, result = b[:, columns], result[:, columns]
    if op == "vecmat":
        a = a.T
    unit = check.row_unit(a)
    size = -(-SAMPLED_ROWS // unit) * unit
    rows, worst = a.shape[0], 0.0
    for start in sorted({0, max(0, rows - size) // unit * unit}):
        part = slice(start, rows if start else min(size, rows))
        found = np.ascontiguousarray(result[part])
        plain = "matvec" if op == "vecmat" else op
        verdict = check.judge(plain, check.rows_of(a, part), b, found, check.Rounding.of(plan))
        if not verdict.ok:
            raise ArithmeticError(f"{plan.problem.describe()}: {verdict.text}")
        worst = max(worst, verdict.ratio)
    return worst


def _on_host(matrix: Any) -> Any:
    if isinstance(matrix, DeviceArray):
        return matrix.to_host()
    return matrix.to(layout="row").to("cpu", layout="row")
