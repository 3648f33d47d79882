"""Files of JSON lines: one object a line, replaced whole, and checked as they are read.

Of files with a dataclass for their lines, `read_records` and `write_records` check and write all.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gemmule.storage.atomic import write_atomically
from gemmule.storage.decode import decode

MAX_LINE_BYTES = 65_536
MAX_FILE_BYTES = 64 * 2**20

T = TypeVar("T")


def write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file by these records, one a line; OSError where it cannot be written."""
    text = "".join(f"{json.dumps(dict(record))}\n" for record in records)
    if not write_atomically(path, text.encode()):
        raise OSError(f"{path} cannot be written.")


def write_records(path: Path, schema: int, records: Iterable[Any]) -> None:
    """Replace a file by instances of a dataclass, one a line; OSError where it cannot be written.

    A folder that is not there yet is made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, ({"schema": schema, **dataclasses.asdict(one)} for one in records))


def read_records(
    path: Path, schema: int, record: Callable[..., T], is_sound: Callable[[T], bool] | None = None
) -> Iterator[T]:
    """Yield the lines of a file as instances of the dataclass `record`, each field checked.

    Skipped are lines of other schemas, those that `gemmule.storage.decode` refuses, and those that
    are not sound.
    """
    for data in read(path, schema):
        try:
            one = decode(record, data, path.name)
        except ValueError:
            continue
        if is_sound is None or is_sound(one):
            yield one


def read(path: Path, schema: int) -> Iterator[dict[str, Any]]:
    """Yield the objects of a schema that a file holds, less that field; other lines are skipped.

    None where the file is absent or too large.
    """
    try:
        content = read_bytes(path, MAX_FILE_BYTES)
    except (OSError, ValueError):
        return
    for line in content.decode("utf-8", errors="replace").splitlines():
        record = _parsed(line)
        if type(record) is not dict:
            continue
        given = record.pop("schema", None)
        if type(given) is int and given == schema:
            yield record


def read_bytes(path: Path, most: int) -> bytes:
    """Return what a file holds; where only a packed one is there, what that holds.

    Packed are ``<path>.gz``, read in a moment, as plans want it, or ``<path>.xz``, the smaller one.
    FileNotFoundError for none of them, ValueError for more than `most` bytes, or a damaged archive.
    """
    archives = (path.with_name(f"{path.name}{suffix}") for suffix in (".gz", ".xz"))
    archive = next((one for one in archives if one.is_file()), None)
    if path.is_file() or archive is None:
        with path.open("rb") as file:
            content = file.read(most + 1)
    else:
        content = _unpacked(archive, most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most:,} bytes.")
    return content


def _unpacked(archive: Path, most: int) -> bytes:
    """Return at most so many bytes of what an archive holds; ValueError for a damaged one."""
    unpack: Any
    damage: type[Exception]
    if archive.suffix == ".gz":
        import gzip
        import zlib

        unpack, damage = gzip.open, zlib.error
    else:
        import lzma  # which some builds of Python lack

        unpack, damage = lzma.open, lzma.LZMAError
    try:
        with unpack(archive) as file:
            content: bytes = file.read(most)
    except (OSError, EOFError, damage) as error:
        raise ValueError(f"{archive} is damaged: {error}.") from None
    return content


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


def today() -> str:
    """Return the day as records have it: of UTC."""
    return dt.datetime.now(tz=dt.UTC).date().isoformat()
