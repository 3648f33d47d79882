"""The README holds: its Python runs, its links exist, its commands are real, its tables current."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import click
import pytest

from gemmule.lab import cli
from gemmule.settings import cache_folder, default_device
from pages import build, speed_table

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert (names["y"] == 4096).all()  # type: ignore[attr-defined]
    assert (names["y2"] == names["y"]).all()  # type: ignore[attr-defined]
    assert names["C"].shape == (1000, 1000)  # type: ignore[attr-defined]
    assert abs(names["yq"] - names["y"]).max() < 0.5  # type: ignore[operator]
    assert "rung" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    local = [target for target in targets if not target.startswith(("http://", "https://"))]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert not missing


def test_the_commands_of_the_pages_exist() -> None:
    known = set(cli.cli.list_commands(click.Context(cli.cli)))
    for page in PAGES:
        named = set(re.findall(r"`gemmule ([a-z]+)", page.read_text("utf-8")))
        assert named <= known, page.name
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.M))
    for page in PAGES:
        assert set(re.findall(r"^make ([a-z]+)", page.read_text("utf-8"), re.M)) <= targets


def test_generated_parts_are_current() -> None:
    assert build.stale(ROOT) == [], "run `make docs`"


def test_staleness_is_seen(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/ladder.md"):
        (tmp_path / name).write_text((ROOT / name).read_text("utf-8"), "utf-8")
    speed_table.copy_sources(ROOT, tmp_path)
    page = tmp_path / "docs" / "ladder.md"
    page.write_text(page.read_text("utf-8").replace("scalar_loop", "other_loop"), "utf-8")
    assert build.stale(tmp_path) == [page]
    assert build.update(tmp_path) == [page]
    assert build.stale(tmp_path) == []


def test_pictures_are_our_own_and_described() -> None:
    for path in sorted((ROOT / "docs" / "img").glob("*.svg")):
        root = ET.parse(path).getroot()
        names = {child.tag.rpartition("}")[2] for child in root}
        assert {"title", "desc"} <= names, path.name
        assert "<script" not in path.read_text("utf-8")


def test_the_table_of_environment_variables_is_complete() -> None:
    source = (ROOT / "src" / "gemmule" / "settings.py").read_text("utf-8")
    read = set(re.findall(r"environ\.get\(\s*\"(GEMMULE_[A-Z_]+)\"", source))
    listed = set(re.findall(r"^\| `(GEMMULE_[A-Z_]+)`", _environment_page(), re.M))
    assert read == listed != set()
    elsewhere = [
        path.name
        for path in (ROOT / "src").rglob("*.py")
        if path.name != "settings.py"
        and re.search(r"environ(\.get\(|\[)[^\n]*GEMMULE_", path.read_text("utf-8"))
    ]
    assert not elsewhere
    assert cache_folder().is_absolute()
    assert default_device() in (None, "cpu", "cuda")


def _environment_page() -> str:
    return (ROOT / "docs" / "environment.md").read_text("utf-8")
