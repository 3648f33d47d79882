"""Reruns and products beyond 2^31 elements: what is counted, what is covered, what is recorded."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extremes import extremes, giant
from gemmule.core.registry import cuda_rungs
from gemmule.core.rung import Rung
from gemmule.storage import evidence
from proofs import proof_lines, proofs

RUNGS = [pytest.param(r, id=f"{r.folder}-{r.name}") for r in extremes.watched()]
GIANT = giant.SIDES[0]
TWO_STEP = next(r for r in cuda_rungs() if r.name == "two_step")


@pytest.mark.parametrize("rung", RUNGS)
def test_every_dtype_and_every_rung_takes_part(rung: Rung) -> None:
    dtypes = {signature[0] for signature in proofs.signatures(rung)}
    assert {v.name.split(",")[0] for v in extremes.of_each_dtype(rung)} == dtypes
    assert dtypes & set(extremes.GIANT_DTYPES)
    dtype = next(d for d in extremes.GIANT_DTYPES if d in dtypes)
    signature = next(s for s in rung.signatures if s[0] == dtype)
    for batch in (1, giant.BATCH) if rung.batched else (1,):
        rows, columns = giant.sides_of(rung, signature, batch)
        assert rows * columns > 2**31
        if rung.quantized:  # codes are made as the rung reads them, and it takes what they make
            spec = giant.arrangement(rung, signature, (rows, columns))
            assert spec.group_size is None
            assert spec in giant.arrangements(signature)


def test_results_that_differ_are_counted() -> None:
    calls = itertools.count()

    def run(rung: Rung, inputs: Any, params: Any) -> Any:
        assert np.isnan(inputs.out).all(), "each run begins with poison"
        inputs.out[...] = 1.0
        inputs.out[-1] = next(calls) % 3
        return inputs.out

    signature = ("float32",) * 3
    assert len(extremes.digests(TWO_STEP, signature, run, 7)) == 3
    assert len(extremes.digests(TWO_STEP, signature, lambda r, i, p: i.out, 7)) == 1


def test_the_giant_has_most_of_its_elements_in_the_last_row() -> None:
    points = list(giant.points(GIANT))
    for places in (
        {(row, column // 2) for row, column, _ in points},
        {(column, row // 2) for row, column, _ in points},  # transposed
    ):
        assert len(places) == len(points), "two 4-bit codes must not share a byte"
    flat = [row * GIANT[1] + column for row, column, _ in points]
    assert max(flat) == GIANT[0] * GIANT[1] - 1
    assert 2**31 in flat
    last = [column for row, column, _ in points if row == GIANT[0] - 1]
    assert len(last) > 200


@pytest.mark.parametrize("sides", giant.SIDES)
def test_every_giant_has_an_element_at_2_to_the_31(sides: tuple[int, int]) -> None:
    points = list(giant.points(sides))
    places = {(row, column) for row, column, _ in points}
    assert len(places) == len(points)
    flat = [row * sides[1] + column for row, column in places]
    assert 2**31 in flat
    assert max(flat) == sides[0] * sides[1] - 1
    assert len(points) * 2 * 3 < 2048, "exact in float16"
    assert sides[0] % 16 == sides[1] % 16 == 0


@pytest.mark.parametrize("batch", [1, giant.BATCH])
def test_the_expected_product_is_the_product(batch: int) -> None:
    rows, columns = GIANT
    x = 1 + (np.arange(columns) + np.arange(batch)[:, None]) % 3
    y = giant.expected(GIANT, batch, x)
    assert y.shape == (batch, rows // batch)
    assert (y != 0).sum() == 3
    row = np.zeros(columns, np.int64)
    for place, column, value in giant.points(GIANT):
        if place == rows - 1:
            row[column] += value
    assert y[-1, -1] == row @ x[-1]
    assert y.max() < 2048, "exact in float16"


def found(check: str, wrong: str = "") -> extremes.Found:
    return extremes.Found(check, "matvec", "r", "v", "k", "NVIDIA X", {"runs": 3}, wrong)


def test_what_fails_loses_its_line(tmp_path: Path) -> None:
    path = extremes.write(tmp_path, [found("reruns"), found("beyond 2^31")])
    assert path == tmp_path / "nvidia-x" / "extremes.jsonl"
    assert [line["check"] for line in proof_lines.read(path)] == ["beyond 2^31", "reruns"]
    extremes.write(tmp_path, [found("reruns", "2 results")])
    assert [line["check"] for line in proof_lines.read(path)] == ["beyond 2^31"]
    assert (
        extremes.write(tmp_path, [extremes.Found("all", "f", "r", "", "", "", wrong="x")]) is None
    )


def test_lines_of_older_code_are_told(tmp_path: Path) -> None:
    extremes.write(tmp_path, [found("reruns")])
    name = ("matvec", "r", "v")
    assert proof_lines.out_of_date(proof_lines.under(tmp_path), {name: "k"}) == []
    (words,) = proof_lines.out_of_date(proof_lines.under(tmp_path), {name: "new"})
    assert words == "extremes.jsonl: reruns of matvec/r/v is of older code"


@pytest.mark.parametrize(
    "line", ["", "[]", "{}", '{"schema": 1, "check": "reruns"}', "[" * 100_000]
)
def test_lines_that_are_no_records_are_passed_over(tmp_path: Path, line: str) -> None:
    path = extremes.write(tmp_path, [found("reruns")])
    assert path is not None
    path.write_text(f"{line}\n{path.read_text()}")
    assert len(proof_lines.read(path)) == 1


def test_what_is_on_file_was_checked_on_the_code_that_was_proved() -> None:
    """The proofs themselves are held against the code in test_evidence."""
    proved = {(r.folder, r.rung, r.variant): r.key for r in evidence.read()}
    assert proof_lines.out_of_date(proof_lines.under(), proved) == []
