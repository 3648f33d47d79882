"""Tests of a GPU are skipped without one; here is what can be known of them on any machine."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkout import TESTS

FOLDER = TESTS / "gpu"


def imported(code: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of what a source takes from gemmule, in its strings of code too."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gemmule"):
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and "import " in str(node.value):
            try:
                yield from imported(str(node.value))
            except SyntaxError:
                continue  # a sentence


def absent(code: str) -> list[str]:
    """Return what a source imports and gemmule does not have."""
    found = []
    for module, name in set(imported(code)):
        try:
            if not hasattr(importlib.import_module(module), name):
                importlib.import_module(f"{module}.{name}")
        except ImportError:
            found.append(f"{module}.{name}")
    return sorted(found)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_what_they_import_exists(path: Path) -> None:
    assert absent(path.read_text()) == []


def test_absent_names_are_seen() -> None:
    code = (
        'from gemmule.errors import Gone\nCHILD = """\nfrom gemmule.backends import driver\n"""\n'
    )
    assert absent(code) == ["gemmule.backends.driver", "gemmule.errors.Gone"]
