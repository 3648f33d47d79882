"""Host side of the tile of sixteen rows: workspaces, the check of x, threads."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu.pool import Pooled
from gemmule.backends.cpu.simd import BLOCK_BYTES, LANES
from gemmule.core.problem import Problem
from gemmule.rungs.quantized.cpu._operands import (
    SERIAL_BYTES,
    Stored,
    address,
    scale_dtype_of,
)
from gemmule.rungs.quantized.cpu._rows import multiply_rows
from gemmule.rungs.quantized.cpu._tasks import run_tasks
from gemmule.rungs.quantized.cpu._tile_kernels import (
    TileJob,
    float_tile_kernels,
    quantise_tile_kernel,
    tile_kernels,
)
from gemmule.rungs.quantized.cpu._tile_ops import (
    RECORD_BYTES,
    TILE_COLUMNS,
    chunk_columns,
    chunk_records,
)


def multiply_tiles(
    parts: Stored, x: NDArray[Any], y: NDArray[Any], rows_per_task: int, columns: int
) -> None:
    """Set ``y = A x`` with x, (n, c) float32, rounded to 8 bits; A's groups are whole chunks.

    An x that holds NaN or infinity is multiplied as it is, `columns` at a time.
    """
    if not np.isfinite(x).all():
        multiply_rows(parts, x, y, columns, rows_per_task)
        return
    has_zeros = parts.zeros is not None
    chunks = -(-parts.row_bytes // BLOCK_BYTES)
    panels = -(-x.shape[1] // LANES)
    panel_bytes = chunks * chunk_records(parts.bits) * RECORD_BYTES
    records = np.zeros(panels * panel_bytes, np.uint8)
    quantise_tile_kernel(parts.bits, has_zeros)(
        address(x), parts.n, x.shape[1], address(records), panel_bytes
    )
    job = _job(parts, records, panel_bytes, y)
    _launch(tile_kernels(parts.bits, scale_dtype_of(parts), has_zeros), job, parts, rows_per_task)


def multiply_float_tiles(
    parts: Stored, x: NDArray[Any], y: NDArray[Any], rows_per_task: int
) -> None:
    """Set ``y = A x`` with x, (n, c) float32, as it is; A's groups are whole chunks."""
    columns = TILE_COLUMNS if x.shape[1] <= TILE_COLUMNS else 2 * TILE_COLUMNS
    panels = -(-x.shape[1] // columns)
    length = -(-parts.row_bytes // BLOCK_BYTES) * chunk_columns(parts.bits)
    padded = np.zeros((panels, length, columns), np.float32)
    for panel in range(panels):
        some = x[:, panel * columns : (panel + 1) * columns]
        padded[panel, : parts.n, : some.shape[1]] = some
    whole = panels * columns == x.shape[1]
    target = y if whole else np.empty((parts.m, panels * columns), np.float32)
    job = _job(parts, padded, padded.strides[0], target)
    kernels = float_tile_kernels(
        parts.bits, columns, scale_dtype_of(parts), parts.zeros is not None
    )
    _launch(kernels, job, parts, rows_per_task)
    if not whole:
        y[...] = target[:, : x.shape[1]]


def _job(parts: Stored, x: NDArray[Any], panel_bytes: int, y: NDArray[Any]) -> TileJob:
    one_group = parts.group >= parts.n
    chunks = -(-parts.row_bytes // BLOCK_BYTES)
    return TileJob(
        codes=address(parts.codes),
        row_bytes=parts.row_bytes,
        m=parts.m,
        scales=address(parts.scales),
        zeros=parts.zeros_address,
        scale_step=parts.scale_step,
        chunks_per_group=chunks if one_group else parts.group // chunk_columns(parts.bits),
        x=address(x),
        panel_bytes=panel_bytes,
        y=address(y),
        columns=y.shape[1],
    )


def _launch(tasks: Pooled, job: TileJob, parts: Stored, rows_per_task: int) -> None:
    small = parts.codes.nbytes * job.columns < LANES * SERIAL_BYTES
    run_tasks(tasks, job, parts.m, max(LANES, rows_per_task), alone=small)


def groups_are_chunks(problem: Problem) -> bool:
    """Whether no 64 bytes of a row meet two groups."""
    spec = problem.quant
    if spec is None:
        return False
    size = spec.group_size
    return size is None or size == -1 or size >= problem.k or size % chunk_columns(spec.bits) == 0
