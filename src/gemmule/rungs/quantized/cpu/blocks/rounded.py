"""Products of codes by many columns in tiles of bfloat16, on all threads.

Beside bfloat16 weights are rounded to it once; where more is asked for, weights and other floats of
x are sums of two or three of them, the *pieces*, and each product some of their products.

Along the stored rows a block of 32 rows becomes tiles in the nearest caches, which meet x packed in
the order of codes, while the next block is decoded. Across them the terms are the stored rows: a
chunk of codes of some hundred rows becomes panels of sixteen columns of the result, pairs of rows
put together as they are decoded, and x is packed as it lies; sums are brought into the order of
columns at the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gemmule.backends.cpu import amx
from gemmule.backends.cpu.amx import TILE_BYTES, TILE_ROWS, missing_tiles
from gemmule.backends.cpu.atomics import unpacked_as
from gemmule.backends.cpu.intrinsics import call_c, enter, load, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.simd import LANES, block_columns, codes_per_lane
from gemmule.backends.cpu.steps import Step, Steps, buffer, per_team
from gemmule.backends.cpu.threads import thread_count
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Params, may_round_weights
from gemmule.rungs._cpu_workspace import claimed, release, workspace
from gemmule.rungs.matmul.cpu import _tile_steps
from gemmule.rungs.matmul.cpu._tile_blocks import GROUP, LEAST_EXPONENTS, place_kernel
from gemmule.rungs.matmul.cpu._tile_steps import (
    EXTREMES_BYTES,
    SHAPES,
    STEP_TERMS,
    SUMS_BYTES,
    SUMS_PITCH,
    least_and_most,
)
from gemmule.rungs.quantized.cpu._operands import Run, Stored
from gemmule.rungs.quantized.cpu.blocks import products
from gemmule.rungs.quantized.cpu.blocks.decode import pairs_kernel
from gemmule.rungs.quantized.cpu.blocks.halves import in_columns, pack_kernel, put_pieces
from gemmule.rungs.quantized.cpu.blocks.products import Columns, Job, Kept, job_of, kept_of
from gemmule.rungs.quantized.cpu.plain.products import bind_blas
from gemmule.rungs.quantized.cpu.vector.codes import kind_of, lifted_zeros

# Terms at a time: two panels of x, 32 KiB, stay in the first-level cache. Columns at a time: with
# tiles and sums of the rows of a share they stay in the second-level one.
DEPTH, MOST_COLUMNS = 512, 512
_SHARES_PER_THREAD = 4
CHUNK_COLUMNS = 128  # across the rows, decoded at once
_LARGEST = 2.0**127  # below it a weight is no infinity in bfloat16


_load, _note = unpacked_as(Job), _tile_steps.note_extremes()
_put, _get = store("int64", "int64"), load("int64", "int64")
Pieces = tuple[int, int]  # of weights and of x


@kernel
def pack_share(at: int, number: int) -> None:
    """Pack one panel of one stretch of x, and note its least element but 0."""
    job = _load(at)
    panels = job.wide // TILE_ROWS
    low, panel = number // panels * job.depth, number % panels
    terms, first, noted = (
        min(job.depth, job.k - low),
        TILE_ROWS * panel,
        job.noted + EXTREMES_BYTES * number,
    )
    nbytes = (terms + job.block - 1) // job.block * job.block * 2 * TILE_ROWS * job.pieces
    source = job.B + low * job.B_row + first * job.B_column
    to = job.packed + 2 * low * job.wide * job.pieces + panel * nbytes
    columns = max(0, min(TILE_ROWS, job.n - first))
    for i in range(EXTREMES_BYTES // 8):
        _put(noted, i, -1 if i < EXTREMES_BYTES // 16 else 0)
    if job.convert != 0:
        part, extent = claimed(job.workspace), (columns, terms)
        call_c(job.convert, (source, job.B_column, job.B_row, *extent, part, job.pack, to, noted))
        release(job.workspace, part)
    else:
        call_c(job.pack, (source, job.B_column, job.B_row, columns, terms, to))
        for tile in range(nbytes // TILE_BYTES):
            _note(to + tile * TILE_BYTES, noted)
    least, most = least_and_most(noted)
    _put(noted, 0, least)
    _put(noted, 1, most)


@functools.cache
def convert_kernel(stored: str, pieces: int, unit: str) -> Kernel:
    """Return ``f(x, column_step, term_step, columns, terms, part, pack, out, noted)``.

    It makes pieces of up to sixteen columns at `part`, which `pack` brings to tiles.
    """
    put, along = put_pieces(stored, pieces), unit == "width"
    item, apart, scattered = ITEMSIZE[stored], 2 * TILE_ROWS * DEPTH, unit == "none"
    word, room, each = f"int{8 * item}", pieces * apart, 2 * LANES
    read, write = load(word, word), store(word, word)

    @kernel
    def convert(
        x: int,
        column_step: int,
        term_step: int,
        columns: int,
        terms: int,
        part: int,
        pack: int,
        out: int,
        noted: int,
    ) -> None:
        if along:
            for term in range(0, terms, 2):
                others = columns if term + 1 < terms else 0
                line = x + term * term_step
                to = part + 2 * TILE_ROWS * term
                put(line, columns, line + term_step, others, to, apart, noted)
        else:
            for column in range(columns):
                line, to = x + column * column_step, part + 2 * DEPTH * column
                if scattered:
                    for term in range(terms):
                        write(part + room, term, read(line + term * term_step, 0))
                    line = part + room
                for term in range(0, terms, each):
                    some = min(LANES, terms - term)
                    others = max(0, min(LANES, terms - term - LANES))
                    at = line + term * item
                    put(at, some, at + LANES * item, others, to + 2 * term, apart, noted)
        steps = (2, 2 * TILE_ROWS) if along else (2 * DEPTH, 2)
        for piece in range(pieces):
            place = part + piece * apart
            call_c(pack, (place, *steps, columns, terms, out + piece * TILE_BYTES))

    return convert


@functools.cache
def lines_kernel(unit: str) -> Kernel:
    """Return what `pack_kernel` does, of terms in their own order, as tiles of the left operand."""
    place, clear = place_kernel(False, unit), store("int64", "int64")

    @kernel
    def pack(x: int, column_step: int, term_step: int, columns: int, terms: int, out: int) -> None:
        for low in range(0, terms, STEP_TERMS):
            tile, some = out + low // STEP_TERMS * TILE_BYTES, min(STEP_TERMS, terms - low)
            if columns < TILE_ROWS or some < STEP_TERMS:
                for i in range(TILE_BYTES // 8):
                    clear(tile, i, 0)
            place(x + low * term_step, column_step, term_step, columns, some, tile)

    return pack


@kernel
def check_share(at: int, number: int) -> None:
    """Refuse an x that tiles would lose something of: they take subnormal numbers for zeros."""
    job = _load(at)
    stretches, least, most = (job.k + job.depth - 1) // job.depth, 1 << 16, 0
    for i in range(stretches * job.wide // TILE_ROWS):
        least = min(least, _get(job.noted + EXTREMES_BYTES * i, 0))
        most = max(most, _get(job.noted + EXTREMES_BYTES * i, 1))
    if (least + 1) >> 7 < job.exponent or most >= job.most:
        _put(job.refused, 0, 1)


class Ahead(NamedTuple):
    """What is decoded while tiles multiply: the arguments of `Job.decode`, all rows or some."""

    decode: int
    product: int
    row: int
    rows: int
    padded: int
    first: int
    blocks: int
    out: int
    low: int
    high: int


_NOTHING = (0,) * len(Ahead._fields)


@functools.cache
def groups_kernel(across: bool, pieces: tuple[int, int] = (1, 1)) -> Kernel:
    """Return what multiplies a block by all columns of x in a stretch, and stores them if last.

    ``f(registers, a, b, panel, count, width, sums, sums_step, first, ahead, C, C_column, C_step, m,
    n, unpack)``: `count` tiles of 32 terms from `a`, decoded, and `b`, packed x, on; panels `panel`
    bytes apart; sums of `width` groups of 32 columns lie `sums_step` bytes apart and begin at zero
    in the `first` stretch. C: m x n elements from there on; unpack: address of what stores a group,
    else 0. across: sums have a row for each column of x. pieces: of A, of x. Products of tiles take
    their time, so the rows `ahead` are decoded in between.
    """
    start, resume, keep = (
        _tile_steps.start_sums(),
        _tile_steps.resume_rows(),
        _tile_steps.keep_rows(),
    )
    add = _tile_steps.add_products(pieces, streamed="a" if across else "b")  # x
    a_bytes, b_bytes = pieces[0] * TILE_BYTES, pieces[1] * TILE_BYTES

    @kernel
    def add_groups(
        registers: int,
        a: int,
        b: int,
        panel: int,
        count: int,
        width: int,
        sums: int,
        sums_step: int,
        first: bool,
        ahead: Ahead,
        C: int,
        C_column: int,
        C_step: int,
        m: int,
        n: int,
        unpack: int,
    ) -> None:
        rows = (ahead.product, ahead.row, ahead.rows, ahead.padded)
        of_block = (*rows, ahead.first, ahead.blocks, ahead.out)
        # A row at a time, evenly: tiles go on multiplying beside one, and would wait for several.
        turns, now, due = width * count, ahead.low, 0
        for j in range(width):
            place, left = sums + j * sums_step, n - GROUP * j
            right = b + j * panel * 2 * b_bytes // TILE_BYTES
            if first:
                start(registers)
            else:
                resume(registers, place)
            for step in range(count):
                one, other = a + step * a_bytes, right + step * b_bytes
                if across:
                    add(registers, other, one, panel, panel)
                else:
                    add(registers, one, other, panel, panel)
                due += ahead.high - ahead.low
                if due >= turns:
                    soon = now + due // turns
                    enter(ahead.decode, (*of_block, now, soon))
                    now, due = soon, due % turns
            keep(registers, place)
            if unpack != 0:
                target = C + GROUP * j * C_column
                call_c(unpack, (place, SUMS_PITCH, target, C_step, m, min(GROUP, left)))

    return add_groups


@functools.cache
def rows_kernel(pieces: int) -> Kernel:
    """Return ``f(words, number)``: the results of some rows in some columns, all rows first.

    pieces: of weights.
    """
    configure, forget = amx.configured(*SHAPES), amx.released()

    @kernel
    def rows_share(at: int, number: int) -> None:
        job = _load(at)
        if _get(job.refused, 0) != 0:
            return
        part, down = claimed(job.workspace), (job.m + job.rows - 1) // job.rows
        begin, aside = number % down * job.rows, number // down * job.tile
        width = min(job.tile, job.wide - aside) // GROUP
        count, depth = min(job.rows, job.m - begin), job.depth
        room = 2 * GROUP * depth * pieces
        left, sums = part + SUMS_BYTES, part + SUMS_BYTES + 2 * room
        apart, now = SUMS_BYTES if job.k > depth else 0, 0
        configure()
        for low in range(0, job.k, depth):
            blocks = (min(depth, job.k - low) + job.block - 1) // job.block
            terms, unpack = blocks * job.block, job.unpack if low + depth >= job.k else 0
            panel, before = 2 * TILE_ROWS * terms, low * job.wide + aside * terms
            right = job.packed + 2 * before * job.pieces
            for top in range(0, count, GROUP):
                row, some, first = begin + top, min(GROUP, count - top), low // job.block
                here, there = left + now * room, left + (1 - now) * room
                now = 1 - now
                if low == 0 and top == 0:
                    whole = (row, some, GROUP, first, blocks, here, 0, GROUP)
                    enter(job.decode, (job.product, *whole))
                to, next_blocks = row + GROUP, blocks
                if top + GROUP >= count:
                    to, first = begin, first + blocks
                    next_blocks = (min(depth, job.k - low - depth) + job.block - 1) // job.block
                rows = min(GROUP, begin + count - to)
                last = GROUP if next_blocks > 0 else 0
                ahead = (to, rows, GROUP, first, next_blocks, there, 0, last)
                operands = (part, here, right, panel, terms // STEP_TERMS, width)
                place, C = sums + top // GROUP * width * apart, job.C + row * job.C_row
                C += aside * job.C_column
                rest = (C, job.C_column, job.C_step, some, job.n - aside, unpack)
                numbers = (*operands, place, apart, int(low == 0), job.decode, job.product)
                enter(job.multiply, (*numbers, *ahead, *rest))
        forget()
        release(job.workspace, part)

    return rows_share


@functools.cache
def columns_kernel(bits: int) -> Kernel:
    """Return ``f(words, number)``: some columns of the product across the stored rows."""
    configure, forget, order = amx.configured(*SHAPES), amx.released(), in_columns(bits)
    chunk, together = block_columns(bits), TILE_ROWS // codes_per_lane(bits)
    line, each = 4 * chunk, CHUNK_COLUMNS // chunk

    @kernel
    def columns_share(at: int, number: int) -> None:
        job = _load(at)
        if _get(job.refused, 0) != 0:
            return
        part, begin, width = claimed(job.workspace), number * job.rows, job.wide // GROUP
        count, decoded = min(job.rows, job.m - begin), part + SUMS_BYTES
        ordered = decoded + 2 * CHUNK_COLUMNS * DEPTH
        sums, apart = ordered + GROUP * line, width * SUMS_BYTES
        every = (job.m + chunk - 1) // chunk
        configure()
        for low in range(0, job.k, DEPTH):
            some = min(DEPTH, job.k - low)
            terms = (some + STEP_TERMS - 1) // STEP_TERMS * STEP_TERMS
            right, panel = job.packed + 2 * low * job.wide, 2 * TILE_ROWS * terms
            for left in range(0, count, CHUNK_COLUMNS):
                block = (begin + left) // chunk
                blocks = min(each, every - block)
                asked = (job.product, low, some, terms, block, blocks, decoded, 0, terms)
                enter(job.decode, asked)
                for group in range(blocks * (chunk // GROUP)):
                    place = sums + (left // GROUP + group) * apart
                    operands = (part, decoded + 2 * group * panel, right, panel)
                    sizes = (terms // STEP_TERMS, width, place, SUMS_BYTES, int(low == 0))
                    enter(job.multiply, (*operands, *sizes, *_NOTHING, 0, 0, 0, 0, 0, 0))
        forget()
        for left in range(0, count, chunk):
            for j in range(width):
                place, some = sums + left // GROUP * apart + j * SUMS_BYTES, job.n - GROUP * j
                for row in range(0, GROUP, together):
                    order(place + 4 * SUMS_PITCH * row, apart, ordered + line * row)
                target = job.C + (begin + left) * job.C_row + GROUP * j * job.C_column
                extent = (min(GROUP, some), min(chunk, count - left))
                call_c(job.unpack, (ordered, chunk, target, job.C_step, *extent))
        release(job.workspace, part)

    return columns_share


def exponents(parts: Stored) -> tuple[int, int]:
    """Return biased exponents of the least weight but 0, or less, and of the largest, or more.

    Both are 0 where tiles cannot serve, as a weight would be subnormal, or no number, in bfloat16.
    """
    scales = np.abs(parts.scales.astype(np.float64))
    top, middle = 2**parts.bits - 1, 2.0 ** (parts.bits - 1)
    zeros = np.full(1, middle) if parts.zeros is None else parts.zeros.astype(np.float64)
    with np.errstate(all="ignore"):
        apart = np.abs(zeros - np.clip(np.rint(zeros), 0, top))
        most = np.abs(scales).max(initial=0) * np.maximum(np.abs(zeros), np.abs(top - zeros)).max()
    if not most < _LARGEST:
        return 0, 0
    least = scales[scales > 0].min(initial=1.0) * apart[apart > 0].min(initial=1.0)
    found = max(0, 126 + int(np.frexp(least)[1]))
    return found, 126 + int(np.frexp(most)[1]) if found else 0


class Served(NamedTuple):
    """Which numbers of x tiles serve: see `Job.exponent` and `Job.most`."""

    exponent: int
    most: int


def served(parts: Stored, pieces: Pieces, k: int) -> Served:
    """Return what x has to be, of k terms: no piece, no product of two is subnormal, no sum large.

    The last bit of two or three pieces is 2^-23 of the first at least. `exponents` counts the least
    weight as 1 at most, which keeps pieces of x from being subnormal.
    """
    (least, most), last = exponents(parts), 8 * (max(pieces) - 1)
    if least < (1 if pieces[0] == 1 else 8 * pieces[0]):
        return Served(1 << 16, 0)
    above = 380 - most - k.bit_length()
    return Served(LEAST_EXPONENTS + last - least, max(0, min(0xFE, above)) << 7)


def two_are_exact(parts: Stored) -> bool:
    """Whether each weight is exactly two bfloat16: a half times a whole number of five bits."""
    whole = parts.zeros is None or bool((parts.zeros == np.rint(parts.zeros)).all())
    within = parts.zeros is None or bool((np.abs(parts.zeros) <= 16).all())
    return parts.bits == 4 and parts.scales.dtype != np.float32 and whole and within


@functools.cache
def _products(across: bool, asked: Pieces) -> Callable[[Stored], Callable[..., Steps]]:
    """Return what makes of a matrix what makes its products, of which the last ones are kept."""

    def make(parts: Stored) -> Callable[..., Steps]:
        pieces = (2, asked[1]) if asked[0] == 3 and two_are_exact(parts) else asked
        kept, m, k = kept_of(parts, 0, pieces[0]), parts.m, parts.n
        if across:
            kind = kind_of(parts, lifted=parts.kept(lifted_zeros) is not None)
            kept, m, k = kept._replace(decode=pairs_kernel(kind).address(9)), k, m
        limits = served(parts, pieces, k)
        return per_team(functools.partial(_steps, across, pieces, m, kept, limits))

    return make


def column_parts(m: int, n: int, threads: int) -> int:
    """Return in how many parts columns are cut, so that what a thread has of C is about square.

    A thread decodes the codes of its rows and fetches its columns of x, which others have packed:
    a number of either takes about as long.
    """
    return max(1, min(-(-n // GROUP), threads, round(math.sqrt(n * threads / m))))


def _steps(
    across: bool, pieces: Pieces, m: int, ready: Kept, limits: Served, columns: Columns
) -> Steps:
    """Return the product with n columns."""
    (k, n), chunk, (of_weights, of_x) = columns.sizes, block_columns(ready.bits), pieces
    depth, stored = DEPTH // (1, 2, 4)[of_weights - 1], columns.dtypes[0]
    padded, threads = -(-n // GROUP) * GROUP, thread_count()
    # Terms are padded to a `block`, shares of the rows of the product begin at a `piece`.
    block, piece = (STEP_TERMS, CHUNK_COLUMNS) if across else (chunk, GROUP)
    apart = 1 if across or threads == 1 else column_parts(m, n, threads)
    wanted = -(-m * apart // (_SHARES_PER_THREAD * threads)) if threads > 1 else m
    apiece = -(-padded // (GROUP * apart)) * GROUP
    rows = -(-min(columns.rows, wanted) // piece) * piece
    packed_bytes = 2 * of_x * padded * -(-k // block) * block
    slots = -(-k // depth) * (padded // TILE_ROWS)
    groups, room = rows // GROUP * (apiece // GROUP) if k > depth else 1, 4 * GROUP * depth
    room *= of_weights
    if across:
        groups = rows // GROUP * (padded // GROUP)
        room = 2 * CHUNK_COLUMNS * DEPTH + 4 * chunk * GROUP
    unit, convert, most = columns.unit, 0, 1 << 16
    if stored != "bfloat16":
        convert, most = convert_kernel(stored, of_x, unit).address(9), limits.most
        room = max(room, 2 * of_x * TILE_ROWS * DEPTH + ITEMSIZE[stored] * DEPTH)
        unit = "depth" if unit == "none" else unit
    pack = lines_kernel(unit) if across else pack_kernel(ready.bits, unit, pieces=of_x)
    words = job_of(
        ready,
        m,
        columns,
        axis=0 if across else 1,
        multiply=groups_kernel(across, pieces).entry(*[int] * 9, Ahead, *[int] * 6),
        pack=pack.address(6),
        noted=buffer(packed_bytes),
        block=block,
        wide=padded,
        tile=apiece,
        rows=rows,
        exponent=limits.exponent,
        convert=convert,
        pieces=of_x,
        depth=depth,
        most=most,
        workspace=workspace(room + (1 + groups) * SUMS_BYTES),
    )
    share = columns_kernel(ready.bits) if across else rows_kernel(of_weights)
    tasks = [
        Step(pack_share.address(2), slots),
        Step(check_share.address(2), 1, alone=True),
        Step(share.address(2), -(-m // rows) * -(-padded // apiece)),
    ]
    return Steps(tasks, words, buffer_bytes=packed_bytes + EXTREMES_BYTES * slots, kept=ready)


def pieces_of(problem: Problem) -> Pieces:
    """Return of how many bfloat16 weights and numbers of x are sums.

    Where 8 bits of x would do, one is enough: it errs by 2^-8 of an element, 8 bits by more of the
    largest of 32, and weights of two pieces by 2^-16.
    """
    spec = problem.quant
    if problem.b == "bfloat16" and (_across(problem) or may_round_weights(problem)):
        return 1, 1
    if spec is not None and spec.activations == "int8":
        return 2, 1
    return 3, {"float32": 3, "float16": 2, "bfloat16": 1}[problem.b]


def _across(problem: Problem) -> bool:
    return problem.quant is not None and problem.quant.transposed


def _make(problem: Problem) -> Callable[[Stored], Callable[..., Steps]]:
    return _products(_across(problem), pieces_of(problem))


job = products.job_by_columns(_make, MOST_COLUMNS)


def bind(problem: Problem, params: Params) -> Run:
    """Return ``run(A, B, C)``; what tiles would lose something of goes to float32 registers."""
    missing_tiles("bf16")  # the system has to be asked, whoever binds
    make, otherwise = _make(problem), _by_blas if _across(problem) else products.bind
    return products.by_columns(problem, params, make, MOST_COLUMNS, otherwise)


def _by_blas(problem: Problem, params: Params) -> Run:
    return bind_blas(problem, {"block_bytes": 4 << 20})
