"""Runs a study: step by step, each row on disk before the next step begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gemmule_lab.ceilings.best import TOLERANCE
from gemmule_lab.records.rows import Environment
from gemmule_lab.studies import store
from gemmule_lab.studies.grid import Bench, Case, Cell, Measured, Step, Study, Task
from gemmule_lab.studies.records import Rows, StudyRow, key_of

DURATION = "duration"  # of a run that was not stopped


@dataclass(frozen=True, slots=True)
class Todo:
    """A step and the names of its rows that are not on file."""

    step: Step
    names: tuple[str, ...]


def todo(
    study: Study, bench: Bench, full: bool, known: set[str], only: Collection[str] = ()
) -> list[Todo]:
    """Return the steps of a study's grid that lack rows, with the names that they lack."""
    found = []
    for step in study.steps(bench.backend, full):
        if only and step.experiment not in only:
            continue
        keys = {name: key_in(step, bench.backend, bench.device, name) for name in names_in(step)}
        lacking = tuple(name for name, key in keys.items() if key not in known)
        if lacking:
            found.append(Todo(step, lacking))
    return found


def names_in(step: Step) -> tuple[str, ...]:
    """Return the names of what a step measures."""
    return tuple(lane.name for lane in step.lanes) if isinstance(step, Cell) else step.names


def key_in(step: Step, backend: str, device: str, name: str) -> str:
    """Return the key of the row that a step gives one name on a device."""
    case, temperature = _filed(step)
    return key_of(backend, device, step.experiment, case, name, temperature)


def _filed(step: Step) -> tuple[dict[str, str | int | float | bool], str]:
    if isinstance(step, Cell):
        return dict(step.filed), step.temperature
    return dict(step.case), "once"


def run(
    study: Study,
    bench: Bench,
    environment: Callable[[], Environment],
    path: Path,
    *,
    full: bool,
    only: Collection[str] = (),
    progress: Callable[[list[Todo]], Iterable[Todo]] = lambda todos: todos,
) -> Rows:
    """Measure what the file lacks, append each step's rows to it, and return all it holds.

    Stopped at any moment, by Ctrl-C or a crash, it loses the step under way and nothing else; the
    next run goes on there. ArithmeticError for a result that the oracle finds wrong.
    """
    known = {row.key for row in store.read(path, study.number)}
    steps = todo(study, bench, full, known, only)
    if not steps:
        return store.read(path, study.number)
    here, start = environment(), time.monotonic()
    store.append(path, [here])
    for one in progress(steps):
        measured = _measure(bench, one)
        store.append(path, list(_rows(study.number, bench, here, one, measured)))
    case: Case = {"full": full, "steps": len(steps), "experiments": ", ".join(sorted(only))}
    where = (study.number, DURATION, here.id, bench.device, bench.backend, case)
    took = {"seconds": time.monotonic() - start}
    store.append(path, [StudyRow(*where, "the run", "task", "once", figures=took)])
    rows = store.read(path, study.number)
    if above_ceiling(of_last_devices(rows), bench.backend):
        # Something slowed the ceilings down: of both measurements the higher one counts.
        store.append(path, [environment()])
    return rows


def _measure(bench: Bench, one: Todo) -> dict[str, Measured]:
    if isinstance(one.step, Task):
        return dict(one.step.run(bench, one.names, one.step.case))
    lanes = tuple(lane for lane in one.step.lanes if lane.name in one.names)
    return dict(bench.measure(one.step, lanes))


def _rows(
    number: str, bench: Bench, environment: Environment, one: Todo, measured: dict[str, Measured]
) -> Iterator[StudyRow]:
    case, temperature = _filed(one.step)
    kinds = {}
    if isinstance(one.step, Cell):
        kinds = {lane.name: lane.kind for lane in one.step.lanes}
    where = (number, one.step.experiment, environment.id, bench.device, bench.backend, case)
    for name in one.names:
        found = measured.get(name, Measured(note="it gave no figure"))
        what = (found.params, found.times_us, found.figures, found.note)
        yield StudyRow(*where, name, kinds.get(name, "task"), temperature, *what)


def of_last_devices(rows: Rows) -> Rows:
    """Return the rows of the last CPU and the last GPU on file, which verdicts are made of."""
    last = {row.backend: row.device for row in rows}
    kept = [row for row in rows if row.device == last[row.backend]]
    environments = {k: e for k, e in rows.environments.items() if e.device in last.values()}
    return Rows(kept, environments)


def above_ceiling(rows: Rows, backend: str) -> bool:
    """Tell whether a cold row beats the measured read ceiling by more than the tolerance."""
    read = rows.ceiling("read", backend)
    cold = rows.where(backend=backend, temperature="cold").timed()
    limit = (1 + TOLERANCE[backend]) * (read or float("inf"))
    return any(row.figures.get("gbs", 0.0) > limit for row in cold)
