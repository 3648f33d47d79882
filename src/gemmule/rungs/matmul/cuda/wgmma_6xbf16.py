"""Floats in three parts: float32 by few columns at the speed of reading the wide matrix once.

`wgmma_3xfp16` writes the halves of both operands before it multiplies: of a wide matrix by some
dozen columns that moves it four times. Here it is read once, past shared memory: a thread loads the
floats of its own rows, takes them apart into three bfloat16 each, whose sum they are to the last
bit, and multiplies from registers. bfloat16 has float32's exponents, so nothing is scaled, and no
element is too small beside its neighbours. Of the nine products of parts the six largest count:
what is left out is below two roundoffs of each product. Sums leave the tensor cores every 64 steps,
the smallest products first, for these cut off what they add.

The narrow matrix is taken apart by a kernel in front, which lays it out as shared memory has it.
Some blocks share a tile's sum, so that the whole chip reads; a kernel behind adds their parts. It
computes anew what is not finite: an infinity has no parts.

A warpgroup that only loads gives its registers up: with 128 columns a thread that multiplies takes
more than 168.
"""

from __future__ import annotations

from collections.abc import Iterable

from gemmule.core.device_model import Terms
from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, Constraint, CudaRung, Machine, Params, Step, same
from gemmule.rungs._cuda import half_tiles
from gemmule.rungs._cuda.geometry import ceil_div, flat, instance, modelled
from gemmule.rungs._cuda.stream import ALONE
from gemmule.rungs._cuda.terms import rounds
from gemmule.rungs._cuda.tiles import EVERY_LAYOUT

HEIGHT, THREADS, PLANES, ALL = 128, 384, 3, 256  # as in the kernels
SHARED_BYTES = 200 * 1024
MOST_STAGES, PASS_BLOCKS = 8, 8
MOST_NARROW = 512  # columns, or rows, beside a wide matrix
LOST = 4  # units of two roundoffs: what products of parts that are left out come to


def _turned(problem: Problem) -> bool:
    """Tell whether B is the wide matrix, and C^T = B^T A^T is computed."""
    return problem.m < problem.n


def _sides(problem: Problem) -> tuple[int, int]:
    return (problem.n, problem.m) if _turned(problem) else (problem.m, problem.n)


def _pieces(problem: Problem) -> int:
    return ceil_div(problem.k, half_tiles.DEPTH)


def _tiles(problem: Problem, columns: int) -> int:
    wide, narrow = _sides(problem)
    return ceil_div(wide, HEIGHT) * ceil_div(narrow, columns)


def _stage(columns: int) -> int:
    return PLANES * columns * 128


def _packed_bytes(problem: Problem, columns: int) -> int:
    return ceil_div(_sides(problem)[1], columns) * _pieces(problem) * _stage(columns)


def _workspace(problem: Problem, params: Params, machine: Machine) -> int:
    sums = params["parts"] * problem.m * problem.n * 4
    return _packed_bytes(problem, params["columns"]) + int(sums)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    columns, parts, turned = params["columns"], params["parts"], _turned(problem)
    stages, most = min(SHARED_BYTES // _stage(columns), MOST_STAGES), PASS_BLOCKS * machine.units
    packed = ceil_div(_packed_bytes(problem, columns), 16 * PLANES * ALL)
    added = ceil_div(problem.m * problem.n, ALL)
    return (
        flat(instance("take_columns_apart", columns, turned), min(packed, most), ALL),
        Step(
            kernel=instance("wgmma_6xbf16", columns, stages, turned),
            grid=(_tiles(problem, columns), parts, 1),
            block=(THREADS, 1, 1),
            smem=stages * _stage(columns),
        ),
        flat(instance("add_parts", columns, parts, turned), min(added, most), ALL),
    )


def _chain(problem: Problem, params: Params) -> int:
    """Return the longest chain of additions, in tensor cores' units of two roundoffs.

    A sum of 64 steps goes through six products of four instructions, of 17 terms each.
    """
    inside = 6 * (half_tiles.DEPTH + half_tiles.DEPTH // 16)
    outside = ceil_div(_pieces(problem), int(params["parts"])) + int(params["parts"])
    return max(inside + outside, ceil_div(problem.k, 32) + 5) + LOST


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    columns, parts = params["columns"], params["parts"]
    turns = ceil_div(_pieces(problem), parts)
    shape = _tiles(problem, columns) * parts, 1, turns
    moved = 2 * _packed_bytes(problem, columns) + 2 * 4 * parts * problem.m * problem.n
    return rounds(
        problem, machine, shape, str(columns), {"moved": moved / machine.read_bytes_per_s}
    )


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    """Take the narrowest tile that holds the narrow side, if any does."""
    narrow = min(problem.m, problem.n)
    return (
        params
        for params in RUNG.space(problem)
        if narrow <= MOST_NARROW and (params["columns"] >= narrow or params["columns"] == 128)
    )


def _reads_along(problem: Problem, params: Params) -> bool:
    layout = problem.layout_b if _turned(problem) else problem.layout_a
    return layout == ("col" if _turned(problem) else "row") and problem.k % 4 == 0


RUNG = CudaRung(
    title="Floats in three parts",
    idea="float32 as six products of bfloat16; the wide matrix goes from memory to registers once.",
    source="Henry, Tang and Heinecke 2019: leveraging bfloat16 for higher precision",
    signatures=same("float32"),
    arithmetic=lambda problem: Arithmetic(accumulator="float32", chain=_chain, per_add=2.0),
    after="wgmma_3xfp16",
    branch="float32 by few columns",
    layouts=EVERY_LAYOUT,
    layouts_b=EVERY_LAYOUT,
    params={"columns": (64, 32, 128), "parts": (4, 1, 2, 8, 16)},
    constraints=(
        half_tiles.ALIGNED,
        half_tiles.COUNTED,
        ALONE,
        Constraint("the longer side's matrix along the sum, of whole fours", _reads_along),
        Constraint(
            "no precision='ieee', which means plain multiply-adds",
            lambda problem, params: problem.precision != "ieee",
        ),
        Constraint(
            "no promise of equal bits for a row alone",
            lambda problem, params: not problem.batch_invariant,
        ),
        Constraint(
            "at most 2^31 - 1 tiles and sums",
            lambda problem, params: (
                _tiles(problem, params["columns"]) < 2**31 and problem.m * problem.n < 2**31
            ),
        ),
    ),
    workspace=_workspace,
    steps=_steps,
    archs=("sm_90a",),
    **modelled("matmul/wgmma_6xbf16", _terms, _choices),
)
