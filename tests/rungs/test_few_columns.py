"""Few columns, packed and as they lie: what common tests do not reach, under the emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cuda_emulation import Emulator, together
from cuemu.toolchain import missing_tools
from gemmule.core.problem import Problem
from gemmule.core.registry import all_rungs
from gemmule.oracle.inputs import make_inputs
from gemmule.oracle.judge import check
from gemmule.oracle.problems import make_problem
from proofs import proofs

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
RUNG, UNPACKED, TENSOR = (
    next(rung for rung in all_rungs("cuda") if rung.name == name)
    for name in ("few_columns", "few_columns_unpacked", "few_columns_tensor")
)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layout_b", ["row", "col"])
def test_warps_that_share_columns_wait_for_each_other(dtype: str, layout_b: str) -> None:
    """Rings that are filled again, in several orders of the threads, a group with few columns."""
    problems = [
        make_problem("matmul", m, n, k, (dtype,) * 3, layout_b=layout_b)
        for m, n, k in ((70, 20, 640), (33, 4, 672))
    ]
    together(RUNG, ((one, params) for one in problems for params in RUNG.space(one)), Emulator())
    for problem in problems:
        for index, params in enumerate(RUNG.space(problem)):
            inputs = make_inputs(problem, "integers", 11)
            got = Emulator(seed=index % 4).run(RUNG, inputs, params)
            verdict = check(inputs, RUNG.arithmetic(problem), params, got)
            assert verdict.ok, f"{params}: {verdict.text}"


def test_columns_that_lie_as_they_are_read_are_not_packed() -> None:
    machine = proofs.proof_machine()
    for k, layout_b, steps in ((640, "col", 1), (640, "row", 2), (648, "col", 2), (639, "col", 2)):
        problem = make_problem("matmul", 70, 12, k, ("float32",) * 3, layout_b=layout_b)
        params = RUNG.check_params(problem, None)
        found = RUNG.steps(problem, params, machine)  # type: ignore[attr-defined]
        assert len(found) == steps, (k, layout_b)
        assert (RUNG.workspace(problem, params, machine) > 0) == (steps == 2)  # type: ignore[attr-defined]
    problem = make_problem("matmul", 70, 3, 640, ("float16",) * 3, layout_b="col")
    for alignment, packed in ((16, False), (2, True)):
        one = replace(problem, alignment=alignment)
        params = TENSOR.check_params(one, None)
        assert (TENSOR.workspace(one, params, machine) > 0) == packed  # type: ignore[attr-defined]
    # Columns across the sum are packed however few and well aligned they are.
    across = make_problem("matmul", 70, 2, 640, ("float64",) * 3, layout_b="row")
    assert across.alignment == 16
    params = TENSOR.check_params(across, None)
    assert TENSOR.workspace(across, params, machine) > 0  # type: ignore[attr-defined]


def test_a_batch_of_lying_columns() -> None:
    problem = make_problem("matmul", 40, 20, 96, ("float32",) * 3, layout_b="col", batch=3)
    inputs = make_inputs(problem, "integers", 5)
    got = Emulator(seed=1).run(RUNG, inputs, RUNG.check_params(problem, None))
    assert np.array_equal(got, inputs.a @ inputs.b)


def unpacked(dtype: str) -> list[tuple[Problem, dict[str, Any]]]:
    """Return products whose kernels are one build: rings that fill again, blocks of two sizes."""
    problems = [
        make_problem("matmul", m, n, k, (dtype,) * 3, layout_b=layout_b)
        for m, n, k, layout_b in (
            (300, 16, 2100, "row"),
            (100, 4, 1600, "col"),
            (40, 20, 2048, "row"),
        )
    ]
    sets = ({"rows": 32, "resident": 1, "pieces": 8}, {"rows": 16, "resident": 2, "pieces": 4})
    products = [(problem, params) for problem in problems for params in sets]
    together(UNPACKED, products, Emulator())
    return products


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rings_of_warps_that_begin_at_different_chunks(dtype: str) -> None:
    """Blocks walk from chunks of their own on, past the last one to the first."""
    for index, (problem, params) in enumerate(unpacked(dtype)):
        inputs = make_inputs(problem, "integers", 13)
        got = Emulator(seed=index % 4).run(UNPACKED, inputs, params)
        verdict = check(inputs, UNPACKED.arithmetic(problem), params, got)
        assert verdict.ok, f"{params}: {verdict.text}"


def test_rows_of_the_last_block_are_stored_once() -> None:
    """The last block has rows of the one before it, whose old C must not be added again."""
    (_, params), *_ = unpacked("float32")
    inputs = make_inputs(make_problem("matmul", 40, 16, 128, ("float32",) * 3), "integers", 5)
    inputs.out[...] = np.arange(40 * 16).reshape(40, 16)
    wanted = 2 * (inputs.a @ inputs.b) + 3 * inputs.out
    assert np.array_equal(Emulator(seed=1).run(UNPACKED, inputs, params, 2.0, 3.0), wanted)


def test_floats_are_added_as_doubles() -> None:
    """And nothing past the end of the sum is: an infinity there times a zero would be none."""
    (_, params), *_ = unpacked("float32")
    problem = make_problem("matmul", 33, 3, 4004, ("float32",) * 3, layout_b="col")
    inputs = make_inputs(problem, "normal", 7)
    inputs.a[32, -1] = np.inf
    got = Emulator(seed=3).run(UNPACKED, inputs, params)
    a, b = inputs.a[:32].astype(np.float64), inputs.b.astype(np.float64)
    error = np.abs(got[:32] - a @ b) / (np.abs(a) @ np.abs(b))
    assert error.max() < 2.0**-24
    assert np.array_equal(got[32], np.copysign(np.inf, inputs.b[-1]))
    plain = replace(problem, precision="ieee")  # float32 products and sums, no tensor cores
    assert "ieee" in str(UNPACKED.refusal(plain))
    assert UNPACKED.refusal(replace(plain, a="float64", b="float64", out="float64")) is None
