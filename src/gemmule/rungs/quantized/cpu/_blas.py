"""Dequantise blocks of rows and hand them to NumPy's BLAS."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.rungs.quantized.cpu._operands import SERIAL_BYTES, Stored, address
from gemmule.rungs.quantized.cpu._plain_kernels import (
    kind_of,
    matrix_of,
)
from gemmule.rungs.quantized.cpu._plain_spread import decode_tasks


def multiply_by_blas(
    parts: Stored, B: NDArray[Any], C: NDArray[Any], block_bytes: int, *, transposed: bool
) -> None:
    """Set ``C = A B`` or ``C = A^T B`` through blocks of `block_bytes` of weights.

    B and C in the working dtype, contiguous. The block is decoded once and read by BLAS from the
    cache; the whole matrix never exists as floats.
    """
    rows = max(8, min(parts.m, block_bytes // (parts.n * B.itemsize)))
    block = np.empty((rows, parts.n), B.dtype)
    if transposed:
        C[...] = 0
    for first in range(0, parts.m, rows):
        end = min(parts.m, first + rows)
        weights = _decoded(parts, first, end, block)
        with np.errstate(all="ignore"):  # NaN and Inf are the caller's
            if transposed:
                C += weights.T @ B[first:end]
            else:
                np.matmul(weights, B, out=C[first:end])


def _decoded(parts: Stored, first: int, end: int, block: NDArray[Any]) -> NDArray[Any]:
    tasks = decode_tasks(kind_of(parts, str(block.dtype.name)))
    matrix, out = matrix_of(parts), address(block)
    run = tasks.alone if (end - first) * parts.row_bytes < SERIAL_BYTES else tasks
    run(-(-(end - first) // 8), *matrix, first, end, out, block.strides[0])
    return block[: end - first]
