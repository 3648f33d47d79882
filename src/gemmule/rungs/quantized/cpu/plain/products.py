"""How hosts run the plain micro-kernels: on one thread or on all, alone or before BLAS."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu.pool import team
from gemmule.backends.cpu.steps import Steps
from gemmule.core.problem import Problem
from gemmule.core.rung import Params
from gemmule.rungs._cpu import address
from gemmule.rungs.quantized.cpu._across import Across
from gemmule.rungs.quantized.cpu._operands import SERIAL_BYTES, Run, Stored, bound, working_dtype
from gemmule.rungs.quantized.cpu._product import Rows, product_of
from gemmule.rungs.quantized.cpu.plain import kernels
from gemmule.rungs.quantized.cpu.plain.kernels import kind_of

PANEL_COLUMNS = 4096  # of results that stay in L1
_DECODED_ROWS = 16  # of a share
_DECODED_ALONE = SERIAL_BYTES // 8  # bytes of codes, each of which takes 0.13 to 0.3 ns


def bind_loop(problem: Problem, params: Params) -> Run:
    """Return the function that takes one weight at a time."""
    working = working_dtype(problem)
    transposed = problem.quant is not None and problem.quant.transposed

    def core(parts: Stored, x: NDArray[Any], y: NDArray[Any]) -> None:
        columns = 1 if x.ndim == 1 else x.shape[1]
        product = product_of(parts, x=address(x), y=address(y), columns=columns)
        kernels.loop_kernel(kind_of(parts, working), transposed)(product, 0, y.shape[0])

    return bound(core, working)


def bind_four_rows(problem: Problem, params: Params) -> Run:
    """Return the function that takes four rows at a time, on one thread unless it is told how."""
    rows, working = int(params.get("rows_per_task", 0)), working_dtype(problem)

    def core(parts: Stored, x: NDArray[Any], y: NDArray[Any]) -> None:
        half = (parts.n + 1) // 2
        if parts.bits == 4:  # even columns, then odd ones
            x = np.concatenate((x[0::2], x[1::2]))
        step = half * x.itemsize if parts.bits == 4 else 0
        product = product_of(parts, x=address(x), y=address(y), x_step=step)
        alone = rows == 0 or parts.codes.nbytes < SERIAL_BYTES
        parts.kept(_four_rows, working).run(product, parts.m, 1, rows or parts.m, alone=alone)

    return bound(core, working)


def _four_rows(parts: Stored, working: str) -> Rows:
    return Rows(kernels.four_rows_kernel(kind_of(parts, working)))


def bind_panels(problem: Problem, params: Params) -> Run:
    """Return the function that spreads each row over the results."""
    threads = bool(params["threads"])

    def core(parts: Stored, x: NDArray[Any], y: NDArray[Any]) -> None:
        working = "float32" if x.itemsize == 4 else "float64"
        parts.kept(_steps_across, working, threads, team())(0, address(x), address(y))

    return bound(core, working_dtype(problem))


def _steps_across(parts: Stored, working: str, threads: bool, now: tuple[int, int]) -> Steps:
    kind, item = kind_of(parts, working), np.dtype(working).itemsize
    product = product_of(parts, x_step=min(PANEL_COLUMNS, parts.n + parts.n % 2) * item)
    made = kernels.panels_kernel(kind), kernels.results_in_order(kind)
    across = Across(product, parts.codes.nbytes, *made, parts.m, item=working)
    return across.steps(across.split(by_columns=False) if threads else (False, 1))


def bind_blas(problem: Problem, params: Params) -> Run:
    """Return the function that decodes blocks of rows for BLAS."""
    transposed = problem.quant is not None and problem.quant.transposed
    block_bytes = int(params["block_bytes"])

    def core(parts: Stored, B: NDArray[Any], C: NDArray[Any]) -> None:
        _multiply_by_blas(parts, B, C, block_bytes, transposed=transposed)

    return bound(core, working_dtype(problem))


def _multiply_by_blas(
    parts: Stored, B: NDArray[Any], C: NDArray[Any], block_bytes: int, *, transposed: bool
) -> None:
    """Set ``C = A B`` or ``C = A^T B`` through blocks of `block_bytes` of weights.

    B and C in the working dtype, contiguous. The block is decoded once and read by BLAS from the
    cache; the whole matrix never exists as floats.
    """
    rows = max(8, min(parts.m, block_bytes // (parts.n * B.itemsize)))
    block = np.empty((rows, parts.n), B.dtype)
    decode, whole = kernels.decode_rows(kind_of(parts, B.dtype.name)), product_of(parts)
    numbers = parts.scale_step * np.array([parts.scales.itemsize, 4])
    if transposed:
        C[...] = 0
    for first in range(0, parts.m, rows):
        end = min(parts.m, first + rows)
        scales, zeros = (int(n) for n in first * numbers)
        product = whole._replace(
            codes=whole.codes + first * parts.row_bytes,
            m=end - first,
            scales=whole.scales + scales,
            zeros=whole.zeros + zeros,
            y=address(block),
        )
        small = (end - first) * parts.row_bytes < _DECODED_ALONE
        decode.run(product, end - first, 1, _DECODED_ROWS, alone=small)
        weights = block[: end - first]
        with np.errstate(all="ignore"):  # NaN and Inf are the caller's
            if transposed:
                C += weights.T @ B[first:end]
            else:
                np.matmul(weights, B, out=C[first:end])
