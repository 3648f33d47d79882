"""Few columns of halves on the host: sums in slices, and which operand holds the few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gemmule.backends.cpu.target import missing_vectors
from gemmule.core.problem import Problem
from gemmule.core.registry import all_rungs
from gemmule.oracle.inputs import make_inputs
from gemmule.oracle.judge import check
from gemmule.oracle.problems import make_problem
from gemmule.rungs.matmul.cpu import _few_kernels, _few_tiles, few_columns

pytestmark = pytest.mark.skipif(missing_vectors() is not None, reason=str(missing_vectors()))
RUNG = next(r for r in all_rungs("cpu") if (r.folder, r.name) == ("matmul", "few_columns"))
PARAMS = {"shares_per_thread": 4, "piece": 2048}


def judged(problem: Problem, seed: int) -> None:
    inputs = make_inputs(problem, "integers", seed)
    few_columns.RUNG.bind(problem, PARAMS)(inputs.a, inputs.b, inputs.out)
    verdict = check(inputs, RUNG.arithmetic(problem), PARAMS, inputs.out)
    assert verdict.ok, verdict.text


@pytest.mark.parametrize("cut", [(1, 1), (1, 3), (2, 2), (3, 1), (2, 5)])
@pytest.mark.parametrize("turned", [False, True])
def test_slices_of_the_sum_are_added(
    cut: tuple[int, int], turned: bool, fault: Callable[..., Any]
) -> None:
    """Shares end where no tile does, panels are shorter than shares, and lines left over few."""
    fault(few_columns, "shares_and_slices", lambda sound, problem, params: cut)
    longer = _few_kernels.PANEL_BYTES // (4 * 6) + 50  # than a panel of six columns
    for seed, (m, few, k) in enumerate(((199, 2, 70), (330, 6, 37), (193, 8, 16), (longer, 6, 5))):
        sizes = (few, m, k) if turned else (m, few, k)
        layouts: dict[str, Any] = {"layout_a": "row" if turned else "col", "layout_b": "row"}
        dtype = ("float16", "bfloat16")[seed % 2]
        judged(make_problem("matmul", *sizes, (dtype,) * 3, **layouts), seed)


def test_a_large_share_of_few_results_is_cut_into_slices() -> None:
    problem = make_problem("matmul", 4096, 4, 1 << 16, ("float16",) * 3, layout_a="col")
    across, slices = few_columns.shares_and_slices(problem, PARAMS)
    assert across <= 2
    assert slices >= 1
    wide = make_problem("matmul", 4096, 32, 64, ("float16",) * 3, layout_a="col")
    most = wide.compulsory_bytes // (few_columns.SUMS_SHARE * 4 * wide.m * wide.n)
    assert few_columns.shares_and_slices(wide, PARAMS)[1] <= max(most, 1), "sums are no traffic"
    along = make_problem("matmul", 4096, 4, 1 << 16, ("float16",) * 3)
    assert few_columns.shares_and_slices(along, PARAMS)[1] == 1


@pytest.mark.parametrize(
    ("sizes", "layouts", "words"),
    [
        ((4096, 33, 4096), ("row", "row"), "at most 32"),
        ((4096, 4, 4096), ("strided", "row"), "unit stride"),
        ((4, 4096, 4096), ("row", "strided"), "unit stride"),
        ((40, 4, 4096), ("col", "row"), "side by side"),
        ((4096, 4, 4096), ("row", "strided"), None),
        ((4, 4096, 4096), ("strided", "col"), None),
    ],
)
def test_what_it_takes(
    sizes: tuple[int, int, int], layouts: tuple[str, str], words: str | None
) -> None:
    a, b = layouts
    problem = make_problem("matmul", *sizes, ("float16",) * 3, layout_a=a, layout_b=b)
    refusal = RUNG.refusal(problem)
    assert refusal is None if words is None else words in str(refusal)


def test_the_many_are_halves_where_dtypes_differ() -> None:
    for signature, sizes in (
        (("float16", "float32", "float32"), (70, 3, 40)),
        (("float32", "bfloat16", "float32"), (3, 70, 40)),
    ):
        problem = make_problem("matmul", *sizes, signature)
        assert RUNG.refusal(problem) is None
        judged(problem, 1)
        other = make_problem("matmul", sizes[1], sizes[0], sizes[2], signature)
        assert "halves" in str(RUNG.refusal(other))


def test_tiles_are_as_wide_as_the_few() -> None:
    widths = sorted(_few_tiles._sizes())
    assert [_few_tiles.tile_columns(few) for few in widths] == widths
    for few in range(1, few_columns.MOST + 1):
        width = _few_tiles.tile_columns(few)
        assert -(-few // width) * width <= 4 * few // 3 + 2


def test_sums_that_nothing_is_added_to_are_zero() -> None:
    problem = make_problem("matmul", 5, 2, 0, ("float16",) * 3)
    inputs = make_inputs(problem, "integers", 0)
    few_columns.RUNG.bind(problem, PARAMS)(inputs.a, inputs.b, inputs.out)
    assert np.array_equal(inputs.out, np.zeros((5, 2), np.float16))
