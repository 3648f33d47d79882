"""A^T X over codes in fragment order, several columns: `transposed_fragments` for each of them.

Blocks that follow each other have the same strip of the matrix and neighbouring columns of X, so
that the memory brings the codes once and the L2 the other times. Every column still scales x, cuts
it in three and turns the codes anew: instructions limit it, as they nearly do one column.
"""

from __future__ import annotations

from dataclasses import replace

from gemmule.core.problem import Problem
from gemmule.core.rung import Constraint, Params
from gemmule.rungs._cuda import fragments
from gemmule.rungs._cuda.geometry import modelled
from gemmule.rungs._cuda.tiles import EVERY_LAYOUT
from gemmule.rungs.quantized.cuda import transposed_fragments as one


def _blocks(problem: Problem, params: Params) -> int:
    return one.strips(problem, params) * problem.n


RUNG = replace(
    one.RUNG,
    title="Fragments, transposed, several columns",
    idea="Blocks that read the same codes for neighbouring columns of X run at the same time.",
    op="matmul",
    after="transposed_fragments",
    branch="several columns",
    layouts_b=EVERY_LAYOUT,
    # Blocks of twice the width are 8 % faster by 16 columns, and half as fast by few of 8192.
    params={"across": (1,), "down": (8,), "tiles": (2,), "rows": (4,), "ahead": (1,)},
    constraints=(
        fragments.FITS,
        Constraint(
            "fewer than 2^31 blocks",
            lambda problem, params: _blocks(problem, params) < 2**31,
        ),
    ),
    steps=one.steps("transposed_columns"),
    **modelled("quantized/transposed_columns", one.terms),
)
