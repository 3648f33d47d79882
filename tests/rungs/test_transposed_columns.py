"""x Q by many columns: x brought as it lies or put in order, and both forms of the kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cuda_emulation import Emulator
from gemmule.core.problem import Problem, QuantSpec
from gemmule.core.registry import rung_in
from gemmule.oracle.problems import make_problem
from proofs import device, proofs

RUNG = rung_in("quantized", "cuda", "rounded_transposed")
NARROW = {"tall": 1, "columns": 64, "cluster": 2, "parts": 1, "panels": 2}
WIDE = {"tall": 1, "columns": 256, "cluster": 2, "parts": 1, "panels": 1}


def product(bits: int, group: int, layout_b: str, rows: int = 264) -> Problem:
    """Return 200 stored columns by 272 columns of x, whose sums run down the rows."""
    quant = QuantSpec(bits, group, True, "mma16", "float16", True)
    types = (f"uint{bits}", "bfloat16", "bfloat16")
    return make_problem("matmul", 200, 272, rows, types, layout_b=layout_b, quant=quant)


@pytest.mark.parametrize("params", [NARROW, WIDE], ids=["128 rows a stage", "64 rows a stage"])
@pytest.mark.parametrize("layout_b", ["col", "row"])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_are_right_where_x_is_brought_as_it_lies_and_where_not(
    bits: int, layout_b: str, params: dict[str, int]
) -> None:
    for seed, group in enumerate((128, 48)):
        problem = product(bits, group, layout_b)
        kind, view = (("normal", "contiguous"), ("integers", "padded"))[seed]
        trial = device.Trial(problem, params, kind, view, seed)
        verdict = device.judge_trial(RUNG, trial, Emulator(seed).run)
        assert verdict.ok, (trial, verdict.text)


def test_what_lies_along_the_sum_and_is_aligned_needs_no_launch_in_front() -> None:
    machine, direct = proofs.proof_machine(), product(4, 128, "col")
    (step,) = RUNG.steps(direct, WIDE, machine)
    assert step.maps
    assert not step.pdl
    assert RUNG.workspace(direct, WIDE, machine) == 0
    in_parts = {**NARROW, "cluster": 1, "parts": 4}
    others = [
        (product(4, 128, "row"), WIDE),
        (product(4, 128, "col", rows=263), WIDE),
        (replace(direct, alignment=8), NARROW),
        (direct, in_parts),  # their place in the workspace is behind x in order
    ]
    for problem, params in others:
        steps = RUNG.steps(problem, params, machine)
        assert len(steps) > 1, problem.describe()
        assert not any(step.maps for step in steps), problem.describe()
        assert RUNG.workspace(problem, params, machine) >= problem.n * problem.k * 2


def test_only_256_columns_go_by_stages_of_64_rows() -> None:
    shapes = {(one["columns"], one["panels"]) for one in RUNG.space(product(4, 128, "col"))}
    assert shapes == {(32, 2), (64, 2), (128, 2), (256, 1)}
