"""Error-corrected halves: float32 products on tensor cores, three of halves for each.

A float is the sum of two halves to within a few units of its last place: once each row of A and
column of B is scaled, by a power of two, to where halves are precise, and with the low part times
2^11 for itself. Of the four products of such sums, high by high, low by high and high by low count.
The high ones are summed apart: tensor cores cut off what they add, so every 64 steps their sum is
rounded into another in ordinary registers, while they go on with the low ones, whose sum needs it
not. That makes errors smaller than those of a chain of multiply-adds, at three products of halves
for one of floats: with the passes in front about four times as fast as float32 by multiply-adds.

What a pair of halves does not hold, infinities, NaN and elements 2^29 times smaller than the
largest of their row, is counted for each row. A sum that these might have moved by more than its
bound has its part of the tile computed anew, from the operands themselves; that is known only on
the device and stays there. Any strides are read, and no alignment is asked for, as one pass writes
the halves to where TMA wants them. Of a prepared operand the passes were run before.
"""

from __future__ import annotations

from gemmule.core.device_model import Terms
from gemmule.core.packing import HalvesMap, Move, Packing
from gemmule.core.problem import Problem
from gemmule.core.rung import (
    Arithmetic,
    Constraint,
    CudaRung,
    Machine,
    Params,
    Step,
    same,
)
from gemmule.rungs._cuda.geometry import ceil_div, modelled
from gemmule.rungs._cuda.half_tiles import COUNTED, DEPTH, TENSOR_SUMS
from gemmule.rungs._cuda.terms import rounds, settled
from gemmule.rungs._cuda.tiles import ANY_ORDER, tiles
from gemmule.rungs.matmul.cuda.wgmma_specialized import BARRIERS_BYTES, SHARED_BYTES

TILES = {"128x128": (128, 128), "128x64": (128, 64)}
OUT_BYTES = 8 * 16 * 128  # 16 rows of 32 sums for each of 8 warps
PASS_THREADS, PASS_BLOCKS = 256, 8  # of the kernels around the product; blocks of a multiprocessor
SHORTEST = 64
PARTS, SPAN, SIDE = 16, 128, 64  # as in split_halves.cuh
# What a product loses beside the additions, in units of two roundoffs, 2^-23: its two pairs of
# halves hold their floats to within 2^-22 each, the product of the low halves is as small, and so
# is what `suspect` lets pass.
SPLIT = 8


def _size(params: Params) -> tuple[int, int]:
    return TILES[params["tile"]]


def _lines(problem: Problem) -> tuple[int, int]:
    """Return how many rows of A and columns of B there are, over the whole batch."""
    return (
        problem.m * (1 if problem.shared_a else problem.batch),
        problem.n * (1 if problem.shared_b else problem.batch),
    )


def _halves_bytes(problem: Problem) -> tuple[int, int]:
    """Return the bytes of the halves of A and of B, each rounded up to 256."""
    line = ceil_div(problem.k, 8) * 16 * 2
    of_a, of_b = (ceil_div(lines * line, 256) * 256 for lines in _lines(problem))
    return of_a, of_b


def _workspace(problem: Problem, params: Params, machine: Machine) -> int:
    listed = 1 + 2 * tiles(problem, *_size(params))
    return sum(_halves_bytes(problem)) + 4 * ((PARTS + 2) * sum(_lines(problem)) + listed)


def _begins(problem: Problem) -> int:
    """Return where the words lie that the product reads for each row and column."""
    return sum(_halves_bytes(problem)) + 4 * PARTS * sum(_lines(problem))


def _moves(problem: Problem, operand: str) -> tuple[Move, ...]:
    """Return how elements lost and shifts, of A or of B, come to lie for the product.

    Alone they lie behind the operand's own halves and maxima; together those of A precede those of
    B, elements lost and then shifts. Behind the last shifts comes the count of parts of tiles to be
    computed anew: 0, as the passes leave it, and brought with B's.
    """
    which = "ab".index(operand)
    lines, mine, to = _lines(problem), _lines(problem)[which], _begins(problem)
    at = _halves_bytes(problem)[which] + 4 * PARTS * mine
    to += 4 * lines[0] * which
    return (
        Move(at, to, 4 * mine),
        Move(at + 4 * mine, to + 4 * sum(lines), 4 * (mine + which)),
    )


def _pass_blocks(problem: Problem) -> tuple[int, int]:
    """Return how many blocks the passes in front have work for: for maxima, and for halves."""
    span = max(ceil_div(ceil_div(problem.k, PARTS), 64) * 64, SPAN)
    operands = (
        (problem.m, 1 if problem.shared_a else problem.batch),
        (problem.n, 1 if problem.shared_b else problem.batch),
    )
    return (
        max(ceil_div(rows, 32) * planes for rows, planes in operands) * ceil_div(problem.k, span),
        max(ceil_div(rows, SIDE) * planes for rows, planes in operands) * ceil_div(problem.k, SIDE),
    )


def stages(width: int) -> int:
    """Return how many stages a block has room for."""
    room = SHARED_BYTES - OUT_BYTES - BARRIERS_BYTES
    return min(room // (2 * (128 + width) * DEPTH * 2), 4)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    height, width = _size(params)
    ring = stages(width)
    count = tiles(problem, height, width)

    def around(kernel: str, blocks: int) -> Step:
        blocks = min(blocks, PASS_BLOCKS * machine.units)
        return Step(kernel=kernel, grid=(blocks, 1, 1), block=(PASS_THREADS, 1, 1))

    of_maxima, of_halves = _pass_blocks(problem)
    return (
        around("row_maxima", of_maxima),
        around("split_operands", of_halves),
        Step(
            kernel=f"wgmma_3xfp16<{width}, {ring}>",
            grid=(min(machine.units, count), 1, 1),
            block=(384, 1, 1),
            smem=ring * 2 * (height + width) * DEPTH * 2 + OUT_BYTES,
            maps=(
                HalvesMap("a", (DEPTH, height), packed_at=0),
                HalvesMap("b", (DEPTH, width), packed_at=_halves_bytes(problem)[0]),
            ),
        ),
        around(f"compute_anew<{width}>", 2 * count),
    )


def _chain(problem: Problem, params: Params) -> int:
    """Return the longest chain of additions, in tensor cores' units of two roundoffs.

    High products go through four instructions of 17 terms, then through the sum of such sums; low
    ones, of which there are twice as many and 2^11 times smaller, through all instructions.
    """
    inside = DEPTH + DEPTH // 16
    outside = ceil_div(problem.k, DEPTH) + 1
    return inside + outside + problem.k // 256 + 1 + SPLIT


def terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Return the terms of its time: beside the tiles, each operand moves several times."""
    shape = tiles(problem, *_size(params)), 1, ceil_div(problem.k, DEPTH)
    passes = 4.0 * sum(_lines(problem)) * problem.k / machine.read_bytes_per_s
    more = {"passes": passes}
    return rounds(problem, machine, shape, params["tile"], more, {}, {}, settled(problem, machine))


RUNG = CudaRung(
    title="Error-corrected halves",
    idea="float32 as three products of halves, whose sums leave the tensor cores every 64 steps.",
    source="Ootomo and Yokota 2022 (splitting, truncation); no kernel of theirs is for Hopper",
    signatures=same("float32"),
    arithmetic=lambda problem: Arithmetic(accumulator="float32", chain=_chain, per_add=2.0),
    after="wgmma_repacked",
    branch="float32, which tensor cores do not multiply",
    params={"tile": tuple(TILES)},
    constraints=(
        COUNTED,
        Constraint(
            f"sums of at least {SHORTEST} terms, in which the loss of each counts little",
            lambda problem, params: problem.k >= SHORTEST,
        ),
        TENSOR_SUMS,
        Constraint(
            "no promise of equal bits for a row alone, whose part of a tile others may spoil",
            lambda problem, params: not problem.batch_invariant,
        ),
        Constraint(
            "at most 2^25 tiles",
            lambda problem, params: tiles(problem, *_size(params)) <= 2**25,
        ),
    ),
    steps=_steps,
    finished=same("float32"),
    workspace=_workspace,
    packing=Packing(passes=2, begins=_begins, moves=_moves),
    archs=("sm_90a",),
    **ANY_ORDER,
    **modelled("matmul/wgmma_3xfp16", terms),
)
