"""Several columns of x that a first launch puts in the order in which warpgroups read them.

In `warpgroup_columns` every block turns all of x itself: four warps do little else, and of what
they bring at a time a block waits for the slowest. Here a launch in front does it once for all:
it writes the lines that `wgmma` reads from shared memory, chunk by chunk, and sums of x for the
zero points. What is left to a block is to ask for copies, which one warp does, so that the room in
which x lay before it was turned holds twice the chunk by 32 columns. The product begins before that
launch has ended: codes and scales are on their way while it waits for x. Copies begin in the order
that they are asked for, so only half of the codes that a ring holds are asked for before x.

The warps that multiply take the next tile apart, and scale the set before, while one is multiplied.
By 16 columns at 8192 what is left above one column's time is the launch in front, and that
codes stand still while a block waits for its first x.
"""

from __future__ import annotations

from collections.abc import Iterable

from gemmule.core.device_model import Terms
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import fragments
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, modelled
from gemmule.rungs.quantized.cuda import warpgroup_columns as warpgroups

# The shapes that are compiled: for up to 16 columns in groups of whole tiles; for up to 32 columns,
# and small groups.
_NARROW = (
    (2, 2, 2, 8, 2, 4),
    (4, 1, 2, 8, 2, 3),
    (1, 4, 2, 8, 2, 4),
)
_WIDE = (
    (2, 2, 2, 4, 2, 4),
    (4, 1, 2, 8, 2, 2),
)
_SHAPES = fragments.Shapes(
    ("down", "along", "cluster", "tiles", "slots", "stages"), (*_NARROW, *_WIDE)
)


def _chunks(problem: Problem, params: Params) -> int:
    return ceil_div(fragments.tiles_across(problem.k, problem), params["tiles"])


def _sets(problem: Problem, params: Params) -> int:
    """Return how many sets of tiles x is arranged for, in whole chunks."""
    return _chunks(problem, params) * int(params["tiles"]) // warpgroups.each(problem)


def _workspace(problem: Problem, params: Params, machine: Machine) -> int:
    columns = 8 * warpgroups.eights(problem) * fragments.split(problem)
    long = warpgroups.each(problem) * fragments.tile_columns(problem)
    of_set = columns * (2 * long + 4)
    return warpgroups.passes(problem) * _sets(problem, params) * of_set


def _shared(problem: Problem, params: Params) -> int:
    """Return the bytes of stages, rings, barriers, and shares of the results."""
    spec, columns = problem.codes, 8 * warpgroups.eights(problem)
    split, each = fragments.split(problem), warpgroups.each(problem)
    long = params["tiles"] * fragments.tile_columns(problem)
    row = ITEMSIZE[spec.scale_dtype] + 4 * spec.has_zeros
    of_unit = 4 * columns + row * warpgroups.height(params)
    stage = split * (2 * long * columns + params["tiles"] // each * of_unit) + 32
    extra = warpgroups.rings_and_results(problem, params)
    return int(params["stages"] * stage + 1024 + extra)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    shape = _SHAPES.arguments(params)
    eights, each = warpgroups.eights(problem), warpgroups.each(problem)
    product = Step(
        kernel=f"arranged_columns<{fragments.template(problem)}, {shape}, {eights}>",
        grid=(warpgroups.blocks(problem, params), 1, 1),
        block=(128 * params["down"] * params["along"] + 32, 1, 1),
        cluster=(params["cluster"], 1, 1),
        smem=_shared(problem, params),
        pdl=problem.k > 0,
    )
    if problem.k == 0:
        return (product,)
    zeros = str(problem.codes.has_zeros).lower()
    group = f"{zeros}, {fragments.split(problem)}, {fragments.shift(problem)}"
    form = f"{CTYPE[problem.b]}, {fragments.bits(problem)}, {group}"
    arrange = Step(
        kernel=f"arrange_columns<{form}, {params['tiles']}, {eights}>",
        grid=(warpgroups.passes(problem) * _sets(problem, params) * eights, 1, 1),
        block=(each * fragments.tile_columns(problem), 1, 1),
    )
    return (arrange, product)


def _fit(problem: Problem) -> list[dict[str, int]]:
    count = len(_NARROW)
    return _SHAPES.sets[:count] if warpgroups.is_narrow(problem) else _SHAPES.sets[count:]


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Arrange x, and turn it where it does not lie by columns."""
    x = 2 * problem.k * problem.n / machine.read_bytes_per_s
    more = {"arranged": x, "turned": x * (problem.layout_b != "col")}
    return warpgroups.terms(problem, params, machine, more)


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    """Take the shapes that fit.

    A few columns of x in bulk are brought as quickly by `warpgroup_columns`, in one launch.
    """
    few = problem.n <= 8 and problem.layout_b == "col"
    if problem.codes.has_perm or few:
        return []
    return [p for p in _fit(problem) if _shared(problem, p) <= warpgroups.MOST_SHARED]


RUNG = CudaRung(
    title="Columns arranged for warpgroups",
    idea="A first launch puts x in the order that warpgroups read; bulk copies do the rest.",
    source="PTX ISA: wgmma, cp.async.bulk, griddepcontrol",
    op="matmul",
    after="warpgroup_columns",
    signatures=warpgroups.RUNG.signatures,
    layouts_b=warpgroups.RUNG.layouts_b,
    arithmetic=warpgroups.RUNG.arithmetic,
    params=_SHAPES.params,
    constraints=(
        fragments.FITS,
        Constraint(
            "one of the declared shapes, for as many columns and such groups",
            lambda problem, params: params in _fit(problem),
        ),
        Constraint(
            "stages and rings fit in shared memory",
            lambda problem, params: _shared(problem, params) <= warpgroups.MOST_SHARED,
        ),
    ),
    archs=("sm_90a",),
    adds=True,
    accepts_quant=warpgroups.RUNG.accepts_quant,
    workspace=_workspace,
    steps=_steps,
    spills=True,  # of 4-bit floats, whose units all have their own scales, some registers do
    **modelled("quantized/arranged_columns", _terms, _choices),
)
