"""What one call costs the host: planned and unplanned calls of ours beside PyTorch's.

The products are so small that the GPU is done before the next call is made, so the time of a loop
of calls is the time the host spends on each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gemmule as gm
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.problem import Problem
from gemmule.timing.sampler import Budget, Contestant, HostClock
from gemmule_lab.bench.entries import Entry, race
from gemmule_lab.ceilings.device import filled
from gemmule_lab.peers.gpu_float import to_cuda, torch_missing
from gemmule_lab.peers.peer import Absence
from gemmule_lab.records.rows import Environment, Facts, Row

SIDE = 64
DTYPE = "float32"
GROUP = "host cost of a call"
CALLS_IN_FLIGHT = 256  # far fewer than a stream queues before it makes the host wait


def measure(
    environment: Environment, ordinal: int = 0, *, max_seconds: float = 3.0, seed: int = 0
) -> tuple[list[Row], list[Absence]]:
    """Return one row for each way to multiply a 64 x 64 float32 matrix by a vector into an out.

    Ours with tensors of PyTorch where it is installed, otherwise with arrays of this package.
    """
    a = filled(SIDE * SIDE, DTYPE, ordinal, seed)
    matrix = DeviceArray(a.pointer, (SIDE, SIDE), (SIDE, 1), DTYPE, ordinal, a)
    operands: tuple[Any, ...] = (
        matrix,
        filled(SIDE, DTYPE, ordinal, seed + 1),
        DeviceArray.empty((SIDE,), DTYPE, ordinal),
    )
    reason = torch_missing()
    if reason is None:
        operands = tuple(to_cuda(operand) for operand in operands)
    plan = gm.plan("matvec", *operands[:2])
    calls = dict(_ways(plan, operands, with_torch=reason is None))
    entries = [
        Entry(Contestant(name, _bounded(call, ordinal)), _facts(plan.problem, name))
        for name, call in calls.items()
    ]
    budget = Budget(max_seconds, min_block_s=1e-3)
    rows = race(entries, HostClock(), environment, budget, seed=seed)
    absent = [] if reason is None else [Absence("torch.mv", reason)]
    return rows, absent


def _facts(problem: Problem, name: str) -> Facts:
    kind = "peer" if name.startswith("torch") else "rung"
    return Facts(problem, kind, "warm", mode="host time, nothing waited for", group=GROUP)


def _ways(
    plan: gm.Plan, operands: tuple[Any, ...], *, with_torch: bool
) -> Iterator[tuple[str, Callable[[], Any]]]:
    matrix, vector, out = operands
    yield "planned call", lambda: plan(matrix, vector, out=out)
    yield "unplanned call", lambda: gm.matvec(matrix, vector, out=out)
    if with_torch:
        import torch

        yield "torch.mv", lambda: torch.mv(matrix, vector, out=out)


def _bounded(call: Callable[[], Any], ordinal: int) -> Callable[[int], None]:
    """Return the call, which now and then waits so that the stream's queue never fills."""
    made = 0

    def run(_: int) -> None:
        nonlocal made
        call()
        made += 1
        if made % CALLS_IN_FLIGHT == 0:
            driver.synchronize(ordinal)

    return run
