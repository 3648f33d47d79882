"""Host side of the products along stored rows: workspaces, panels of columns, threads."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu.calls.builtin import Job
from gemmule.backends.cpu.pool import Pooled, shares_of
from gemmule.backends.cpu.simd import BLOCK_BYTES, ROWS
from gemmule.core.problem import Problem
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.rungs.quantized.cpu._activations import arrange_kernel, quantise_kernel
from gemmule.rungs.quantized.cpu._integers import record_bytes
from gemmule.rungs.quantized.cpu._lifted import LOWEST_BYTES, LiftedZeros, lifted_zeros
from gemmule.rungs.quantized.cpu._operands import (
    SERIAL_BYTES,
    Stored,
    address,
    blocks_of,
    scale_dtype_of,
    stored,
    takes_arrays,
    takes_floats,
)
from gemmule.rungs.quantized.cpu._quad_ops import (
    BLOCKS,
    quad_pieces,
    quad_record_bytes,
    vectors_of,
)
from gemmule.rungs.quantized.cpu._tasks import run_tasks
from gemmule.rungs.quantized.cpu._vector_calls import VectorKernels, vector_kernels
from gemmule.rungs.quantized.cpu._vector_kernels import RowsJob, rows_kernels

# Codes of a task that meets several panels of columns: half of a 1 MiB L2.
TASK_BYTES = 512 * 1024


class Ready(NamedTuple):
    """What all products of a matrix by one kind of kernel share; `head` begins a `RowsJob`.

    x_step: bytes of a block's activations; x_bytes: of a whole panel's, and a line to align them.
    kept: what addresses in `head` point to, beside the matrix's own parts.
    """

    head: tuple[int, ...]
    x_step: int
    x_bytes: int
    kept: Any


class ReadyForVector:
    """What one vector's products with a matrix share.

    matrix: what the kernel `_vector_calls._share_of` finds in memory, at `place`. rooms:
    zero-filled room for a vector's activations, with its address, for the next call.
    """

    __slots__ = (
        "job",
        "kept",
        "matrix",
        "n",
        "nbytes",
        "on_arrays",
        "place",
        "product",
        "rooms",
        "rows",
        "share",
        "x_bytes",
    )

    def __init__(self, ready: Ready, kernels: VectorKernels, parts: Stored) -> None:
        self.matrix = np.array([*ready.head, ready.x_step, kernels.rows, LOWEST_BYTES], np.int64)
        self.place, self.n, self.x_bytes = address(self.matrix), parts.n, ready.x_bytes
        self.product, self.share = kernels.product.compiled, kernels.share
        self.on_arrays, self.job = kernels.on_arrays.compiled, kernels.job
        self.rows, self.nbytes, self.kept = parts.m, parts.codes.nbytes, ready.kept
        self.rooms: list[tuple[NDArray[np.uint8], int]] = []


def multiply_vector(
    parts: Stored, x: NDArray[Any], y: NDArray[Any], shares_per_thread: int, integers: bool
) -> None:
    """Set ``y = A x`` for vectors of float32, x rounded to 8 bits where `integers`.

    An x that holds NaN or infinity is multiplied as it is. The short way of the one-vector rungs:
    after 9 MB of codes everything that Python touches comes from memory, so it touches little.
    """
    ready = parts.kept(_ready_for_vector, integers)
    try:
        kept = ready.rooms.pop()
    except IndexError:  # the first call, or another thread is at work with it
        room = np.zeros(ready.x_bytes, np.uint8)
        kept = room, _aligned(room)
    shares, helpers, pool = shares_of(ready.nbytes, ready.rows, shares_per_thread)
    matrix = (pool, helpers, ready.share, ready.place, kept[1])
    if takes_arrays(x, y):
        strange = ready.on_arrays(*matrix, x, y, ready.n, shares)
    else:
        strange = ready.product(*matrix, address(x), address(y), ready.n, shares)
    ready.rooms.append(kept)
    if strange:
        multiply_vector(parts, x, y, shares_per_thread, integers=False)


def vector_job(
    problem: Problem, matrix: QuantizedMatrix, shares_per_thread: int, integers: bool
) -> Job | None:
    """Return `multiply_vector` as what a builtin function is bound to."""
    if not takes_floats(problem, matrix):
        return None
    parts = matrix.kept(stored)
    ready = parts.kept(_ready_for_vector, integers)
    shares, helpers, pool = shares_of(ready.nbytes, ready.rows, shares_per_thread)
    words = (pool, helpers, ready.share, ready.place, ready.n, shares, ready.x_bytes)
    return Job(ready.job.address(4, returns=True), words, pool, (parts, ready))


def multiply_rows(
    parts: Stored, x: NDArray[Any], y: NDArray[Any], columns: int, rows_per_task: int
) -> None:
    """Set ``y = A x`` with float activations; x: (n,) or (n, c) float32, `columns` at a time."""
    (ready, tasks), panels = parts.kept(_ready, columns, False), _panel_count(x, columns)
    arranged = np.zeros(panels * ready.x_bytes, np.uint8)
    place = _aligned(arranged)
    arrange_kernel(parts.bits, columns)(address(x), parts.n, _columns(x), place)
    _launch(parts, ready, tasks, place, panels, y, columns, rows_per_task)


def multiply_rows_in_integers(
    parts: Stored, x: NDArray[Any], y: NDArray[Any], columns: int, rows_per_task: int
) -> None:
    """Like `multiply_rows`, with x rounded to 8 bits; as it is where it holds NaN or infinity."""
    (ready, tasks), panels = parts.kept(_ready, columns, True), _panel_count(x, columns)
    records = np.zeros(panels * ready.x_bytes, np.uint8)
    place = _aligned(records)
    if quantise_kernel(parts.bits, columns)(address(x), parts.n, _columns(x), place):
        multiply_rows(parts, x, y, columns, rows_per_task)
    else:
        _launch(parts, ready, tasks, place, panels, y, columns, rows_per_task)


def _columns(x: NDArray[Any]) -> int:
    return 1 if x.ndim == 1 else int(x.shape[1])


def _panel_count(x: NDArray[Any], columns: int) -> int:
    return -(-_columns(x) // columns)


def _aligned(room: NDArray[Any]) -> int:
    """Return the first address in `room` that begins a cache line."""
    return -(-address(room) // BLOCK_BYTES) * BLOCK_BYTES


def _ready(parts: Stored, columns: int, integers: bool) -> tuple[Ready, Pooled]:
    pieces = blocks_of(parts.n, parts.bits, parts.group).pieces
    kernels = rows_kernels(
        parts.bits, columns, pieces, scale_dtype_of(parts), parts.zeros is not None, integers
    )
    return _ready_by(parts, columns, integers), kernels.tasks


def _ready_for_vector(parts: Stored, integers: bool) -> ReadyForVector:
    pieces = blocks_of(parts.n, parts.bits, parts.group).pieces
    lifted = None if integers else parts.kept(lifted_zeros)
    quads = quad_pieces(parts.n, parts.bits, parts.group) if integers else 0
    kernels = vector_kernels(
        parts.bits,
        pieces,
        scale_dtype_of(parts),
        parts.zeros is not None,
        integers,
        lifted is not None,
        quads,
    )
    return ReadyForVector(_ready_by(parts, 1, integers, lifted, quads), kernels, parts)


def _ready_by(
    parts: Stored,
    columns: int,
    integers: bool,
    lifted: LiftedZeros | None = None,
    quads: int = 0,
) -> Ready:
    blocks = blocks_of(parts.n, parts.bits, parts.group)
    head = (
        address(parts.codes),
        parts.row_bytes,
        parts.m,
        address(parts.scales),
        parts.zeros_address if lifted is None else lifted.place,
        parts.scale_step,
        max(parts.scale_step, 1),
        address(blocks.first),
        address(blocks.lanes),
    )
    if quads > 0:
        count, x_step = -(-blocks.count // BLOCKS), quad_record_bytes(vectors_of(quads))
    else:
        count = blocks.count
        x_step = columns * (record_bytes(parts.bits) if integers else 4 * blocks.columns)
    return Ready(head, x_step, count * x_step + BLOCK_BYTES, (blocks, lifted))


def _launch(
    parts: Stored,
    ready: Ready,
    tasks: Pooled,
    x: int,
    panels: int,
    y: NDArray[Any],
    columns: int,
    rows_per_task: int,
) -> None:
    whole = panels * columns == (1 if y.ndim == 1 else y.shape[1])
    target = y if whole else np.empty((parts.m, panels * columns), np.float32)
    job = RowsJob._make(
        (
            *ready.head,
            x,
            ready.x_step,
            panels,
            address(target),
            target.strides[0],
            4 * columns,
            LOWEST_BYTES,
        )
    )
    if columns > 1:  # each panel reads the task's codes again, from L2
        rows_per_task = max(ROWS, min(rows_per_task, TASK_BYTES // parts.row_bytes & -ROWS))
    small = parts.codes.nbytes * panels < SERIAL_BYTES
    run_tasks(tasks, job, parts.m, rows_per_task, alone=small)
    if not whole:
        y[...] = target[:, : y.shape[1]]
