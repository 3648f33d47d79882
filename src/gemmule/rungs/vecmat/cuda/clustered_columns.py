"""Clustered columns: small matrices, whose columns give too few blocks to fill the chip.

As in `block_columns` a lane sums one 16-byte vector of columns, but the blocks of a cluster split
the rows of a strip. Each pushes its sums through the cluster's distributed shared memory to the
block that owns a share of the columns, and that adds them in the order of the blocks: the same bits
on every run, in a single launch.
"""

from __future__ import annotations

from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step, Suggestion
from gemmule.rungs._cuda import stream
from gemmule.rungs._cuda.geometry import (
    CLUSTER_ARCHS,
    STREAMED_SIGNATURES,
    instance,
    type_arguments,
)
from gemmule.rungs._cuda.rows import sums


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    lanes, cluster = params["lanes"], params["cluster"]
    template = type_arguments(problem), lanes, cluster, stream.flags(problem)
    return (
        Step(
            kernel=instance("clustered_columns", *template),
            grid=(stream.strips(problem, lanes) * cluster, problem.batch, 1),
            block=(256, 1, 1),
            cluster=(cluster, 1, 1),
        ),
    )


def _chain(problem: Problem, params: Params) -> int:
    cluster = int(params["cluster"])
    return stream.rows_of_a_thread(problem, cluster * (256 // params["lanes"]), 4) + 5 + 8 + cluster


def _suggest(problem: Problem, machine: Machine) -> Suggestion:
    params = {"lanes": 8 if problem.alignment == 16 else 32, "cluster": 8}
    blocks = stream.strips(problem, params["lanes"]) * params["cluster"] * problem.batch
    # One H200 (November 2026), fitted to 264 shapes and dtypes.
    rate = 0.87 * min(1.0, blocks / machine.units) * machine.read_bytes_per_s
    rate *= 1.0 if problem.alignment == 16 else 0.68
    rate *= min(1.0, problem.m * ITEMSIZE[problem.a] / (16 * params["lanes"]))
    seconds = max(problem.compulsory_bytes / rate, 0.7e-6 * blocks / (4 * machine.units))
    if problem.alignment != 16:  # few units walk rows that begin alike: 1634 x 60 halves 8.1 us
        seconds = max(seconds, 3.1e-9 * problem.n)
    seconds += stream.starting(problem, machine, 0.31, 0.69) + stream.narrow_s(problem)
    return Suggestion(params, seconds)


RUNG = CudaRung(
    title="Clustered columns",
    idea="The blocks of a cluster split the rows of a strip and add up in their shared memory.",
    source="thread block clusters of compute capability 9.0",
    signatures=STREAMED_SIGNATURES,
    arithmetic=sums(_chain),
    layouts=("col",),
    after="block_columns",
    branch="few columns, long sums",
    params={"lanes": (8, 32), "cluster": (8, 4)},
    constraints=(stream.FITS, stream.UNITS_OF_ROWS),
    archs=CLUSTER_ARCHS,
    batched=True,
    suggest=_suggest,
    steps=_steps,
)
