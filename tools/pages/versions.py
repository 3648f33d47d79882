"""Versions of the site side by side, each in a folder of its name, and a list that all read.

A folder of sites has ``<version>/``, ``versions.js``, which tells every page what there is to
switch to, and ``index.html``, which leads to the newest. Nothing is asked of a server.
"""

from __future__ import annotations

import html
import json
from pathlib import Path

from gemmule.storage.atomic import replace_text

LIST, FIRST = "versions.js", "index.html"


def versions(folder: Path) -> dict[str, list[str]]:
    """Return the pages of each version in a folder, the newest first."""
    from packaging.version import InvalidVersion, Version

    found = {}
    for one in folder.iterdir():
        try:
            place = Version(one.name)
        except InvalidVersion:
            continue
        if (one / FIRST).is_file():
            found[place] = one
    return {one.name: _pages(one) for _, one in sorted(found.items(), reverse=True)}


def _pages(site: Path) -> list[str]:
    pages = (path.relative_to(site) for path in site.rglob("*.html"))
    return sorted(
        page.with_suffix("").as_posix() for page in pages if not page.parts[0].startswith("_")
    )


def write(folder: Path) -> dict[str, list[str]]:
    """Write the list of a folder's versions, and the page that leads to the newest; return them."""
    known = versions(folder)
    newest = next(iter(known))
    links = "".join(
        f'<li><a href="{html.escape(name)}/{FIRST}">{html.escape(name)}</a></li>' for name in known
    )
    replace_text(folder / LIST, f"window.gemmuleVersions = {json.dumps(known)};\n")
    replace_text(
        folder / FIRST,
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>gemmule</title>'
        f'<meta http-equiv="refresh" content="0; url={html.escape(newest)}/{FIRST}"></head>'
        f"<body><h1>gemmule</h1><ul>{links}</ul></body></html>\n",
    )
    return known
