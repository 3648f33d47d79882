"""How hosts run the plain micro-kernels: on one thread or on all, alone or before BLAS."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu.pool import team
from gemmule.backends.cpu.steps import Steps
from gemmule.core.problem import Problem
from gemmule.core.rung import Params
from gemmule.rungs._cpu import QUIET, address
from gemmule.rungs._cpu_workspace import claimed, release, workspace
from gemmule.rungs.quantized.cpu._across import Across
from gemmule.rungs.quantized.cpu._operands import SERIAL_BYTES, Run, Stored, bound, working_dtype
from gemmule.rungs.quantized.cpu._product import Product, Rows, product_of
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
    block_bytes, working = int(params["block_bytes"]), working_dtype(problem)

    def core(parts: Stored, B: NDArray[Any], C: NDArray[Any]) -> None:
        blocks = parts.kept(_blocks_of, working, block_bytes)
        _multiply_by_blas(parts, blocks, B, C, transposed=transposed)

    return bound(core, working, by_columns=True)


class _Blocks(NamedTuple):
    """A matrix for BLAS: rows of a block and its bytes, what decodes them, and where they go."""

    rows: int
    nbytes: int
    decode: Rows
    product: Product
    workspace: int


def _blocks_of(parts: Stored, working: str, block_bytes: int) -> _Blocks:
    row_bytes = parts.n * np.dtype(working).itemsize
    rows = max(8, min(parts.m, block_bytes // row_bytes))
    nbytes, decode = rows * row_bytes, kernels.decode_rows(kind_of(parts, working))
    return _Blocks(rows, nbytes, decode, product_of(parts), workspace(nbytes))


def _multiply_by_blas(
    parts: Stored, blocks: _Blocks, B: NDArray[Any], C: NDArray[Any], *, transposed: bool
) -> None:
    """Set ``C = A B`` or ``C = A^T B`` through blocks of weights.

    B and C in the working dtype, each by rows or by columns, as BLAS takes them. The block is
    decoded once and read by BLAS from the cache; the whole matrix never exists as floats.
    """
    place = claimed(blocks.workspace)
    try:
        memory: Any = (ctypes.c_char * blocks.nbytes).from_address(place)
        block = np.ndarray((blocks.rows, parts.n), B.dtype, memory)
        for first in range(0, parts.m, blocks.rows):
            end = min(parts.m, first + blocks.rows)
            some = _some_rows(parts, blocks.product, place, first, end)
            alone = (end - first) * parts.row_bytes < _DECODED_ALONE
            blocks.decode.run(some, end - first, 1, _DECODED_ROWS, alone=alone)
            weights = block[: end - first]
            if not transposed:
                QUIET.run(np.matmul, weights, B, C[first:end])
            elif first == 0:
                QUIET.run(np.matmul, weights.T, B[:end], C)
            else:
                QUIET.run(np.add, C, QUIET.run(np.matmul, weights.T, B[first:end]), C)
    finally:
        release(blocks.workspace, place)


def _some_rows(parts: Stored, whole: Product, place: int, first: int, end: int) -> Product:
    """Return the product that decodes some of a matrix's rows to a place."""
    step = first * parts.scale_step
    return whole._replace(
        codes=whole.codes + first * parts.row_bytes,
        m=end - first,
        scales=whole.scales + step * parts.scales.itemsize,
        zeros=whole.zeros + step * 4,
        y=place,
    )
