"""The page of who may write where and what is run as code: every line has its test."""

from __future__ import annotations

import re

import pytest

from checkout import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text("utf-8")
ROWS = [
    line
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.endswith("| Test |")
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:40])
def test_every_line_names_tests_that_exist(row: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row.split("|")[-2])
    assert named
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text("utf-8"), f"{path} has no {test}"


def test_the_page_has_its_three_tables_and_is_linked() -> None:
    assert len(ROWS) >= 20
    assert PAGE.count("\n|---") == 3
    assert "(security.md)" in (ROOT / "docs" / "index.md").read_text("utf-8")
    assert "(docs/security.md)" in (ROOT / "README.md").read_text("utf-8")
