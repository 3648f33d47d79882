"""The drawings of studies: words at their own places, dtypes named, colours and numbers to read."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from checkout import ROOT
from gemmule_lab import studies
from gemmule_lab.records.rows import Ceiling
from gemmule_lab.records.study import Rows
from gemmule_lab.report import charts, plots
from gemmule_lab.report.charts import Axes, Bar, Bars, HeatMaps, Line, Lines, Mark
from gemmule_lab.report.plots import draw
from gemmule_lab.report.sheet import drawn_of
from gemmule_lab.studies import charted
from gemmule_lab.studies.grid import Cell
from lab_rows import machine, recorded, study_row
from svg_words import SVG, faults, groups, words_of

DRAWN = sorted((ROOT / "docs" / "img").glob("study-*.svg"))
DTYPE = re.compile(r"\b(?:b?float|int)(?:16|32|64)\b|\bfp16\b|\bint[48] (?:codes|or int4 codes)\b")
AXES = Axes("n", "us", log_y=True)


def texts(drawing: str, *kinds: str) -> list[str]:
    """Return the texts of some kinds, in the order of the drawing."""
    return [one.text for one in words_of(drawing) if one.kind in kinds]


def below(drawing: str) -> str:
    """Return the subtitle."""
    return " ".join(texts(drawing, "sub"))


def verticals(drawing: str) -> list[tuple[float, float, float]]:
    """Return x and both ends of each dashed line from top to bottom."""
    paths = (
        path.get("d", "") for one in groups(drawing, "limit") for path in one.iter(f"{SVG}path")
    )
    points = ([float(number) for number in re.findall(r"[\d.]+", path)] for path in paths)
    return [(x1, min(y1, y2), max(y1, y2)) for x1, y1, x2, y2 in points if x1 == x2]


def boxes(drawing: str, *kinds: str) -> list[tuple[float, float, float, float]]:
    """Return left, top, right and bottom of the bars of some kinds."""
    found = []
    for kind in kinds:
        for path in (path for one in groups(drawing, kind) for path in one.iter(f"{SVG}path")):
            numbers = [float(number) for number in re.findall(r"[\d.]+", path.get("d", ""))]
            xs, ys = numbers[::2], numbers[1::2]
            found.append((min(xs), min(ys), max(xs), max(ys)))
    return found


def misplaced(drawing: str) -> list[str]:
    """Return the words on marked places that are not at a line's upper end, or that one crosses."""
    lines, found = verticals(drawing), []
    for one in words_of(drawing):
        if " overtakes " not in one.text or one.kind != "halo":
            continue
        middle = (one.top + one.bottom) / 2
        own = [x for x, top, _ in lines if abs(middle - top) < 12 and 0 < one.left - x < 10]
        own += [x for x, top, _ in lines if abs(middle - top) < 12 and 0 < x - one.right < 30]
        through = [x for x, top, end in lines if one.left < x < one.right and top < middle < end]
        if len(own) != 1 or through:
            found.append(one.text)
    return found


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_words_of_study_pictures_are_whole_and_apart(path: Path) -> None:
    assert faults(path.read_text("utf-8")) == []


def test_words_in_each_others_place_would_be_seen() -> None:
    """Numbers too long for their cells, a name over the ticks of its axis, a line too long."""
    cells = {(512, column): 138_106.0 for column in (512 << i for i in range(8))}
    maps = HeatMaps("t", "s", dict.fromkeys("abc", cells), "us; darker is slower")
    drawing = draw(maps)
    assert faults(drawing) == []
    assert "138k" in drawing
    assert "meets" in faults(drawing.replace(">138k<", ">138,106<"))[0]
    assert "leaves" in faults(drawing.replace(">t</text>", f">{'long ' * 30}</text>"))[0]
    place = 'x="18" y="60" transform="rotate(-90 18 60)"'
    turned = f'<text {place} style="text-anchor: middle">GFLOP/s</text>'
    for tick, expected in ((80, 1), (100, 0)):
        ticks = f'<text x="{tick - 8}" y="64" style="text-anchor: end">100,000</text>'
        svg_of = f'<svg xmlns="{SVG[1:-1]}" viewBox="0 0 920 200">{turned}{ticks}</svg>'
        assert len(faults(svg_of)) == expected


@pytest.mark.parametrize("order", [(59.0, 845.0, 20_000.0), (20_000.0, 59.0, 845.0)])
def test_words_on_a_place_stand_at_its_own_line(order: tuple[float, ...]) -> None:
    lines = [Line("a", [(1.0, 1.0), (26_000.0, 9.0)])]
    marks = [Mark(f"a GPU overtakes a CPU at n = {at}", at, at / 1.1, at * 1.1) for at in order]
    drawing = draw(Lines("t", "s", lines, AXES, marks=marks))
    assert len(verticals(drawing)) == 3
    assert misplaced(drawing) == []
    assert faults(drawing) == []
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
    (x1, y1), (x2, y2) = re.findall(r'x="([\d.]+)" y="([\d.]+)">[^<]* overtakes ', drawing)
    swapped = drawing.replace(f'x="{x1}" y="{y1}"', "@1").replace(f'x="{x2}" y="{y2}"', "@2")
    swapped = swapped.replace("@2", f'x="{x1}" y="{y2}"').replace("@1", f'x="{x2}" y="{y1}"')
    assert set(misplaced(swapped)) == {one, other}


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_each_picture_names_its_dtype_and_its_names(path: Path) -> None:
    drawing = path.read_text("utf-8")
    said = below(drawing)
    assert DTYPE.search(said), said
    assert not DTYPE.search(" ".join(texts(drawing, "title"))), "a title holds for every dtype"
    seen = " ".join(texts(drawing, "tick", "name", "legend"))
    for name, words in charted.NAMES.items():
        assert (words in said) == (name in seen), name


@pytest.mark.parametrize("number", ["000", "002"])
def test_pictures_by_dtype_name_those_that_ran(number: str) -> None:
    cells = (s for s in studies.load(number).steps("cuda", True) if isinstance(s, Cell))
    asked = {cell.filed["dtype"] for cell in cells if cell.experiment == "dtypes"}
    ran = {row.case["dtype"] for row in recorded(number).where("dtypes")}
    assert ran <= asked
    drawing = next(p for p in DRAWN if p.stem == f"study-{number}-cuda-dtypes").read_text("utf-8")
    assert set(DTYPE.findall(below(drawing))) == ran
    assert {label.partition(",")[0] for label in texts(drawing, "tick") if "," in label} == ran


@pytest.mark.parametrize("number", ["000", "001", "002", "003", "004"])
def test_titles_tell_the_pictures_of_a_study_apart(number: str) -> None:
    drawn = [path.read_text("utf-8") for path in DRAWN if path.stem.startswith(f"study-{number}")]
    titles = [title for drawing in drawn for title in texts(drawing, "title")]
    assert len(titles) == len(set(titles)) == len(drawn)


def test_numbers_of_cells_can_be_read_on_them() -> None:
    """Each number lies in a cell, and has black or white, whichever is read on that cell."""
    pairs = set()
    for path in (
        path for path in DRAWN if path.stem.endswith(("heights", "wins-warm", "gain-cold"))
    ):
        drawing = path.read_text("utf-8")
        cells = [cell for one in groups(drawing, "cells") for cell in one.iter(f"{SVG}path")]
        shades = [re.search(r"fill: (#\w{6})", cell.get("style", "")) for cell in cells]
        filled = [one[1] for one in shades if one is not None]
        where = [box for box, one in zip(boxes(drawing, "cells"), shades, strict=True) if one]
        for word in (one for one in words_of(drawing) if one.kind == "value"):
            x, y = (word.left + word.right) / 2, (word.top + word.bottom) / 2
            held = [i for i, at in enumerate(where) if at[0] < x < at[2] and at[1] < y < at[3]]
            assert len(held) == 1, word
            assert where[held[0]][0] < word.left + 1, "the number is no wider than its cell"
            pairs.add((filled[held[0]], word.colour))
    assert len(pairs) > 15
    for fill, colour in pairs:
        light = plots.brightness([int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5)]) + 0.05
        contrast = light / 0.05 if colour == plots.BLACK else 1.05 / light
        assert contrast >= plots.READABLE, (fill, colour)


def test_maps_in_several_files_have_one_scale_and_say_what_is_blank() -> None:
    grid = {(r, c): float(r * c) for r in (1, 2, 4) for c in (1, 2, 4)}
    hole = {case: value for case, value in grid.items() if case != (1, 1)}
    shown = {f"k{i}": {k: v * (i + 1) for k, v in grid.items()} for i in range(9)}
    shown |= {"last": hole, "other": {(1, 1): 9.0, (2, 2): 9.0}}
    head = charted.Head("x", "t", "s")
    drawn = [
        (name, draw(chart)) for name, chart in charted.maps(head, shown, "GB/s; darker is more")
    ]
    assert [name for name, _ in drawn] == ["x-1", "x-2"]
    fills = [
        {
            one.text: cell
            for one, cell in zip(
                [w for w in words_of(svg) if w.kind == "value"],
                [
                    re.search("fill: (#.{6})", p.get("style", ""))[1]
                    for g in groups(svg, "cells")
                    for p in g.iter(f"{SVG}path")
                    if "fill: none" not in p.get("style", "")
                ],
                strict=True,
            )
        }
        for _, svg in drawn
    ]
    assert fills[0]["9.00"] == fills[1]["9.00"], "equal numbers have one colour in both files"
    for _, svg in drawn:
        assert {"1.00", "144"} <= set(texts(svg, "tick")), "the scale's ends are those of all"
    keys = [next(one.text for one in words_of(svg) if "darker" in one.text) for _, svg in drawn]
    assert keys == ["GB/s; darker is more", "GB/s; darker is more; blank: not run"]


def test_each_lone_point_has_a_dot_and_each_crowded_one_none() -> None:
    few = Line("few", [(1.0, 1.0), (64.0, 2.0), (128.0, 3.0)])
    crowded = Line("crowded", [(1.0, 1.0), *((64 + i / 9, 2.0) for i in range(200))])
    for lines, dots, dense in (([few], 3, False), ([few, crowded], 3 + 2, True)):
        drawing = draw(Lines("t", "s", lines, AXES))
        drawn = [use for one in groups(drawing, "line") for use in one.iter(f"{SVG}use")]
        assert len(drawn) == dots
        assert plots.DOTS in below(drawing)
        assert (plots.DENSE in below(drawing)) == dense


def test_each_ratio_is_told_by_its_value_not_by_an_end() -> None:
    rows = {"matvec": {"ours": (2.0, 1.5, 3.0), "other": (0.5, 0.25, 0.75)}, "vecmat": {}}
    assert charts.Dots("t", "s", rows, ("ours", "other"), "").told.startswith(
        "matvec: ours 2.00, other 0.50"
    )


def test_bars_of_groups_keep_their_ranges_limits_and_values() -> None:
    head, mark = charted.Head("x", "t", "s"), Mark("limit", 9.0)
    groups, ends = {"a": {"us": 2.0}, "b": {"us": 5.0}}, {"a": (1.0, 3.0)}
    ((name, chart),) = charted.bar_chart(head, groups, "us", limit=mark, ends=ends)
    assert (name, chart.title, chart.subtitle, chart.limit) == ("x", "t", "s", mark)
    found = [(bar.label, bar.parts, bar.note, bar.ends) for bar in chart.bars]
    assert found == [
        ("a", (2.0,), "2.00 us (1.00 to 3.00)", (1.0, 3.0)),
        ("b", (5.0,), "5.00 us", None),
    ]


def test_the_ceiling_of_kernels_is_a_line_and_what_lies_beyond_is_told() -> None:
    for rate, told in ((126e3, True), (60e3, False)):
        here = dataclasses.replace(
            machine(),
            backend="cuda",
            ceilings={"fma float32": Ceiling("fma float32", 63e3, "", "", 1)},
        )
        rows = [
            study_row(
                "001", "kernels", name, 9.0, temperature=t, figures={"gflops": gflops}, n=1024
            )
            for t in ("warm", "cold")
            for name, gflops in (("shared tile 8", 5e3), ("gemmule's choice", rate))
        ]
        drawn = dict(charted.pictures(studies.load("001"), Rows(rows, {here.id: here})))
        drawing = draw(drawn["study-001-cuda-kernels-1024"])
        assert ("tensor cores" in below(drawing)) == told
        assert "measured FMA ceiling, 63.0 TFLOP/s" in texts(drawing, "halo")
        ((x, _, _),) = verticals(drawing)
        ends = [right for _, _, right, _ in boxes(drawing, "bar")]
        assert (ends[0] > x) == told, "the fastest comes first"
        assert len(ends) == 4
        assert texts(drawing, "tick") == ["gemmule's choice", "shared tile 8"]
        assert texts(drawing, "legend") == ["warm", "cold"]
        assert faults(drawing) == []


def test_bars_have_room_show_ranges_and_refuse_to_be_none() -> None:
    label = "shared tile 32, multiply and add apart, warm"
    bars, series = charts.grouped({label: {"us": 13.1}}, "us", {label: (13.0, 13.5)})
    drawn = draw(Bars("t", "s", bars, series))
    assert f">{label}</text>" in drawn
    assert texts(drawn, "halo") == ["13.1 us (13.0 to 13.5)"]
    assert len(groups(drawn, "range")) == 1
    for chart in (
        lambda: Bars("t", "s", []),
        lambda: Bars("t", "s", [Bar("a", (0.0,), "none")]),
        lambda: Lines("t", "s", [], AXES),
        lambda: Lines("t", "s", [Line("a", [(0.0, 1.0)])], AXES),
        lambda: HeatMaps("t", "s", {"a": {}}, "us"),
    ):
        with pytest.raises(ValueError, match="at least one value, and positive"):
            chart()


def test_long_names_of_bars_stand_above_them_and_are_not_cut() -> None:
    label = "30522 x 384 (1), matmul, bfloat16: matmul A 30522 x 384 row, B 384 x 64 row, float32"
    bars = [Bar(f"{label}, case {i}", (1.0 + i,), "1.0") for i in range(30)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns where names leave a drawing no room
        drawn = draw(Bars("t", "s", bars, limit=Mark("1.0", 1.0)))
    assert [word.text for word in words_of(drawn) if word.kind == "over"] == [b.label for b in bars]
    assert not faults(drawn)


def test_a_drawing_is_the_same_each_time_whatever_a_user_s_settings_say() -> None:
    import matplotlib as mpl

    chart = Lines("t & <t>", "s", [Line("$a$ <b>", [(1.0, 1.0), (64.0, 2.0)])], AXES)
    drawing = draw(chart)
    with mpl.rc_context({"font.size": 40.0, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert draw(chart) == drawing
    assert drawn_of(chart) in drawing
    assert drawn_of(chart) != drawn_of(dataclasses.replace(chart, subtitle="u"))
    assert texts(drawing, "legend") == ["$a$ <b>"], "labels are text as it is given"
    root = ET.fromstring(drawing)
    assert (root.get("role"), root.get("aria-label")) == ("img", "t & <t>")
    assert [node.text for node in root[1:3]] == ["t & <t>", chart.told]
    assert "<metadata" not in drawing


def test_every_colour_of_a_drawing_has_one_for_dark_screens() -> None:
    """Cells with their numbers alone are the same on both."""
    for path in DRAWN[::6]:
        drawing = path.read_text("utf-8")
        sheet, _, body = drawing.partition("</style>")
        body = re.sub(r'<g class="(?:cells|swatch|value)">.*?</g>', "", body)
        used = set(re.findall(r"(?:fill|stroke): (#\w{6})", body)) - {plots.BLACK, plots.WHITE}
        assert not {tone for tone in used if f'"fill: {tone}"' not in sheet}, path.stem


ON_RECORD = (  # of each kind of chart one at least
    "000-cuda-use",
    "000-cuda-gain-warm",
    "000-cuda-rates-warm-2",
    "001-cuda-times",
    "002-cuda-traffic",
    "002-cuda-dtypes",
    "003-cuda-rates-warm",
    "003-cuda-alternatives-cold",
    "004-cuda-five",
    "004-cuda-heights",
)


@pytest.mark.parametrize("name", ON_RECORD)
def test_pictures_on_record_are_what_is_drawn_today(name: str) -> None:
    """Their words at their places, for a head that says the same chart does not say how."""
    number, _, rest = name.partition("-")
    drawn = dict(charted.pictures(studies.load(number), recorded(number)))
    now = list(words_of(draw(drawn[f"study-{number}-{rest}"])))
    then = list(words_of((ROOT / "docs" / "img" / f"study-{name}.svg").read_text("utf-8")))
    assert [(one.text, one.kind, one.colour) for one in now] == [
        (one.text, one.kind, one.colour) for one in then
    ]
    for one, other in zip(now, then, strict=True):
        assert (one.left, one.top) == pytest.approx((other.left, other.top), abs=2), one.text
