"""Every verdict on record agrees with one computed anew, and pages answer first what is asked."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest
import recomputed
from click.testing import CliRunner

from checkout import EVIDENCE, ROOT, TESTS
from gemmule.core.problem import QuantSpec
from gemmule.core.registry import all_rungs
from gemmule.oracle.problems import make_problem
from gemmule_lab import studies
from gemmule_lab.commands.study import study as command
from gemmule_lab.records import study as store
from gemmule_lab.records.study import Rows
from gemmule_lab.studies.documents import document_000, document_003, rows_columns
from gemmule_lab.studies.grid import Cell
from gemmule_lab.studies.rules import CONFIRMED, NOT_MEASURABLE
from lab_rows import recorded, study_row

HELD = recomputed.held()
QUESTIONS = tomllib.loads((TESTS / "data" / "first_screens.toml").read_text("utf-8"))
FIRST_LINES = 28  # what a browser shows of a page before anybody scrolls, some of them long


@pytest.mark.parametrize("number", studies.NUMBERS)
def test_each_verdict_agrees_with_a_recomputation(number: str) -> None:
    claims = studies.load(number).claims
    assert {f"{number}/{claim.id}" for claim in claims} == {
        name for name in HELD if name.startswith(number)
    }
    for claim in claims:
        outcome = claim.judge(recorded(number)).outcome
        assert outcome != NOT_MEASURABLE, claim.id
        assert (outcome == CONFIRMED) == HELD[f"{number}/{claim.id}"], claim.id


@pytest.mark.parametrize("number", studies.NUMBERS)
def test_each_verdict_on_record_has_its_cause(number: str) -> None:
    for claim in studies.load(number).claims:
        finding = claim.judge(recorded(number))
        assert finding.cause, (claim.id, finding.outcome)
        assert finding.cause[-1] == ".", claim.id


def test_the_recomputation_shares_no_code_with_the_studies() -> None:
    text = Path(recomputed.__file__).read_text("utf-8")
    assert set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)) <= {
        "__future__",
        "json",
        "math",
        "statistics",
        "collections",
        "pathlib",
        "typing",
    }


def test_a_planted_row_changes_verdict_and_recomputation_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = recomputed.ROWS["003"][0]
    slow = [{**r, "times_us": {"median": 9e3}} if r["name"] == "int8, chosen" else r for r in rows]
    monkeypatch.setitem(recomputed.ROWS, "003", (slow, recomputed.ROWS["003"][1]))
    assert HELD["003/int8-over-fp16"]
    assert not recomputed.HOLDS["003/int8-over-fp16"]()


@pytest.mark.parametrize("down", [1.5, 40.0])  # growth of the bandwidth from end to end
@pytest.mark.parametrize("across", [1.1, 5.0])
def test_a_rule_of_two_conditions_needs_both(down: float, across: float) -> None:
    document = studies.load("000")
    (claim,) = [one for one in document.claims if one.id == "rows"]
    rows = [
        study_row(
            "000",
            rows_columns.EXPERIMENT,
            document_000.BASIC,
            5.0,
            m=m,
            n=n,
            figures={"gbs": 10 * down ** (m // 256) * across ** (n // 256)},
        )
        for m in (64, 256)
        for n in (64, 256)
    ]
    finding = claim.judge(Rows(rows))
    assert (finding.outcome == CONFIRMED) == (down == 40.0 and across == 1.1)


@pytest.mark.parametrize("number", [*studies.NUMBERS, "index"])
def test_the_first_screen_answers(number: str) -> None:
    text = (ROOT / "docs" / "studies" / f"{number}.md").read_text("utf-8")
    first = "\n".join(text.splitlines()[:FIRST_LINES])
    for asked, found in QUESTIONS["every" if number != "index" else "index"].items():
        assert re.search(found, first), asked
    for asked, found in QUESTIONS.get(number, {}).items():
        assert found in first, asked


def test_each_kernel_on_a_page_links_to_its_page_and_its_source() -> None:
    for number in studies.NUMBERS:
        page = ROOT / "docs" / "studies" / f"{number}.md"
        links = re.findall(r"\]\((\.\./[^)#]+)(#[^)]+)?\)", page.read_text("utf-8"))
        assert len(links) > 4
        for target, anchor in links:
            path = (page.parent / target).resolve()
            assert path.is_file(), target
            if anchor:
                headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
                assert anchor[1:] in {h.lower().replace(" ", "-") for h in headings}, anchor


def test_the_list_answers_each_question() -> None:
    result = CliRunner().invoke(command, ["--list"])
    assert result.exit_code == 0, result.output
    for number in studies.NUMBERS:
        assert f"{number}  " in result.output
    assert "46 times of that is the launch" in result.output
    assert "?" not in re.sub(r"\?\n", "", result.output), "an answer lacks its figure"


def test_two_devices_stand_in_one_table_and_chart(tmp_path: Path) -> None:
    other = EVIDENCE / "nvidia-h200" / "study-003.jsonl"
    given = ["003", "--show", "--against", str(other), "--out", str(tmp_path)]
    result = CliRunner().invoke(command, given, env={"COLUMNS": "220"})
    assert result.exit_code == 0, result.output
    assert "NVIDIA H100 80GB HBM3" in result.output
    assert "times as fast as on NVIDIA H200" in " ".join(result.output.split())
    assert re.search(r"fp16, chosen .* 0\.81 \(6\)", result.output), "the H200 is the faster one"
    assert (tmp_path / "study-003-devices.svg").is_file()
    again = ["003", "--show", "--against", str(store.on_record("003")[0]), "--out", str(tmp_path)]
    same = CliRunner().invoke(command, again, env={"COLUMNS": "220"})
    assert "NVIDIA H100 80GB HBM3, study-003.jsonl" in " ".join(same.output.split()), same.exception
    both = ["003", "--show", "--out", str(tmp_path)]
    for path in (other, store.on_record("003")[0]):
        both += ["--against", str(path)]
    three = CliRunner().invoke(command, both, env={"COLUMNS": "300"})
    assert three.output.count("(cases)") == 2, "a column of ratios for each other device"
    drawn = (tmp_path / "study-003-devices.svg").read_text("utf-8")
    assert "against NVIDIA H200" in drawn
    assert "against NVIDIA H100" in drawn
    wrong = CliRunner().invoke(command, ["--show", "--against", str(other)])
    assert wrong.exit_code
    assert "one study" in str(wrong.exception)


def test_only_some_experiments_are_asked_for_by_name(tmp_path: Path) -> None:
    given = ["003", "--device", "cpu", "--only", "nothing", "--out", str(tmp_path)]
    result = CliRunner().invoke(command, given)
    assert "the experiment nothing; there are: p x rows x values, sizes" in str(result.exception)


def test_the_largest_record_is_shown() -> None:
    paths = store.on_record("003")
    assert [path.parent.name for path in paths] == ["nvidia-h100-80gb-hbm3", "nvidia-h200"]


def test_parameters_are_tuned_on_the_device_at_hand() -> None:
    """Where the sweep was run its best counts, and sections are held against as many threads."""
    claims = {claim.id: claim for claim in studies.load("003").claims}
    rows = [
        study_row("003", "sizes", name, us, n=512)
        for name, us in (("torch", 10.0), ("fp16, best parameters", 12.0))
    ]
    assert claims["fp16-over-torch"].judge(Rows(rows)).outcome != CONFIRMED
    swept = study_row("003", "p x rows x values", "fp16 32 x 1 x 16", 5.0, n=512)
    rows.append(dataclasses.replace(swept, params={"rung": "two_step"}))
    found = claims["fp16-over-torch"].judge(Rows(rows))
    assert (found.outcome, found.value) == (CONFIRMED, pytest.approx(2.0))
    alike = [("fp16 128 x 1 x 8", 10.0), ("fp16 4 sections of 32 x 1 x 8", 11.0)]
    unlike = [("fp16 one block a row", 10.0), ("fp16 y blocks", 30.0)]
    rows = [study_row("003", "sizes", name, us, n=512) for name, us in unlike]
    assert claims["y-blocks"].judge(Rows(rows)).outcome != CONFIRMED
    rows += [study_row("003", "p x rows x values", name, us, n=512) for name, us in alike]
    assert claims["y-blocks"].judge(Rows(rows)).outcome == CONFIRMED


def test_the_table_has_each_kernel_tuned_by_the_sweep_and_torch_of_the_same_run() -> None:
    swept = {
        "fp16 32 x 1 x 8": ("two_step", 9.0),
        "int8 32 x 1 x 8": ("int8_codes", 5.0),
        "fp16 2 sections of 64 x 1 x 8": ("y_blocks", 1.0),  # an alternative, no plain kernel
        "int8 128 x 1 x 8": ("int8_codes", 4.0),
    }
    rows = [
        dataclasses.replace(
            study_row("003", "p x rows x values", name, us, temperature="cold", n=512),
            params={"rung": rung, "p": 32, "rows": 1},
        )
        for name, (rung, us) in swept.items()
    ]
    rows += [
        study_row("003", experiment, "torch", us, temperature="cold", n=512)
        for experiment, us in (("chosen", 3.0), ("sizes", 8.0))
    ]
    header = document_003.STUDY.table[0]
    table = document_003.comparison(Rows(rows))
    lines = {line[1]: line for line in table if line[0] == "512"}
    us, over = header.index("cold us"), header.index("cold x torch")
    assert lines["fp16, best of the sweep"][us] == "9.00"
    assert (lines["int8, best of the sweep"][us], lines["torch"][us]) == ("4.00", "8.00")
    assert (lines["int8, best of the sweep"][over], lines["torch"][over]) == ("2.00", "1.00")


def test_the_tile_is_told_from_the_loads_under_way() -> None:
    claim = next(c for c in studies.load("000").claims if c.id == "tiling")
    times = {"thread_per_row": 12.0, "unrolled_rows": 9.0, "shared_x": 10.0}
    rows = [
        study_row("000", "blocks", f"{name}, blocks of 128", us, temperature="cold", m=8, n=8)
        for name, us in times.items()
    ]
    found = claim.judge(Rows(rows))
    assert found.outcome != CONFIRMED
    assert "unrolled 16 times 1.33" in found.figure
    assert "1.20 (1.20 to 1.20 over 1 case) times as fast: shared_x, blocks of 128" in found.figure


@pytest.mark.parametrize("number", studies.NUMBERS)
def test_each_lane_of_a_grid_is_a_point_of_its_rung(number: str) -> None:
    known = {rung.name: rung for rung in all_rungs("cuda")}
    cells = [s for s in studies.load(number).steps("cuda", True) if isinstance(s, Cell)]
    lanes = {(lane.rung, str(lane.params)): (lane, cell) for cell in cells for lane in cell.lanes}
    for lane, cell in lanes.values():
        if lane.rung in (None, "auto"):
            continue
        rung = known[str(lane.rung)]
        assert not lane.preset or lane.preset in rung.presets
        codes = {"int8 codes": "uint8", "int4 codes": "uint4"}
        form = codes.get(lane.form, lane.form.removeprefix("plain "))
        half = "float16" if form.startswith("uint") else form
        bits = 4 if form == "uint4" else 8
        quant = QuantSpec(bits, None, False, "row", "float32", False) if rung.quantized else None
        wide = cell.columns or 1
        problem = make_problem(cell.op, cell.m, cell.n, wide, (form, half, half), quant=quant)
        if lane.params:  # ValueError for a value that is not in its space, or breaks a constraint
            rung.check_params(problem, lane.params)
