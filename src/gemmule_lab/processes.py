"""Child processes, as a kernel that faults takes its CUDA context with it, and CUDA's tools."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Task = tuple[Any, ...]


def each_apart(
    function: Callable[..., T],
    tasks: Sequence[Task],
    workers: int,
    keep: Callable[[Task, T | Exception], None],
) -> None:
    """Call ``function(*task)``, each in a process of its own, and keep every result or error.

    A process that dies takes its whole pool along, so the tasks that were under way then run again,
    each alone; one that dies once more is kept as a `BrokenProcessPool`.
    """
    for task, _ in _in_pool(function, tasks, workers, keep):
        for _, error in _in_pool(function, [task], 1, keep):
            keep(task, error)


def _in_pool(
    function: Callable[..., T],
    tasks: Sequence[Task],
    workers: int,
    keep: Callable[[Task, T | Exception], None],
) -> list[tuple[Task, BrokenProcessPool]]:
    """Return the tasks that one pool did not finish because a process died."""
    unfinished = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        futures = {pool.submit(function, *task): task for task in tasks}
        for future in as_completed(futures):
            try:
                found: T | Exception = future.result()
            except BrokenProcessPool as error:
                unfinished.append((futures[future], error))
                continue
            except Exception as error:  # a fault of the device, say: the task's failure, not ours
                found = error
            keep(futures[future], found)
    return unfinished


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a child: nothing is imported from its folder."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment_of_child(module: str = __name__, **more: str) -> dict[str, str]:
    """Return this process's environment, in which a child imports a module from where we do."""
    names = dict.fromkeys(name.partition(".")[0] for name in (__name__, module))
    found = [importlib.util.find_spec(name) for name in names]
    homes = [str(Path(one.origin).parents[1]) for one in found if one and one.origin]
    path = os.pathsep.join([*homes, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **more}


def in_toolkit(tool: str) -> Path | None:
    """Return the path of a program of the CUDA toolkit, None where it is in no usual place."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = (Path(home) / "bin" / tool for home in (*homes, "/usr/local/cuda"))
    return next((place for place in places if os.access(place, os.X_OK)), None)
