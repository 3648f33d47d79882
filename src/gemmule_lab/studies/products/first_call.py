"""What a process pays once: driver and context, compilation, loading, the first launch.

Run as a file, this is the child process that pays it, with an empty cache of kernels: as a module
it would have imported the package before the clock starts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmule_lab.studies.grid import Measured

SECONDS = 120


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
    parts: dict[str, float] = {}

    @contextmanager
    def part(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        parts[name] = (time.perf_counter() - start) * 1e6

    with part("import of gemmule us"):
        import gemmule as gm
        from gemmule.backends.cuda import driver
        from gemmule.backends.cuda import launch as cuda_launch
        from gemmule.backends.cuda.device_array import DeviceArray
    with part("context us"):
        driver.synchronize(0)
    with part("first cudaMalloc us"):
        arrays = [DeviceArray.empty((n, n), "float32") for _ in "ABC"]
    with part("compile us"):
        plan = gm.plan("matmul", arrays[0], arrays[1], rung=rung)
        launcher = cuda_launch.Launcher(plan.choice)
    with part("load us"):
        launcher.load(0)
    with part("first launch us"):
        plan(arrays[0], arrays[1], out=arrays[2])
        driver.synchronize(0)
    print(json.dumps(parts))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
