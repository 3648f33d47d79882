"""Clustered rows: few rows of great length, each shared by the blocks of a cluster.

With fewer rows than the chip has room for blocks, `streamed_rows` leaves multiprocessors idle, and
with a few more the last blocks run alone for as long as a whole row takes. Here two to eight blocks
share a row: their sums meet in the shared memory of the first, which the others write to directly,
always in the same order. One launch, no workspace, the same bits on every run. Square matrices have
rows enough; there the meeting of the blocks costs more than it gives.
"""

from __future__ import annotations

from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step, Suggestion
from gemmule.rungs._cuda.geometry import (
    CLUSTER_ARCHS,
    STREAMED_SIGNATURES,
    ceil_div,
    instance,
    quickest,
    type_arguments,
)
from gemmule.rungs._cuda.rows import sums
from gemmule.rungs._cuda.stream import FITS, flags, shared_rows_s, starting

THREADS = 256


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    cluster = params["cluster"]
    template = type_arguments(problem), params["unroll"], cluster, flags(problem)
    return (
        Step(
            kernel=instance("clustered_rows", *template),
            grid=(problem.m * cluster, problem.batch, 1),
            block=(THREADS, 1, 1),
            cluster=(cluster, 1, 1),
        ),
    )


def _chain(problem: Problem, params: Params) -> int:
    vector = 16 // ITEMSIZE[problem.a]
    turns = ceil_div(problem.n, vector * THREADS * params["cluster"]) + 2
    return turns * vector + 5 + THREADS // 32 + int(params["cluster"])


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Share a row among as many blocks as the model finds best."""
    return quickest(RUNG.space(problem), lambda params: _seconds(problem, machine, params))


def _seconds(problem: Problem, machine: Machine, params: Params) -> float:
    """Return the modelled time: what fits four blocks of a multiprocessor, or its registers, waits.

    One H200 (November 2026): clusters of eight leave places free in some of the chip's parts.
    """
    aligned, several = problem.alignment == 16, params["unroll"] == 4
    at_once = 5.6 if aligned and not several else 4.0
    reading = shared_rows_s(
        problem,
        machine,
        params["cluster"],
        params["unroll"],
        turn_us=0.61 if several else 0.58,
        rate=0.90 if aligned else 0.82,
        at_once=0.9 * at_once if params["cluster"] == 8 else at_once,
    )
    return starting(problem, machine, 0.1, 0.6) + reading


RUNG = CudaRung(
    title="Clustered rows",
    idea="The blocks of a cluster share a row and add up through their shared memory.",
    source="thread block clusters of compute capability 9.0; split-K without a workspace",
    signatures=STREAMED_SIGNATURES,
    arithmetic=sums(_chain),
    after="streamed_rows",
    branch="few long rows",
    params={"cluster": (4, 2, 8), "unroll": (2, 4)},
    constraints=(
        FITS,
        Constraint(
            "2 loads in flight a lane for unaligned rows",
            lambda problem, params: problem.alignment == 16 or params["unroll"] == 2,
        ),
    ),
    archs=CLUSTER_ARCHS,
    batched=True,
    suggest=_suggest,
    steps=_steps,
    sends=True,
)
