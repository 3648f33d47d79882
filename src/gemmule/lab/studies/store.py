"""Study rows on disk: JSON lines, appended whole, so that a study goes on where it was stopped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from gemmule.lab.records import results
from gemmule.lab.records.decode import decode
from gemmule.lab.records.rows import Environment
from gemmule.lab.studies.records import TEMPERATURES, Rows, StudyRow

SCHEMA = 1


def append(path: Path, items: Iterable[Environment | StudyRow]) -> None:
    """Append environments and rows; a line that a crash cut off is removed first."""
    results.append_lines(path, [_line(item) for item in items])


def _line(item: Environment | StudyRow) -> str:
    kind = "environment" if isinstance(item, Environment) else "study"
    record = {"schema": SCHEMA, "line": kind}
    if isinstance(item, Environment):
        record["id"] = item.id
    record |= dataclasses.asdict(item)
    return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"


def read(path: Path, seed: str) -> Rows:
    """Return the rows of one seed in a file; none where there is no file.

    A last line that was cut off is overlooked. ValueError, naming file and line, for a file too
    large, another schema, a wrong type or value, or a row before its environment.
    """
    if not path.is_file():
        return Rows(())
    size = path.stat().st_size
    if size > results.MAX_FILE_BYTES:
        raise ValueError(f"{path} has {size:,} bytes; the limit is {results.MAX_FILE_BYTES:,}.")
    environments: dict[str, Environment] = {}
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            item = _parse(line)
            if isinstance(item, Environment):
                environments[item.id] = item
                continue
            _check(item, environments, seed)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        rows.append(item)
    return Rows(rows, environments)


def _parse(line: bytes) -> Environment | StudyRow:
    if len(line) > results.MAX_LINE_BYTES:
        raise ValueError(f"{len(line):,} bytes; a line has at most {results.MAX_LINE_BYTES:,}.")
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object.")
    schema, kind = record.pop("schema", None), record.pop("line", None)
    if schema != SCHEMA:
        raise ValueError(f"schema {schema!r}; this version reads schema {SCHEMA}. Measure again.")
    if kind == "environment":
        digest = record.pop("id", None)
        environment = decode(Environment, record, "environment")
        if environment.id != digest:
            raise ValueError(f"the environment's digest is {environment.id}, not {digest!r}.")
        return environment
    if kind != "study":
        raise ValueError(f"line is {kind!r}; it must be 'environment' or 'study'.")
    return decode(StudyRow, record, "row")


def _check(row: StudyRow, environments: dict[str, Environment], seed: str) -> None:
    if row.seed != seed:
        raise ValueError(f"the row is of seed {row.seed!r}; the file is of seed {seed}.")
    if row.environment not in environments:
        raise ValueError(f"the row's environment {row.environment!r} does not come before it.")
    if row.temperature not in TEMPERATURES:
        raise ValueError(f"temperature is {row.temperature!r}; one of {', '.join(TEMPERATURES)}.")
    times = row.times_us
    if times is not None and not 0 < times.min <= times.q1 <= times.median <= times.q3:
        raise ValueError(f"times {times} are not in the order 0 < min <= q1 <= median <= q3.")
