"""Host side of the products across stored rows: results in parts, joined at the end."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu.calls.builtin import Job
from gemmule.backends.cpu.pool import own_cache_bytes, shares_of
from gemmule.core.problem import Problem
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.rungs.quantized.cpu import _plain_spread, _strip_kernels, _transposed_kernels
from gemmule.rungs.quantized.cpu._lifted import LOWEST_BYTES, lifted_zeros
from gemmule.rungs.quantized.cpu._operands import (
    Stored,
    address,
    blocks_of,
    scale_dtype_of,
    stored,
    takes_arrays,
    takes_floats,
)
from gemmule.rungs.quantized.cpu._panels_job import PanelsJob
from gemmule.rungs.quantized.cpu._plain_kernels import kind_of, matrix_of
from gemmule.rungs.quantized.cpu._transposed_kernels import RESULTS_ALIGNMENT

# A part's rows at least: its results, 4 bytes a column, are written, read and added.
PART_ROWS = 48
PARTS_PER_THREAD = 2


def _split(parts: Stored, blocks: int) -> tuple[bool, int, int, int]:
    """Return whether blocks of columns are shared, not rows; how many shares; helpers; the pool.

    Where every thread's share stays in a cache of its own, it need not lie in one piece, and
    results that are whole need no other thread to add them up: as long as that many blocks are.
    """
    by_rows = _parts_of(parts)
    if parts.codes.nbytes > own_cache_bytes() or 2 * blocks < by_rows[0]:
        return False, *by_rows
    return True, *shares_of(parts.codes.nbytes, blocks, PARTS_PER_THREAD)


def _parts_of(parts: Stored, *, threads: bool = True) -> tuple[int, int, int]:
    """Return into how many parts the rows are split, the helpers, and the pool's address."""
    if not threads:
        return 1, 0, 0
    return shares_of(parts.codes.nbytes, parts.m // PART_ROWS, PARTS_PER_THREAD)


class Numbers(NamedTuple):
    """Where the numbers of groups lie; lanes: by strips, the tables of nibbles."""

    scales: int
    zeros: int
    first: int
    lanes: int


class ReadyToSpread:
    """What products across a matrix in vector registers share: the kernels, and the job's words."""

    def __init__(self, parts: Stored) -> None:
        blocks = blocks_of(parts.n, parts.bits, parts.group)
        lifted = parts.kept(lifted_zeros)
        form = _strip_kernels.form_of(parts, lifted)
        kernels = _transposed_kernels.spread_kernels(
            parts.bits,
            blocks.pieces,
            scale_dtype_of(parts),
            parts.zeros is not None,
            lifted is not None,
            form,
        )
        numbers = Numbers(
            address(parts.scales),
            parts.zeros_address if lifted is None else lifted.place,
            address(blocks.first),
            address(blocks.lanes),
        )
        strips = None
        if form is not None:
            strips = _strip_kernels.operands_of(parts, form, lifted)
            numbers = Numbers(*(0 if some is None else address(some) for some in strips))
        self.kept = blocks, lifted, strips  # the job holds their addresses
        self.blocks, self.part_floats = blocks.count, blocks.count * blocks.columns
        self.x_floats = 4 * (parts.m // 4 + parts.m % 4) + RESULTS_ALIGNMENT // 4
        job = PanelsJob(
            codes=address(parts.codes),
            row_bytes=parts.row_bytes,
            m=parts.m,
            scales=numbers.scales,
            zeros=numbers.zeros,
            scale_step=parts.scale_step,
            groups=max(parts.scale_step, 1),
            first=numbers.first,
            lanes=numbers.lanes,
            x=0,
            y=0,
            block_step=4 * blocks.columns,
            part_bytes=4 * self.part_floats,
            lowest=LOWEST_BYTES,
        )
        self.job = np.array([*job, kernels.panels], np.int64)
        self.product = kernels.product.compiled
        self.by_rows, self.by_columns = (kernels.share, kernels.join), (kernels.columns, 0)
        self.place, self.on_arrays = address(self.job), kernels.on_arrays.compiled
        self.whole = kernels.job


def spread_rows(parts: Stored, x: NDArray[Any], y: NDArray[Any]) -> None:
    """Set ``y = A^T x`` in vector registers; x: (m,), y: (n,) float32."""
    ready = parts.kept(ReadyToSpread)
    by_columns, shares, helpers, pool = _split(parts, ready.blocks)
    steps, results = (ready.by_columns, 1) if by_columns else (ready.by_rows, shares)
    room = np.empty(ready.x_floats + results * ready.part_floats, np.float32)
    if takes_arrays(x, y):
        ready.on_arrays(pool, helpers, *steps, x, y, parts.n, shares, room, ready.place)
        return
    ready.product(
        pool,
        helpers,
        *steps,
        address(x),
        address(y),
        parts.n,
        shares,
        address(room),
        ready.place,
    )


def spread_job(problem: Problem, matrix: QuantizedMatrix) -> Job | None:
    """Return `spread_rows` as what a builtin function is bound to."""
    if not takes_floats(problem, matrix):
        return None
    parts = matrix.kept(stored)
    ready = parts.kept(ReadyToSpread)
    by_columns, shares, helpers, pool = _split(parts, ready.blocks)
    steps = ready.by_columns if by_columns else ready.by_rows
    sizes = (parts.n, shares, ready.x_floats, ready.part_floats)
    words = (pool, helpers, *steps, *sizes, ready.place)
    return Job(ready.whole.address(4, returns=True), words, pool, (parts, ready))


def spread_rows_plainly(parts: Stored, x: NDArray[Any], y: NDArray[Any], *, threads: bool) -> None:
    """Set ``y = A^T x`` in plain loops, in the dtype of x and y (float32 or float64)."""
    kernels, matrix = parts.kept(_plain, "float32" if x.itemsize == 4 else "float64")
    shares, helpers, pool = _parts_of(parts, threads=threads)
    sides = 8 // parts.bits
    room = np.empty(shares * sides * -(-parts.n // sides), x.dtype)
    kernels.product.compiled(
        pool,
        helpers,
        kernels.share,
        kernels.join,
        *matrix,
        address(x),
        address(y),
        address(room),
        shares,
        *kernels.own,
    )


def _plain(parts: Stored, working: str) -> tuple[_plain_spread.Spread, tuple[int, ...]]:
    return _plain_spread.spread_kernels(kind_of(parts, working)), tuple(matrix_of(parts))
