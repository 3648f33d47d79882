"""Products of matrices in files, in blocks: what is larger than memory still multiplies.

A block is some rows of the left operand (matvec, matmul), or some columns of the matrix (vecmat),
so each element of the result comes out of one call of the public API, as it would in one piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import gemmule as gm
from gemmule.core.memory import available_bytes, check_map
from gemmule.core.problem import (
    FLOATS,
    INTEGERS,
    matmul_shape,
    matvec_shape,
    numpy_dtype,
    result_dtype,
)
from gemmule.core.words import Bits
from gemmule.quant.checks import group_size

Matrix: TypeAlias = NDArray[Any]
BLOCK_BYTES = 256 << 20
# Elements' products in a call, by the kind of numbers: well below a second's work on two cores, as
# Ctrl-C waits for the call that is under way. And columns, below which a call wastes the block.
FLOAT_PRODUCTS, INTEGER_PRODUCTS, LEAST_COLUMNS = 1 << 34, 1 << 31, 64


@dataclass(frozen=True, slots=True)
class Job:
    """One product over arrays that may be memory-mapped: operands in the order of the public API.

    dtype: what both operands are converted to, block by block, or None. bits: 4 or 8 to quantise
    the matrix first (`group_size` columns a scale). options: passed on to the public function.
    """

    op: str
    left: Matrix
    right: Matrix
    dtype: str | None = None
    out_dtype: str | None = None
    bits: Bits | None = None
    group_size: int = 128
    symmetric: bool = False
    device: str | None = None
    rung: str | None = None

    @property
    def matrix(self) -> Matrix:
        """The operand that is quantised and that blocks are taken of."""
        return self.right if self.op == "vecmat" else self.left

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result; ValueError where the operands do not fit together."""
        left, right = self.left.shape, self.right.shape
        if self.op == "vecmat":
            flipped = (*right[:-2], right[-1], right[-2]) if len(right) >= 2 else right
            return matvec_shape(flipped, left, op="vecmat")
        if self.op == "matvec":
            return matvec_shape(left, right)
        if len(left) < 2 or len(right) < 2:
            raise ValueError(
                f"matmul needs two matrices; got shapes {left} and {right}. Use --op matvec or "
                "--op vecmat for a vector."
            )
        return matmul_shape(left, right)

    @property
    def result(self) -> str:
        """Dtype name of the result; TypeError where the operands' dtypes do not multiply."""
        left, right = (self.dtype or array.dtype.name for array in (self.left, self.right))
        if self.bits is None:
            return result_dtype(left, right, self.out_dtype)
        vector = left if self.op == "vecmat" else right
        if vector not in FLOATS:
            raise TypeError(
                f"the quantised matrix is multiplied by {vector}; it must be one of "
                f"{', '.join(FLOATS)}. Pass --dtype float32."
            )
        return result_dtype(vector, vector, self.out_dtype)


def order(op: str | None, first: Matrix, second: Matrix) -> tuple[str, Matrix, Matrix]:
    """Return the operation and its operands in the public order.

    Without `op` the dimensions decide: two matrices are a matmul, a matrix and a vector a matvec,
    a vector and a matrix a vecmat. With ``vecmat`` the vector may be given second. Where `op` asks
    for a vector, a matrix of one column or one row is one: some formats hold nothing else.
    """
    if op is None:
        op = "vecmat" if first.ndim == 1 else "matvec" if second.ndim == 1 else "matmul"
    if op == "vecmat":
        last_alone = _is_vector(second) and not _is_vector(first)
        if (first.ndim > 1 and second.ndim == 1) or last_alone:
            first, second = second, first
        return op, _as_vector(first), second
    return op, first, _as_vector(second) if op == "matvec" else second


def _is_vector(array: Matrix) -> bool:
    return array.ndim == 1 or (array.ndim == 2 and 1 in array.shape)


def _as_vector(array: Matrix) -> Matrix:
    return array.reshape(-1) if array.ndim == 2 and 1 in array.shape else array


def quantized(job: Job) -> gm.QuantizedMatrix:
    """Return the job's matrix quantised; ValueError where its codes would not fit in memory."""
    matrix, bits = job.matrix, job.bits or 8
    if matrix.ndim != 2:
        raise ValueError(f"only a 2-D matrix can be quantised; got shape {matrix.shape}.")
    group_size(job.group_size)
    per_row = 1 if job.group_size == -1 else -(-matrix.shape[1] // job.group_size)
    needed = matrix.size * bits // 8 + matrix.shape[0] * per_row * 8
    if needed > available_bytes() * 0.8:
        raise ValueError(
            f"the quantised matrix takes {needed:,} bytes, more than memory has free. Quantise and "
            "multiply parts of it."
        )
    return gm.quantize(matrix, bits=bits, group_size=job.group_size, symmetric=job.symmetric)


def blocks(job: Job, block_bytes: int = BLOCK_BYTES, *, whole: bool = False) -> list[slice]:
    """Return the slices of the result's axis that are computed one after the other.

    With `whole` one, where a GPU takes the operands in panels by itself: those of the files' dtype.
    """
    matrix = job.matrix
    extent = job.shape[-1] if job.op != "matmul" else job.shape[-2]
    away = job.device not in (None, "cpu") and job.dtype is None and job.rung is None
    whole = job.bits is not None or matrix.ndim > 2 or extent == 0 or (whole and away)
    itemsize = max(matrix.itemsize, 1 if job.dtype is None else numpy_dtype(job.dtype).itemsize)
    step = max(1, block_bytes * extent // max(1, matrix.size * itemsize))
    return _steps(extent, extent if whole else step)


def columns(job: Job, part: slice) -> list[slice]:
    """Return the slices of the other operand's columns that a block meets, one call for each."""
    if job.op != "matmul" or job.device not in (None, "cpu") or 0 in job.shape:
        return [slice(None)]
    rows = math.prod(job.shape[:-2]) * (part.stop - part.start)
    itemsize = numpy_dtype(job.result).itemsize
    at_once = INTEGER_PRODUCTS if job.result in INTEGERS else FLOAT_PRODUCTS * 4 // itemsize
    step = at_once // max(1, rows * job.left.shape[-1])
    return _steps(job.shape[-1], max(step, LEAST_COLUMNS))


def _steps(extent: int, step: int) -> list[slice]:
    if step >= extent:
        return [slice(0, extent)]
    return [slice(start, min(start + step, extent)) for start in range(0, extent, step)]


def multiply(
    job: Job,
    out: Matrix,
    parts: Sequence[slice],
    *,
    watch: Callable[[slice, Any, Matrix, Matrix], None] | None = None,
) -> Iterator[slice]:
    """Compute the job into `out` part by part (see `blocks`), yielding each finished slice.

    watch: called as ``watch(slice, left, right, result)`` with the operands that the public
    function was given, before the slice is yielded. Memory in use beyond the maps of the files is
    about a block for converted operands, and the other operand.
    """
    call = getattr(gm, job.op)
    options: dict[str, Any] = {"out_dtype": job.out_dtype, "rung": job.rung}
    away = job.device not in (None, "cpu")
    if job.device is not None:
        options["device"] = job.device
    for operand in (job.left, job.right):
        check_map(operand)
    small = converted(job.left if job.op == "vecmat" else job.right, job.dtype)
    held = None if job.bits is None else quantized(job)
    for part in parts:
        block: Any = held
        check_map(small)
        if held is None:
            check_map(cut(job, part))
            block = converted(cut(job, part), job.dtype)
        left, right = (small, block) if job.op == "vecmat" else (block, small)
        target = out[..., part, :] if job.op == "matmul" else out[..., part]
        if away:
            call(left, right, out=target, **options)
        elif job.op == "matmul":
            for piece in columns(job, part):
                target[..., piece] = call(left, right[..., piece], **options)
        else:
            target[...] = call(left, right, **options)
        if watch is not None:
            watch(part, left, right, target)
        yield part


def cut(job: Job, part: slice) -> Matrix:
    """Return the part of the matrix that makes the part of the result."""
    if job.op == "vecmat":
        return job.matrix[..., part]
    return job.matrix[..., part, :]


def converted(array: Matrix, dtype: str | None) -> Matrix:
    """Return `array` in native byte order and, where given, in another dtype.

    TypeError where complex numbers would become real or floats integers, ValueError where an
    integer does not fit; other conversions round to nearest, as asked for.
    """
    wanted = array.dtype.newbyteorder("=") if dtype is None else numpy_dtype(dtype)
    if dtype is not None and array.dtype.kind == "c" and wanted.kind != "c":
        raise TypeError(
            f"--dtype {dtype} would drop the imaginary part of {array.dtype}. Pass complex64 or "
            "complex128."
        )
    if wanted.kind in "iu" and array.dtype.kind not in "iu":
        raise TypeError(
            f"--dtype {dtype} would round {array.dtype} numbers to integers. Use --bits 8 to "
            "quantise them."
        )
    if wanted.kind in "iu" and array.dtype != wanted:
        _check_integers_fit(array, wanted)
    with np.errstate(over="ignore"):
        return array.astype(wanted, copy=False)


def _check_integers_fit(array: Matrix, wanted: np.dtype[Any]) -> None:
    limits = np.iinfo(wanted)
    if array.size and not (limits.min <= int(array.min()) and int(array.max()) <= limits.max):
        raise ValueError(
            f"--dtype {wanted.name} holds {limits.min} to {limits.max}, but the file has values "
            f"from {array.min()} to {array.max()}. Pass a wider dtype."
        )


def flops(job: Job) -> int:
    """Return multiplications plus additions of the job."""
    return 2 * math.prod(job.shape) * int(job.left.shape[-1])
