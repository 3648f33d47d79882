"""What a release says of itself in several places: its version, and what changed."""

from __future__ import annotations

import re
import tomllib

import gemmule
from checkout import SOURCE

ROOT = SOURCE.parent


def test_the_version_is_written_once_and_cited_so() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/gemmule/__init__.py"
    assert f"\nversion: {gemmule.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_changelog_has_the_version_with_its_date_below_what_is_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    unreleased, released = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.M)[:2]
    assert unreleased == ("Unreleased", "")
    assert released[0] == gemmule.__version__
    assert f"\ndate-released: {released[1]}\n" in (ROOT / "CITATION.cff").read_text()
