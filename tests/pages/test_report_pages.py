"""Pages of results in headless Chromium, as readers see them: nothing cut, all to be read."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chromium
from checkout import EVIDENCE
from gemmule.core.problem import Problem
from gemmule.timing.sampler import ratio
from gemmule_lab import cli
from gemmule_lab.demo import gpu, story
from gemmule_lab.records import results
from gemmule_lab.records.results import append
from gemmule_lab.records.rows import Facts, Row, Speedup, make_row, speedup_of
from gemmule_lab.report import render
from lab_rows import machine, result_row, samples

pytestmark = pytest.mark.skipif(
    chromium.found() is None, reason="needs Chromium: apt-get install chromium"
)
FAULTS = (Path(__file__).parent / "faults.js").read_text("utf-8")
SIZES = {"telephone": (360, 740), "screen": (1280, 800)}
MOST_BYTES = 3_000_000
OPEN = "for (const fold of document.querySelectorAll('details')) fold.open = true"
PAGES = {
    "an H200": sorted((EVIDENCE / "nvidia-h200" / "bench").glob("*.jsonl")),
    "every rung of a GPU": [EVIDENCE / "nvidia-h200" / "ladder.jsonl"],
    "every rung of a CPU": [EVIDENCE / "intel-r-xeon-r-processor" / "cpu_ladder.jsonl"],
    "two machines": sorted(EVIDENCE.glob("nvidia-h*/bench/quantised.jsonl")),
    "a study": [EVIDENCE / "nvidia-h200" / "study-003.jsonl"],
}


def new_rows() -> list[Any]:
    """Return a run as `gemmule bench` writes it: with single blocks, caches, and a disturbance."""
    here = dataclasses.replace(
        machine(), caches={"L1": 1 << 16, "L2": 4 << 20}, timestamp="2026-11-27"
    )
    rows: list[Row] = []
    for place, (n, dtype) in enumerate(itertools.product((128, 512, 2048), ("float32", "float16"))):
        problem = Problem("matvec", n, n, a=dtype, b=dtype, out=dtype)
        ours = samples("threads", n / 10, spread=0.02)
        theirs = samples("numpy", n / 10 * np.linspace(0.7, 2.0, 6)[place], spread=0.03)
        title = f"{n} x {n}, matvec, {dtype}"
        speedups = {"numpy": speedup_of(ratio(ours, theirs))}
        facts = Facts(problem, "rung", "cold", error_ratio=0.1, group=title)
        flags = ("other programs used 62% of the processors",) if place == 5 else ()
        rows.append(dataclasses.replace(make_row(here, facts, ours, speedups), flags=flags))
        rows.append(make_row(here, Facts(problem, "peer", "cold", group=title), theirs))
    return [here, *rows]


def demo_page(folder: Path) -> Path:
    """Write the demo's page of a CPU whose NumPy stalled, and of a GPU; return where."""
    stalled = {"numpy on float32": Speedup(434.0, 0.3, 900.0, 9, 0.95, "undecided")}
    own = []
    for shape, op, form in itertools.product(
        ("384 x 384 (24)", "384 x 1536 (6)", "1536 x 384 (6)"), story.OPS, story.FORMATS
    ):
        problem = Problem("matvec", 384, 384)
        one = result_row("threads", 10.0, problem, group=f"{shape}, {op}, {form}")
        own.append(dataclasses.replace(one, environment=machine().id, speedups=stalled))
    other = machine(3000.0, "NVIDIA H100 80GB HBM3")
    theirs = []
    for _, product in gpu.products():
        against = "torch on bfloat16" if product.form.bits else "torch"
        over = {against: 0.6, gpu.PACKED: 24.0}
        problem = Problem("matvec", *product.shape)
        one = result_row("ours", 9.0, problem, over=over, group=product.title)
        theirs.append(dataclasses.replace(one, environment=other.id))
    append(folder / "demo.jsonl", [machine(), *own, other, *theirs])
    told = gpu.story(other.device, theirs)
    assert told is not None
    page = folder / "demo.html"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns where words leave a drawing no room
        read = results.read(folder / "demo.jsonl")
        render.write_html(read, page, title="gemmule demo", stories=[story.story(own), told])
    return page


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, made = tmp_path_factory.mktemp("pages"), {}
    append(folder / "new.jsonl", new_rows())
    for name, files in {**PAGES, "a new run": [folder / "new.jsonl"]}.items():
        made[name] = folder / f"{name.replace(' ', '-')}.html"
        assert cli.run(["report", *map(str, files), "-o", str(made[name])]) == 0
    return {**made, "a demo": demo_page(folder)}


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Chromium]:
    one = chromium.Chromium()
    yield one
    one.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [*PAGES, "a new run", "a demo"])
def test_nothing_is_cut_and_all_can_be_read(
    name: str, size: str, scheme: str, pages: dict[str, Path], browser: chromium.Chromium
) -> None:
    page = pages[name]
    assert page.stat().st_size <= MOST_BYTES
    browser.show(page, *SIZES[size], scheme)
    for state in ("folded", "open"):
        seen = browser.run(FAULTS)
        assert seen["found"] == [], state
        browser.run(OPEN)
    assert seen["boxes"] > 50
    assert seen["texts"] > 50
    assert seen["drawings"] >= (0 if name == "a study" else 6)
    assert browser.requests == [page.as_uri()]
    assert browser.complaints == []


@pytest.mark.parametrize("size", SIZES)
def test_the_first_screen_tells_what_won_where_it_lost_and_on_what_machine(
    size: str, pages: dict[str, Path], browser: chromium.Chromium
) -> None:
    browser.show(pages["an H200"], *SIZES[size], "light")
    lead, bottom, chart = browser.run(
        """(() => {
        const lead = document.querySelector('.lead'), chart = document.querySelector('figure svg');
        const at = chart.getBoundingClientRect();
        return [lead.textContent, lead.getBoundingClientRect().bottom, (at.top + at.bottom) / 2];
        })()"""
    )
    for words in (
        "On NVIDIA H200, 2026-11-21",
        "surely faster on 18",
        "It gained most in",
        "It lost",
    ):
        assert words in lead
    height = SIZES[size][1]
    assert bottom < 0.75 * height
    assert chart < height, "half of the chart is on the first screen"
    tall = browser.run("document.documentElement.scrollHeight")
    assert tall < 2.5 * height, "the rest is folded"


def test_rows_are_sorted_and_filtered_by_keyboard(
    pages: dict[str, Path], browser: chromium.Chromium
) -> None:
    browser.show(pages["an H200"], *SIZES["screen"], "light")
    focused = "document.activeElement"
    browser.press("Tab")
    assert browser.run(f"{focused}.textContent").startswith("Every kind of product")
    browser.press("Enter", "\r")
    assert browser.run(f"{focused}.parentElement.open")
    browser.press("/", "/")
    for letter in "int4":
        browser.press(letter, letter)
    shown = "[...document.querySelector('table.sort').tBodies[0].rows].filter(r => !r.hidden)"
    kinds = browser.run(f"{shown}.map(row => row.cells[0].textContent)")
    assert kinds == ["matvec int4", "matmul int4"]
    assert browser.run("document.querySelector('output').textContent") == "2 of 19 rows"
    browser.press("Escape")
    for _ in range(3):
        browser.press("Tab")
    assert browser.run(f"{focused}.textContent") == "mean"
    for up in (True, False):
        browser.press("Enter", "\r")
        means = browser.run(f"{shown}.map(row => parseFloat(row.cells[2].textContent))")
        assert len(means) == 19
        assert means == sorted(means, reverse=not up)
    assert browser.run("document.querySelector('th[aria-sort]').textContent") == "mean"


def test_the_page_is_read_without_its_script_and_prints(
    pages: dict[str, Path], browser: chromium.Chromium
) -> None:
    browser.ask("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.show(pages["a new run"], *SIZES["telephone"], "light")
        assert browser.run("document.querySelectorAll('input, button').length") == 0
        browser.run(OPEN)
        assert browser.run(FAULTS)["found"] == []
        rows = browser.run("document.querySelectorAll('tbody tr').length")
        assert rows > 12
    finally:
        browser.ask("Emulation.setScriptExecutionDisabled", value=False)
    browser.show(pages["a new run"], *SIZES["screen"], "light", media="print")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run("document.querySelectorAll('details.fold:not([open])').length") == 0
    assert browser.run(FAULTS)["found"] == []


def test_the_check_itself_sees_what_is_wrong(tmp_path: Path, browser: chromium.Chromium) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<body style='width:300px'><p style='color:#999'>pale</p>"
        "<p style='width:40px;overflow:hidden;white-space:nowrap'>much too long for it</p>"
        "<svg width=100 height=50><text x=90 y=20>outside</text>"
        "<text x=0 y=40>one</text><text x=3 y=41>two</text></svg></body>"
    )
    browser.show(page, *SIZES["telephone"], "light")
    found = " ".join(browser.run(FAULTS)["found"])
    for words in (
        "contrast 2.85 of p",
        "cut at the side: p",
        "outside its drawing",
        "on each other",
    ):
        assert words in found, found
