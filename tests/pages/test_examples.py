"""Every example is listed and described, and the short ones run.

The longer ones, which need more, are run by the tests of layers and of models.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import ROOT
from site_pages import links

FOLDER = ROOT / "examples"
# A model, a download, a server, minutes: run by the tests of what they show.
LONG = ("generate_tokens", "sentence_embeddings", "serve_model", "experts_layer")
SHORT = [path for path in sorted(FOLDER.glob("*.py")) if path.stem not in LONG]


@pytest.mark.parametrize("path", SHORT, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, elsewhere: Path, tree: dict[str, str]) -> None:
    """Every example asserts what it shows, in a folder that it must leave as it was."""
    assert any(isinstance(n, ast.Assert) or "assert_" in ast.dump(n) for n in ast.walk(_tree(path)))
    run = [sys.executable, str(path)]
    done = subprocess.run(run, env=tree, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    assert not list(elsewhere.iterdir())


def test_there_are_ten_short_examples_and_four_notebooks() -> None:
    assert len(SHORT) >= 10
    assert all(len(path.read_text("utf-8").splitlines()) <= 60 for path in SHORT)
    assert len(list((FOLDER / "notebooks").glob("*.ipynb"))) >= 4


def test_every_example_is_listed_and_says_what_it_is() -> None:
    listed = {link.file for link in links(FOLDER / "README.md")}
    present = {*FOLDER.glob("*.py"), *(FOLDER / "notebooks").glob("*.ipynb")}
    assert listed == {path.resolve() for path in present}
    assert all(ast.get_docstring(_tree(path)) for path in FOLDER.glob("*.py"))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))
