"""What the page of a ladder takes from the files of a rung: its words, some of its code, counters.

The words are the docstring of the rung's Python file. The code lies between two comments of its
``.cu``, or of a header where the ``.cu`` names it, so what a page shows cannot differ from what
runs; another comment names the counters that explain the rung::

    // excerpt                          the lines to show begin here
    // end of excerpt                   and end here
    // excerpt turn of row_stream.cuh   they lie in that header, after its line "// excerpt turn"
    // counters: DRAM read, MB; occupancy, %
    // counters by columns: ...         of the product in whose title that word stands

All of them may be left out: a rung without shows no code, and every counter.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmule.core.rung import HEADERS_FOLDER, Rung

MOST_LINES = 30
END = "// end of excerpt"
_ELSEWHERE = re.compile(r"^// excerpt (\w+) of ([\w.]+)$", re.MULTILINE)
_COUNTERS = re.compile(r"^// counters(?: by ([\w ]+))?: (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Some lines of a rung as a page shows them, and the file they come from."""

    path: Path
    code: str


@dataclass(frozen=True, slots=True)
class Telling:
    """The counters that explain a rung (none: all do), on the product whose title has `product`."""

    names: tuple[str, ...] = ()
    product: str = ""


def docstring(rung: Rung) -> str:
    """Return the docstring of a rung's file."""
    return ast.get_docstring(ast.parse(rung.path.read_text(encoding="utf-8"))) or ""


def excerpt(rung: Rung) -> Excerpt | None:
    """Return the lines that a rung's ``.cu`` shows, or None where it marks none.

    ValueError where the lines that it names are not there, not ended, or more than 30.
    """
    path, name = rung.source_path, ""
    elsewhere = _ELSEWHERE.search(path.read_text(encoding="utf-8"))
    if elsewhere is not None:
        path, name = HEADERS_FOLDER / elsewhere[2], elsewhere[1]
    code = marked(path.read_text(encoding="utf-8").splitlines(), name)
    if code is None and name:
        raise ValueError(f"{path.name} has no line '// excerpt {name}', named by {rung.name}.cu.")
    if code is not None and not 0 < code.count("\n") + 1 <= MOST_LINES:
        raise ValueError(f"{path.name} has an excerpt of more than {MOST_LINES} lines; shorten it.")
    return None if code is None else Excerpt(path, code)


def telling(rung: Rung) -> Telling:
    """Return the counters that a rung's ``.cu`` names."""
    found = _COUNTERS.search(rung.source_path.read_text(encoding="utf-8"))
    if found is None:
        return Telling()
    return Telling(tuple(name.strip() for name in found[2].split(";")), found[1] or "")


def marked(lines: Sequence[str], name: str = "") -> str | None:
    """Return the lines after ``// excerpt NAME``, braces closed, or None where it is not there.

    ValueError where no ``// end of excerpt`` follows.
    """
    stripped = [line.strip() for line in lines]
    opening = f"// excerpt {name}".strip()
    if opening not in stripped:
        return None
    begin = stripped.index(opening) + 1
    if END not in stripped[begin:]:
        raise ValueError(f"the line {opening!r} is not followed by {END!r}; add it.")
    end = stripped.index(END, begin)
    kept = [line for line in lines[begin:end] if not line.startswith("#pragma unroll")]
    return textwrap.dedent("\n".join([*kept, *_closing(kept)]))


def _closing(lines: Sequence[str]) -> list[str]:
    """Return the braces that would close those that the lines leave open."""
    stack: list[str] = []
    for line in lines:
        code = line.partition("//")[0]
        for character in code:
            if character == "{":
                stack.append(code[: len(code) - len(code.lstrip())])
            elif character == "}" and stack:
                stack.pop()
    return [f"{indent}}}" for indent in reversed(stack)]
