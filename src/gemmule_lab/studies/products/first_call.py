"""What a process pays once: driver and context, compilation, loading, the first launch.

Run as a file, this is the child process that pays it, with an empty cache of kernels: as a module
it would have imported the package before the clock starts.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmule_lab.studies.grid import Measured

SECONDS = 120
PARTS = ("import of gemmule", "context", "first cudaMalloc", "compile", "load", "first launch")


def first_call(rung: str, n: int) -> Measured:
    """Return what the first product of a new process takes, part by part, in microseconds."""
    from gemmule_lab.processes import environment_of_child
    from gemmule_lab.studies.grid import Measured

    with tempfile.TemporaryDirectory() as cache:
        try:
            done = subprocess.run(
                [sys.executable, "-P", __file__, rung, str(n)],
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
                env=environment_of_child(GEMMULE_CACHE=cache),
            )
        except subprocess.TimeoutExpired:
            return Measured(note=f"the first call did not return within {SECONDS} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Measured(note=f"the child process failed: {last}"[:300])
    figures = json.loads(done.stdout.splitlines()[-1])
    return Measured(figures={str(k): float(v) for k, v in figures.items()})


def main(rung: str, n: int) -> None:
    """Time the parts of this process's first product and print them as JSON."""
    marks = [time.perf_counter()]

    def end() -> None:
        marks.append(time.perf_counter())

    import gemmule as gm
    from gemmule.backends.cuda import driver
    from gemmule.backends.cuda import launch as cuda_launch
    from gemmule.backends.cuda.device_array import DeviceArray

    end()
    driver.synchronize(0)
    end()
    a, b, out = (DeviceArray.empty((n, n), "float32") for _ in "ABC")
    end()
    plan = gm.plan("matmul", a, b, rung=rung)
    launcher = cuda_launch.Launcher(plan.choice)
    end()
    launcher.load(0)
    end()
    plan(a, b, out=out)
    driver.synchronize(0)
    end()
    took = (1e6 * (after - before) for before, after in itertools.pairwise(marks))
    print(json.dumps(dict(zip((f"{part} us" for part in PARTS), took, strict=True))))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
