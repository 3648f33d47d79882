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
import itertools
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
from gemmule.rungs._cpu_workspace import workspace
from gemmule.rungs.matmul.cpu import packed_threads
from gemmule.rungs.matmul.cpu._tile import unit_axis, unpack_kernel
from gemmule.rungs.matmul.cpu._tile_blocks import (
    GROUP,
    Tiled,
    block_bytes,
    block_shares,
    pack_shares,
    places_kernel,
    small_kernel,
)
from gemmule.rungs.matmul.cpu._tile_steps import PRODUCTS, STEP_TERMS
from gemmule.rungs.matmul.cpu.packed import NEITHER, Sides

Array = np.ndarray[Any, Any]

# Terms of a pass: with them two panels of B, 32 KiB, stay in the first-level cache.
_TERMS = {1: 512, 2: 256}
# What it takes to pack 32 lines of A, and of B, in times of 32 x 32 sums of as many terms.
_PACKS = (6, 11)
_SMALL = 256**3  # multiply-adds that the calling thread does as fast as with helpers, about
# Multiply-adds, and elements packed, for each fused float32 multiply-add of a core (Xeon with AMX,
# 16 cores, 1024 to 4096; packing two cores, 64 to 256; November 2026; a loop over the first-level
# cache makes thrice as many, and small products _NEAR times).
_PRODUCTS_PER_FMA = {"bfloat16": 3.5, "float16": 1.2}
_ELEMENTS_PER_FMA, _NEAR = 0.05, 2.0


def _pieces(problem: Problem, by: str) -> int:
    return 2 if problem.a == "float16" and by == "tiles" else 1


def _extremes(noted: Array) -> tuple[int, int]:
    """Return the least magnitude that is not zero, less one, and the largest, as bits."""
    return int(noted[:, 0].min()), int(noted[:, 1].max())


def pack(problem: Problem, operand: str, array: Array, *, by: str = "tiles") -> HostPacked:
    """Return A or B in tiles, two panels of sixteen lines after the other, and its extremes."""
    axis, pieces, k = "ab".index(operand), _pieces(problem, by), problem.k
    groups = -(-array.shape[axis] // GROUP)
    nbytes = 2 * groups * -(-k // STEP_TERMS) * pieces * TILE_BYTES
    memory.require(nbytes, "what is packed of the matrix")
    held, noted = np.empty(nbytes + 64, np.uint8), np.empty((groups, 2, 32), np.uint16)
    at = -(-held.ctypes.data // 64) * 64
    lies = _cpu.address(array), array.strides[axis], array.strides[1 - axis], array.shape[axis]
    places = _places(problem)[axis]
    pack_shares(pieces)(groups, places, *lies, at, noted.ctypes.data, k)
    held.flags.writeable = False
    return HostPacked(array, held, at, _extremes(noted))


def _places(problem: Problem) -> list[int]:
    units = unit_axis(problem.layout_a, 0), unit_axis(problem.layout_b, 1)
    return [places_kernel(axis == 1, unit).address(7) for axis, unit in enumerate(units)]


@functools.lru_cache(256)
def block_groups(
    down: int, across: int, threads: int, most: tuple[int, int], packs: tuple[int, int]
) -> tuple[int, int]:
    """Return rows and columns of a block in groups of 32, at most `most`, of the least time.

    down, across: groups of C. packs: what packing such a group of A or of B takes, in times of a
    group of C; every block packs its own.
    """

    def time(rows: int, columns: int) -> tuple[int, int]:
        blocks = -(-down // rows) * -(-across // columns)
        each = rows * columns + packs[0] * rows + packs[1] * columns
        return -(-blocks // threads) * each, blocks

    each = itertools.product(range(1, min(down, most[0]) + 1), range(1, min(across, most[1]) + 1))
    return min(each, key=lambda size: time(*size))


def is_small(problem: Problem) -> bool:
    """Whether one thread is as quick as two, for want of a call of helpers."""
    return problem.m * problem.n * problem.k <= _SMALL


def job(problem: Problem, params: Params, A: Array, B: Any, *, by: str = "tiles") -> Job | None:
    """Return a small product as what a builtin function is bound to."""
    if not is_small(problem):
        return None
    item = ITEMSIZE[problem.out]
    C_steps = item * problem.n, item
    words = _small(problem, by)._replace(**_lies(A.strides, B.strides, C_steps))
    return Job(small_kernel(_pieces(problem, by), by).address(4), words)


def _lies(of_A: Strides, of_B: Strides, of_C: Strides) -> dict[str, int]:
    """Return the steps of a product's matrices in bytes, as a `Tiled` has them."""
    steps = (*of_A, *of_B[::-1], *of_C)
    return dict(
        zip(("A_line", "A_term", "B_line", "B_term", "C_row", "C_item"), steps, strict=True)
    )


def _product(problem: Problem, by: str) -> Tiled:
    """Return all of a product that is known before its matrices are."""
    places = _places(problem)
    known = {
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "places_a": places[0],
        "places_b": places[1],
        "depth": _TERMS[_pieces(problem, by)] // STEP_TERMS,
        "unpack": unpack_kernel(problem.out, "float32").address(6),
    }
    return Tiled(**(dict.fromkeys(Tiled._fields, 0) | known))


def _in_blocks(product: Tiled, rows: int, columns: int, pieces: int, together: int = 1) -> Tiled:
    found = product._replace(rows=rows, columns=columns, together=together)
    return found._replace(workspace=workspace(block_bytes(found, pieces)))


def blocks_together(down: int, across: int, threads: int) -> int:
    """Return how many blocks below each other one thread should have, so that B is packed once.

    down, across: blocks of C. As many as make nobody wait longer; of several threads each has two
    shares at least.
    """
    rounds, least = -(-down * across // threads), 2 * threads if threads > 1 else 1

    def serves(some: int) -> bool:
        shares = -(-down // some) * across
        return shares >= least and -(-shares // threads) * some <= rounds

    return max((some for some in range(2, down + 1) if serves(some)), default=1)


def _small(problem: Problem, by: str) -> Tiled:
    """Return a product of one block."""
    down, across = -(-problem.m // GROUP), -(-problem.n // GROUP)
    return _in_blocks(_product(problem, by), down, across, _pieces(problem, by))


def bind(
    problem: Problem, params: Params, ready: Sides = NEITHER, *, by: str = "tiles"
) -> Callable[..., None]:
    """Return ``run(A, B, C)``; `ready` operands come in tiles.

    by: ``"tiles"``, or what `add_dots` multiplies in vectors.
    """
    if by == "tiles":
        missing_tiles("bf16")  # the system has to be asked, whoever binds
    pieces, alone = _pieces(problem, by), is_small(problem) and not any(ready)
    plainly = functools.cache(lambda: packed_threads.bind(problem, packed_threads.RUNG.defaults()))

    def on_arrays(A: Any, B: Any, C: Array) -> None:
        plainly()(A.array if ready[0] else A, B.array if ready[1] else B, C)

    if not (problem.m and problem.n and problem.k):
        return on_arrays
    down, across = -(-problem.m // GROUP), -(-problem.n // GROUP)
    most = (params["rows"] // GROUP, params["columns"] // GROUP)
    packs = 0 if ready[0] else _PACKS[0] // pieces, 0 if ready[1] else _PACKS[1] // pieces

    @functools.lru_cache(8)
    def laid(threads: int, *steps: Strides) -> tuple[int, Tiled, Array]:
        """Return the blocks, and all words but the places of matrices that lie so."""
        if alone:
            product, blocks = _small(problem, by), 1
        else:
            rows, columns = block_groups(down, across, threads, most, packs)
            high, wide = -(-down // rows), -(-across // columns)
            together = 1 if ready[1] else blocks_together(high, wide, threads)
            if together > 1:  # sums and A of half the rows stay nearer, and B is packed once anyway
                rows, together = -(-rows // 2), 2 * together
                high = -(-down // rows)
            product = _in_blocks(_product(problem, by), rows, columns, pieces, together)
            blocks = -(-high // together) * wide
        product = product._replace(**_lies(*steps))
        return blocks, product, np.array(product, np.int64)

    def run(A: Any, B: Any, C: Array) -> None:
        arrays = A.array if ready[0] else A, B.array if ready[1] else B, C
        blocks, product, words = laid(thread_count(), *(one.strides for one in arrays))
        if alone:
            undone = small_kernel(pieces, by)(*map(_cpu.address, (words, A, B, C)))
        else:
            if ready[0]:
                product = product._replace(places_a=0, least_a=A.notes[0], most_a=A.notes[1])
            if ready[1]:
                product = product._replace(places_b=0, least_b=B.notes[0], most_b=B.notes[1])
            refused = np.zeros(1, np.int64)
            both = (
                one.at if has else _cpu.address(one) for one, has in zip((A, B), ready, strict=True)
            )
            places = *both, _cpu.address(C), _cpu.address(refused)
            block_shares(pieces, by)(blocks, *places, *product[len(places) :])
            undone = refused[0]
        if undone:
            on_arrays(A, B, C)

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
