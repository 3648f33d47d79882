"""Results on disk: JSON lines, one environment or one row each, and the arithmetic over them.

A file is a sequence of lines ``{"schema": 1, "line": "environment" | "row", ...}``. A row names the
environment it was measured in by that line's digest, so a file may hold several runs and several
machines. Lines are appended whole; a line that a crash cut off is dropped by the next writer and
overlooked by the reader. Files are untrusted: sizes, types and values are checked on reading.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemmule.core.problem import DTYPES, ITEMSIZE, Problem
from gemmule.lab.records.decode import decode
from gemmule.lab.records.rows import KINDS, TEMPERATURES, Environment, Row

SCHEMA = 1
MAX_FILE_BYTES = 256 << 20
MAX_LINE_BYTES = 1 << 20
SAME_WITHIN = 0.02
QUANTISED = ("uint4",)  # stored two to a byte, so no dtype of its own
CODES = ("uint4", "uint8")
LAYOUTS = ("row", "col", "strided")


@dataclass(frozen=True, slots=True)
class Results:
    """What a file holds. `torn` tells that its last line was cut off and overlooked."""

    environments: Mapping[str, Environment]
    rows: tuple[Row, ...]
    torn: bool = False


def append(path: Path, items: Iterable[Environment | Row]) -> None:
    """Append environments and rows to a results file, creating it and its folder if need be.

    All lines go out in one write under a lock, and reach the disk before the call returns; a line
    that an earlier crash cut off is removed first.
    """
    append_lines(path, (_line(item) for item in items))


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines, each ending in a newline, in the way of `append`."""
    text = "".join(lines).encode()
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


def _line(item: Environment | Row) -> str:
    kind = "environment" if isinstance(item, Environment) else "row"
    record: dict[str, Any] = {"schema": SCHEMA, "line": kind}
    if isinstance(item, Environment):
        record["id"] = item.id
    record |= dataclasses.asdict(item)
    return json.dumps(record, allow_nan=False, sort_keys=False, separators=(",", ":")) + "\n"


def read(path: Path) -> Results:
    """Read and check a results file.

    ValueError, naming file and line, for a file too large, a line that is no JSON object of the
    schema, a wrong type or value, or a row whose environment the file does not hold.
    """
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has {size:,} bytes; the limit is {MAX_FILE_BYTES:,}.")
    environments: dict[str, Environment] = {}
    rows: list[Row] = []
    with path.open("rb") as file:
        lines = file.read(MAX_FILE_BYTES + 1).split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            item = _parse(line, environments)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if isinstance(item, Environment):
            environments[item.id] = item
        else:
            rows.append(item)
    return Results(environments, tuple(rows), torn=bool(lines[-1]))


def _parse(line: bytes, environments: Mapping[str, Environment]) -> Environment | Row:
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"{len(line):,} bytes; a line has at most {MAX_LINE_BYTES:,}.")
    record = json.loads(line, parse_constant=_refuse_constant)
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
    if kind != "row":
        raise ValueError(f"line is {kind!r}; it must be 'environment' or 'row'.")
    row = decode(Row, record, "row")
    _check_row(row, environments)
    return row


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of a results file.")


def _check_row(row: Row, environments: Mapping[str, Environment]) -> None:
    if row.environment not in environments:
        raise ValueError(f"the row's environment {row.environment!r} does not come before it.")
    if row.kind not in KINDS or row.temperature not in TEMPERATURES:
        raise ValueError(
            f"kind {row.kind!r}, temperature {row.temperature!r}; they must be one of "
            f"{', '.join(KINDS)} and of {', '.join(TEMPERATURES)}."
        )
    times = row.times_us
    if not (0 < times.min <= times.q1 <= times.median <= times.q3 and times.n >= 1):
        raise ValueError(f"times {times} are not in the order 0 < min <= q1 <= median <= q3.")
    _check_problem_fields(row.problem)


def _check_problem_fields(problem: Problem) -> None:
    if problem.op not in ("matvec", "matmul"):
        raise ValueError(f"op is {problem.op!r}; it must be 'matvec' or 'matmul'.")
    if min(problem.m, problem.n, problem.k, problem.batch) < 0:
        raise ValueError("a size of the problem is negative.")
    if problem.a not in DTYPES + QUANTISED or {problem.b, problem.out} - set(DTYPES):
        raise ValueError(f"unknown dtypes {problem.a}, {problem.b}, {problem.out}.")
    if {problem.layout_a, problem.layout_b, problem.layout_out} - set(LAYOUTS):
        raise ValueError(f"a layout is none of {', '.join(LAYOUTS)}.")
    spec = problem.quant
    # Quantised to 8 bits the matrix is called uint8, as a plain one of bytes is.
    if (problem.a in QUANTISED and spec is None) or (spec is not None and problem.a not in CODES):
        raise ValueError(f"A of dtype {problem.a} does not go with quantisation {spec}.")
    if spec is not None:
        size = spec.group_size
        if not 1 <= spec.bits <= 16 or (size is not None and size != -1 and size < 1):
            raise ValueError(f"quantisation to {spec.bits} bits in groups of {size} is none.")
        if spec.scale_dtype not in ITEMSIZE:
            raise ValueError(f"scale_dtype {spec.scale_dtype!r} is unknown.")


def median(values: Iterable[float]) -> float:
    """Return the median; ValueError for no values."""
    numbers = list(values)
    if not numbers:
        raise ValueError("the median of no values is asked for.")
    return float(np.median(numbers))


def geomean(values: Iterable[float]) -> float:
    """Return the geometric mean, the right one for ratios; ValueError unless all are positive.

    >>> geomean([0.5, 2.0])
    1.0
    """
    numbers = list(values)
    if not numbers or min(numbers) <= 0:
        raise ValueError(f"the geometric mean needs one or more positive values, not {numbers}.")
    return math.exp(math.fsum(math.log(v) for v in numbers) / len(numbers))


@dataclass(frozen=True, slots=True)
class Change:
    """One measurement in two files: `ratio` is new time over old; `verdict` in words.

    ``same`` within 2 %, else ``faster`` or ``slower``; ``added`` and ``removed`` (ratio None) for
    rows that one file alone holds. Runs of different days do not pair, so this is no statistical
    verdict: a ``slower`` is a reason to measure both in one run.
    """

    row: Row
    old_us: float | None
    new_us: float | None
    ratio: float | None
    verdict: str


def compare(old: Results, new: Results, within: float = SAME_WITHIN) -> tuple[Change, ...]:
    """Return what changed between two files, in the order of the new one, then what is gone.

    Where a file holds a measurement several times, its last row counts.
    """
    before = {row.key: row for row in old.rows}
    after = {row.key: row for row in new.rows}
    changes = []
    for key, row in after.items():
        earlier = before.get(key)
        now = row.times_us.median
        if earlier is None:
            changes.append(Change(row, None, now, None, "added"))
            continue
        ratio = now / earlier.times_us.median
        changes.append(Change(row, earlier.times_us.median, now, ratio, _verdict(ratio, within)))
    gone = (row for key, row in before.items() if key not in after)
    return (*changes, *(Change(r, r.times_us.median, None, None, "removed") for r in gone))


def _verdict(ratio: float, within: float) -> str:
    if ratio > 1 + within:
        return "slower"
    return "faster" if ratio < 1 / (1 + within) else "same"
