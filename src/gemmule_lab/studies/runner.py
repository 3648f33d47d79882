"""Runs a study: step by step, each row on disk before the next step begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from gemmule_lab.ceilings.best import TOLERANCE
from gemmule_lab.records import study as store
from gemmule_lab.records.rows import Environment
from gemmule_lab.records.study import Rows, StudyRow, key_of
from gemmule_lab.studies.grid import Bench, Case, Measured, Names, Step, Study

DURATION = "duration"  # of a run that was not stopped
Todo = tuple[Step, Names]  # and the names of its rows that are not on file


def todo(
    study: Study, bench: Bench, full: bool, known: set[str], only: Collection[str] = ()
) -> list[Todo]:
    """Return the steps of a study's grid that lack rows, with the names that they lack."""
    found = []
    for step in study.steps(bench.backend, full):
        keys = {name: key_in(step, bench.backend, bench.device, name) for name in step.names}
        lacking = tuple(name for name, key in keys.items() if key not in known)
        if lacking and (not only or step.experiment in only):
            found.append((step, lacking))
    return found


def key_in(step: Step, backend: str, device: str, name: str) -> str:
    """Return the key of the row that a step gives one name on a device."""
    return key_of(backend, device, step.experiment, dict(step.filed), name, step.temperature)


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
    for step, names in progress(steps):
        store.append(path, list(_rows(study.number, bench, here, step, names)))
    case: Case = {"full": full, "steps": len(steps), "experiments": ", ".join(sorted(only))}
    where = (study.number, DURATION, here.id, bench.device, bench.backend, case)
    took = {"seconds": time.monotonic() - start}
    store.append(path, [StudyRow(*where, "the run", "task", "once", figures=took)])
    rows = store.read(path, study.number)
    if above_ceiling(store.of_last_devices(rows), bench.backend):
        # Something slowed the ceilings down: of both measurements the higher one counts.
        store.append(path, [environment()])
    return rows


def _rows(
    number: str, bench: Bench, environment: Environment, step: Step, names: Names
) -> Iterator[StudyRow]:
    measured = step.measured(bench, names)
    peers = [lane.name for lane in getattr(step, "lanes", ()) if lane.rung is None]
    case = dict(step.filed)
    where = (number, step.experiment, environment.id, bench.device, bench.backend, case)
    for name in names:
        kind = "task" if step.temperature == "once" else "peer" if name in peers else "rung"
        found = measured.get(name, Measured(note="it gave no figure"))
        what = (found.params, found.times_us, found.figures, found.note)
        yield StudyRow(*where, name, kind, step.temperature, *what)


def above_ceiling(rows: Rows, backend: str) -> bool:
    """Tell whether a cold row beats the measured read ceiling by more than the tolerance."""
    read = rows.ceiling("read", backend)
    cold = rows.where(backend=backend, temperature="cold").timed()
    limit = (1 + TOLERANCE[backend]) * (read or float("inf"))
    return any(row.figures.get("gbs", 0.0) > limit for row in cold)
