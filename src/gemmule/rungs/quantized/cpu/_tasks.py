"""Kernels over rows ``first:end`` of a job, in tasks that threads claim one by one."""

from __future__ import annotations

import functools

from gemmule.backends.cpu.atomics import unpacked_as
from gemmule.backends.cpu.intrinsics import enter, load
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.pool import Pooled

_number = load("int64", "int64")


@functools.cache
def in_tasks(rows: Kernel, kind: type) -> Pooled:
    """Return ``rows(job, first, end)`` in tasks: ``f(count, *job, rows per task)``.

    kind: the job's class, a named tuple of integers with a field `m`, its number of rows.
    """
    return Pooled(_task(kind), lambda: rows.entry(kind, int, int))


@functools.cache
def _task(kind: type) -> Kernel:
    load_job, size = unpacked_as(kind), len(kind._fields)  # type: ignore[attr-defined]

    @kernel
    def task(at: int, number: int) -> None:
        job, rows_per_task, rows = load_job(at), _number(at, size), _number(at, size + 1)
        low = number * rows_per_task
        enter(rows, (job, low, min(job.m, low + rows_per_task)))

    return task


def run_tasks(
    tasks: Pooled, job: tuple[int, ...], m: int, rows_per_task: int, *, alone: bool
) -> None:
    """Run the tasks of a job of `m` rows, on the calling thread alone where `alone`."""
    run = tasks.alone if alone else tasks
    run(-(-m // rows_per_task), *job, rows_per_task)
