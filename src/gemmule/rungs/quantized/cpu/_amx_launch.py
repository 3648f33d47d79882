"""Host side of the tile registers: packed activations, the check of x, threads."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu.amx import AmxJob
from gemmule.backends.cpu.pool import Pooled
from gemmule.backends.cpu.simd import BLOCK_BYTES, LANES
from gemmule.core.problem import Problem
from gemmule.core.rung import Machine, Suggestion
from gemmule.rungs._cpu import spread_s
from gemmule.rungs.quantized.cpu._amx_bfloat16 import BLOCK_ROWS, shrunk_by, window, x_bytes
from gemmule.rungs.quantized.cpu._amx_float_kernels import (
    float_register_kernels,
    magnitudes,
    pack_kernel,
)
from gemmule.rungs.quantized.cpu._amx_int8 import tile_register_kernels
from gemmule.rungs.quantized.cpu._integers import ACTIVATION_GROUP
from gemmule.rungs.quantized.cpu._operands import (
    SERIAL_BYTES,
    Stored,
    address,
    read_time,
    scale_dtype_of,
)
from gemmule.rungs.quantized.cpu._rows import multiply_rows
from gemmule.rungs.quantized.cpu._tasks import run_tasks
from gemmule.rungs.quantized.cpu._tile_kernels import quantise_tile_kernel
from gemmule.rungs.quantized.cpu._tile_ops import RECORD_BYTES, chunk_columns, chunk_records

COLUMNS = 4  # at once, the plain way, as in `few_columns`

# Lines are asked for with float activations: of short rows those of the next 48 rows, of others, in
# bytes, so far ahead in each of the 48 in work. Two cores of a Xeon in a slow hour, November 2026,
# ms: rows of 2 KiB 1.26, not 1.75 ahead in the rows or 1.23 to 1.8 if not asked for; 8192 x 8192 of
# 8-bit codes 6.0, not 10 for the next rows or 7.2 if not asked for, of 4-bit codes 4.8, not 5.0.
# 128 and 512 bytes, and the order of memory, were no better.
LONG_ROW_BYTES = 4096
LINE_AHEAD = 256

# By the power of two by which decoded codes are smaller than they are: powers of two to try for x,
# and the least and the largest power that x may then have. Nothing is to be subnormal, and the last
# of three pieces is a multiple of 2^-23 of its element at worst, a product 2^-112 of that; the sums
# of a chunk, 128 products with codes below 2^8, are to stay below 2^128.
_POWERS = {0: ((46, 0), -103, 110), 112: ((60, 110, 10), 9, 126)}

_WINDOW = np.array(window(), np.uint16)


def multiply_integer_tiles(
    parts: Stored, x: NDArray[Any], y: NDArray[Any], rows_per_task: int
) -> None:
    """Set ``y = A x`` with x, (n, c) float32, rounded to 8 bits; see `groups_are_records`.

    An x that holds NaN or infinity is multiplied as it is, the plain way.
    """
    if not np.isfinite(x).all():
        multiply_rows(parts, x, y, COLUMNS, rows_per_task)
        return
    has_zeros = parts.zeros is not None
    panels, chunks = -(-x.shape[1] // LANES), -(-parts.row_bytes // BLOCK_BYTES)
    panel_bytes = chunks * chunk_records(parts.bits) * RECORD_BYTES
    records = np.zeros(panels * panel_bytes + BLOCK_BYTES, np.uint8)
    place = -(-address(records) // BLOCK_BYTES) * BLOCK_BYTES
    quantise_tile_kernel(parts.bits, has_zeros)(address(x), parts.n, x.shape[1], place, panel_bytes)
    span = min(parts.group, chunk_columns(parts.bits)) // ACTIVATION_GROUP
    span = chunk_records(parts.bits) if parts.group >= parts.n else span
    kernels = tile_register_kernels(parts.bits, scale_dtype_of(parts), has_zeros, span)
    _launch(kernels, _job(parts, place, panel_bytes, y), parts, rows_per_task)


def multiply_bfloat16_tiles(
    parts: Stored, x: NDArray[Any], y: NDArray[Any], rows_per_task: int, pieces: int
) -> None:
    """Set ``y = A x`` with x, (n, c) float32, as a sum of `pieces` bfloat16; A's groups are chunks.

    An x that holds NaN or infinity, or spans too many powers of two, is multiplied the plain way.
    """
    largest, smallest = magnitudes(address(x), x.size)
    shrunk = shrunk_by(parts.bits)
    power = _power_for(int(largest), int(smallest), shrunk)
    if power is None:
        multiply_rows(parts, x, y, COLUMNS, rows_per_task)
        return
    panels, chunks = -(-x.shape[1] // LANES), -(-parts.row_bytes // BLOCK_BYTES)
    panel_bytes = chunks * x_bytes(parts.bits, pieces)
    packed = np.zeros(panels * panel_bytes + BLOCK_BYTES, np.uint8)
    place = -(-address(packed) // BLOCK_BYTES) * BLOCK_BYTES
    pack_kernel(parts.bits, pieces)(
        address(x), parts.n, x.shape[1], 127 + power, place, panel_bytes
    )
    below = parts.row_bytes < LONG_ROW_BYTES
    job = _job(parts, place, panel_bytes, y)._replace(
        line_ahead=BLOCK_ROWS * parts.row_bytes if below else LINE_AHEAD,
        factor=(127 + shrunk - power) << 23,
        window=address(_WINDOW),
    )
    kernels = float_register_kernels(
        parts.bits, pieces, scale_dtype_of(parts), parts.zeros is not None
    )
    _launch(kernels, job, parts, -(-rows_per_task // BLOCK_ROWS) * BLOCK_ROWS)


def _power_for(largest: int, smallest: int, shrunk: int) -> int | None:
    """Return the power of two to multiply x by, or None, from bits of its extreme magnitudes.

    shrunk: the power of two by which decoded codes are smaller than they are.
    """
    powers, low, high = _POWERS[shrunk]
    for power in powers:
        if largest < (127 + high - power) << 23 and smallest >= max(1, (127 + low - power) << 23):
            return power
    return None


def _job(parts: Stored, x: int, panel_bytes: int, y: NDArray[Any]) -> AmxJob:
    chunks, width = -(-parts.row_bytes // BLOCK_BYTES), chunk_columns(parts.bits)
    return AmxJob(
        codes=address(parts.codes),
        row_bytes=parts.row_bytes,
        m=parts.m,
        scales=address(parts.scales),
        zeros=parts.zeros_address,
        scale_step=parts.scale_step,
        groups=max(parts.scale_step, 1),
        chunks_per_group=chunks if parts.group >= parts.n else max(parts.group // width, 1),
        x=x,
        panel_bytes=panel_bytes,
        y=address(y),
        columns=y.shape[1],
        line_step=parts.row_bytes,
        line_on=BLOCK_BYTES,
    )


def _launch(tasks: Pooled, job: AmxJob, parts: Stored, rows_per_task: int) -> None:
    small = parts.codes.nbytes * job.columns < LANES * SERIAL_BYTES
    run_tasks(tasks, job, parts.m, rows_per_task, alone=small)


def groups_are_records(problem: Problem) -> bool:
    """Whether a group is a row, or whole chunks, or what divides a chunk into whole records."""
    spec = problem.quant
    if spec is None:
        return False
    size, chunk = spec.group_size, chunk_columns(spec.bits)
    if size is None or size == -1 or size >= problem.k or size % chunk == 0:
        return True
    return chunk % size == 0 and size % ACTIVATION_GROUP == 0


def suggestion(
    problem: Problem, machine: Machine, codes_per_fma: float, products_per_fma: float
) -> Suggestion | None:
    """Return the expected time, from the codes and products that a core handles in a multiply-add.

    Products count whole panels of sixteen columns.
    """
    reading = read_time(0.90, columns_at_once=max(1, problem.n))(problem, machine)
    if reading is None:
        return None
    codes, columns = problem.m * problem.k, -(-problem.n // LANES) * LANES
    work = codes * (1 / codes_per_fma + columns / products_per_fma)
    busy = work / (machine.rates.fma * machine.units)
    return Suggestion({}, max(reading.expected_s, busy + 2 * spread_s(machine)))
