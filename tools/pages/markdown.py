"""Tables as Markdown, and the places between markers where documents show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gemmule.storage.atomic import replace_text
from gemmule_lab.report.tables import TableData


def markdown(table: TableData) -> str:
    """Return a table as GitHub Markdown; characters that would break or script it are escaped."""
    lines = [_markdown_line(table.header)]
    lines.append(_markdown_line(["---:" if right else "---" for right in table.numeric], raw=True))
    lines += [_markdown_line(row) for row in table.rows]
    return "\n".join(lines)


def _markdown_line(cells: Sequence[str], *, raw: bool = False) -> str:
    return "| " + " | ".join(cells if raw else [_markdown_text(c) for c in cells]) + " |"


def _markdown_text(text: str) -> str:
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join("\\" + c if c in "\\|`*_[]" else c for c in text)


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
