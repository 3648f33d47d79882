"""Tuning results on disk: one small JSON file per key, replaced atomically, checked on read.

Promised: a reader sees a whole entry or none; two writers cannot mix entries; an entry can only
pick a rung and parameter values that the rung itself declares; a file that is corrupt, too large,
of another schema, or about a rung of which any source changed since (`gemmule.storage.sources`) is
a miss. Not promised: that an entry survives a power cut right after it was written.

Files in `SHIPPED` come with the package. Each names its device and problem in full, so that
`shipped_fault` can tell without that device whether a plan would accept it.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gemmule.core.problem import DTYPES, FLOAT4_DTYPE, Problem, check_problem
from gemmule.core.registry import all_rungs
from gemmule.core.rung import BACKENDS, Machine, Rung
from gemmule.settings import cache_folder, tuning_enabled
from gemmule.storage.atomic import LEFT_OVER, small_file, write_atomically
from gemmule.storage.decode import decode
from gemmule.storage.lines import without_duplicates
from gemmule.storage.sources import rung_digest

SCHEMA = 1
SHIPPED = Path(__file__).parents[1] / "tuned"
# A writer that was killed leaves its temporary file; after an hour nobody is writing it any more.
LEFT_OVER_S = 3600.0
_QUANT_DTYPES = ("uint4", FLOAT4_DTYPE, *DTYPES)


@dataclass(frozen=True, slots=True)
class Tuned:
    """One stored choice: the rung, its parameters, the measured time, and the day."""

    rung: Rung
    params: Mapping[str, Any]
    time_s: float
    date: str


def key(machine: Machine, problem: Problem) -> str:
    """Return the file stem of an entry: a digest of device and problem."""
    text = json.dumps(
        [SCHEMA, machine.backend, machine.name, machine.arch, machine.units, asdict(problem)],
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def lookup(machine: Machine, problem: Problem) -> Tuned | None:
    """Return the stored choice for this device and problem, the user's own before the shipped."""
    if not tuning_enabled():
        return None
    stem = key(machine, problem)
    for root in (cache_folder() / "tuned", SHIPPED):
        entry = _read(root / f"{stem}.json", machine, problem)
        if entry is not None:
            return entry
    return None


def _read(path: Path, machine: Machine, problem: Problem) -> Tuned | None:
    try:
        record = json.loads(small_file(path), object_pairs_hook=without_duplicates)
    except (OSError, ValueError, RecursionError):
        return None
    return _checked(record, machine, problem)


def _checked(record: Any, machine: Machine, problem: Problem) -> Tuned | None:
    """Return the entry if every field is what this package could have written, else None."""
    if not isinstance(record, dict) or type(record.get("schema")) is not int:
        return None
    if record["schema"] != SCHEMA:
        return None
    names = [(r.folder, r.name) for r in all_rungs(machine.backend)]
    wanted = (record.get("folder"), record.get("rung"))
    if wanted not in names:
        return None
    rung = all_rungs(machine.backend)[names.index(wanted)]
    time_s, date = record.get("time_s"), record.get("date")
    if record.get("digest") != rung_digest(rung) or rung.refusal(problem) is not None:
        return None
    given = record.get("params")
    params = next((known for known in rung.space(problem) if _identical(given, known)), None)
    if params is None:
        return None
    if type(time_s) is not float or not 0.0 < time_s < 3600.0 or not isinstance(date, str):
        return None
    if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", date[:10]):  # explain() prints it
        return None
    return Tuned(rung, params, time_s, date[:10])


def _identical(params: Any, declared: dict[str, Any]) -> bool:
    """Whether values and their types agree: in Python 1 == True == 1.0."""
    return params == declared and all(type(v) is type(declared[k]) for k, v in params.items())


def save(machine: Machine, problem: Problem, tuned: Tuned, root: Path | None = None) -> Path | None:
    """Write an entry atomically; return its path, or None when the folder cannot be written.

    root: another folder than the cache's, such as the one of the shipped entries.
    """
    record = {
        "schema": SCHEMA,
        "machine": machine.name,
        "problem": problem.describe(),
        "folder": tuned.rung.folder,
        "rung": tuned.rung.name,
        "digest": rung_digest(tuned.rung),
        "params": dict(tuned.params),
        "time_s": float(tuned.time_s),
        "date": tuned.date,
        "device": {
            "backend": machine.backend,
            "name": machine.name,
            "arch": machine.arch,
            "units": machine.units,
        },
        "fields": asdict(problem),
    }
    folder = cache_folder() / "tuned" if root is None else root
    target = folder / f"{key(machine, problem)}.json"
    if not write_atomically(target, json.dumps(record, indent=1).encode()):
        return None
    _sweep(folder)
    return target


def _sweep(folder: Path) -> None:
    """Remove what writers that were killed left behind long ago."""
    try:
        for path in folder.glob(f"{LEFT_OVER}*"):
            if time.time() - path.lstat().st_mtime > LEFT_OVER_S:
                path.unlink(missing_ok=True)
    except OSError:  # somebody else's file, or gone by now
        return


def problem_of(fields: Any) -> Problem:
    """Return the problem with these fields, as `dataclasses.asdict` gave them.

    ValueError for anything that is not every field of a legal problem, in its own type.
    """
    known = asdict(Problem("matvec", 1, 1))
    if not isinstance(fields, dict) or set(fields) != set(known):
        raise ValueError(f"a problem has the fields {', '.join(known)}.")
    problem = decode(Problem, fields, "a problem")
    sizes = (problem.m, problem.n, problem.k, problem.batch)
    if problem.op not in ("matvec", "matmul", "grouped") or min(sizes) < 0:
        raise ValueError("a problem's op is matvec, matmul or grouped, and no size is negative.")
    if any(name not in _QUANT_DTYPES for name in (problem.a, problem.b, problem.out)):
        raise ValueError(f"{problem.a}, {problem.b}, {problem.out} are not all dtypes.")
    return check_problem(problem)


def shipped_fault(path: Path) -> str:
    """Return why a plan on the entry's own device would not accept it, or ``""`` where it would."""
    try:
        record = json.loads(small_file(path), object_pairs_hook=without_duplicates)
        device, problem = record["device"], problem_of(record["fields"])
        machine = Machine(
            device["backend"], device["name"], device["arch"], device["units"], 1.0, 1
        )
        stem = key(machine, problem)
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        return f"{path.name} names no device and problem ({type(error).__name__}: {error})"
    if path.name != f"{stem}.json":
        return f"{path.name} holds the entry of {stem}.json"
    if machine.backend not in BACKENDS or _checked(record, machine, problem) is None:
        return f"{path.name} ({record.get('problem')}) is about a rung that changed, or is damaged"
    return ""
