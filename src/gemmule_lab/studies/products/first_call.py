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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemmule_lab.studies.grid import Bench, Case, Found, Names

SECONDS = 120
PARTS = ("import of gemmule", "context", "first cudaMalloc", "compile", "load", "first launch")


def first_call(bench: Bench, names: Names, case: Case) -> Found:
    """Return what each rung's first product in a new process takes, by part, in microseconds."""
    from gemmule_lab.processes import environment_of_child
    from gemmule_lab.studies.grid import Measured

    found = {}
    for name in names:
        command = [sys.executable, "-P", __file__, name, str(case["n"])]
        with tempfile.TemporaryDirectory() as cache:
            given: dict[str, Any] = {"env": environment_of_child(GEMMULE_CACHE=cache)}
            given |= {"timeout": SECONDS, "capture_output": True, "text": True}
            try:
                done = subprocess.run(command, check=True, **given)
                found[name] = Measured(figures=json.loads(done.stdout.splitlines()[-1]))
            except subprocess.SubprocessError as error:
                last = (str(getattr(error, "stderr", "") or error).strip().splitlines())[-1]
                found[name] = Measured(note=f"the child process failed: {last}"[:300])
    return found


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
