"""Q x by many columns: x brought as it lies or put in order, and what codes are read for each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cuda_emulation import Emulator
from gemmule.core.problem import Problem, QuantSpec
from gemmule.core.registry import rung_in
from gemmule.oracle.problems import make_problem
from proofs import device, proofs

RUNG = rung_in("quantized", "cuda", "rounded_columns")
NAMES = ("tall", "columns", "cluster", "parts", "panels")
SHAPES = {
    "cluster": (1, 32, 2, 1, 2),
    "parts": (1, 64, 1, 4, 2),
    "tall": (2, 64, 1, 1, 2),
    "panel": (1, 256, 2, 1, 1),
}


def product(bits: int, group: int, layout_b: str, terms: int = 520) -> Problem:
    """Return 200 rows of `terms` codes by 72 columns of x: ragged but for what TMA reads."""
    quant = QuantSpec(bits, group, True, "mma16", "float16", False)
    types = (f"uint{bits}", "bfloat16", "bfloat16")
    return make_problem("matmul", 200, 72, terms, types, layout_b=layout_b, quant=quant)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout_b", ["col", "row"])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_are_right_where_x_is_brought_as_it_lies_and_where_not(
    bits: int, layout_b: str, shape: str
) -> None:
    params = dict(zip(NAMES, SHAPES[shape], strict=True))
    for seed, group in enumerate((128, 32, 16, 48)):
        problem = product(bits, group, layout_b)
        kind, view = (("normal", "contiguous"), ("integers", "padded"))[seed % 2]
        trial = device.Trial(problem, params, kind, view, seed)
        verdict = device.judge_trial(RUNG, trial, Emulator(seed).run)
        assert verdict.ok, (trial, verdict.text)


def test_what_lies_along_the_sum_and_is_aligned_needs_no_launch_in_front() -> None:
    machine, params = proofs.proof_machine(), dict(zip(NAMES, SHAPES["cluster"], strict=True))
    problem = product(4, 128, "col")
    (step,) = RUNG.steps(problem, params, machine)
    assert [one.operand for one in step.maps] == ["b", "a"]
    assert not step.pdl
    assert RUNG.workspace(problem, params, machine) == 0
    in_parts = dict(zip(NAMES, SHAPES["parts"], strict=True))
    _, added = RUNG.steps(problem, in_parts, machine)
    assert added.kernel.startswith("add_parts")
    ordered = replace(problem.quant, has_perm=True) if problem.quant else None
    others = [
        product(4, 128, "row"),
        product(4, 128, "col", terms=519),
        product(8, 8, "col"),  # an instruction has columns of two groups
        replace(problem, alignment=8),
        replace(problem, quant=ordered),
    ]
    for other in others:
        first, second = RUNG.steps(other, params, machine)
        assert first.kernel.startswith("turn_columns"), other.describe()
        assert not second.maps, other.describe()
        assert RUNG.workspace(other, params, machine) >= other.n * other.k * 2
