"""The README holds: its Python runs, its links exist, its commands are real, its tables current."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import statistics
import tomllib
from pathlib import Path
from xml.etree import ElementTree as ET

import click
import pytest

from checkout import EVIDENCE, ROOT
from gemmule.core.registry import OPS
from gemmule.core.rung import BACKENDS
from gemmule.errors import INSTALL
from gemmule.settings import cache_folder, default_device
from gemmule_lab import cli
from layers import LAYERS
from pages import build, cpu_speed, note_tables, speed_table

DOCS = ROOT / "docs"
NOTES = sorted((DOCS / "notes").glob("*.md"))
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *sorted(DOCS.glob("*.md")),
    *NOTES,
    *sorted((DOCS / "decisions").glob("*.md")),
]


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
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


def test_the_tables_of_speeds_have_no_gaps() -> None:
    """Each size by 1, 4 and 16 columns was measured, and each format by a vector on a CPU."""
    assert "|  |" not in speed_table.quantised(ROOT)
    told = cpu_speed.processors(ROOT).splitlines()[4:]
    assert {line.split("|")[2].strip() for line in told} == {"float32", "float16", "int8", "int4"}
    assert all(line.split("|")[3].strip() for line in told)


def test_the_sentence_on_cublas_says_what_is_on_record() -> None:
    """For which few columns most products are 10 % faster, how far float32 and odd halves go."""
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    fastest: dict[tuple[str, int], dict[str, float]] = {}
    most: dict[str, float] = {}
    for line in (EVIDENCE / "nvidia-h200" / "margins.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        products = fastest.setdefault((row["a"], row["n"]), {})
        product = f"{row['m']} {row['k']} {row['layout_a']} {row['layout_b']}"
        products[product] = max(products.get(product, 0.0), row["ratio"])
        most[row["rung"]] = max(most.get(row["rung"], 0.0), row["ratio"])

    def columns(dtype: str) -> list[int]:
        few = {n: some.values() for (a, n), some in fastest.items() if a == dtype and n <= 32}
        return sorted(n for n, some in few.items() if statistics.median(some) >= 1.1)

    assert columns("float16") == columns("bfloat16") == [2, 4]
    assert columns("float32") == [2, 4, 8, 16]
    assert columns("float64") == [2, 4, 8]
    assert "by 2 to 4 columns in halves, 2 to 16 in float32 and 2 to 8 in float64" in text
    assert f"(up to {most['wgmma_repacked']:.1f} times as fast)" in text
    assert f"up to {most['wgmma_3xfp16']:.1f} times as fast and have smaller" in text


def test_staleness_is_seen(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/ladder.md", "docs/reliability.md"):
        (tmp_path / name).write_text((ROOT / name).read_text("utf-8"), "utf-8")
    shutil.copytree(ROOT / "evidence", tmp_path / "evidence")
    page = tmp_path / "docs" / "ladder.md"
    page.write_text(page.read_text("utf-8").replace("scalar_loop", "other_loop"), "utf-8")
    assert build.stale(tmp_path) == [page]
    assert build.update(tmp_path) == [page]
    assert build.stale(tmp_path) == []


def test_notes_say_what_is_on_record(tmp_path: Path) -> None:
    """A table of a note follows the run on record, each time in the column of its side."""
    name = "docs/notes/cuda_vecmat.md"
    bench = tmp_path / "evidence/nvidia-h200/bench"
    bench.mkdir(parents=True)
    (tmp_path / name).parent.mkdir(parents=True)
    shutil.copyfile(ROOT / name, tmp_path / name)
    lines = (ROOT / "evidence/nvidia-h200/bench/matvec.jsonl").read_text("utf-8").splitlines()
    changed = []
    for line in lines:
        row = json.loads(line)
        if row.get("group") == "1024 x 1024, x A, float64" and row["kind"] == "rung":
            row["times_us"] = dict.fromkeys(row["times_us"], 77.7) | {"n": 3}
        changed.append(json.dumps(row))
    (bench / "matvec.jsonl").write_text("\n".join(changed) + "\n", "utf-8")
    assert note_tables.update(tmp_path) == [tmp_path / name]
    text = (tmp_path / name).read_text("utf-8")
    header = next(one for one in text.splitlines() if one.startswith("| side"))
    doubles = next(one for one in text.splitlines() if one.startswith("| doubles |"))
    assert doubles.split("|")[header.split("|").index(" 1024 ")] == " 77.7 "
    assert text.count("77.7") == 1
    assert note_tables.update(tmp_path) == []


def test_a_note_shows_both_clocks(tmp_path: Path) -> None:
    """The figures of the cross-check stand in microseconds, and their difference."""
    page, record = tmp_path / "docs/notes/measuring.md", tmp_path / "evidence/a-gpu/nvbench.jsonl"
    for path in (page, record):
        path.parent.mkdir(parents=True)
    page.write_text("<!-- table:crosscheck -->\n\nold\n\n<!-- /table -->\n", "utf-8")
    about = {"schema": 1, "device": "A GPU", "date": "2026-01-02", "nvbench": "9.8"}
    row = {**about, "product": "3 x 4", "ours_s": 2e-6, "nvbench_s": 5.5e-6}
    record.write_text(json.dumps(row) + "\n", "utf-8")
    assert note_tables.update(tmp_path) == [page]
    text = page.read_text("utf-8")
    assert "A GPU, 2026-01-02, NVBench 9.8" in text
    assert "| 3 x 4 | 2 | 5.5 | 3.5 |" in text


def test_pictures_are_our_own_and_described() -> None:
    for path in sorted((ROOT / "docs" / "img").glob("*.svg")):
        root = ET.parse(path).getroot()
        names = {child.tag.rpartition("}")[2] for child in root}
        assert {"title", "desc"} <= names, path.name
        assert "<script" not in path.read_text("utf-8")


def test_the_picture_of_the_rooms_is_that_of_the_layers() -> None:
    """Rooms from top to bottom as tests/layers.py has them, from the last up."""
    root = ET.parse(ROOT / "docs" / "img" / "architecture.svg").getroot()
    tags = [(child.tag.rpartition("}")[2], child) for child in root]
    drawn: dict[float, list[str]] = {}
    for (tag, box), (_, label) in itertools.pairwise(tags):
        if tag == "rect" and box.get("rx") == "5":
            drawn.setdefault(float(box.attrib["y"]), []).append(label.text or "")
    layers = [layer for layer in reversed(LAYERS) if layer != ("__main__",)]
    assert [sorted(drawn[y]) for y in sorted(drawn)] == [sorted(layer) for layer in layers]


@pytest.mark.parametrize("page", NOTES, ids=lambda page: page.stem)
def test_notes_hold_one_table_of_what_was_tried(page: Path) -> None:
    """Beside what is generated from what is on record."""
    generated = re.compile(r"<!-- table:\w+ -->.*?<!-- /table -->", re.S)
    lines = generated.sub("", page.read_text("utf-8")).splitlines()
    tables = [i for i, line in enumerate(lines) if line.startswith("|") and lines[i - 1][:1] != "|"]
    assert [lines[i] for i in tables] == ["| tried | expected | measured | kept? |"]
    rows = [line for line in lines if line.startswith("|")][2:]
    assert not [row for row in rows if row.count("|") != 5 or "|  |" in row]


def test_every_ladder_has_a_page_of_notes() -> None:
    wanted = {f"{backend}_{op}" for backend in BACKENDS for op in OPS}
    assert {page.stem for page in NOTES} == wanted | {
        "cpu_threads",
        "cuda_bytes",
        "cuda_grouped",
        "first_products",
        "measuring",
        "outofcore",
    }


def test_the_table_of_environment_variables_is_complete() -> None:
    source = (ROOT / "src" / "gemmule" / "settings.py").read_text("utf-8")
    read = set(re.findall(r"(?:environ\.get|_switched_on)\(\s*\"(GEMMULE_[A-Z_]+)\"", source))
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


def test_messages_advise_the_packages_of_the_extras() -> None:
    """By their own names, which an index has even where gemmule itself is a clone."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    for extra, command in INSTALL.items():
        wanted = [*extras[extra]]
        for place, name in enumerate(wanted):
            if name == "gemmule[torch]":
                wanted[place : place + 1] = extras["torch"]
        assert shlex.split(command) == ["pip", "install", *wanted]
