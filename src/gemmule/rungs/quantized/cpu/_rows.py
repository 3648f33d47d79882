"""Host side of the products along stored rows: workspaces, panels of columns, threads."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.jit import thread_count
from gemmule.rungs.quantized.cpu._integers import record_bytes
from gemmule.rungs.quantized.cpu._operands import (
    SERIAL_BYTES,
    Blocks,
    Stored,
    address,
    blocks_of,
    scale_dtype_of,
)
from gemmule.rungs.quantized.cpu._simd import LANES, ROWS
from gemmule.rungs.quantized.cpu._vector_kernels import (
    RowsJob,
    arrange_kernel,
    quantise_kernel,
    rows_kernels,
)

Panels = NDArray[Any]

# A line is asked for four rows before its use, so that a row's start is no surprise to the memory
# system: 31 -> 43 GB/s at 4096, 27 -> 42 at 8192 (int4, two cores of an AMD EPYC, Zen 5, November
# 2026). Longer rows ask within the row instead: four of them would crowd the activations out.
LONG_ROW_BYTES = 16384
AHEAD_BYTES = 2048

# Codes of a task that meets several panels of columns: half of a 1 MiB L2.
TASK_BYTES = 512 * 1024


def multiply_rows(
    parts: Stored, x: NDArray[Any], y: NDArray[Any], columns: int, rows_per_task: int
) -> None:
    """Set ``y = A x`` with float activations; x: (n,) or (n, c) float32, `columns` at a time."""
    blocks = blocks_of(parts.n, parts.bits, parts.group)
    panels = _panel_count(x, columns)
    width = blocks.columns // LANES
    arranged = np.zeros((panels, blocks.count, width, columns, LANES), np.float32)
    arrange_kernel(parts.bits, columns)(address(x), parts.n, _columns(x), address(arranged))
    _launch(parts, blocks, arranged, y, columns, rows_per_task, integers=False)


def multiply_rows_in_integers(
    parts: Stored, x: NDArray[Any], y: NDArray[Any], columns: int, rows_per_task: int
) -> None:
    """Like `multiply_rows`, with x rounded to 8 bits; as it is where it holds NaN or infinity."""
    blocks = blocks_of(parts.n, parts.bits, parts.group)
    shape = (_panel_count(x, columns), blocks.count, columns, record_bytes(parts.bits))
    records = np.zeros(shape, np.uint8)
    quantise = quantise_kernel(parts.bits, columns)
    if quantise(address(x), parts.n, _columns(x), address(records)):
        multiply_rows(parts, x, y, columns, rows_per_task)
    else:
        _launch(parts, blocks, records, y, columns, rows_per_task, integers=True)


def _columns(x: NDArray[Any]) -> int:
    return 1 if x.ndim == 1 else int(x.shape[1])


def _panel_count(x: NDArray[Any], columns: int) -> int:
    return -(-_columns(x) // columns)


def _launch(
    parts: Stored, blocks: Blocks, panels: Panels, y: NDArray[Any], columns: int,
    rows_per_task: int, *, integers: bool,
) -> None:  # fmt: skip
    whole = panels.shape[0] * columns == (1 if y.ndim == 1 else y.shape[1])
    target = y if whole else np.empty((parts.m, panels.shape[0] * columns), np.float32)
    long_row = parts.row_bytes > LONG_ROW_BYTES
    job = RowsJob(
        codes=address(parts.codes),
        row_bytes=parts.row_bytes,
        m=parts.m,
        scales=address(parts.scales),
        zeros=parts.zeros_address,
        scale_step=parts.scale_step,
        groups=max(parts.scale_step, 1),
        first=address(blocks.first),
        lanes=address(blocks.lanes),
        x=address(panels),
        block_step=panels.strides[1],
        panels=panels.shape[0],
        y=address(target),
        y_step=target.strides[0],
        panel_bytes=4 * columns,
        ahead=AHEAD_BYTES if long_row else ROWS * parts.row_bytes,
    )
    kernels = rows_kernels(
        parts.bits, columns, blocks.per_lane, scale_dtype_of(parts), parts.zeros is not None,
        integers,
    )  # fmt: skip
    if columns > 1:  # each panel reads the task's codes again, from L2
        rows_per_task = max(ROWS, min(rows_per_task, TASK_BYTES // parts.row_bytes & -ROWS))
    small = parts.codes.nbytes * panels.shape[0] < SERIAL_BYTES
    form = kernels.serial if small or thread_count() == 1 else kernels.threaded
    form(job, rows_per_task)
    if not whole:
        y[...] = target[:, : y.shape[1]]
