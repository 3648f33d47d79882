"""Halves in tile registers: 32 x 32 sums and 32 terms of them an instruction each.

AMX multiplies a tile of 16 rows x 32 terms with one of 32 terms x 16 columns in bfloat16 and sums
in float32. A float16 is the sum of two bfloat16 exactly, so it takes four such products. Both
operands are packed into tiles once, by all threads; a block of C then passes over them, its sums in
the second-level cache between two passes.

Tile registers take subnormal numbers for zeros, and infinity less itself would be a piece of a
float16: operands in which that could show are found while they are packed, and their product goes
to `packed_threads`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.amx import TILE_BYTES, missing_tiles
from gemmule.backends.cpu.calls.builtin import Job
from gemmule.backends.cpu.threads import thread_count
from gemmule.core import memory
from gemmule.core.packing import HostPacked, HostPacking
from gemmule.core.problem import HALVES, ITEMSIZE, Problem
from gemmule.core.rung import Arithmetic, CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs._cpu_rows import Strides
from gemmule.rungs._cpu_workspace import claimed, release, workspace
from gemmule.rungs.matmul.cpu import packed_threads
from gemmule.rungs.matmul.cpu._tile import unit_axis, unpack_kernel
from gemmule.rungs.matmul.cpu._tile_blocks import (
    GROUP,
    Small,
    block_bytes,
    block_shares,
    carried,
    pack_shares,
    places_kernel,
    small_bytes,
    small_kernel,
)
from gemmule.rungs.matmul.cpu._tile_steps import PRODUCTS, STEP_TERMS
from gemmule.rungs.matmul.cpu.packed import NEITHER, Sides

Array = np.ndarray[Any, Any]

# Terms of a pass: with them two panels of B, 32 KiB, stay in the first-level cache.
_TERMS = {1: 512, 2: 256}
# Blocks for each thread at least, where there are so many groups of 32: who ends late ends soon.
_BLOCKS_PER_THREAD = 2
_LEAST_GROUPS = 2
# Bytes of tiles for which memory is kept: fresh pages took a quarter of a product of 1024 x 1024.
_MOST_KEPT = 64 << 20
_SMALL = 256**3  # multiply-adds that the calling thread does as fast as with helpers, about
# Multiply-adds, and elements packed, for each fused float32 multiply-add of a core (Xeon with AMX,
# 16 cores, 1024 to 4096; packing two cores, 64 to 256; November 2026; a loop over the first-level
# cache makes thrice as many, and small products _NEAR times).
_PRODUCTS_PER_FMA = {"bfloat16": 3.5, "float16": 1.2}
_ELEMENTS_PER_FMA, _NEAR = 0.05, 2.0


def _pieces(problem: Problem, by: str) -> int:
    return 2 if problem.a == "float16" and by == "tiles" else 1


class _Tiles:
    """An operand as tiles: a panel of sixteen lines after the other, an even number of them."""

    def __init__(self, pieces: int, lines: int, terms: int, place: int) -> None:
        self.lines, self.place = lines, place
        self.groups = -(-lines // GROUP)
        self.nbytes = 2 * self.groups * -(-terms // STEP_TERMS) * pieces * TILE_BYTES

    def extremes(self) -> Array:
        """Return memory for the extremes of all 32 lines."""
        return np.empty((self.groups, 2, 32), np.uint16)

    def words(self, array: Array, line_axis: int, at: int, noted: Array) -> tuple[int, ...]:
        """Return what `pack_shares` has to know of an operand whose lines lie along an axis."""
        steps = array.strides[line_axis], array.strides[1 - line_axis]
        return self.place, _cpu.address(array), *steps, self.lines, at, noted.ctypes.data


def _fresh(nbytes: int) -> tuple[Array, int]:
    """Return new memory for tiles, and where they begin in it."""
    memory = np.empty(nbytes + 64, np.uint8)
    return memory, -(-memory.ctypes.data // 64) * 64


def _extremes(noted: Array) -> tuple[int, int]:
    """Return the least magnitude that is not zero, less one, and the largest, as bits."""
    return int(noted[:, 0].min()), int(noted[:, 1].max())


def block_groups(down: int, across: int, threads: int, most: tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of a block in groups of 32: at most `most`, enough for all threads.

    down, across: groups of C.
    """
    rows, columns = min(down, most[0]), min(across, most[1])
    wanted = _BLOCKS_PER_THREAD * threads if threads > 1 else 1
    while -(-down // rows) * -(-across // columns) < wanted:
        if max(rows, columns) <= _LEAST_GROUPS:
            break
        rows, columns = (-(-rows // 2), columns) if rows >= columns else (rows, -(-columns // 2))
    return rows, columns


def _operands(problem: Problem, by: str) -> tuple[_Tiles, _Tiles]:
    """Return how A and B become tiles."""
    units = unit_axis(problem.layout_a, 0), unit_axis(problem.layout_b, 1)
    places = [places_kernel(b, unit).address(7) for b, unit in enumerate(units)]
    pieces, k = _pieces(problem, by), problem.k
    return _Tiles(pieces, problem.m, k, places[0]), _Tiles(pieces, problem.n, k, places[1])


def pack(problem: Problem, operand: str, array: Array, *, by: str = "tiles") -> HostPacked:
    """Return A or B in tiles, and its extremes."""
    axis = "ab".index(operand)
    tiles = _operands(problem, by)[axis]
    memory.require(tiles.nbytes, "what is packed of the matrix")
    (held, at), noted = _fresh(tiles.nbytes), tiles.extremes()
    words = tiles.words(array, axis, at, noted)
    pack_shares(_pieces(problem, by))(tiles.groups, tiles.groups, problem.k, *words, *words)
    held.flags.writeable = False
    return HostPacked(array, held, at, _extremes(noted))


def _in_tiles(
    problem: Problem, ready: Sides, by: str
) -> tuple[int, Callable[..., list[HostPacked]]]:
    """Return what makes tiles of A and B at once, of those that are none yet, and their bytes.

    It is given where they go, and the operands.
    """
    both, pieces, k = _operands(problem, by), _pieces(problem, by), problem.k
    shares = [0 if has else tiles.groups for tiles, has in zip(both, ready, strict=True)]
    nbytes = [0 if has else tiles.nbytes for tiles, has in zip(both, ready, strict=True)]

    def in_tiles(place: int, *given: Any) -> list[HostPacked]:
        noted, places = [tiles.extremes() for tiles in both], (place, place + nbytes[0])
        words: list[int] = []
        for axis, has in enumerate(ready):
            operand = both[axis], given[axis], axis, places[axis], noted[axis]
            words += (0,) * 7 if has else operand[0].words(*operand[1:])
        if any(shares):
            pack_shares(pieces)(sum(shares), shares[0], k, *words)
        return [
            one if has else HostPacked(one, None, at, _extremes(found))
            for one, has, at, found in zip(given, ready, places, noted, strict=True)
        ]

    return sum(nbytes), in_tiles


def is_small(problem: Problem) -> bool:
    """Whether one thread is as quick as two, for want of a call of helpers."""
    return problem.m * problem.n * problem.k <= _SMALL


def job(problem: Problem, params: Params, A: Array, B: Any, *, by: str = "tiles") -> Job | None:
    """Return a small product as what a builtin function is bound to."""
    if not is_small(problem):
        return None
    item = ITEMSIZE[problem.out]
    words = _small_words(problem, by, A.strides, B.strides, (item * problem.n, item))
    return Job(small_kernel(_pieces(problem, by), by).address(4), words)


def _small_words(problem: Problem, by: str, of_A: Strides, of_B: Strides, of_C: Strides) -> Small:
    """Return a small product on the calling thread; strides in bytes."""
    m, n, k, pieces = problem.m, problem.n, problem.k, _pieces(problem, by)
    left, right = _operands(problem, by)
    operands = (left.place, *of_A, m, right.place, *of_B[::-1], n)
    unpack, room = unpack_kernel(problem.out, "float32"), small_bytes(m, n, k, pieces)
    depth = _TERMS[pieces] // STEP_TERMS
    return Small._make((*operands, *of_C, k, depth, unpack.address(6), workspace(room)))


def bind(
    problem: Problem, params: Params, ready: Sides = NEITHER, *, by: str = "tiles"
) -> Callable[..., None]:
    """Return ``run(A, B, C)``; `ready` operands come in tiles.

    by: ``"tiles"``, or what `add_dots` multiplies in vectors.
    """
    if by == "tiles":
        missing_tiles("bf16")  # the system has to be asked, whoever binds
    pieces, (m, n, k) = _pieces(problem, by), (problem.m, problem.n, problem.k)
    rule = 0 if by == "float16" else pieces
    plainly = functools.cache(lambda: packed_threads.bind(problem, packed_threads.RUNG.defaults()))

    def on_arrays(A: Any, B: Any, C: Array) -> None:
        plainly()(A.array if ready[0] else A, B.array if ready[1] else B, C)

    if not (m and n and k):
        return on_arrays
    (left, right), (nbytes, in_tiles) = _operands(problem, by), _in_tiles(problem, ready, by)
    most = (params["rows"] // GROUP, params["columns"] // GROUP)
    down, across, count = left.groups, right.groups, -(-k // STEP_TERMS)
    unpack, depth = unpack_kernel(problem.out, "float32").address(6), _TERMS[pieces] // STEP_TERMS
    small = small_kernel(pieces, by) if is_small(problem) and not any(ready) else None

    def in_blocks(place: int, A: Any, B: Any, C: Array) -> None:
        of_a, of_b = in_tiles(place, A, B)
        if not carried(rule, *of_a.notes, *of_b.notes):
            on_arrays(A, B, C)
            return
        rows, columns = block_groups(down, across, thread_count(), most)
        blocks = -(-down // rows) * -(-across // columns)
        steps = _cpu.address(C), C.strides[0], C.itemsize, m, n, count
        room = workspace(block_bytes(rows, columns, count, depth))
        words = of_a.at, of_b.at, *steps, rows, columns, depth, unpack, room
        block_shares(pieces, by)(blocks, *words)

    def run(A: Any, B: Any, C: Array) -> None:
        if small is not None:
            words = np.array(_small_words(problem, by, A.strides, B.strides, C.strides), np.int64)
            if small(words.ctypes.data, *map(_cpu.address, (A, B, C))):
                on_arrays(A, B, C)
        elif nbytes > _MOST_KEPT:
            fresh = _fresh(nbytes)
            in_blocks(fresh[1], A, B, C)
        else:
            kept = workspace(nbytes)
            part = claimed(kept)
            try:
                in_blocks(part, A, B, C)
            finally:
                release(kept, part)

    return run


def _arithmetic(problem: Problem) -> Arithmetic:
    """A product meets sixteen additions within its tile, that of both halves, one a later tile.

    Pieces of a number have its sign, so the magnitudes of their products sum to that of theirs.
    """
    pieces = _pieces(problem, "tiles")
    products = len(PRODUCTS[pieces, pieces])

    def chain(p: Problem, params: Params) -> int:
        return 17 + products * -(-p.reduction // STEP_TERMS)

    return Arithmetic("float32", chain, product="float32")


def suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Expect the rate of tile products on every core."""
    near = _NEAR if is_small(problem) else 1.0
    return expected(problem, machine, near * _PRODUCTS_PER_FMA[problem.a])


def expected(problem: Problem, machine: Machine, per_fma: float) -> Suggestion:
    """Expect products at a rate on every core, and two parallel regions; or on one core."""
    sizes = (-(-problem.m // GROUP) * GROUP, -(-problem.n // GROUP) * GROUP, problem.k)
    alone = is_small(problem)
    fma = machine.rates.fma * (1 if alone else machine.units)
    products = float(sizes[0]) * sizes[1] * sizes[2] / (per_fma * fma)
    packing = (sizes[0] + sizes[1]) * sizes[2] / (_ELEMENTS_PER_FMA * fma)
    packing /= _NEAR if alone else 1.0
    calls = machine.rates.call if alone else 3 * _cpu.spread_s(machine)
    return Suggestion({}, problem.batch * (products + packing + calls))


RUNG = CpuRung(
    title="Tile products",
    idea="One instruction of AMX adds 32 terms to 16 x 16 sums, in bfloat16; a float16 is two.",
    source="AMX (TDPBF16PS); splitting as in Henry, Tang and Heinecke 2019",
    signatures=tuple((a, a, out) for a in HALVES for out in (a, "float32")),
    layouts=("row", "col", "strided"),
    layouts_b=("row", "col", "strided"),
    arithmetic=_arithmetic,
    after="packed_threads",
    branch="halves on processors with AMX",
    params={"rows": (512, 256, 1024), "columns": (512, 256, 1024)},
    suggest=suggest,
    bind=bind,
    job=job,
    available=lambda: missing_tiles("bf16"),
    packing=HostPacking(pack, bind),
)
