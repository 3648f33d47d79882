"""The report: escaped, self-contained, well-formed; plots that put values where they belong."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import io
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner
from rich.console import Console

from checkout import EVIDENCE, ROOT
from gemmule.core.problem import Problem
from gemmule.timing.sampler import ratio
from gemmule_lab import cli
from gemmule_lab.records.distributed import read as read_distributed
from gemmule_lab.records.results import Results, append, read
from gemmule_lab.records.rows import Facts, Speedup, make_row, speedup_of
from gemmule_lab.report import figures
from gemmule_lab.report.charts import Axes, Line, Lines, Mark
from gemmule_lab.report.plots import draw
from gemmule_lab.report.render import print_tables, render_html, write_html
from gemmule_lab.report.tables import TableData, markdown, rows_table, speedup_text
from lab_rows import QUANT, machine, result_row, samples
from pages.markdown import update_markers
from svg_words import SVG, faults, groups, words_of

HOSTILE = '<script>alert("x")</script>\'"&<img src=x onerror=alert(1)>{{ 7*7 }}'
VOID = {"meta", "br", "hr", "img", "input", "link"}


def test_one_block_has_no_interval() -> None:
    one, two = (Speedup(1.25, 1.2, 1.3, n, 1 - 0.5 ** (n - 1), "undecided") for n in (1, 2))
    assert speedup_text(one) == "~1.25 (one block)"
    assert speedup_text(two) == "~1.25 (1.20 to 1.30)"


def test_a_chart_shows_ours_as_plans_have_it_beside_the_fastest_other() -> None:
    problem, here = Problem("matvec", 64, 64), machine()
    rows = [
        dataclasses.replace(result_row("ours", 5.0, problem), mode="by a call"),
        result_row("ours", 10.0, problem),
        result_row("slow", 30.0, problem),
        result_row("numpy", 20.0, problem, "peer"),
        result_row("torch", 25.0, problem, "peer"),
    ]
    size = problem.matrix_bytes / figures.MIB
    chart = figures.times(rows, here)
    assert chart is not None
    assert list(chart.points.values()) == [[(size, 10.0)]]
    assert list(chart.rings.values()) == [[(size, 20.0)]]
    assert figures.times(rows[:1] + rows[3:], here) is None, "nothing of ours by a plan"


def results(device: str = "Test GPU", peer: str = "numpy", name: str = "threads") -> Results:
    here = machine(device=device)
    rows = []
    for n in (512, 1024, 4096):
        problem = Problem("matvec", n, n)
        times = {peer: 120.0, "scalar_loop": 900.0, name: 100.0, "four_rows": 150.0}
        run = {k: samples(k, us * n / 1024, spread=0.02) for k, us in times.items()}
        for key, taken in run.items():
            kind = "peer" if key == peer else "rung"
            over = {} if kind == "peer" else {peer: speedup_of(ratio(taken, run[peer]))}
            error = 0.125 if kind == "rung" else None
            group = f"{n} x {n}, matvec, float32"
            named = key in ("scalar_loop", "four_rows")
            facts = Facts(problem, kind, "cold", error_ratio=error, group=group, named=named)
            rows.append(make_row(here, facts, taken, speedups=over))
    quantised = Problem("matvec", 512, 1024, a="uint4", b="float16", out="float16", quant=QUANT)
    rows.append(make_row(here, Facts(quantised, "rung", "warm"), samples("few", 9.5)))
    return Results({here.id: here}, tuple(rows))


@functools.cache
def plain_page() -> str:
    return render_html(results())


class Page(HTMLParser):
    """Elements, attributes and text of a page; complains about tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_page_is_self_contained_and_accessible() -> None:
    page = Page(plain_page())
    names = [tag for tag, _ in page.elements]
    assert names.count("script") == 1
    script = plain_page().partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (a["content"] for _, a in page.elements if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; ")
    assert policy.endswith(f"script-src 'sha256-{digest}'"), "no other script runs"
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object")
        assert not any(name.startswith("on") for name in attributes)
        address = attributes.get("href")
        assert address is None or address.startswith("#")
    plots = [a for tag, a in page.elements if tag == "svg"]
    assert all(a["role"] == "img" and a["aria-label"] for a in plots)
    assert names.count("desc") == len(plots) == names.count("figcaption")
    text = " ".join(page.text)
    for expected in (
        "On Test GPU, undated: beside numpy gemmule is surely faster on 3 of 3 products.",
        "It gained most in matvec float32: 1.20x numpy in the mean (1.20x to 1.20x).",
        "It is surely slower on none.",
        "Asked for (a rung by name) it is surely faster than numpy on 0 of 3 products",
        *("Time over size", "Share of the read ceiling over size", "Roofline", "Error beside time"),
        *("Single blocks beside their median", "Speed over the fastest other's, float32"),
        *(
            "Ladder: 512 x 512, matvec",
            "1.20 (1.20 to 1.20) numpy",
            "4 streams, 2 threads",
            "1.7 MiB",
        ),
        "gemmule bench --product '512 x 512, matvec, float32'",
    ):
        assert expected in text, expected


@pytest.mark.parametrize("place", ["device", "peer", "name"])
def test_hostile_names_stay_text(place: str) -> None:
    text = render_html(results(**{place: HOSTILE}), title=HOSTILE)
    page = Page(text)
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert "img" not in [tag for tag, _ in page.elements]
    assert HOSTILE in "".join(page.text)
    assert "49" not in "".join(re.findall(r"onerror=alert\(1\)&gt;(.{12})", text))


def test_hostile_names_in_terminal_and_markdown() -> None:
    made = results(name="[bold red]rung[/] | `x` <b>")
    console = Console(file=io.StringIO(), width=300, force_terminal=False)
    print_tables(made, console)
    assert "[bold red]rung[/] | `x` <b>" in console.file.getvalue()  # type: ignore[attr-defined]
    line = markdown(rows_table("t", made.rows[2:3])).splitlines()[2]
    assert line.startswith(
        "| 512 x 512, matvec, float32 | \\[bold red\\]rung\\[/\\] \\| \\`x\\` &lt;b&gt; |"
    )


def test_terminal_tables_hold_the_figures() -> None:
    console = Console(file=io.StringIO(), width=200)
    print_tables(results(), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for expected in ("threads", "1.20 (1.20 to 1.20) numpy", "surely slower on none", "1.20x"):
        assert expected in text, expected


def test_report_of_a_file_on_disk(tmp_path) -> None:
    made = results()
    append(tmp_path / "r.jsonl", [*made.environments.values(), *made.rows])
    (tmp_path / "page.html").write_text("old")
    write_html(read(tmp_path / "r.jsonl"), tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == plain_page()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html", "r.jsonl"]
    with pytest.raises(ValueError, match="no rows"):
        render_html(Results({}, ()))


def numbers(element: ET.Element, attribute: str = "d") -> list[float]:
    return [float(one) for one in re.findall(r"[\d.]+", element.get(attribute, ""))]


def test_bandwidth_plot_puts_points_where_they_belong() -> None:
    points = [(256.0, 10.0), (1024.0, 40.0), (4096.0, 20.0)]
    line = Line("a", points, [(8.0, 12.0), (39.0, 41.0), (19.0, 21.0)])
    chart = Lines("T", "", [line], Axes("n", "GB/s"), [Mark("read ceiling", 50.0)])
    drawing = draw(chart)
    (drawn,) = groups(drawing, "line")
    dots = list(drawn.iter(f"{SVG}use"))
    xs, ys = ([numbers(dot, name)[0] for dot in dots] for name in "xy")
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.3), "the size axis is logarithmic"
    assert (ys[0] - ys[1]) == pytest.approx(1.5 * (ys[2] - ys[1]), abs=0.5), "the other is not"
    (ceiling,) = (path for one in groups(drawing, "ceiling") for path in one)
    per_unit = (ys[0] - ys[1]) / 30
    assert ys[1] - numbers(ceiling)[1] == pytest.approx(10 * per_unit, abs=0.3)
    (band,) = (path for one in groups(drawing, "band") for path in one.iter(f"{SVG}path"))
    (use,) = (use for one in groups(drawing, "band") for use in one.iter(f"{SVG}use"))
    below = [numbers(use, "y")[0] - up for up in numbers(band)[1::2]]
    assert (min(below), max(below)) == pytest.approx(
        (ys[1] - per_unit, ys[0] + 2 * per_unit), abs=0.5
    )
    root = ET.fromstring(drawing)
    assert root.find(f"{SVG}title").text == "T"
    assert root.find(f"{SVG}desc").text == chart.told
    assert "T" not in [one.text for one in words_of(drawing)], "the page has the title"
    assert faults(drawing) == []


def test_markers_are_filled_and_the_rest_is_left_alone(tmp_path) -> None:
    readme = tmp_path / "README.md"
    text = (
        "# T\n\n<!-- table:cpu -->\nold\n<!-- /table -->\nmiddle\n"
        "<!-- table:gpu -->\nkeep\n<!-- /table -->\nend\n"
    )
    readme.write_text(text)
    readme.chmod(0o640)
    table = markdown(TableData("t", ("a", "b"), (("1", "2"),), (False, True)))
    assert update_markers(readme, {"cpu": table})
    assert readme.read_text() == text.replace("old", "\n| a | b |\n| --- | ---: |\n| 1 | 2 |\n")
    assert readme.stat().st_mode & 0o777 == 0o640
    assert not update_markers(readme, {"cpu": table}), "a second run changes nothing"
    assert [p.name for p in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize(
    ("text", "tables", "words"),
    [
        ("no markers", {"cpu": "x"}, "no marker"),
        ("<!-- table:cpu -->\nopen", {"cpu": "x"}, "not closed"),
        ("<!-- table:a -->\n<!-- table:b -->\n<!-- /table -->", {"a": "x"}, "not closed"),
        ("<!-- table:cpu -->\n<!-- /table -->", {"cpu": "<!-- /table -->"}, "HTML comment"),
    ],
)
def test_broken_markers_are_refused(tmp_path, text: str, tables: dict, words: str) -> None:
    path = tmp_path / "R.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        update_markers(path, tables)
    assert path.read_text() == text


def test_flags_and_low_confidence_are_shown() -> None:
    made = results().rows[2]
    few = {k: dataclasses.replace(s, confidence=0.75) for k, s in made.speedups.items()}
    shown = rows_table("t", [dataclasses.replace(made, flags=("hot",), speedups=few)])
    assert shown.rows[0][-1] == "hot"
    assert any(cell.startswith("~1.20") for cell in shown.rows[0])


def test_products_of_several_processes_are_printed(tmp_path) -> None:
    kept = EVIDENCE / "nvidia-h200" / "distributed.jsonl"
    done = CliRunner().invoke(cli.cli, ["report", str(kept)])
    assert done.exit_code == 0, done.output
    assert "A x, 4096 x 4096 float16, 2 processes, nccl" in done.output
    assert "own rows, sent by the kernel" in done.output
    assert done.output.count("own rows alone") == 3, "a table for each size"
    refused = [
        (["report", str(kept), "-o", str(tmp_path / "page.html")], "have no page"),
        (["report", str(kept), "--against", str(kept)], "--against does not compare"),
    ]
    other = tmp_path / "r.jsonl"
    append(other, [*results().environments.values(), *results().rows])
    refused.append((["report", str(kept), str(other)], "reported on apart"))
    for command, words in refused:
        done = CliRunner().invoke(cli.cli, command)
        assert done.exit_code != 0
        assert words in f"{done.output} {done.exception}"


MODEL_US = {  # what comes after the product of own rows; docs/distributed.md has the model
    "own rows alone": 0.0,
    "own rows, sent by the kernel": 2.0,
    "own rows, all-gather": 6.5,
    "own columns, all-reduce": 7.0,
}


def test_the_model_of_several_gpus_gives_what_is_on_record() -> None:
    """Times of 2.2 us and bytes over 4.5 TB/s; bytes and messages as the page's formulas say."""
    root = ROOT
    page = (root / "docs" / "distributed.md").read_text("utf-8")
    rows = read_distributed(root / "evidence" / "nvidia-h200" / "distributed.jsonl").rows
    told = {way: [""] * 3 for way in MODEL_US}
    for row in rows:
        n, w = row.n, row.world
        sent = {
            "own rows, all-gather": ((w - 1) * n * 2 // w, w - 1),
            "own columns, all-reduce": (2 * (w - 1) * n * 2 // w, 2 * (w - 1)),
            "own rows, sent by the kernel": ((w - 1) * n // w * 8, (w - 1) * n // w),
        }
        if row.way in sent:
            assert (row.sent_bytes, row.messages) == sent[row.way]
        if row.way in MODEL_US:
            expected = 2.2 + n * n * 2 / w / 4.5e6 + MODEL_US[row.way]
            assert expected == pytest.approx(row.times_us.median, rel=0.031), row.way
            told[row.way][(4096, 8192, 16384).index(n)] = f"{expected:.1f}"
            assert f" {row.times_us.median:.3g} |" in page
    for way, times in told.items():
        assert f"| {way} | {' | '.join(times)} |" in page


def test_a_file_without_results_names_what_writes_some(tmp_path) -> None:
    (tmp_path / "empty.jsonl").touch()
    done = CliRunner().invoke(cli.cli, ["report", str(tmp_path / "empty.jsonl")])
    assert "`gemmule bench --out DIRECTORY`" in f"{done.output} {done.exception}"
    assert "--out" in CliRunner().invoke(cli.cli, ["bench", "--help"]).output
