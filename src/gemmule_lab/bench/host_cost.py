"""What one call costs the host: planned and unplanned calls of ours beside PyTorch's.

The products are so small that the GPU is done before the next call is made, so the time of a loop
of calls is the time the host spends on each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gemmule as gm
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.timing.clock import Entry, HostClock
from gemmule.timing.sampler import Budget
from gemmule_lab.ceilings.device import filled
from gemmule_lab.harness.bench import Found, race
from gemmule_lab.harness.device import DeviceBench
from gemmule_lab.harness.products import Product
from gemmule_lab.peers.gpu_float import to_cuda, torch_missing
from gemmule_lab.peers.peer import Absence
from gemmule_lab.records.rows import Environment, Facts

SIDE = 64
DTYPE = "float32"
GROUP = "host cost of a call"
CALLS_IN_FLIGHT = 256  # far fewer than a stream queues before it makes the host wait


class HostCostBench(DeviceBench):
    """A GPU's bench whose clock is the host's."""

    def attempt(self, product: Product, environment: Environment) -> Callable[[], Found]:
        """Return the measurement of calls, whatever the product."""
        return functools.partial(measure, environment, self.ordinal)


def measure(
    environment: Environment, ordinal: int = 0, *, max_seconds: float = 3.0, seed: int = 0
) -> Found:
    """Return one row for each way to multiply a 64 x 64 float32 matrix by a vector into an out.

    Ours with tensors of PyTorch where it is installed, otherwise with arrays of this package.
    """
    a = filled(SIDE * SIDE, DTYPE, ordinal, seed)
    operands: tuple[Any, ...] = (
        DeviceArray(a.pointer, (SIDE, SIDE), (SIDE, 1), DTYPE, ordinal, a),
        filled(SIDE, DTYPE, ordinal, seed + 1),
        DeviceArray.empty((SIDE,), DTYPE, ordinal),
    )
    reason = torch_missing()
    if reason is None:
        operands = tuple(to_cuda(operand) for operand in operands)
    matrix, vector, out = operands
    plan = gm.plan("matvec", matrix, vector)
    calls: dict[str, Callable[[], Any]] = {
        "planned call": lambda: plan(matrix, vector, out=out),
        "unplanned call": lambda: gm.matvec(matrix, vector, out=out),
    }
    if reason is None:
        import torch

        calls["torch.mv"] = lambda: torch.mv(matrix, vector, out=out)
    entries = []
    for name, call in calls.items():
        kind = "peer" if name.startswith("torch") else "rung"
        mode = "host time, nothing waited for"
        facts = Facts(plan.problem, kind, "warm", mode=mode, group=GROUP)
        entries.append(Entry(name, _bounded(call, ordinal), about=facts))
    budget = Budget(max_seconds, min_block_s=1e-3)
    rows = race(entries, HostClock(), environment, budget, seed=seed)
    return rows, [] if reason is None else [Absence("torch.mv", reason)]


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
