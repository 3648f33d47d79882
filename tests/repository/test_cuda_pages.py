"""The pages of the CUDA ladders: every rung described, drawn, shown as it is; figures readable."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from checkout import ROOT
from counters import ladder_times
from counters.counters import METRICS, Counted
from figure_words import check_words
from gemmule.core.problem import Problem
from gemmule.core.registry import OPS, ladder
from gemmule.core.rung import CudaRung
from gemmule.storage import evidence
from gemmule_lab.records.rows import Row
from gemmule_lab.report.ladder_gains import before
from gemmule_lab.report.ladder_table import examples, rows
from lab_rows import result_row
from pages import build, cuda_pages, ladder_tables, newest
from pages.cuda_pages import page, picture
from pages.excerpts import MOST_LINES, Telling, docstring, excerpt, marked, telling
from pages.figures import of_ladder
from pages.figures.drawing import Figure

RUNGS = [(op, rung) for op in OPS for rung in ladder(op, "cuda")]
DRAWN = [(op, name) for op in OPS for name in of_ladder(op)]
PAGES = sorted((ROOT / "docs" / "ladder").glob("*.md"))
named = pytest.mark.parametrize(("op", "rung"), RUNGS, ids=[f"{o}-{r.name}" for o, r in RUNGS])
drawn = pytest.mark.parametrize(("op", "name"), DRAWN, ids=[f"{o}-{n}" for o, n in DRAWN])


def text_of(op: str) -> str:
    return (ROOT / page(op)).read_text("utf-8")


@named
def test_every_rung_has_an_example(op: str, rung) -> None:
    """Else the table could say neither what it sums in nor whether it is proved."""
    assert examples(rung, 4096)


@pytest.mark.parametrize("op", OPS)
def test_the_table_calls_proved_what_is_on_record(op: str) -> None:
    on_record = {(one.folder, one.rung) for one in evidence.read()}
    for row, rung in zip(rows(op, "cuda", 4096, here=False), ladder(op, "cuda"), strict=True):
        if isinstance(rung, CudaRung):
            proved = (rung.folder, rung.name) in on_record
            assert (row.rung, row.proof != "unproved") == (rung.name, proved)


@named
def test_every_rung_explains_itself(op: str, rung) -> None:
    said = docstring(rung)
    assert "\n\n" in said, (
        f"the docstring of {rung.path.name} is its section on {page(op)}: after the first line, "
        f"say in a few sentences what it adds to {rung.after or 'nothing'}"
    )
    assert len(said.split()) >= 24, f"the docstring of {rung.path.name} says too little"
    text = text_of(op)
    heading = f"\n## {ladder(op, 'cuda').numbers[rung.name]} {rung.name}\n"
    assert heading in text, "run `make docs`"
    assert f"\n\n{said}\n" in text, "run `make docs`"


@named
def test_code_and_counters_shown_of_a_rung_are_in_its_files(op: str, rung) -> None:
    wanted = telling(rung)
    assert set(wanted.names) <= set(ladder_tables.DERIVED)
    assert any(wanted.product in title for title in ladder_tables.titles(op))
    shown = excerpt(rung)
    if shown is not None:
        assert shown.code.count("{") == shown.code.count("}")


@drawn
def test_figures_are_well_formed_and_their_words_do_not_collide(op: str, name: str) -> None:
    figure = of_ladder(op)[name]()
    assert figure.svg() == of_ladder(op)[name]().svg()
    root = ET.fromstring(figure.svg())
    assert {"title", "desc"} <= {child.tag.rpartition("}")[2] for child in root}
    check_words(figure)


def test_colliding_words_would_be_seen() -> None:
    figure = Figure("t", "d", 100)
    figure.text(20, 50, "one")
    figure.text(30, 52, "two")
    with pytest.raises(AssertionError, match="overlap"):
        check_words(figure)
    wide = Figure("t", "d", 100)
    wide.text(700, 50, "too long for its place")
    with pytest.raises(AssertionError, match="leaves"):
        check_words(wide)


@drawn
def test_every_figure_is_on_its_page(op: str, name: str) -> None:
    assert picture(op, name).name in text_of(op)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_of_the_ladders_pages_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)\)", path.read_text("utf-8"))
    assert not [target for target in targets if not (path.parent / target).exists()]


def test_a_page_that_lags_behind_the_evidence_is_stale(tmp_path: Path) -> None:
    for folder in ("docs/ladder", "docs/img/ladder", "evidence"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for name in ("README.md", "docs/ladder.md"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    build.update(tmp_path)
    assert build.stale(tmp_path) == []
    drawing = tmp_path / picture("matvec", "banks")
    drawing.write_text("<svg/>")
    assert build.stale(tmp_path) == [drawing]
    (path,) = (tmp_path / "evidence").glob(f"*/{ladder_times.FILE}")
    path.unlink()
    changed = build.update(tmp_path)
    assert tmp_path / page("matvec") in changed
    assert "Not measured yet" in (tmp_path / page("matvec")).read_text()


def test_excerpts_lie_between_their_comments() -> None:
    lines = [
        "  // excerpt",
        "  for (b) {",
        "#pragma unroll",
        "    y;  // }",
        "    // excerpt turn",
        "    z;",
        "  // end of excerpt",
        "  }",
        "// excerpt open",
    ]
    assert marked(lines[:4] + lines[6:]) == "for (b) {\n  y;  // }\n}"
    assert marked(lines, "turn") == "z;"
    assert marked(lines, "other") is None
    with pytest.raises(ValueError, match="not followed"):
        marked(lines, "open")


def test_an_excerpt_in_a_header_has_to_be_there(tmp_path: Path) -> None:
    class Rung:
        name, source_path = "early", tmp_path / "early.cu"

    Rung.source_path.write_text(
        "// excerpt prefetch of row_stream.cuh\n// counters by 8: a, %; b\n"
    )
    found = excerpt(Rung)
    assert found is not None
    assert found.path.name == "row_stream.cuh"
    assert "prefetch" in found.code
    assert telling(Rung) == Telling(("a, %", "b"), "8")
    Rung.source_path.write_text("// excerpt gone of row_stream.cuh\n")
    with pytest.raises(ValueError, match=r"no line '// excerpt gone', named by early\.cu"):
        excerpt(Rung)
    long = ["// excerpt", *["x;"] * (MOST_LINES + 1), "// end of excerpt"]
    Rung.source_path.write_text("\n".join(long))
    with pytest.raises(ValueError, match="more than"):
        excerpt(Rung)
    Rung.source_path.write_text("x;\n")
    assert excerpt(Rung) is None
    assert telling(Rung) == Telling()


def timed(name: str, us: float, over: dict[str, float], kind: str = "rung") -> Row:
    title = ladder_tables.titles("matvec")[0]
    return result_row(name, us, Problem("matvec", 4096, 4096), kind, over=over, group=title)


def test_a_rung_stands_beside_the_nearest_one_before_it() -> None:
    rungs = ladder("matvec", "cuda")
    chosen = {rung.name: rung for rung in rungs}
    present = ("thread_per_row", "p_threads_vector", "two_step")
    assert before(chosen["two_step"], rungs, present) == "p_threads_vector"
    assert before(chosen["p_threads_vector"], rungs, present) == "thread_per_row"
    assert before(chosen["thread_per_row"], rungs, present) is None
    rows = [
        timed("thread_per_row", 400.0, {"torch": 0.03}),
        timed("torch", 12.0, {}, "peer"),
        timed("two_step", 16.0, {"torch": 0.75, "thread_per_row": 25.0}),
    ]
    text = ladder_tables.rung_times("matvec", chosen["two_step"], rungs, rows)
    assert "x over thread\\_per\\_row | x over torch" in text
    assert "| 16.0 |" in text
    assert "| 25.00 | 0.75 |" in text
    assert ladder_tables.rung_times("matvec", chosen["y_blocks"], rungs, rows) == ""
    every = ladder_tables.all_times("matvec", rows).splitlines()
    assert [line.split("|")[1].strip().replace("\\", "") for line in every[2:]] == [
        "1 thread_per_row",
        "2a3 two_step",
        "torch",
    ]


def test_counters_are_shown_beside_those_of_the_rung_before() -> None:
    rungs = ladder("matvec", "cuda")
    title = ladder_tables.titles("matvec")[0]
    counted = [
        Counted(
            "matvec",
            name,
            title,
            "NVIDIA X",
            "2026-11-21",
            counters={**dict.fromkeys(METRICS, 8.0), "load sectors": sectors},
        )
        for name, sectors in (("thread_per_row", 128.0), ("warp_per_row", 16.0))
    ]
    chosen = next(rung for rung in rungs if rung.name == "warp_per_row")
    names = Telling(("sectors a load request", "DRAM read, MB"))
    lines = ladder_tables.telling("matvec", chosen, rungs, names, counted).splitlines()
    assert lines[0].endswith("| thread\\_per\\_row | warp\\_per\\_row |")
    assert lines[2] == "| sectors a load request | 16.0 | 2 |"
    assert lines[3] == "| DRAM read, MB | 0 | 0 |"
    assert ladder_tables.telling("matvec", chosen, rungs, names, []) == ""
    assert "Not counted yet" in ladder_tables.all_counters("matvec", [])


def test_a_rung_without_figure_or_times_still_has_a_section() -> None:
    """Some CPU rungs have no figure."""
    text = cuda_pages.of_rungs(
        "quantized", "cpu", (), lambda rung: None, lambda rung, rungs: ["Not measured yet."]
    )
    first, *others = text.split("\n\n## ")
    assert docstring(ladder("quantized", "cpu")[0]) in first
    assert any("![" not in other for other in others)
    assert all(other.endswith("Not measured yet.") for other in (first, *others))


def test_the_way_to_the_fastest_rung_is_told_step_by_step() -> None:
    _, rows = newest.ladder_rows(ROOT / "evidence")
    rungs = {rung.name: rung for rung in ladder("matmul", "cuda")}
    text = ladder_tables.story("matmul", rows, newest.counters(ROOT / "evidence"))
    steps = [line.split("|")[1].strip().replace("\\", "") for line in text.splitlines()[2:]]
    title = ladder_tables.titles("matmul")[0]
    times = {row.name: row.times_us.median for row in rows if row.group == title}
    ours = {name: us for name, us in times.items() if name in rungs and not rungs[name].vendor}
    assert steps[-1] == min(ours, key=ours.__getitem__)
    assert rungs[steps[0]].after is None
    for name, earlier in zip(steps[1:], steps, strict=False):
        assert before(rungs[name], tuple(rungs.values()), ours) == earlier
    assert text.splitlines()[-1].count("|") == text.splitlines()[0].count("|")
    assert "Not measured yet" in ladder_tables.story("matmul", (), ())


def test_the_products_of_the_ladders_are_named_apart() -> None:
    spots = list(ladder_times.spots())
    assert len({spot.title for spot in spots}) == len(spots)
    assert {spot.op for spot in spots} == set(OPS)
    for op in OPS:
        timed = {name for spot in spots if spot.op == op for name in dict(spot.rungs)}
        assert {rung.name for rung in ladder(op, "cuda")} <= timed
