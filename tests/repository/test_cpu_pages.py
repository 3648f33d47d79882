"""The pages of the CPU ladders: every rung described, tables made from the files beside them."""

from __future__ import annotations

import ast
import dataclasses
import json
import shutil
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from checkout import ROOT
from figure_words import check_words
from gemmule.core.problem import Problem, QuantSpec
from gemmule.core.registry import OPS, ladder
from gemmule_lab.report.ladder_gains import gains, newest
from lab_rows import result_row
from pages import build, cpu_code, cpu_pages, ladder_chart
from pages.cuda_pages import picture
from pages.excerpts import docstring
from pages.figures import of_ladder

DRAWN = [(op, name) for op in OPS for name in of_ladder(f"cpu_{op}")]
drawn = pytest.mark.parametrize(("op", "name"), DRAWN, ids=[f"{o}-{n}" for o, n in DRAWN])


@pytest.mark.parametrize("op", OPS)
def test_every_rung_of_a_ladder_is_described_and_measured_or_said_not_to_be(op: str) -> None:
    text = (ROOT / cpu_pages.page(op)).read_text("utf-8")
    table = text.split("<!-- table:measured -->")[1].split("<!-- /table -->")[0]
    for rung in ladder(op, "cpu"):
        assert len(docstring(rung).split()) >= 7, f"{rung.path.name} says too little of itself"
        heading = f"\n## {ladder(op, 'cpu').numbers[rung.name]} {rung.name}\n"
        assert heading in text, "run `make docs`"
        assert f"\n\n{docstring(rung)}\n" in text, "run `make docs`"
        assert rung.name in table.replace("\\", "")


def test_the_code_shown_of_a_rung_is_in_its_files() -> None:
    """Most rungs show a function, every line of which stands in the file that is named."""
    shown = {(op, rung.name): cpu_code.shown(rung) for op in OPS for rung in ladder(op, "cpu")}
    assert sum(one is not None for one in shown.values()) >= 0.9 * len(shown)
    for one in filter(None, shown.values()):
        ast.parse(one.code)
        written = {line.strip() for line in one.path.read_text("utf-8").splitlines()}
        head, _, body = one.code.partition(":\n")
        assert head.startswith("def ")
        assert {line.strip() for line in body.splitlines()} <= written
    known = {f"{rung.folder}/{rung.name}" for op in OPS for rung in ladder(op, "cpu")}
    assert set(cpu_code.ELSEWHERE) <= known


def test_code_that_cannot_be_shown_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rung.py"
    path.write_text(
        'def f(a: int, *, b: int) -> int:\n    """Words."""\n    return a\n'
        "def long(x: int) -> None:\n" + "    x\n" * (cpu_code.MOST_LINES + 1)
    )
    assert cpu_code.function_text(path, "f") == "def f(a, *, b):\n    return a"
    with pytest.raises(ValueError, match="has no function g"):
        cpu_code.function_text(path, "g")
    with pytest.raises(ValueError, match="more than"):
        cpu_code.function_text(path, "long")


@drawn
def test_figures_are_readable_and_on_their_page(op: str, name: str) -> None:
    figure = of_ladder(f"cpu_{op}")[name]()
    root = ET.fromstring(figure.svg())
    assert {"title", "desc"} <= {child.tag.rpartition("}")[2] for child in root}
    check_words(figure)
    assert picture(f"cpu_{op}", name).name in (ROOT / cpu_pages.page(op)).read_text("utf-8")


def test_rungs_that_were_not_measured_are_named() -> None:
    problem = Problem("matvec", 64, 64)
    rows = [result_row(rung.name, 1.0, problem) for rung in ladder("matvec", "cpu")]
    assert "Not measured" not in cpu_pages.measured("matvec", rows)
    missing = rows.pop().name
    assert cpu_pages.measured("matvec", rows).endswith(f"{cpu_pages.NOT_YET} {missing}.")


def test_a_run_is_kept_under_the_name_of_its_processor(tmp_path: Path) -> None:
    (path,) = (ROOT / "evidence").glob(f"*/{cpu_pages.MEASURED}")
    assert cpu_pages.keep(tmp_path, path) == tmp_path / path.relative_to(ROOT)
    part = tmp_path / "part.jsonl"
    lines = path.read_text("utf-8").splitlines()
    part.write_text("\n".join(line for line in lines if '"op":"matmul"' not in line) + "\n")
    with pytest.raises(ValueError, match="no rows of some ladder"):
        cpu_pages.keep(tmp_path, part)


def test_rungs_stand_in_ladder_order_with_what_each_gained() -> None:
    problem = Problem("matvec", 64, 64)
    rows = [
        result_row("numpy", 5.0, problem, "peer"),
        result_row("threads", 10.0, problem),
        result_row("four_rows", 20.0, problem),
        result_row("scalar_loop", 80.0, problem),
        result_row("panels", 1.0, dataclasses.replace(problem, layout_a="col")),
    ]
    lines = cpu_pages.measured("matvec", rows).splitlines()
    names = [line.split("|")[1].strip().replace("\\", "") for line in lines if line[:1] == "|"][2:]
    assert names == ["scalar_loop", "four_rows", "threads", "numpy [peer]"]
    gains = [line.split("|")[6].strip() for line in lines if line.startswith("| ")][2:]
    assert gains == ["", "4.00", "2.00", ""]


def test_rows_go_to_their_ladder() -> None:
    spec = QuantSpec(4, 128, True, "row", "float32", False)
    for problem, op in (
        (Problem("matvec", 4, 4), "matvec"),
        (Problem("matvec", 4, 4, layout_a="col"), "vecmat"),
        (Problem("matmul", 4, 4, 4), "matmul"),
        (Problem("matmul", 4, 4, 4, a="uint4", quant=spec), "quantized"),
    ):
        rows = [result_row("a_rung", 1.0, problem)]
        shown = [one for one in OPS if "| a\\_rung" in cpu_pages.measured(one, rows)]
        assert shown == [op]


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"matvec": 3}',
        '{"matvec": {"threads": {"float32": {}}}}',
        '{"matvec": {"threads": {"float32": {"counts": {"evil": 1}, "width": 64, "folded": 0}}}}',
        '{"matvec": {"threads": {"float32": {"counts": {"add": "1"}, "width": 64, "folded": 0}}}}',
    ],
)
def test_other_files_than_mixes_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mixes.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="instruction mix"):
        cpu_pages.read_mixes(path)


def test_a_page_that_lags_behind_its_files_is_stale(tmp_path: Path) -> None:
    for folder in ("docs/ladder", "evidence"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for name in ("README.md", "docs/ladder.md"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "docs" / "img" / "ladder", tmp_path / "docs" / "img" / "ladder")
    build.update(tmp_path)
    (path,) = (tmp_path / "evidence").glob(f"*/{cpu_pages.MIXES}")
    mixes = json.loads(path.read_text())
    mixes["matvec"]["four_rows"]["float32"]["counts"]["multiply-add"] = 4321
    path.write_text(json.dumps(mixes))
    page = tmp_path / cpu_pages.page("matvec")
    assert build.stale(tmp_path) == [page]
    assert build.update(tmp_path) == [page]
    assert "4321" in page.read_text()
    assert build.stale(tmp_path) == []


def test_operands_are_those_that_the_rung_takes() -> None:
    assert cpu_pages.operands_of("quantized", "panels", "int4")[0] == "vecmat"
    called = {rung.name: rung for rung in ladder("quantized")}
    for name, op in (("int8_activations", "matvec"), ("sixteen_rows_int8", "matmul")):
        if called[name].available() is None:
            assert cpu_pages.operands_of("quantized", name, "int8")[0] == op
    for path in (ROOT / cpu_pages.EVIDENCE).glob(f"*/{cpu_pages.MIXES}"):
        for name, formats in cpu_pages.read_mixes(path)["quantized"].items():
            for form in formats if called[name].available() is None else ():
                *_, options = cpu_pages.operands_of("quantized", name, form)
                assert options == ({"activations": "int8"} if "int8" in name else {}), form
    with pytest.raises(ValueError, match="takes no float16"):
        cpu_pages.operands_of("matvec", "blas", "float16")


def test_the_chart_of_the_ladders_multiplies_the_gains_of_the_steps(tmp_path: Path) -> None:
    check_words(ladder_chart.chart(ROOT / "evidence"))
    assert ladder_chart.climb("matvec", "cpu", tmp_path) == {"scalar_loop": 1.0}
    gained = gains("vecmat", "cpu", newest("cpu", ROOT / "evidence").rows)
    steps = ladder_chart.climb("vecmat", "cpu", ROOT / "evidence")
    assert list(steps)[:3] == ["scalar_loop", "axpy_columns", "panels"]
    assert steps["panels"] == gained["panels"].times * gained["axpy_columns"].times
