"""Clustered rows: few rows of great length, each shared by the blocks of a cluster.

With fewer rows than the chip has room for blocks, `streamed_rows` leaves multiprocessors idle, and
with a few more the last blocks run alone for as long as a whole row takes. Here two to eight blocks
share a row: their sums meet in the shared memory of the first, which the others write to directly,
always in the same order. One launch, no workspace, the same bits on every run. Square matrices have
rows enough; there the meeting of the blocks costs more than it gives.
"""

from __future__ import annotations

from gemmule.core.device_model import Terms
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.geometry import (
    CLUSTER_ARCHS,
    STREAMED_SIGNATURES,
    ceil_div,
    instance,
    lies,
    modelled,
    type_arguments,
)
from gemmule.rungs._cuda.rows import sums
from gemmule.rungs._cuda.stream import FITS, flags
from gemmule.rungs._cuda.terms import streaming

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


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    cluster, unroll = params["cluster"], params["unroll"]
    turns = problem.n * ITEMSIZE[problem.a] / (16 * THREADS * cluster * unroll)
    shape = problem.m * problem.batch * cluster, 4, turns
    kind = f"{lies(problem)} {unroll}"
    return streaming(problem, machine, shape, kind, {f"meeting_s {cluster}": 1.0})


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
    steps=_steps,
    sends=True,
    **modelled("matvec/clustered_rows", _terms),
)
