"""Grouped products in the sample of a GPU's model: verified and timed on an emulated device."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuemu.toolchain import missing_tools
from emulated_driver import TimedDriver, emulated
from gemmule.core.choice import Choice
from gemmule.core.grouped import groups
from gemmule.core.problem import FLOAT4_DTYPE, Problem, QuantSpec
from gemmule.core.registry import rung_in
from gemmule.core.rung import Machine
from gemmule.oracle.inputs import Frame
from gemmule.oracle.problems import make_problem
from gemmule.tuning import sample
from gemmule.tuning.operands import canonical_call, random_operands
from gemmule.tuning.trials import exact, sampled

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
HALF = "float16"
DENSE = make_problem("grouped", 20, 64, 64, (HALF,) * 3, batch=3, layout_b="col")
SPEC = QuantSpec(4, 32, True, "row", "float16", False)
CODES = make_problem("grouped", 20, 64, 64, (HALF, "uint4", HALF), batch=3, quant=SPEC)
SIMPLE = {"row_by_row", "code_by_code"}


class Spoiling(TimedDriver):
    """A device whose kernels, once told so, add one to the first number of a result."""

    spoils = False

    def launched(self, function: int, params: int, *geometry: Any) -> None:
        super().launched(function, params, *geometry)
        if self.spoils:
            struct = ctypes.c_void_p.from_address(params).value or 0
            codes = "code" in self.kernels[function - 1][1]
            result = ctypes.c_void_p.from_address(struct + (40 if codes else 16)).value or 0
            ctypes.c_uint16.from_address(result).value ^= 1 << 14


@pytest.fixture
def device(
    own_cache: Path,
    limit: Callable[..., None],
    only_proved: Callable[..., None],
    modules: Callable[..., None],
) -> Iterator[Spoiling]:
    modules(torch=..., cupy=...)  # one without a GPU has no streams
    limit(sample, SECONDS={"cuda": 1e-3}, MOST_SETS={"cuda": 3})
    only_proved("cuda", SIMPLE)
    with emulated(kind=Spoiling) as found:
        assert isinstance(found, Spoiling)
        yield found


def quiet(what: str, done: int, total: int) -> None:
    return None


@pytest.mark.parametrize("problem", [DENSE, CODES], ids=["dense", "codes"])
def test_ways_are_verified_timed_and_read_again(device: Spoiling, problem: Problem) -> None:
    sampler = sample.Sampler("cuda", seed=1)
    gc.disable()
    try:
        sampler.measure([problem], quiet)
        assert not device.memory  # no circle keeps a product's operands on the device
    finally:
        gc.enable()
    (row,) = sampler.timed()
    assert row.problem == problem
    assert row.rung.name in SIMPLE
    assert row.seconds > 0
    assert [one for one, _ in sample.Sampler("cuda").rows] == [one for one, _ in sampler.rows]


@pytest.mark.parametrize("problem", [DENSE, CODES], ids=["dense", "codes"])
def test_a_wrong_kernel_is_not_timed(device: Spoiling, problem: Problem) -> None:
    device.spoils = True
    sampler = sample.Sampler("cuda", seed=1)
    sampler.measure([problem], quiet)
    assert not sampler.timed()
    assert [way.why for way, _ in sampler.rows] == ["Wrong"]


def test_tokens_choose_evenly_and_a_sample_of_their_sums_is_judged() -> None:
    problem = make_problem("grouped", 4000, 96, 64, (HALF,) * 3, batch=8)
    host = random_operands(problem, 3)
    a, w, ends, out = host.arrays()
    sizes = np.diff(ends, prepend=0)
    assert ends[-1] == problem.m
    assert sizes.min() > 400
    for expert, rows in groups(ends):
        out[rows] = a[rows].astype(np.float32) @ w[expert].astype(np.float32)
    small = exact(problem, 0)
    assert small.call.problem.batch == 3
    found = sampled(problem, host, 3)
    assert {len(part.rows) for part in found.parts} == {64}
    assert {int(part.rows[0] < sizes[0]) for part in found.parts} == {0, 1}
    machine = Machine("cuda", "made up", "sm_90a", 132, 4e12, 50 << 20, 227 << 10)
    rung = rung_in("grouped", "cuda", "row_by_row")
    choice = Choice(canonical_call(problem, host), problem, rung, {}, machine, "")
    assert found.complaint(choice, out) == ""
    out[ends[-2] + np.flatnonzero(sizes[-1:])[0]] = 99
    assert "sampled elements are wrong" in found.complaint(choice, out)


def test_all_matrices_of_experts_have_to_fit() -> None:
    drawn = (one for one in sample.draw("cuda", 11) if one.op == "grouped")
    some = [next(drawn) for _ in range(200)]
    for problem in some:
        host_bytes = problem.batch * problem.k * problem.n * (0.5 if problem.quant else 2)
        assert host_bytes <= sample.MOST_BYTES["cuda"]
    assert {problem.layout_b for problem in some} == {"row", "col"}
    assert {problem.b for problem in some} == {HALF, "bfloat16", "uint4", "uint8", FLOAT4_DTYPE}
    assert min(problem.m for problem in some) < 4
    assert max(problem.m for problem in some) > 4000
    assert isinstance(random_operands(DENSE, 1).ends, Frame)
