"""Evidence beside the proofs: lines that say what was checked of a variant, with the proof's key.

``sanitized.jsonl`` and ``extremes.jsonl`` under ``evidence/<gpu>/`` are such files. A line counts
while its key is the variant's own (`proofs.status`), as for the proofs themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gemmule.storage import evidence
from gemmule.storage import lines as stored_lines

Line = dict[str, Any]
VARIANT = ("folder", "rung", "variant")
# file name -> the field that says what was checked.
FILES = {"sanitized.jsonl": "tool", "extremes.jsonl": "check"}


def record(
    root: Path, file: str, found: Iterable[tuple[str, Any, Mapping[str, Any], bool]]
) -> Path | None:
    """Merge checks into ``<root>/<gpu>/<file>``: which, the variant's outcome, figures, if passed.

    What did not pass loses its line. Returns the file, or None when nothing ran on a device.
    """
    known = [one for one in found if one[1].device]
    if not known:
        return None
    path = root / evidence.slug(known[0][1].device) / file
    for passed in (True, False):
        some = [_line(FILES[file], *one) for *one, fine in known if fine == passed]
        update(path, some, passed)
    return path


def _line(what: str, value: str, outcome: Any, figures: Mapping[str, Any]) -> Line:
    return {
        "schema": evidence.SCHEMA,
        what: value,
        **{part: getattr(outcome, part) for part in (*VARIANT, "key", "device")},
        "date": stored_lines.today(),
        **figures,
    }


def read(path: Path) -> list[Line]:
    """Return the well-formed lines of a file; none where it is absent or too large."""
    parts = (FILES[path.name], *VARIANT, "key")
    return [
        {"schema": evidence.SCHEMA, **line}
        for line in stored_lines.read(path, evidence.SCHEMA)
        if all(isinstance(line.get(part), str) for part in parts)
    ]


def update(path: Path, lines: Iterable[Line], passed: bool) -> None:
    """Put lines in the place of those of the same check and variant; drop these if not `passed`."""
    what = FILES[path.name]
    records = {_name(what, line): line for line in read(path)}
    for line in lines:
        records.pop(_name(what, line), None)
        if passed:
            records[_name(what, line)] = line
    stored_lines.write(path, (records[name] for name in sorted(records)))


def _name(what: str, line: Line) -> tuple[str, ...]:
    return tuple(str(line[part]) for part in (what, *VARIANT))


def under(root: Path | None = None) -> list[tuple[str, Line]]:
    """Return (file name, line) of every such line under the evidence folder."""
    base = evidence.folder() if root is None else root
    return [
        (path.name, line)
        for name in FILES
        for path in sorted(base.glob(f"*/{name}"))
        for line in read(path)
    ]


def out_of_date(
    lines: Iterable[tuple[str, Line]], keys: Mapping[tuple[str, str, str], str]
) -> list[str]:
    """Return which `lines` tell of other code than `keys`, variant -> present key, in words."""
    found = []
    for file, line in lines:
        name = (line["folder"], line["rung"], line["variant"])
        if name in keys and line["key"] != keys[name]:
            found.append(f"{file}: {line[FILES[file]]} of {'/'.join(name)} is of older code")
    return found
