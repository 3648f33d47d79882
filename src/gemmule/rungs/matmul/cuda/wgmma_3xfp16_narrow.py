"""Floats by a narrow matrix: float32 as three products of halves, the wide matrix read once.

`wgmma_3xfp16` writes the halves of both operands before it multiplies: of a wide matrix by some
dozen columns that moves it four times. Here TMA brings its floats, and a thread takes those of its
own rows apart and multiplies from registers. Halves have few exponents, so each 64 steps of a row
or column share a power of two, as scales by blocks do: the sum of 64 steps leaves the tensor cores
anyway, which cut off what they add, and joins the others times both powers. The low halves are kept
2^11 times as large, in a sum of their own.

The narrow matrix is taken apart by a kernel in front, which lays it out as shared memory has it.
Some blocks share a tile's sum, so that the whole chip reads; a kernel behind adds their parts. It
computes anew what is not finite, for an infinity has no halves, and sums so small that elements
2^28 times smaller than the largest beside them, of which halves keep less, might matter.
"""

from __future__ import annotations

from collections.abc import Iterable

from gemmule.core.device_model import Terms
from gemmule.core.packing import TensorMap
from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, Constraint, CudaRung, Machine, Params, Step, same
from gemmule.rungs._cuda import half_tiles
from gemmule.rungs._cuda.geometry import ceil_div, flat, instance, modelled
from gemmule.rungs._cuda.stream import ALONE
from gemmule.rungs._cuda.terms import rounds
from gemmule.rungs._cuda.tiles import EVERY_LAYOUT

HEIGHT, THREADS, PLANES, ALL = 128, 384, 2, 256  # as in the kernels
SHARED_BYTES = 224 * 1024
WIDE, LINE = HEIGHT * half_tiles.DEPTH * 4, 32  # bytes of a stage's floats; floats of a line
MOST_STAGES, PASS_BLOCKS = 8, 8
MOST_NARROW = 512  # columns, or rows, beside a wide matrix
# What a product loses beside the additions, in units of two roundoffs, 2^-23: its two pairs of
# halves hold their floats to within 2^-22 each, the product of the low halves is as small, and so
# is what elements lost may move a sum by that is not computed anew.
SPLIT = 8


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


def _packed_bytes(problem: Problem, columns: int) -> int:
    """Return the bytes of the narrow matrix's halves and of their powers of two."""
    pieces = ceil_div(_sides(problem)[1], columns) * _pieces(problem)
    return pieces * columns * (PLANES * 128 + 4)


def _workspace(problem: Problem, params: Params, machine: Machine) -> int:
    (wide, narrow), columns = _sides(problem), params["columns"]
    marks = wide + ceil_div(narrow, columns) * columns
    kept = params["parts"] * (8 * marks + 4 * problem.m * problem.n)
    return _packed_bytes(problem, columns) + int(kept)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    columns, parts, turned = params["columns"], params["parts"], _turned(problem)
    stage, most = WIDE + PLANES * columns * 128, PASS_BLOCKS * machine.units
    stages = min(SHARED_BYTES // (stage + columns * 4), MOST_STAGES)
    packed = ceil_div(_sides(problem)[1], columns) * _pieces(problem)
    added = ceil_div(problem.m * problem.n, ALL)
    return (
        flat(instance("take_columns_apart", columns, turned), min(packed, most), ALL),
        Step(
            kernel=instance("wgmma_3xfp16_narrow", columns, stages, turned),
            grid=(_tiles(problem, columns), parts, 1),
            block=(THREADS, 1, 1),
            smem=stages * stage,
            maps=(TensorMap("b" if turned else "a", (LINE, HEIGHT)),),
        ),
        flat(instance("add_parts", columns, parts, turned), min(added, most), ALL),
    )


def _chain(problem: Problem, params: Params) -> int:
    """Return the longest chain of additions, in tensor cores' units of two roundoffs.

    A sum of 64 steps goes through four instructions of 17 terms each, and joins the others in two
    additions; sums of low halves, 2^11 times smaller, count once.
    """
    inside = half_tiles.DEPTH + half_tiles.DEPTH // 16 + 1
    outside = 2 * ceil_div(_pieces(problem), int(params["parts"])) + int(params["parts"])
    return max(inside + outside, ceil_div(problem.k, 32) + 5) + SPLIT


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
    title="Halves by a narrow matrix",
    idea="float32 as three products of halves, taken apart on their way to the tensor cores.",
    source="Ootomo and Yokota 2022 (splitting); scales by blocks as DeepSeek-V3 has them",
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
        half_tiles.TENSOR_SUMS,
        half_tiles.ROWS_TOGETHER,
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
    **modelled("matmul/wgmma_3xfp16_narrow", _terms, _choices),
)
