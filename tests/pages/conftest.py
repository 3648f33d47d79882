"""What the tests of pages, examples and notebooks share: they run in folders of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from checkout import ROOT


@pytest.fixture(scope="session")
def tree() -> dict[str, str]:
    """The environment of a child process that imports this checkout, and runs on one kind."""
    paths = [str(ROOT / "src"), str(ROOT / "tools")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "GEMMULE_DEVICE": "cpu"}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, where what a page writes disappears."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
