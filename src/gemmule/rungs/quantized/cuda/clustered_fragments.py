"""x A over codes in fragment order, by clusters: small matrices have too few strips of columns.

As `transposed_fragments`, but the blocks of a cluster share the rows of a strip. Each adds up the
sums of its share of the columns, which the others push into its shared memory: in the order of the
blocks, so that every run gives the same bits, and in one launch.
"""

from __future__ import annotations

from dataclasses import replace

from gemmule.core.rung import Constraint
from gemmule.rungs._cuda import fragments
from gemmule.rungs._cuda.geometry import CLUSTER_ARCHS, modelled
from gemmule.rungs.quantized.cuda import transposed_fragments as plain

_SHAPES = fragments.Shapes(
    ("across", "down", "tiles", "rows", "ahead", "cluster"),
    ((1, 4, 1, 2, 0, 8), (1, 4, 2, 4, 0, 8), (1, 8, 2, 4, 1, 2), (2, 8, 2, 4, 0, 2)),
)
_ONE_OF = Constraint("one of the declared shapes", lambda problem, params: params in _SHAPES.sets)


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
    **modelled("quantized/clustered_fragments", plain.terms),
)
