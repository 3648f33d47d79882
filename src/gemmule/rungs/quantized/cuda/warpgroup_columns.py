"""Several columns of x beside codes in fragment order, multiplied by warpgroups.

`mma.sync` wants both operands in registers: by sixteen columns each fragment of x that a warp reads
from shared memory meets but two rows of tiles. `wgmma` takes the codes from registers, in the very
order that they are stored in, and reads x from shared memory itself, once for 64 rows. What is left
to the warps that multiply is to take codes apart (20 of 58 instructions a tile), and to scale what
comes out of a group. Four other warps bring x and scales for all rows of a block: bulk copies fetch
both as they lie, `stmatrix` puts the words of four lanes side by side as `wgmma` expects them in
its swizzled lines, and products by ones sum it up for the zero points. Codes come by bulk copies
too, to a ring of each warp. Two blocks of a cluster share the columns of the matrix, so that they
have twice the rows, and x comes half as often; each sends the other the sums of its rows. What
limits it below 16384: those four warps, which take as long for 512 columns of x however many rows
meet it.
"""

from __future__ import annotations

from collections.abc import Iterable

from gemmule.core.device_model import Numbers, Terms
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import fragments
from gemmule.rungs._cuda.geometry import ceil_div, modelled
from gemmule.rungs._cuda.terms import rounds
from gemmule.rungs._cuda.tiles import EVERY_LAYOUT

_BRINGERS = 4  # warps that bring x and scales
_UNIT = 4  # tiles of codes that are asked for at a time
_PANEL = 64  # stored columns in a line of a swizzle
MOST_SHARED = 227 * 1024  # bytes that a block may have
# The shapes that are compiled, the tallest blocks first: for up to 16 columns in groups of whole
# tiles; for up to 32 columns, and small groups.
_NARROW = (
    (4, 1, 2, 8, 2, 3, 1),
    (2, 2, 2, 8, 2, 4, 3),
    (1, 4, 2, 4, 2, 8, 6),
)
_WIDE = (
    (4, 1, 2, 4, 2, 4, 1),
    (2, 2, 2, 4, 2, 4, 3),
    (1, 4, 2, 4, 2, 4, 3),
)
_SHAPES = fragments.Shapes(
    ("down", "along", "cluster", "tiles", "slots", "stages", "raw"), (*_NARROW, *_WIDE)
)


def eights(problem: Problem) -> int:
    """Return how many eights of columns a pass has: 1, 2 or 4, fewer beside small groups."""
    most = 4 // fragments.split(problem)
    return next((e for e in (1, 2) if 8 * e >= problem.n and e < most), most)


def height(params: Params) -> int:
    """Return the rows of a block."""
    return int(64 * params["down"])


def each(problem: Problem) -> int:
    """Return how many tiles are scaled together: of one group, and two panels of x at most."""
    if fragments.split(problem) > 1 or fragments.shift(problem) < 0:
        return 1
    most = 2 * _PANEL // fragments.tile_columns(problem)
    return int(min(most, 2 ** min(fragments.shift(problem), 7)))


def passes(problem: Problem) -> int:
    """Return how many times the codes are read, each time for other columns."""
    return ceil_div(problem.n, 8 * eights(problem))


def blocks(problem: Problem, params: Params) -> int:
    """Return how many blocks a launch has."""
    return int(ceil_div(problem.m, height(params)) * passes(problem) * params["cluster"])


def _shared(problem: Problem, params: Params) -> int:
    """Return the bytes of stages, x as it lies, rings, barriers, and shares of the results."""
    columns, split = 8 * eights(problem), fragments.split(problem)
    long = params["tiles"] * fragments.tile_columns(problem)
    units = params["tiles"] // each(problem) * split
    spec = problem.codes
    row = ITEMSIZE[spec.scale_dtype] + 4 * spec.has_zeros
    stage = 2 * long * columns * split + units * (4 * columns + row * height(params)) + 32
    pad = 16 if fragments.bits(problem) == 4 else 64
    chunks = params["stages"] * stage + params["raw"] * (columns * (2 * long + pad) + 8)
    return int(chunks + 1024 + rings_and_results(problem, params))


def rings_and_results(problem: Problem, params: Params) -> int:
    """Return the bytes of codes on their way, and of what a cluster's blocks tell each other."""
    warps = 4 * params["down"] * params["along"]
    ring = warps * params["slots"] * (_UNIT * 512 + 8)
    apart = height(params) // params["cluster"] + 4
    return int(ring + params["cluster"] * params["along"] * 8 * eights(problem) * apart * 4)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    shape = _SHAPES.arguments(params)
    template = f"{fragments.template(problem)}, {shape}, {eights(problem)}"
    return (
        Step(
            kernel=f"warpgroup_columns<{template}>",
            grid=(blocks(problem, params), 1, 1),
            block=(128 * params["down"] * params["along"] + 32 * _BRINGERS, 1, 1),
            cluster=(params["cluster"], 1, 1),
            smem=_shared(problem, params),
        ),
    )


def _chain(problem: Problem, params: Params) -> int:
    """Count a set's products and its sums of x, then a warp's sets, then the warps."""
    tiles = fragments.tiles_across(problem.k, problem)
    turns = ceil_div(ceil_div(tiles, params["tiles"]), params["cluster"] * params["along"]) + 1
    sets = turns * params["tiles"] * fragments.split(problem)
    return int(4 * _PANEL + sets + params["along"] * params["cluster"])


def is_narrow(problem: Problem) -> bool:
    """Tell whether sums and scales leave room for chunks of 8 tiles."""
    return problem.n <= 16 and fragments.split(problem) == 1


def width_of(problem: Problem) -> str:
    """Return ``narrow`` or ``wide``, as the shapes for a problem's columns and groups are."""
    return "narrow" if is_narrow(problem) else "wide"


def _fit(problem: Problem) -> list[dict[str, int]]:
    count = len(_NARROW)
    return _SHAPES.sets[:count] if is_narrow(problem) else _SHAPES.sets[count:]


def terms(problem: Problem, params: Params, machine: Machine, *more: Numbers) -> Terms:
    """Return the terms of chunks that warps bring and others multiply, or of reading the codes.

    A tile is taken apart, meets eights of columns, and is scaled for each of its groups.
    """
    again = problem.matrix_bytes * (passes(problem) - 1) / machine.read_bytes_per_s
    across = ceil_div(fragments.tiles_across(problem.k, problem), params["cluster"])
    shape = blocks(problem, params), 1, ceil_div(across, params["tiles"])
    taken = ceil_div(shape[0], machine.units)
    mine, columns = taken * across / params["along"], eights(problem)
    brought = taken * across * fragments.tile_columns(problem) * columns
    multiplied = {
        f"tile_s {fragments.form(problem)}": mine,
        "eight_s": mine * columns,
        "group_s": mine * columns * fragments.split(problem) / each(problem),
    }
    crooked = brought * (not fragments.whole_vectors(problem))
    bring = {"bring_s": brought, "crooked_s": crooked}
    less = more or ({},)
    multiplied[f"down_s {params['down']}"] = taken
    multiplied["across_s"] = taken * params["down"] * columns * fragments.across(problem)
    kind = str(params["down"])
    return rounds(problem, machine, shape, kind, *less, {"again": again}, multiplied, bring)


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    """Take the shapes that fit."""
    if problem.layout_b != "col" or problem.codes.has_perm:
        return []
    return [p for p in _fit(problem) if _shared(problem, p) <= MOST_SHARED]


RUNG = CudaRung(
    title="Fragments and columns by warpgroups",
    idea="An instruction multiplies 64 rows of codes by x as it lies in shared memory.",
    source="PTX ISA: wgmma, stmatrix, cp.async.bulk; codes as operands as in Marlin (Frantar et "
    "al., 2024)",
    op="matmul",
    after="staged_fragments",
    layouts_b=EVERY_LAYOUT,
    params=_SHAPES.params,
    constraints=(
        fragments.FITS,
        Constraint(
            "one of the declared shapes, chunks of 8 tiles up to 16 columns beside "
            "groups of whole tiles",
            lambda problem, params: params in _fit(problem),
        ),
        Constraint(
            "stages and rings fit in shared memory",
            lambda problem, params: _shared(problem, params) <= MOST_SHARED,
        ),
    ),
    archs=("sm_90a",),
    steps=_steps,
    **fragments.along(_chain) | {"signatures": fragments.OF_HALVES + fragments.FLOATS[:2]},
    **modelled("quantized/warpgroup_columns", terms, _choices),
)
