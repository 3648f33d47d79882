"""x A over codes in fragment order, by clusters: small matrices have too few strips of columns.

As `transposed_fragments`, but the blocks of a cluster share the rows of a strip. Each adds up the
sums of its share of the columns, which the others push into its shared memory: in the order of the
blocks, so that every run gives the same bits, and in one launch.
"""

from __future__ import annotations

from dataclasses import replace

from gemmule.core.problem import Problem
from gemmule.core.rung import Constraint, Machine, Params, Step, Suggestion
from gemmule.rungs._cuda import fragments
from gemmule.rungs.quantized.cuda import transposed_fragments as plain


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    cluster = params["cluster"]
    return (
        Step(
            kernel=f"clustered_fragments<{plain.template(problem, params)}, {cluster}>",
            grid=(plain.strips(problem, params) * cluster, 1, 1),
            block=(32 * params["across"] * params["down"], 1, 1),
            cluster=(cluster, 1, 1),
        ),
    )


# What won somewhere on one H200 (November 2026), of 100 and more: int4 in groups of 128, squares of
# 1024, 2048 and 4096, 8192 and 16384. across, down, tiles, rows, ahead, cluster.
_SHAPES = ((1, 4, 1, 2, 0, 8), (1, 4, 2, 4, 0, 8), (1, 8, 2, 4, 1, 2), (2, 8, 2, 4, 0, 2))
_NAMES = ("across", "down", "tiles", "rows", "ahead", "cluster")
_FULL = 0.9  # of the multiprocessors have a block


def _suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Take the shape with the fewest blocks, of those whose blocks fill the chip."""
    tried = [dict(zip(_NAMES, shape, strict=True)) for shape in _SHAPES]
    full = (
        params
        for params in reversed(tried)
        if plain.strips(problem, params) * params["cluster"] >= _FULL * machine.units
    )
    return plain.suggest(problem, machine, next(full, tried[0]))


RUNG = replace(
    plain.RUNG,
    title="Fragments, transposed, by clusters",
    idea="The blocks of a cluster share the rows of a strip and add up in their shared memory.",
    source="thread block clusters of compute capability 9.0",
    after="transposed_fragments",
    branch="few columns, long sums",
    params={
        name: tuple(dict.fromkeys(shape[i] for shape in _SHAPES)) for i, name in enumerate(_NAMES)
    },
    constraints=(
        fragments.FITS,
        Constraint(
            "one of the shapes that won somewhere",
            lambda problem, params: tuple(params[name] for name in _NAMES) in _SHAPES,
        ),
    ),
    archs=("sm_90a", "sm_100a", "sm_120a"),
    suggest=_suggest,
    steps=_steps,
)
