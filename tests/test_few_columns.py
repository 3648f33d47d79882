"""Few columns on the ordinary units: what common tests do not reach, under the emulator."""

from __future__ import annotations

import numpy as np
import pytest

from cuda_emulation import Emulator, together
from cuemu.toolchain import missing_tools
from gemmule.core.registry import all_rungs
from gemmule.lab.verify import proofs
from gemmule.oracle.inputs import make_inputs
from gemmule.oracle.judge import check
from gemmule.oracle.problems import make_problem

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
RUNG = next(rung for rung in all_rungs("cuda") if rung.name == "few_columns")


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


def test_a_batch_of_lying_columns() -> None:
    problem = make_problem("matmul", 40, 20, 96, ("float32",) * 3, layout_b="col", batch=3)
    inputs = make_inputs(problem, "integers", 5)
    got = Emulator(seed=1).run(RUNG, inputs, RUNG.check_params(problem, None))
    assert np.array_equal(got, inputs.a @ inputs.b)
