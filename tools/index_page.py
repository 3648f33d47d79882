"""The README as a package index shows it, and the project's addresses: a hook of Hatchling.

An index page has no files beside it, so relative links lead nowhere there. This hook puts one
address before them, `address` in ``[tool.hatch.metadata.hooks.custom]`` of pyproject.toml: where
the repository is hosted. The owner fills it in; as long as it is empty, links become their words.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ModuleNotFoundError:  # nothing is built here
    MetadataHookInterface = object

# A fence of code, or a link or picture: its words, its path, and its place in the page.
_PIECE = re.compile(
    r"^```.*?^```\s*?$|(?P<picture>!?)\[(?P<words>(?:[^\[\]]|\[[^\[\]]*\])*)\]"
    r"\((?P<path>[^)\s#]*)(?P<place>#[^)\s]*)?\)",
    re.MULTILINE | re.DOTALL,
)


def with_links(text: str, target: Callable[[str, bool], str | None]) -> str:
    """Return Markdown with its relative links changed; code and addresses stay as they are.

    ``target(path, is_picture)`` returns the new path, or None where only the words shall stay. A
    link within the page has the empty path.
    """

    def changed(piece: re.Match[str]) -> str:
        path = piece["path"]
        if path is None or re.match(r"[a-z]+:", path):
            return piece[0]
        new = target(path, bool(piece["picture"]))
        if new is None:
            return piece["words"]
        return f"{piece['picture']}[{piece['words']}]({new}{piece['place'] or ''})"

    return _PIECE.sub(changed, text)


def for_an_index(text: str, address: str) -> str:
    """Return a README whose links lead to the files of a repository at `address`.

    >>> for_an_index("[a](docs/a.md#b), [c](#d), ![e](e.svg)", "https://host/owner/gemmule/")
    '[a](https://host/owner/gemmule/blob/HEAD/docs/a.md#b), [c](#d), \
![e](https://host/owner/gemmule/raw/HEAD/e.svg)'
    >>> for_an_index("[a](docs/a.md#b), [c](#d)", "")
    'a, [c](#d)'
    """

    def target(path: str, is_picture: bool) -> str | None:
        if not path:
            return ""
        if not address:
            return None
        return f"{address.rstrip('/')}/{'raw' if is_picture else 'blob'}/HEAD/{path}"

    return with_links(text, target)


def urls_of(address: str) -> dict[str, str]:
    """Return a project's addresses; none where its owner has not filled in where it is hosted."""
    if not address:
        return {}
    base = address.rstrip("/")
    return {
        "Source": base,
        "Documentation": f"{base}/blob/HEAD/docs/index.md",
        "Changelog": f"{base}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{base}/issues",
    }


class IndexPageHook(MetadataHookInterface):  # type: ignore[misc]  # Any where hatchling is absent
    """Gives the package its README and its addresses."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in what pyproject.toml calls dynamic."""
        address = self.config.get("address", "")
        text = (Path(self.root) / "README.md").read_text("utf-8")
        readme = {"content-type": "text/markdown", "text": for_an_index(text, address)}
        metadata.update(readme=readme, urls=urls_of(address))
