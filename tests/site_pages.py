"""The Markdown pages that people read, and what stands in them: blocks, headings, links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from checkout import ROOT

DOCS = ROOT / "docs"
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")
PAGES = [
    *(ROOT / name for name in (*OUTSIDE, "evidence/README.md")),
    *sorted(path for path in DOCS.rglob("*.md") if DOCS / "_build" not in path.parents),
]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^)\s]+)\)")


class Link(NamedTuple):
    """A link of a page: the file, and the heading in it (empty: its top)."""

    file: Path
    place: str


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the code of a page in some languages, in order."""
    found = _FENCE.findall(page.read_text("utf-8"))
    return [code for language, code in found if language in languages]


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return _FENCE.sub("", page.read_text("utf-8"))


def headings(page: Path) -> list[str]:
    """Return the headings of a page, from all levels."""
    return re.findall(r"^#+ (.+?)\s*$", prose(page), re.MULTILINE)


def slugs(page: Path) -> set[str]:
    """Return the places that links may name: the headings, as GitHub and Sphinx write them."""
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings(page)}


def links(page: Path) -> list[Link]:
    """Return the links of a page that lead to files or places of this repository."""
    found = []
    for target in _LINK.findall(prose(page)):
        if not re.match(r"[a-z]+:", target):
            path, _, place = target.partition("#")
            found.append(Link((page.parent / path).resolve() if path else page, place))
    return found
