"""Early rows: a product that begins before the one in front of it has ended.

Between two launches on one stream the chip stands idle for a while: the first grid
drains, the second one starts, and its first loads come back. With programmatic dependent launch the
blocks of the second grid are there already. They bring the vectors of their first turn into the L2,
wait until the grid before has ended and what it wrote can be seen, and go on as `streamed_rows`.

The matrix is only prefetched before the wait, into the cache that all writes pass through, and both
the matrix and x are read after it: the result is right also where the kernel before wrote either.

Chained calls of 512 x 512 halves take two thirds of the time so (`gemmule bench --device cuda
--suite chained`). From 4096 x 4096 on they lose, for the waiting blocks hold room that reading ones
would use. What a call gains depends on its neighbours, so plans never choose this rung: name it,
`rung="early_rows"`, where products follow each other, above all in captured graphs.
"""

from __future__ import annotations

from dataclasses import replace

from gemmule.core.problem import Problem
from gemmule.core.rung import Constraint, Machine, Params, Step, Suggestion
from gemmule.rungs._cuda.geometry import (
    CLUSTER_ARCHS,
    STREAMED_SIGNATURES,
    ceil_div,
    instance,
    type_arguments,
)
from gemmule.rungs._cuda.stream import INDEXED, flags
from gemmule.rungs.matvec.cuda import streamed_rows


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    lanes = params["lanes"]
    threads = 128 if lanes == 128 else 256
    return (
        Step(
            kernel=instance(
                "early_rows",
                type_arguments(problem),
                threads,
                lanes,
                params["unroll"],
                flags(problem),
            ),
            grid=(ceil_div(problem.m, threads // lanes), min(problem.batch, 65_535), 1),
            block=(threads, 1, 1),
            pdl=True,
        ),
    )


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Take the lanes and the time of `streamed_rows`: what is saved depends on other calls."""
    plain = streamed_rows.RUNG.suggest(problem, machine)
    if plain is None:
        return None
    unroll = max(2, plain.params["unroll"]) if problem.alignment == 16 else 2
    params = {"lanes": plain.params["lanes"], "unroll": unroll}
    return Suggestion(params, plain.expected_s)


RUNG = replace(
    streamed_rows.RUNG,
    title="Early rows",
    idea="The next launch fetches its first vectors into the L2 while this one still runs.",
    source="programmatic dependent launch of compute capability 9.0, as in vLLM and llama.cpp",
    signatures=STREAMED_SIGNATURES,
    after="streamed_rows",
    branch="launches that follow each other",
    params={"lanes": (128, 256, 32, 8), "unroll": (4, 2)},
    constraints=(
        INDEXED,
        Constraint(
            "2 loads in flight a lane and 32 lanes or more for unaligned rows",
            lambda problem, params: (
                problem.alignment == 16 or (params["unroll"] == 2 and params["lanes"] >= 32)
            ),
        ),
    ),
    archs=CLUSTER_ARCHS,
    by_name_only=True,
    suggest=_suggest,
    seconds=None,
    terms=None,
    counts_with="",
    steps=_steps,
    sends=False,
)
