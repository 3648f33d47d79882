"""x A over codes in fragment order, by clusters: small matrices have too few strips of columns.

As `transposed_fragments`, but the blocks of a cluster share the rows of a strip. Each adds up the
sums of its share of the columns, which the others push into its shared memory: in the order of the
blocks, so that every run gives the same bits, and in one launch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gemmule.core.problem import Problem
from gemmule.core.rung import Constraint, Machine, Params
from gemmule.rungs._cuda import fragments
from gemmule.rungs._cuda.geometry import CLUSTER_ARCHS, modelled
from gemmule.rungs.quantized.cuda import transposed_fragments as plain

_SHAPES = fragments.Shapes(
    ("across", "down", "tiles", "rows", "ahead", "cluster"),
    ((1, 4, 1, 2, 0, 8), (1, 4, 2, 4, 0, 8), (1, 8, 2, 4, 1, 2), (2, 8, 2, 4, 0, 2)),
)
FULL = 0.9  # of the multiprocessors, from where on they count as busy
_ONE_OF = Constraint("one of the declared shapes", lambda problem, params: params in _SHAPES.sets)


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    """Take the shape with the fewest blocks, of those whose blocks fill the chip."""
    full = (
        params
        for params in reversed(_SHAPES.sets)
        if plain.strips(problem, params) * params["cluster"] >= FULL * machine.units
    )
    yield next(full, _SHAPES.sets[0])


RUNG = replace(
    plain.RUNG,
    title="Fragments, transposed, by clusters",
    idea="The blocks of a cluster share the rows of a strip and add up in their shared memory.",
    source="thread block clusters of compute capability 9.0",
    after="transposed_fragments",
    branch="few columns, long sums",
    params=_SHAPES.params,
    constraints=(fragments.FITS, _ONE_OF),
    archs=CLUSTER_ARCHS,
    steps=plain.steps("clustered_fragments"),
    **modelled("quantized/clustered_fragments", plain.terms, _choices),
)
