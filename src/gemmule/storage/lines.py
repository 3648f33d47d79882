"""Files of JSON lines that are replaced whole: one object a line, read with care."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gemmule.storage.atomic import write_atomically

MAX_LINE_BYTES = 65_536
MAX_FILE_BYTES = 64 * 2**20


def write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file by these records, one a line; OSError where it cannot be written."""
    text = "".join(f"{json.dumps(dict(record))}\n" for record in records)
    if not write_atomically(path, text.encode()):
        raise OSError(f"{path} cannot be written.")


def read(path: Path, schema: int) -> Iterator[dict[str, Any]]:
    """Yield the objects of a schema that a file holds, less that field; other lines are skipped.

    None where the file is absent or too large.
    """
    if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        record = _parsed(line)
        if type(record) is not dict:
            continue
        given = record.pop("schema", None)
        if type(given) is int and given == schema:
            yield record


def _parsed(line: str) -> Any:
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        return json.loads(line, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError):
        return None


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON as a dict; ValueError where a key stands in it twice."""
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return record
