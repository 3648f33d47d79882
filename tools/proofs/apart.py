"""Calls in processes of their own: a kernel that faults takes its CUDA context with it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
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
