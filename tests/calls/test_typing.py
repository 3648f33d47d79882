"""What mypy finds in a program of a user; tests/pages asks pyright."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import typed_program

api = pytest.importorskip("mypy.api")


def test_a_checker_knows_results_and_finds_words_that_mean_nothing(
    tmp_path: Path, setting: Callable[..., None]
) -> None:
    typed_program.write(tmp_path)
    setting(MYPYPATH=tmp_path / "stubs")
    said, complaint, _ = api.run(["--strict", "--config-file=", str(tmp_path / "program.py")])
    assert not complaint
    found: dict[int, str] = {}
    for line in said.splitlines():
        if (match := re.search(r"program\.py:(\d+): (error|note): (.*)", line)) is not None:
            number, kind, text = int(match[1]), match[2], match[3]
            if kind == "error" or text.startswith("Revealed"):
                found[number] = "error" if kind == "error" else text
    typed_program.check(found)
