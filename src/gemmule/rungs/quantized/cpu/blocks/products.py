"""Products of codes by many columns, on all threads: B packed once, then shares of the rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu.atomics import unpacked_as
from gemmule.backends.cpu.calls.builtin import Job as HostJob
from gemmule.backends.cpu.intrinsics import call_c, enter
from gemmule.backends.cpu.jit import kernel
from gemmule.backends.cpu.simd import block_columns
from gemmule.backends.cpu.steps import A, Place, Step, Steps, X, Y, buffer, per_team
from gemmule.backends.cpu.threads import thread_count
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Params
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.rungs._cpu import address
from gemmule.rungs._cpu_workspace import claimed, release, workspace
from gemmule.rungs.matmul.cpu._packed_blocks import chunk_kernel
from gemmule.rungs.matmul.cpu._packed_operands import DEPTH, PITCH
from gemmule.rungs.matmul.cpu._tile import register_tile, unit_axis, unpack_kernel
from gemmule.rungs.quantized.cpu._operands import (
    Run,
    Stored,
    blocks_of,
    stored,
    times_factors,
)
from gemmule.rungs.quantized.cpu._product import product_of
from gemmule.rungs.quantized.cpu.blocks.columns import pack_kernel, turn_kernel
from gemmule.rungs.quantized.cpu.blocks.decode import decode_kernel
from gemmule.rungs.quantized.cpu.vector.codes import by_words, kind_of, lifted_zeros

Array = NDArray[Any]

CHUNK = 96  # rows that are decoded at once: lines of results are stored whole
# Columns at a time: their sums for the rows of a share stay in the second-level cache.
MOST_COLUMNS = 256
_GAP = 16  # numbers between rows of sums: without it their lines meet in few sets of a cache


class Job(NamedTuple):
    """A product by many columns: kernels' addresses, operands, steps in bytes, sizes.

    decode, multiply, multiply_last, pack, unpack: of what decodes codes, multiplies (whole tiles of
    columns, and a last one of one register), packs B, and stores sums. product: of a `Product`. B
    is packed to `packed` stretch by stretch: whole slivers, `wide` columns together, then one of
    `last`. C_step: what `unpack` takes. Of tile registers what is least in a sliver is noted at
    `noted`, and `refused` is where a 1 is written if they would lose something of B: an exponent
    below `exponent`, or an upper half of a float from `most` on. convert: of what makes of B its
    `pieces` in bfloat16, or 0. depth: terms of a stretch.
    """

    decode: int
    multiply: int
    multiply_last: int
    pack: int
    unpack: int
    product: int
    B: int | Place
    B_row: int
    B_column: int
    packed: int | Place
    noted: int | Place
    refused: int | Place
    C: int | Place
    C_row: int
    C_column: int
    C_step: int
    m: int
    n: int
    k: int
    block: int
    tile: int
    wide: int
    last: int
    rows: int
    unit: int
    exponent: int
    convert: int
    pieces: int
    depth: int
    most: int
    workspace: int


_load = unpacked_as(Job)


@kernel
def pack_share(at: int, number: int) -> None:
    """Pack one sliver of one stretch of B."""
    job = _load(at)
    slivers = job.wide // job.tile + (1 if job.last > 0 else 0)
    stretch, sliver = number // slivers, number % slivers
    first, low = sliver * job.tile, stretch * DEPTH
    width = job.tile if first < job.wide else job.last
    terms = min(DEPTH, job.k - low)
    padded = (terms + job.block - 1) // job.block * job.block
    source = job.B + low * job.B_row + first * job.B_column
    to = job.packed + 4 * (low * (job.wide + job.last) + first * padded)
    columns = min(width, job.n - first)
    call_c(job.pack, (source, job.B_column, job.B_row, columns, terms, to, width))


@kernel
def rows_share(at: int, number: int) -> None:
    """Compute the results of some rows in all columns."""
    job = _load(at)
    part, begin, breadth = claimed(job.workspace), number * job.rows, job.wide + job.last
    count, pitch = min(job.rows, job.m - begin), breadth + _GAP
    sums = part + 4 * CHUNK * PITCH
    for low in range(0, job.k, DEPTH):
        blocks = (min(DEPTH, job.k - low) + job.block - 1) // job.block
        depth, first = blocks * job.block, int(low == 0)
        packed = job.packed + 4 * low * breadth
        for top in range(0, count, CHUNK):
            some, to = min(CHUNK, count - top), sums + 4 * top * pitch
            padded = (some + job.unit - 1) // job.unit * job.unit
            row = begin + top
            asked = (job.product, row, some, padded, low // job.block, blocks, part, 0, padded)
            enter(job.decode, asked)
            if job.wide > 0:
                enter(job.multiply, (part, packed, to, some, job.wide, depth, pitch, first))
            if job.last > 0:
                last, right = packed + 4 * job.wide * depth, to + 4 * job.wide
                enter(job.multiply_last, (part, last, right, some, job.last, depth, pitch, first))
            if low + DEPTH >= job.k:
                target = job.C + row * job.C_row
                call_c(job.unpack, (to, pitch, target, job.C_step, some, job.n))
    release(job.workspace, part)


def tile_columns(n: int) -> int:
    """Return how many columns are multiplied for n: whole registers."""
    lanes = register_tile("float32", narrow=True).columns
    return -(-n // lanes) * lanes


class Kept(NamedTuple):
    """What all products of a matrix read: its `Product` in memory, and what that points to."""

    product: NDArray[np.int64]
    decode: int
    bits: int
    words: bool
    parts: Any


def _products(parts: Stored) -> Callable[..., Steps]:
    """Return what makes the products of a matrix, the last ones kept."""
    return per_team(functools.partial(_steps, parts.m, kept_of(parts, PITCH)))


def kept_of(parts: Stored, pitch: int, pieces: int = 1) -> Kept:
    """Return what products of a matrix read; pitch, pieces: of `decode_kernel`."""
    blocks, lifted = blocks_of(parts.n, parts.bits, parts.group), parts.kept(lifted_zeros)
    zeros = parts.zeros_address if lifted is None else lifted.place
    first, lanes = address(blocks.first), address(blocks.lanes)
    product = product_of(parts, first=first, lanes=lanes, zeros=zeros)
    kind = kind_of(parts, lifted=lifted is not None)
    return Kept(
        np.array(product, np.int64),
        decode_kernel(kind, pitch, pieces).address(9),
        parts.bits,
        by_words(blocks.pieces),
        (blocks, lifted),
    )


class Columns(NamedTuple):
    """The columns that a matrix meets: dtypes and strides of B and of C, sizes (k, n) of B.

    unit: the axis of B with unit stride; rows: of a share, at most.
    """

    dtypes: tuple[str, str]
    sizes: tuple[int, int]
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    unit: str
    rows: int


def job_of(ready: Kept, m: int, columns: Columns, axis: int = 1, **given: int | Place) -> Job:
    """Return the job of a product with m rows, fields beside those of its operands as `given`.

    axis: of C, along which lines of sums lie; where C does not lie so, `unpack` turns them.
    """
    (k, n), (of_B, of_C), stored = columns.sizes, columns.strides, columns.dtypes[1]
    turned = (m, n)[axis] > 1 and of_C[axis] != ITEMSIZE[stored]
    unpack = turn_kernel(stored) if turned else unpack_kernel(stored, "float32")
    known: dict[str, int | Place] = {"m": m, "n": n, "k": k, "packed": buffer(), "refused": A}
    known |= {"decode": ready.decode, "product": address(ready.product)}
    known |= {"B": X, "B_row": of_B[0], "B_column": of_B[1], "unpack": unpack.address(6)}
    known |= {"C": Y, "C_row": of_C[0], "C_column": of_C[1]}
    known |= {"C_step": of_C[axis if turned else 1 - axis]}
    return Job(**(dict.fromkeys(Job._fields, 0) | known | given))  # type: ignore[arg-type]


def _steps(m: int, ready: Kept, columns: Columns) -> Steps:
    """Return the product with n columns."""
    (k, n), rows, block = columns.sizes, columns.rows, block_columns(ready.bits)
    tile, narrow = (register_tile("float32", one) for one in (False, True))
    padded, most = tile_columns(n), -(-m // narrow.rows)
    wide, last = padded // tile.columns * tile.columns, padded % tile.columns
    multiply, low = (chunk_kernel("float32", one, True).entry(*[int] * 8) for one in (False, True))
    threads = thread_count()
    shares = min(most, -(-m // (rows * threads)) * threads)
    rows = -(-most // shares) * narrow.rows
    if m >= CHUNK * threads:
        rows = -(-rows // CHUNK) * CHUNK
    room = CHUNK * PITCH + rows * (padded + _GAP)
    words = job_of(
        ready,
        m,
        columns,
        multiply=multiply,
        multiply_last=low,
        pack=pack_kernel(columns.dtypes[0], ready.bits, ready.words, columns.unit).address(7),
        block=block,
        tile=tile.columns,
        wide=wide,
        last=last,
        rows=rows,
        unit=narrow.rows,
        workspace=workspace(4 * room),
    )
    slivers = -(-k // DEPTH) * -(-padded // tile.columns)
    both = [Step(pack_share.address(2), slivers), Step(rows_share.address(2), -(-m // rows))]
    k_padded = -(-k // block) * block
    return Steps(both, words, buffer_bytes=4 * k_padded * padded, kept=ready)


def bind(problem: Problem, params: Params) -> Run:
    """Return ``run(A, B, C)``, MOST_COLUMNS at a time; B and C as they lie."""
    return by_columns(problem, params, _products, MOST_COLUMNS)


def by_columns(
    problem: Problem,
    params: Params,
    make: Callable[[Stored], Callable[..., Steps]],
    most: int,
    otherwise: Callable[[Problem, Params], Run] | None = None,
) -> Run:
    """Return ``run(A, B, C)`` by what `make` gives for a matrix, `most` columns at a time.

    otherwise: binds what computes a product that its steps refuse.
    """
    unit, rows = unit_axis(problem.layout_b, 1), int(params["rows"])
    plainly = functools.cache(lambda: otherwise and otherwise(problem, params))

    def run(matrix: QuantizedMatrix, B: Array, C: Array) -> None:
        if C.size == 0 or B.shape[0] == 0:
            C[...] = 0
            return
        parts, across = matrix.kept(stored), matrix.transposed
        x, y, axis = B, C, unit
        if matrix.perm is not None and across:
            y = np.empty_like(C)
        elif matrix.perm is not None:
            x, axis = B[matrix.perm], "none"
        if parts.factors is not None:  # not across: whose products come here are along the rows
            y = np.empty_like(C, dtype=np.float32)
        product, refused = parts.kept(make), np.zeros(1, np.int64)
        of = (problem.b, y.dtype.name)
        for low in range(0, C.shape[1], most):
            some, to = x[:, low : low + most], y[:, low : low + most]
            strides = some.strides, to.strides
            call = product(Columns(of, some.shape, strides, axis, rows))
            call(refused.ctypes.data, some.ctypes.data, to.ctypes.data)
        other = plainly() if refused[0] else None
        if other is not None:
            other(matrix, B, C)
        elif parts.factors is not None:
            with np.errstate(all="ignore"):  # halves of what is beyond them are infinite, or 0
                C[...] = times_factors(parts, y)
        elif y is not C:
            C[matrix.perm] = y

    return run


def job_by_columns(
    make: Callable[[Problem], Callable[[Stored], Callable[..., Steps]]], most: int
) -> Callable[[Problem, Params, QuantizedMatrix, Any], HostJob | None]:
    """Return the `job` of a rung whose products `by_columns` makes, of up to `most` columns.

    make: what makes a matrix's, of the problem. A: where a 1 is written if x is refused.
    """

    def job(problem: Problem, params: Params, matrix: QuantizedMatrix, B: Any) -> HostJob | None:
        parts, sizes = matrix.kept(stored), (problem.k, problem.n)
        if matrix.perm is not None or parts.factors is not None or problem.n > most:
            return None
        item, by_rows = ITEMSIZE[problem.out], problem.layout_out == "row"
        of_C = (item * problem.n, item) if by_rows else (item, item * problem.m)
        unit, rows = unit_axis(problem.layout_b, 1), int(params["rows"])
        dtypes = problem.b, problem.out
        columns = Columns(dtypes, sizes, (B.strides, of_C), unit, rows)
        return parts.kept(make(problem))(columns).job()

    return job
