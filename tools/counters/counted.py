"""The program that Nsight Compute watches: one launch of every CUDA rung at the ladders' problems.

``python -m counters.counted ORDINAL SECONDS OPS MARKS`` writes one JSON line for each
rung it launched to MARKS, in the order of the launches. OPS are ladders with commas between. Only
what lies between the profiler's start and stop is counted, so that operands may be made by kernels
as well.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from counters.counters import SCHEMA, Mark
from counters.ladder_times import Spot, planned, spots
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.single import cuda_rung
from gemmule.core.rung import LibraryRung
from gemmule_lab.harness.device import DeviceBench


def main(arguments: Sequence[str]) -> None:
    """Launch every rung once, until the seconds are over."""
    ordinal, seconds, ops, marks = arguments
    wanted = [one for one in spots() if one.counted and one.op in ops.split(",")]
    end = time.monotonic() + float(seconds)
    bench = DeviceBench(int(ordinal))
    with Path(marks).open("w", encoding="utf-8") as file:
        for spot in wanted:
            for mark in launched(spot, bench, end):
                file.write(json.dumps({"schema": SCHEMA, **asdict(mark)}) + "\n")
                file.flush()


def launched(spot: Spot, bench: DeviceBench, end: float) -> list[Mark]:
    """Launch the rungs of one product, each once unwatched and once watched; say which."""
    # One set: Nsight Compute empties the caches.
    sets = {product: bench.sets(product, warm=True) for product in set(dict(spot.rungs).values())}
    plans = planned(spot, sets)
    found = []
    for name, product in spot.rungs:
        plan = plans[name]
        if isinstance(plan, str) or isinstance(plan.rung, LibraryRung):
            continue
        if time.monotonic() > end:
            break
        run = bench.calls(sets[product], plan)[0]
        run()
        driver.synchronize(bench.ordinal)
        _watched(run, bench.ordinal)
        steps = cuda_rung(plan.choice).steps(plan.choice.problem, plan.params, plan.choice.machine)
        names = tuple(step.kernel.partition("<")[0] for step in steps)
        found.append(Mark(spot.op, plan.rung.name, spot.title, dict(plan.params), names))
    return found


def _watched(run: Callable[[], object], ordinal: int) -> None:
    api = driver.bindings()
    with driver.on_device(ordinal):
        driver.check(api.cuProfilerStart(), "starting the profiler")
        run()
        driver.synchronize(ordinal)
        driver.check(api.cuProfilerStop(), "stopping the profiler")


if __name__ == "__main__":
    main(sys.argv[1:])
