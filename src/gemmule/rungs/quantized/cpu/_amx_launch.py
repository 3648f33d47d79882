"""Host side of the tile registers: packed activations, the check of x, threads."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.jit import thread_count
from gemmule.problem import Problem
from gemmule.rung import Machine, Suggestion
from gemmule.rungs.quantized.cpu._amx import AmxJob
from gemmule.rungs.quantized.cpu._amx_bfloat16 import BLOCK_ROWS, window, x_bytes
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
from gemmule.rungs.quantized.cpu._simd import BLOCK_BYTES, LANES
from gemmule.rungs.quantized.cpu._tile_kernels import TileKernels, quantise_tile_kernel
from gemmule.rungs.quantized.cpu._tile_ops import RECORD_BYTES, chunk_columns, chunk_records

COLUMNS = 4  # at once, the plain way, as in `few_columns`

# Asking for lines of the next 48 rows: 1.3 ms -> 1.0 with rows of 2 KiB, but 1.4 -> 1.8 with 4 KiB
# and 16 -> 27 with 8 KiB (two cores of a Xeon, November 2026): the processor does better alone.
LONG_ROW_BYTES = 4096

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
    power = _power_for(int(largest), int(smallest))
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
    ahead = parts.row_bytes < LONG_ROW_BYTES
    job = _job(parts, place, panel_bytes, y, ahead=ahead)._replace(
        factor=(127 - power) << 23, window=address(_WINDOW)
    )
    kernels = float_register_kernels(
        parts.bits, pieces, scale_dtype_of(parts), parts.zeros is not None
    )
    _launch(kernels, job, parts, -(-rows_per_task // BLOCK_ROWS) * BLOCK_ROWS)


def _power_for(largest: int, smallest: int) -> int | None:
    """Return the power of two to multiply x by, or None, from bits of its extreme magnitudes.

    The last of three pieces is a multiple of 2^-23 of its element, at worst, and must be at least
    2^-126; the sums of a chunk, 128 products with codes below 2^8, must stay below 2^128.
    """
    for power in (46, 0):
        if largest < (127 + 110 - power) << 23 and smallest >= max(1, (127 - 103 - power) << 23):
            return power
    return None


def _job(parts: Stored, x: int, panel_bytes: int, y: NDArray[Any], *, ahead: bool = True) -> AmxJob:
    chunks, width = -(-parts.row_bytes // BLOCK_BYTES), chunk_columns(parts.bits)
    return AmxJob(
        codes=address(parts.codes), row_bytes=parts.row_bytes, m=parts.m,
        scales=address(parts.scales), zeros=parts.zeros_address, scale_step=parts.scale_step,
        groups=max(parts.scale_step, 1),
        chunks_per_group=chunks if parts.group >= parts.n else max(parts.group // width, 1),
        x=x, panel_bytes=panel_bytes, y=address(y), columns=y.shape[1],
        line_step=parts.row_bytes if ahead else 0, line_on=BLOCK_BYTES if ahead else 0,
    )  # fmt: skip


def _launch(kernels: TileKernels, job: AmxJob, parts: Stored, rows_per_task: int) -> None:
    if parts.codes.nbytes * job.columns < LANES * SERIAL_BYTES or thread_count() == 1:
        kernels.serial(job, parts.m)
    else:
        kernels.threaded(job, rows_per_task)


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
    problem: Problem, machine: Machine, codes_per_s: float, products_per_s: float
) -> Suggestion | None:
    """Return the expected time, from the codes and products that one core handles in a second.

    Products count whole panels of sixteen columns; 20 us are for packing activations and the call.
    """
    reading = read_time(0.90, columns_at_once=max(1, problem.n))(problem, machine)
    if reading is None:
        return None
    codes, columns = problem.m * problem.k, -(-problem.n // LANES) * LANES
    work = codes * (1 / codes_per_s + columns / products_per_s) / machine.units
    return Suggestion({}, max(reading.expected_s, work + 20e-6))
