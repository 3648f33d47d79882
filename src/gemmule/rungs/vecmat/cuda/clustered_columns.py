"""Clustered columns: small matrices, whose columns give too few blocks to fill the chip.

As in `block_columns` a lane sums one 16-byte vector of columns, but the blocks of a cluster split
the rows of a strip. Each pushes its sums through the cluster's distributed shared memory to the
block that owns a share of the columns, and that adds them in the order of the blocks: the same bits
on every run, in a single launch.
"""

from __future__ import annotations

from gemmule.core.device_model import Terms
from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import stream
from gemmule.rungs._cuda.geometry import (
    CLUSTER_ARCHS,
    STREAMED_SIGNATURES,
    instance,
    lies,
    modelled,
    type_arguments,
)
from gemmule.rungs._cuda.rows import sums
from gemmule.rungs._cuda.terms import narrow, streaming


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


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    lanes, cluster = params["lanes"], params["cluster"]
    blocks = stream.strips(problem, lanes) * cluster * problem.batch
    shape = blocks, 4, problem.n * lanes / (cluster * 256 * 4)
    more = {f"narrow_s {lies(problem)}": narrow(problem)}
    return streaming(problem, machine, shape, f"{lies(problem)} {lanes}", more)


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
    steps=_steps,
    **modelled("vecmat/clustered_columns", _terms),
)
