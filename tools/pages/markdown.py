"""The places between markers in documents, where tables and other generated texts stand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gemmule.storage.atomic import replace_text


def update_markers(path: Path, tables: Mapping[str, str]) -> bool:
    """Put each text of `tables` between its markers in a Markdown file; return whether it changed.

    The markers are ``<!-- table:NAME -->`` and ``<!-- /table -->``, each on a line of its own.
    ValueError for a name without markers, a marker that is not closed, or a text that holds a
    marker itself. Tables that the file marks but `tables` lacks are left alone.
    """
    old = path.read_text(encoding="utf-8")
    lines, wanted, output = old.split("\n"), dict(tables), []
    while lines:
        line = lines.pop(0)
        output.append(line)
        name = _marked_name(line)
        if name is None:
            continue
        inside = []
        while lines and lines[0].strip() != "<!-- /table -->" and _marked_name(lines[0]) is None:
            inside.append(lines.pop(0))
        if not lines or lines[0].strip() != "<!-- /table -->":
            raise ValueError(f"{path}: table {name!r} is not closed; add <!-- /table --> after it.")
        text = wanted.pop(name, None)
        if text is not None and ("<!--" in text or "-->" in text):
            raise ValueError(f"the text of table {name!r} holds an HTML comment; take it out.")
        output += inside if text is None else ["", *text.strip("\n").split("\n"), ""]
    if wanted:
        raise ValueError(f"{path} has no marker <!-- table:{next(iter(wanted))} -->; add it.")
    new = "\n".join(output)
    if new != old:
        replace_text(path, new)
    return new != old


def _marked_name(line: str) -> str | None:
    text = line.strip()
    if text.startswith("<!-- table:") and text.endswith(" -->"):
        return text.removeprefix("<!-- table:").removesuffix(" -->").strip()
    return None
