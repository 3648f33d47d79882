"""Clustered columns: small matrices, whose columns give too few blocks to fill the chip.

As in `block_columns` a lane sums one 16-byte vector of columns, but the blocks of a cluster split
the rows of a strip. Each pushes its sums through the cluster's distributed shared memory to the
block that owns a share of the columns, and that adds them in the order of the blocks: the same bits
on every run, in a single launch.
"""

from __future__ import annotations

from collections.abc import Iterable

from gemmule.core.problem import ITEMSIZE, Problem
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
from gemmule.storage.models import numbers


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


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    yield {"lanes": 8 if problem.alignment == 16 else 32, "cluster": 8}


def _seconds(problem: Problem, params: Params, machine: Machine) -> float:
    own, lying = numbers(machine, "vecmat/clustered_columns"), lies(problem)
    blocks = stream.strips(problem, params["lanes"]) * params["cluster"] * problem.batch
    rate = own["rate"][lying] * min(1.0, blocks / machine.units) * machine.read_bytes_per_s
    rate *= min(1.0, problem.m * ITEMSIZE[problem.a] / (16 * params["lanes"]))
    reading = problem.compulsory_bytes / rate
    reading = max(reading, own["block_s"] * blocks / machine.units)
    if lying == "unaligned":  # few units walk rows that begin alike
        reading = max(reading, own["unaligned_row_s"] * problem.n)
    return stream.starting(problem, machine, own) + stream.narrow_s(problem, own) + float(reading)


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
    **modelled(_choices, _seconds),
)
