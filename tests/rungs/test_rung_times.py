"""Rungs hold formulas; the numbers of a device are data: no times, rates or cards in a rung."""

from __future__ import annotations

import ast
import functools
import io
import itertools
import math
import re
import tokenize
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gemmule.core import device_model
from gemmule.core.problem import Problem
from gemmule.core.registry import all_rungs
from gemmule.core.rung import RUNGS_FOLDER, Machine, Rung
from gemmule.rungs.vecmat.cpu import panels
from gemmule.storage import models
from gemmule.tuning import sample

MACHINE = Machine("cuda", "NVIDIA H200", "sm_90a", 132, 4.5e12, 50 << 20, 227 << 10, 1.8e-6)
TIMED = [rung for rung in all_rungs("cuda") if rung.seconds is not None]
SHORT, QUICK = 1e-4, 1e9  # seconds below, and so many a second above, are a device's
SAID = re.compile(r"\b(H100|H200|A100|November)\b|\bmicroseconds?\b|\d (us|ns)\b")
NAMED = re.compile(r".*_(us|s|US|S)")


def numbers_in(text: str) -> Iterator[str]:
    """Yield numbers of a time's or a rate's size, and names of times that are given a number."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and type(node.value) is float:
            if 0 < abs(node.value) < SHORT or QUICK <= abs(node.value) < math.inf:
                yield f"line {node.lineno}: {node.value}"
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            named = [one.id for one in node.targets if isinstance(one, ast.Name)]
            if any(NAMED.fullmatch(name) for name in named) and node.value.value:
                yield f"line {node.lineno}: {named[0]} is {node.value.value!r}"


def said_in(text: str) -> Iterator[str]:
    """Yield comments and docstrings that speak of one card, or of microseconds."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        words = token.type in (tokenize.COMMENT, tokenize.STRING)
        if words and (found := SAID.search(token.string)):
            yield f"line {token.start[0]}: {found[0]}"


@pytest.mark.parametrize("path", sorted(RUNGS_FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_no_rung_holds_a_time(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    on_a_gpu = "cuda" in path.parent.name
    found = [*numbers_in(text), *(said_in(text) if on_a_gpu else ())]
    assert not found, f"{path}: {found}"


@pytest.mark.parametrize(
    ("planted", "is_found"),
    [
        ("x = 0.8e-6", True),
        ("START_S = 2", True),
        ("def f():\n    turn_us = 0.58\n", True),
        ("rate = 7.1e12", True),
        ("x = max(fill, 1e-3)", False),
        ("LARGEST = 2**31 - 1", False),
    ],
)
def test_planted_numbers_are_found(planted: str, is_found: bool) -> None:
    assert bool(list(numbers_in(planted))) == is_found


@pytest.mark.parametrize(
    ("planted", "is_found"),
    [
        ("# One H200 (a month): 3.7 us by 80 splits", True),
        ('"""It costs two microseconds."""', True),
        ("PRESET = 'h200_512'", False),
    ],
)
def test_planted_words_are_found(planted: str, is_found: bool) -> None:
    assert bool(list(said_in(planted))) == is_found


def test_the_shipped_models_are_of_the_rungs_that_are_there() -> None:
    names = {f"{rung.folder}/{rung.name}" for rung in all_rungs("cuda")}
    for model, devices in models.shipped():
        assert models.fault(model) == ""
        assert devices
        assert set(model.numbers) <= names


@functools.cache
def drawn() -> tuple[Problem, ...]:
    return tuple(itertools.islice(sample.draw("cuda", 3), 400))


@pytest.mark.parametrize("rung", TIMED, ids=lambda rung: f"{rung.folder}-{rung.name}")
def test_every_declared_point_has_a_time(rung: Rung) -> None:
    """Also those that a rung never suggests: the tuner and the fit ask for them."""
    met = 0
    for problem in drawn():
        if problem.a == "float32" and met % 2:
            problem = replace(problem, precision="tf32")
        if rung.mismatch(problem) is not None:
            continue
        for params in rung.space(problem):
            assert rung.seconds is not None
            expected = rung.seconds(problem, params, MACHINE)
            assert 0 < expected < 1e3, (problem.describe(), params)
            met += 1
        if met > 200:
            break
    assert met or rung.name in SELDOM


SELDOM = {
    "byte_slices",
    "complex_parts",
    "int4_codes",
    "int8_codes",
    "wgmma_float8",
    "wgmma_float8_blocks",
    "transposed_fragments",
    "transposed_columns",
    "clustered_fragments",
}  # of layouts and dtypes that no sample draws
# Each token's sums take the time, however many experts' matrices they are of.
HARDLY = {("batch", "row_by_row"), ("batch", "code_by_code")}


@pytest.mark.parametrize("rung", TIMED, ids=lambda rung: f"{rung.folder}-{rung.name}")
def test_every_size_and_the_batch_count(rung: Rung) -> None:
    """A time that a size does not enter is far too short for some product 64 times as large."""
    assert rung.seconds is not None
    taken = [problem for problem in drawn() if rung.mismatch(problem) is None]
    sizes = ("m", "n", "batch") if rung.op == "matvec" else ("m", "n", "batch", "k")
    for name in sizes:
        if (name, rung.name) in HARDLY:
            continue
        growth = []
        for problem in taken:
            grown = replace(problem, **{name: 64 * getattr(problem, name)})
            params = next(rung.space(grown), None)
            if rung.mismatch(grown) is None and params in list(rung.space(problem)):
                times = [rung.seconds(one, params or {}, MACHINE) for one in (problem, grown)]
                growth.append(times[1] / times[0])
        assert max(growth, default=2.0) > 1.5 or len(growth) < 5, name


def test_times_follow_the_coefficients() -> None:
    """Of a machine with a model of its own, twice as slow in all, a plan expects twice the time."""
    problem = next(p for p in sample.draw("cuda", 5) if p.op == "matvec" and p.quant is None)
    model = models.of(MACHINE)
    slower = models.scaled(model, 0.5)
    before, after = (one.numbers["matvec/streamed_rows"]["start_s"] for one in (model, slower))
    assert after == pytest.approx(2 * before)
    rung = next(rung for rung in TIMED if rung.mismatch(problem) is None)
    own, params = slower.numbers[rung.counts_with], next(rung.space(problem))
    assert rung.seconds is not None
    assert rung.terms is not None
    expected = rung.seconds(problem, params, replace(MACHINE, model=slower))
    assert expected == device_model.seconds(own, rung.terms(problem, params, MACHINE))


def test_each_panel_of_columns_has_its_own_loop() -> None:
    one = Problem("matvec", panels.WIDTHS[0], 7)
    here = Machine("cpu", "test", "x86_64", 2, 40e9, 32 << 20)
    times = [panels.columns_s(replace(one, m=one.m + more), here) for more in (0, 1, one.m)]
    assert times == [times[0], 2 * times[0], 2 * times[0]]
