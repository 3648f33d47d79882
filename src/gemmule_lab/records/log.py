"""Logs of measurements: environments and rows, a line of JSON each, appended whole.

A line is ``{"schema": 1, "line": "environment" or the kind of its row, ...}``. A row names the
environment it was measured in by that line's digest, so a file may hold several runs and several
machines. A line that a crash cut off is dropped by the next writer and overlooked by the reader.
Files are untrusted: sizes, types and values are checked on reading.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from gemmule.storage.decode import decode
from gemmule.storage.lines import read_bytes
from gemmule_lab.records.rows import Environment, Times

SCHEMA = 1
MAX_FILE_BYTES = 256 << 20
MAX_LINE_BYTES = 1 << 20


class Logged(Protocol):
    """A row of some kind: a dataclass that names its environment."""

    @property
    def environment(self) -> str:
        """The digest of the environment."""
        ...


R = TypeVar("R", bound=Logged)


@dataclass(frozen=True)  # without slots: a generic class that has them cannot be made by its alias
class Log(Generic[R]):
    """What a file holds. `torn` tells that its last line was cut off and overlooked."""

    environments: Mapping[str, Environment]
    rows: tuple[R, ...]
    torn: bool = False


def fresh(folder: Path, name: str) -> Path:
    """Return a path for what a run writes: its name, and the time to the second."""
    return folder / f"{name}-{dt.datetime.now(dt.UTC):%Y%m%dT%H%M%S}.jsonl"


def append(path: Path, kind: str, items: Iterable[Any]) -> None:
    """Append environments, and rows of a kind, creating the file and its folder if need be.

    All lines go out in one write under a lock, and reach the disk before the call returns; a line
    that an earlier crash cut off is removed first.
    """
    text = "".join(_line(kind, item) for item in items).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        _lock(descriptor)
        _drop_torn_line(descriptor)
        view = memoryview(text)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, kind: str, items: Iterable[Any]) -> None:
    """Make these the whole of a log; until then it is as it was."""
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    append(fresh, kind, items)
    fresh.replace(path)


def _lock(descriptor: int) -> None:
    try:
        import fcntl
    except ImportError:  # not a Unix: appending still works, two writers at once do not
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def _drop_torn_line(descriptor: int) -> None:
    size = os.lseek(descriptor, 0, os.SEEK_END)
    tail_start = max(0, size - MAX_LINE_BYTES)
    os.lseek(descriptor, tail_start, os.SEEK_SET)
    tail = os.read(descriptor, size - tail_start)
    if tail and not tail.endswith(b"\n"):
        if b"\n" not in tail and tail_start:
            raise ValueError("the file does not end in a line of results; it is left as it is.")
        os.ftruncate(descriptor, tail_start + tail.rfind(b"\n") + 1)


def _line(kind: str, item: Any) -> str:
    record = {"schema": SCHEMA, "line": kind}
    if isinstance(item, Environment):
        record = {"schema": SCHEMA, "line": "environment", "id": item.id}
    record |= dataclasses.asdict(item)
    return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"


def read(path: Path, kind: str, row: type[R], check: Callable[[R], None]) -> Log[R]:
    """Read and check a log with rows of a kind; `check` raises for values that no row has.

    ValueError, naming file and line, for a file too large, a line that is no JSON object of the
    schema, a wrong type or value, or a row whose environment does not come before it.
    """
    environments: dict[str, Environment] = {}
    rows: list[R] = []
    lines = read_bytes(path, MAX_FILE_BYTES).split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            item = _parse(line, kind, row)
            if isinstance(item, Environment):
                environments[item.id] = item
                continue
            if item.environment not in environments:
                raise ValueError(
                    f"the row's environment {item.environment!r} does not come before it."
                )
            check(item)
        except UnicodeDecodeError:
            raise ValueError(
                f"{path}, line {number}: bytes that are no text; results are files of JSON lines, "
                "as `gemmule bench` and `gemmule study` write them."
            ) from None
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        rows.append(item)
    return Log(environments, tuple(rows), torn=bool(lines[-1]))


def first_row(path: Path) -> Mapping[str, Any]:
    """Return the first row of a file as it stands there, unchecked; empty where there is none."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                break
            if isinstance(found, dict) and found.get("line") not in (None, "environment"):
                return found
    return {}


def _parse(line: bytes, kind: str, row: type[R]) -> Environment | R:
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"{len(line):,} bytes; a line has at most {MAX_LINE_BYTES:,}.")
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except json.JSONDecodeError:
        raise ValueError("no line of results as `gemmule bench` writes them (no JSON).") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object.")
    schema, found = record.pop("schema", None), record.pop("line", None)
    if schema != SCHEMA:
        raise ValueError(f"schema {schema!r}; this version reads schema {SCHEMA}. Measure again.")
    if found == "environment":
        digest = record.pop("id", None)
        environment = decode(Environment, record, "environment")
        if environment.id != digest:
            raise ValueError(f"the environment's digest is {environment.id}, not {digest!r}.")
        return environment
    if found != kind:
        raise ValueError(f"line is {found!r}; it must be 'environment' or {kind!r}.")
    return decode(row, record, "row")


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of a results file.")


def check_times(times: Times) -> None:
    """Raise ValueError for times that no measurement gives."""
    if not (0 < times.min <= times.q1 <= times.median <= times.q3 and times.n >= 1):
        raise ValueError(f"times {times} are not in the order 0 < min <= q1 <= median <= q3.")
