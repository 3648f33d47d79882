"""The drawings of studies: words at their own places, dtypes named, colours and numbers to read."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from gemmule_lab import studies
from gemmule_lab.records.rows import Ceiling
from gemmule_lab.report import bars, heat_maps, line_chart
from gemmule_lab.report.charts import Mark
from gemmule_lab.studies import pictures
from gemmule_lab.studies.grid import Cell
from gemmule_lab.studies.records import Rows
from svg_words import faults, words_of
from test_results import machine
from test_studies import row

SVG = "{http://www.w3.org/2000/svg}"
DRAWN = sorted((Path(__file__).parents[1] / "docs" / "img").glob("study-*.svg"))
DTYPE = re.compile(r"\b(?:b?float|int)(?:16|32|64)\b|\bfp16\b|\bint[48] (?:codes|or int4 codes)\b")
AXES = line_chart.Axes("n", "us", log_y=True)


def texts(drawing: str, kind: str) -> list[str]:
    """Return the texts of a class, in the order of the drawing."""
    found = ET.fromstring(drawing).iter(f"{SVG}text")
    return [node.text or "" for node in found if node.get("class") == kind]


def below(drawing: str) -> str:
    """Return the subtitle, which is the lines at the left edge."""
    found = ET.fromstring(drawing).iter(f"{SVG}text")
    lines = (n.text or "" for n in found if n.get("class") == "sub" and n.get("x") == "16.0")
    return " ".join(lines)


def verticals(drawing: str) -> list[tuple[float, float, float]]:
    """Return x and both ends of each dashed line from top to bottom."""
    lines = (
        [float(node.get(name, "0")) for name in ("x1", "y1", "x2", "y2")]
        for node in ET.fromstring(drawing).iter(f"{SVG}line")
        if node.get("class") == "limit"
    )
    return [(x1, y1, y2) for x1, y1, x2, y2 in lines if x1 == x2]


def misplaced(drawing: str) -> list[str]:
    """Return the words on marked places that are not at a line's upper end, or that one crosses."""
    lines, found = verticals(drawing), []
    for one in words_of(drawing):
        if " overtakes " not in one.text:
            continue
        middle = (one.top + one.bottom) / 2
        own = [x for x, top, _ in lines if abs(middle - top) < 10 and 0 < one.left - x < 10]
        own += [x for x, top, _ in lines if abs(middle - top) < 10 and 0 < x - one.right < 30]
        through = [x for x, top, end in lines if one.left < x < one.right and top < middle < end]
        if len(own) != 1 or through:
            found.append(one.text)
    return found


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_words_of_study_pictures_are_whole_and_apart(path: Path) -> None:
    assert faults(path.read_text("utf-8")) == []


def test_words_in_each_others_place_would_be_seen() -> None:
    """Numbers too long for their cells, a name over the ticks of its axis, a line too long."""
    cells = {(512, column): 138_106.0 for column in (512, 1024, 2048, 4096, 8192)}
    panels = [heat_maps.Panel(name, cells) for name in "abc"]
    scale = heat_maps.Scale("us; darker is slower")
    drawing = heat_maps.heat_maps(panels, scale, title="t", subtitle="s", axes=("rows", "columns"))
    assert faults(drawing) == []
    assert "138k" in drawing
    assert "meets" in faults(drawing.replace(">138k<", ">138,106<"))[0]
    assert "leaves" in faults(drawing.replace(">t<", f">{'long ' * 30}<"))[0]
    turned = '<text x="18" y="60" text-anchor="middle" transform="rotate(-90 18 60)">GFLOP/s</text>'
    for tick, expected in ((84, 1), (100, 0)):
        ticks = f'<text x="{tick - 8}" y="64" text-anchor="end">100,000</text>'
        svg_of = f'<svg xmlns="{SVG[1:-1]}" viewBox="0 0 920 200">{turned}{ticks}</svg>'
        assert len(faults(svg_of)) == expected


@pytest.mark.parametrize("order", [*itertools.permutations((59.0, 845.0, 20_000.0))])
def test_words_on_a_place_stand_at_its_own_line(order: tuple[float, ...]) -> None:
    lines = [line_chart.Line("a", [(1.0, 1.0), (26_000.0, 9.0)])]
    marks = [Mark(f"a GPU overtakes a CPU at n = {at}", at, at / 1.1, at * 1.1) for at in order]
    drawing = line_chart.line_chart(lines, AXES, title="t", subtitle="s", marks=marks)
    assert len(verticals(drawing)) == 3
    assert misplaced(drawing) == []
    xs = {one.text: (one.left, one.right) for one in words_of(drawing) if "overtakes" in one.text}
    places = {x for x, _, _ in verticals(drawing)}
    for at, x in zip(sorted(order), sorted(places), strict=True):
        left, right = xs[f"a GPU overtakes a CPU at n = {at}"]
        assert min(abs(left - x), abs(right - x)) < 30, "its words begin or end at its own line"


def test_break_evens_on_record_are_at_their_lines_and_crossed_ones_would_be_seen() -> None:
    drawing = next(p for p in DRAWN if p.stem == "study-001-cuda-times").read_text("utf-8")
    assert len(verticals(drawing)) == 2
    assert misplaced(drawing) == []
    (one, other) = (t for t in texts(drawing, "halo") if "overtakes" in t)
    rows = re.findall(r'<text class="halo" x="([\d.]+)" y="([\d.]+)"', drawing)
    (x1, y1), (x2, y2) = rows
    swapped = drawing.replace(f'x="{x1}" y="{y1}"', "#").replace(f'x="{x2}" y="{y2}"', "##")
    swapped = swapped.replace("##", f'x="{x1}" y="{y2}"').replace("#", f'x="{x2}" y="{y1}"')
    assert set(misplaced(swapped)) == {one, other}


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_each_picture_names_its_dtype_and_its_names(path: Path) -> None:
    drawing = path.read_text("utf-8")
    said = below(drawing)
    assert DTYPE.search(said), said
    assert not DTYPE.search(" ".join(texts(drawing, "title"))), "a title holds for every dtype"
    seen = " ".join(texts(drawing, "tick") + texts(drawing, "name"))
    for name, words in pictures.NAMES.items():
        assert (words in said) == (name in seen), name


@pytest.mark.parametrize("seed", ["000", "002"])
def test_pictures_by_dtype_name_those_that_ran(seed: str) -> None:
    cells = (s for s in studies.load(seed).steps("cuda", True) if isinstance(s, Cell))
    ran = {lane.form for cell in cells if cell.experiment == "dtypes" for lane in cell.lanes}
    drawing = next(p for p in DRAWN if p.stem == f"study-{seed}-cuda-dtypes").read_text("utf-8")
    assert set(DTYPE.findall(below(drawing))) == ran
    assert {label.partition(",")[0] for label in texts(drawing, "tick") if "," in label} == ran


@pytest.mark.parametrize("seed", ["000", "001", "002", "003", "004"])
def test_titles_tell_the_pictures_of_a_study_apart(seed: str) -> None:
    drawn = [path.read_text("utf-8") for path in DRAWN if path.stem.startswith(f"study-{seed}")]
    titles = [title for drawing in drawn for title in texts(drawing, "title")]
    assert len(titles) == len(set(titles)) == len(drawn)


def test_numbers_of_cells_can_be_read_on_them() -> None:
    cell = re.compile(r'style="fill:#(\w{6})"/><text [^>]*style="fill:(#\w{6})')
    found = {pair for path in DRAWN for pair in cell.findall(path.read_text("utf-8"))}
    assert len(found) > 100
    for fill, ink in found:
        red, green, blue = (int(fill[at : at + 2], 16) for at in (0, 2, 4))
        light = heat_maps.brightness((red, green, blue)) + 0.05
        contrast = light / 0.05 if ink == heat_maps.BLACK else 1.05 / light
        assert contrast >= heat_maps.READABLE, (fill, ink)


def test_maps_in_several_files_have_one_scale_and_say_what_is_blank() -> None:
    grid = {(r, c): float(r * c) for r in (1, 2, 4) for c in (1, 2, 4)}
    hole = {case: value for case, value in grid.items() if case != (1, 1)}
    shown = [heat_maps.Panel(f"k{i}", {k: v * (i + 1) for k, v in grid.items()}) for i in range(9)]
    shown += [heat_maps.Panel("last", hole), heat_maps.Panel("other", {(1, 1): 9.0, (2, 2): 9.0})]
    scale = heat_maps.Scale("GB/s; darker is more")
    drawn = list(pictures.maps("x", shown, ("t", "s"), scale))
    assert [name for name, _ in drawn] == ["x-1", "x-2"]
    swatches = [re.findall(r'height="15" style="fill:(#\w+)"', svg) for _, svg in drawn]
    assert swatches[0] == swatches[1]
    assert len(set(swatches[0])) == heat_maps.SWATCHES
    keys = [next(t for t in texts(svg, "tick") if "darker" in t) for _, svg in drawn]
    assert keys == ["144   GB/s; darker is more", "144   GB/s; darker is more; blank: not run"]


def test_each_lone_point_has_a_dot_and_each_crowded_one_none() -> None:
    few = line_chart.Line("few", [(1.0, 1.0), (64.0, 2.0), (128.0, 3.0)])
    crowded = line_chart.Line("crowded", [(1.0, 1.0), *((64 + i / 9, 2.0) for i in range(200))])
    for lines, dots, dense in (([few], 3, False), ([few, crowded], 3 + 2, True)):
        drawing = line_chart.line_chart(lines, AXES, title="t", subtitle="s")
        assert drawing.count("<circle") == dots
        assert line_chart.DOTS in below(drawing)
        assert (line_chart.DENSE in below(drawing)) == dense


def test_the_ceiling_of_kernels_is_a_line_and_what_lies_beyond_is_told() -> None:
    for rate, told in ((126e3, True), (60e3, False)):
        here = dataclasses.replace(
            machine(),
            backend="cuda",
            ceilings={"fma float32": Ceiling("fma float32", 63e3, "", "", 1)},
        )
        rows = [
            row("001", "kernels", name, 9.0, temperature=t, figures={"gflops": gflops}, n=1024)
            for t in ("warm", "cold")
            for name, gflops in (("shared tile 8", 5e3), ("gemmule's choice", rate))
        ]
        drawn = dict(studies.load("001").pictures(Rows(rows, {here.id: here}), "cuda"))
        drawing = drawn["study-001-cuda-kernels-1024"]
        assert ("tensor cores" in below(drawing)) == told
        assert "measured FMA ceiling, 63.0 TFLOP/s" in texts(drawing, "halo")
        ((x, _, _),) = verticals(drawing)
        boxes = re.findall(
            r'<rect class="f\d cell" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', drawing
        )
        ends = [float(left) + float(wide) for left, wide in boxes]
        assert (ends[0] > x) == told, "the fastest comes first"
        assert len(ends) == 4
        assert texts(drawing, "tick")[2:] == ["gemmule's choice", "shared tile 8"]


def test_bars_have_room_show_ranges_and_refuse_to_be_none() -> None:
    label = "shared tile 32, multiply and add apart, warm"
    group = bars.Group(label, {"us": 13.1}, {"us": (13.0, 13.5)})
    drawn = bars.grouped_bars([group], title="t", subtitle="s", unit="us")
    assert f">{label}</text>" in drawn
    assert texts(drawn, "halo") == ["13.1 us (13.0 to 13.5)"]
    with pytest.raises(ValueError, match="needs bars"):
        bars.grouped_bars([], title="t", subtitle="s", unit="us")
    with pytest.raises(ValueError, match="needs bars"):
        bars.stacked_bars([], ("load",), title="t", subtitle="s")
