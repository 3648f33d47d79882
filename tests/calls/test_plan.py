"""Plans: choice, explanation, reuse, refusal, log lines."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pickle
import platform
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule import backends
from gemmule.backends.cpu import launch
from gemmule.core.caches import forget_plans
from gemmule.core.registry import all_rungs
from gemmule.plan import rebound, resolve
from gemmule.rungs.quantized.cpu import packed_codes
from gemmule.storage import tuned as tuned_store
from planted import planted
from products import ARRANGEMENTS, assert_same, exact, misaligned, small


@pytest.fixture(autouse=True)
def _empty_cache(own_cache: Path) -> None:
    pass


def operands(dtype: str = "float32") -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    return small(rng, (20, 30), dtype), small(rng, (30,), dtype)


def test_a_plan_is_frozen_and_tells_its_choice() -> None:
    A, x = operands()
    p = gm.plan("matvec", A, x)
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.op = "matmul"
    assert p.rung in all_rungs("cpu")
    assert p.params in list(p.rung.space(p.problem))
    p.params["new"] = 1  # a copy
    assert "new" not in p.params
    assert (p.problem.m, p.problem.n, p.reason) == (20, 30, "heuristic")


def test_explain_has_a_line_for_each_matter() -> None:
    A, x = operands()
    lines = gm.plan("matvec", A, x).explain().splitlines()
    words = [line.split()[0] for line in lines]
    assert words[:5] == ["problem", "device", "rung", "parameters", "reason"]
    for word in ("expected", "sums", "copies"):
        assert word in words
    assert lines[0].endswith("matvec A 20 x 30 row, float32 x float32 -> float32")
    assert lines[-1] == "copies     none"
    named = gm.plan("matmul", A, A.T, rung="cache_blocks", params={"depth": 64, "width": 256})
    assert "parameters depth=64, width=256" in named.explain().splitlines()
    named = gm.plan("matvec", A, x, rung="four_rows")
    assert "parameters none" in named.explain().splitlines()


@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul"])
def test_explain_tells_what_limits_a_product(op: str) -> None:
    """Reading limits products of a vector, however long they take, and matrices while it shows."""
    W, x = np.ones((512, 512), np.float32), np.ones(512, np.float32)
    plan = gm.plan(op, *((x, W) if op == "vecmat" else (W, x) if op == "matvec" else (W, W)))
    ceiling_s = plan.problem.compulsory_bytes / plan.choice.machine.read_bytes_per_s
    for share in (1.2, 0.5, 0.11, 0.09, 0.01):
        choice = dataclasses.replace(plan.choice, expected_s=ceiling_s / share)
        told = dataclasses.replace(plan, choice=choice).explain().splitlines()
        (line,) = (one for one in told if one.startswith("expected"))
        reads = op != "matmul" or share >= 0.1
        assert (f"{share:.0%} of the read ceiling" in line) == reads
        assert ("GFLOP/s" in line) == (op == "matmul")


def test_explain_tells_what_was_allowed_for_nothing() -> None:
    A, x = np.ones((8, 8), np.float32), np.ones(8, np.float32)
    assert "no use" not in gm.plan("matvec", A, x).explain()
    said = gm.plan("matvec", A, x, precision="tf32", accumulate="float16").explain()
    assert 'no use of precision="tf32" and accumulate="float16"' in said
    assert "no use" not in gm.plan("matvec", A, x, precision="ieee").explain()


@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul"])
def test_a_plan_computes_what_the_function_does(op: str) -> None:
    rng = np.random.default_rng(2)
    shapes = {
        "matvec": [((9, 17), (17,)), ((3, 9, 17), (3, 17))],
        "vecmat": [((17,), (17, 9)), ((4, 17), (17, 9))],
        "matmul": [((9, 17), (17, 5)), ((17,), (17, 5)), ((2, 9, 17), (17, 5))],
    }
    for a, b in shapes[op]:
        left, right = small(rng, a, "float32"), small(rng, b, "float32")
        p = gm.plan(op, left, right)
        truth = exact(op, left, right)
        assert_same(p(left, right), truth, "float32")
        for how in ("row", "sliced", "reversed"):
            out = ARRANGEMENTS[how](np.full(truth.shape, np.nan, "f4"))
            assert p(left, right, out=out) is out
            assert_same(out, truth, "float32")


def test_new_values_in_the_same_form() -> None:
    A, x = operands()
    p = gm.plan("matvec", A, x)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        A, x = small(rng, (20, 30), "float32"), small(rng, (30,), "float32")
        assert_same(p(A, x), exact("matvec", A, x), "float32")


@pytest.mark.parametrize("how", ["sliced", "read_only", "misaligned", "swapped_bytes"])
def test_operands_of_other_strides_but_the_same_problem(how: str) -> None:
    A, x = operands()
    p = gm.plan("matvec", A, x)
    A2, x2 = ARRANGEMENTS[how](A), ARRANGEMENTS[how](x)
    assert_same(p(A2, x2), exact("matvec", A, x), "float32")
    assert_same(p(A, misaligned(x)), exact("matvec", A, x), "float32")


@pytest.mark.parametrize(
    "change",
    [
        lambda A, x: (A[:19], x),
        lambda A, x: (A[:, :29], x[:29]),
        lambda A, x: (A.astype("f8"), x.astype("f8")),
        lambda A, x: (np.asfortranarray(A), x),
        lambda A, x: (A[::-1], x),
        lambda A, x: (A[None], np.stack([x, x])),
        lambda A, x: (gm.quantize(A, group_size=-1), x),
    ],
)
def test_another_problem_is_refused(change: Any) -> None:
    A, x = operands()
    p = gm.plan("matvec", A, x)
    with pytest.raises((ValueError, TypeError), match=r"this plan computes matvec A 20 x 30 row"):
        p(*change(A, x))


def test_wrong_arguments_of_a_plan() -> None:
    A, x = operands()
    p = gm.plan("matvec", A, x)
    with pytest.raises(TypeError, match=r"second operand is a list"):
        p(A, [1.0] * 30)
    with pytest.raises(ValueError, match="overlaps an input"):
        gm.plan("matvec", A[:, :20], x[:20])(A[:, :20], x[:20], out=x[:20])
    with pytest.raises(TypeError, match="out has dtype float64"):
        p(A, x, out=np.zeros(20))
    with pytest.raises(ValueError, match="read-only"):
        p(A, x, out=ARRANGEMENTS["read_only"](np.zeros(20, "f4")))
    with pytest.raises(ValueError, match="out has shape"):
        p(A, x, out=np.zeros(21, "f4"))
    with pytest.raises(ValueError, match="is for cuda:0, but the operands lie on cpu"):
        dataclasses.replace(p, device="cuda:0")._check_device("cpu")


def test_plans_are_cached_by_form() -> None:
    A, x = operands()
    assert gm.plan("matvec", A, x) is gm.plan("matvec", A.copy(), x.copy())
    before = resolve.cache_info().misses
    gm.matvec(A, x)
    gm.matvec(A + 1, x + 1)
    assert resolve.cache_info().misses == before
    forget_plans()
    assert resolve.cache_info().currsize == 0


def test_a_plan_finds_out_once_how_to_fill_a_result_of_another_layout() -> None:
    A, B = np.ones((6, 5), np.float32), np.ones((5, 3), np.float32)
    plan, out = gm.plan("matmul", A, B), np.zeros((6, 3), np.float32, order="F")
    forget_plans()
    for _ in range(3):
        out[...] = 0
        assert plan(A, B, out=out) is out
        np.testing.assert_array_equal(out, 5)
    assert rebound.cache_info().misses == 1
    with pytest.raises(ValueError, match="Make another plan"):
        plan(A[:, :4], B[:4], out=out)
    forget_plans()
    assert rebound.cache_info().currsize == 0


def test_copies_are_listed_and_a_large_one_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    A = np.zeros((1100, 2200), np.float32)[:, ::2]
    x = np.zeros(1100, np.float32)
    named = next(r for r in gm.ladder("matvec", "cpu") if "strided" not in r.layouts)
    with caplog.at_level(logging.DEBUG, "gemmule"):
        p = gm.plan("matvec", A, x, rung=named.name)
    assert (
        p.explain()
        .splitlines()[-1]
        .startswith("copies     A copied from float32 strided to float32 row, 4,840,000 bytes")
    )
    levels = [record.levelno for record in caplog.records if record.name == "gemmule"]
    assert levels.count(logging.WARNING) == 1
    assert levels.count(logging.DEBUG) == 1
    copying, packed = (gm.plan("matvec", one, x).choice for one in (A, A.copy()))
    assert copying.copies
    assert copying.expected_s > packed.expected_s, "a copy takes time"


def test_a_copy_of_more_than_a_mebibyte_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    named = next(r for r in gm.ladder("matvec", "cpu") if "strided" not in r.layouts)
    for rows, warned in ((512, 0), (513, 1)):  # 512 x 512 float32 are a mebibyte
        caplog.clear()
        A, x = np.zeros((rows, 1024), np.float32)[:, ::2], np.zeros(512, np.float32)
        with caplog.at_level(logging.WARNING, "gemmule"):
            p = gm.plan("matvec", A, x, rung=named.name)
        assert p.choice.copies
        assert len(caplog.records) == warned
    caplog.clear()
    with caplog.at_level(logging.WARNING, "gemmule"):
        gm.plan("matvec", np.zeros((513, 512), np.float32), x)
    assert not caplog.records


def test_one_debug_line_per_new_plan(caplog: pytest.LogCaptureFixture) -> None:
    A, x = operands()
    with caplog.at_level(logging.DEBUG, "gemmule"):
        for _ in range(3):
            gm.matvec(A, x)
    lines = [r.getMessage() for r in caplog.records if r.name == "gemmule"]
    assert len(lines) == 1
    rung = gm.plan("matvec", A, x).rung
    assert (
        f"matvec A 20 x 30 row, float32 x float32 -> float32 -> {rung.folder}/{rung.name}"
        in (lines[0])
    )
    assert "(heuristic)" in lines[0]


def test_the_library_never_prints(capfd: pytest.CaptureFixture[str]) -> None:
    A, x = operands()
    gm.matvec(A, x)
    gm.matmul(A, A.T)
    assert capfd.readouterr() == ("", "")


def test_a_stored_choice_is_taken_and_can_be_forgotten(
    setting: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    A, x = operands()
    default = gm.plan("matvec", A, x)
    other = next(
        r
        for r in gm.ladder("matvec", "cpu")
        if r.name != default.rung.name
        and r.refusal(default.problem) is None
        and len(list(r.space(default.problem))) > 1
    )
    params = list(other.space(default.problem))[-1]
    assert params != other.check_params(default.problem, None)
    machine = backends.get("cpu").machine("cpu")
    tuned = tuned_store.Tuned(other, params, 1e-6, "2026-11-21")
    assert tuned_store.save(machine, default.problem, tuned) is not None
    assert gm.plan("matvec", A, x) is default
    forget_plans()
    p = gm.plan("matvec", A, x)
    assert (p.rung.name, p.params) == (other.name, params)
    assert p.reason == "tuned on this device, 2026-11-21"
    assert_same(p(A, x), exact("matvec", A, x), "float32")
    with caplog.at_level("DEBUG", "gemmule"):
        p(A, x, out=np.empty(2 * len(A), "float32")[::2])
    assert f"{other.name} {params} (named" in caplog.text, "with its parameters into any out"
    forget_plans()
    setting(GEMMULE_TUNE="0")
    assert gm.plan("matvec", A, x).reason == "heuristic"


def test_only_proved_rungs_are_chosen(only_proved: Callable[..., None]) -> None:
    A, x = operands()
    best = gm.plan("matvec", A, x).rung
    only_proved("cpu", {rung.name for rung in all_rungs("cpu")} - {best.name})
    other = gm.plan("matvec", A, x)
    assert other.rung is not best
    assert gm.plan("matvec", A, x, rung=best.name).rung.name == best.name  # by name it may run
    only_proved("cpu", ())
    with pytest.raises(TypeError, match="no proved cpu rung computes matvec A 20 x 30"):
        gm.plan("matvec", A, x)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 500])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int8", "int64"])
def test_default_choices_sum_in_float32_or_better(size: int, dtype: str) -> None:
    A, x = small(np.random.default_rng(3), (size, size), dtype), None
    x = A[0].copy()
    for p in (gm.plan("matvec", A, x), gm.plan("vecmat", x, A), gm.plan("matmul", A, A)):
        assert p.rung.arithmetic(p.choice.problem).at_least_float32
        assert p.choice.expected_s is not None
        assert p.choice.expected_s > 0


@pytest.mark.parametrize("how", ["step_two", "reversed", "zero_stride", "sliced"])
def test_a_compiled_rung_never_meets_a_vector_it_was_not_planned_for(how: str) -> None:
    """A Numba kernel walks x with unit stride, so another stride must be gathered first."""
    A, x = operands()
    p = gm.plan("matvec", A, x, rung="four_rows")
    other = ARRANGEMENTS[how](x)
    assert_same(p(A, other), exact("matvec", A, other), "float32")
    out = ARRANGEMENTS["step_two"](np.full(20, np.nan, "f4"))
    assert p(A, other, out=out) is out
    assert_same(out, exact("matvec", A, other), "float32")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", [3, 40, 300, 1000])
def test_batch_invariant_plans_do_not_depend_on_the_batch(size: int, dtype: str) -> None:
    A = np.zeros((size, size), dtype)
    alone = gm.plan("matvec", A, A[0], batch_invariant=True)
    for batch in (2, 30, 1000):
        X = np.broadcast_to(A[0], (batch, size))
        p = gm.plan("matvec", A, X, batch_invariant=True)
        assert (p.rung.name, p.params) == (alone.rung.name, alone.params)


@pytest.mark.parametrize("op", ["matvec", "matmul"])
def test_a_rung_that_takes_no_batch_walks_it(op: str) -> None:
    rng = np.random.default_rng(12)
    A = small(rng, (3, 6, 7), "float32")
    B = small(rng, (3, 7) if op == "matvec" else (3, 7, 5), "float32")
    walked = 0
    for rung in gm.ladder(op, "cpu"):
        p = gm.plan(op, A, B)
        if rung.refusal(p.choice.problem) is None and not rung.batched and not rung.available():
            assert_same(gm.plan(op, A, B, rung=rung.name)(A, B), exact(op, A, B), "float32")
            walked += 1
    assert walked


DIRECT = {
    "matvec": ("matvec", (20, 30), (30,), True),
    "vecmat": ("vecmat", (20,), (20, 30), True),
    "matmul": ("matmul", (20, 30), (30, 40), True),
    "a row by a matrix": ("matmul", (1, 30), (30, 40), False),
    "a batch": ("matmul", (2, 20, 30), (2, 30, 40), False),
    "vectors": ("matvec", (20, 30), (3, 30), False),
}


@pytest.mark.parametrize("name", DIRECT)
def test_operands_that_fit_go_to_the_rung_as_they_are(name: str) -> None:
    op, left, right, direct = DIRECT[name]
    a, b = (np.ones(shape, np.float32) for shape in (left, right))
    assert launch.is_direct(gm.plan(op, a, b).choice) == direct
    if len(right) == 1:
        assert not launch.is_direct(gm.plan(op, a, np.repeat(b, 2)[::2]).choice)


@pytest.mark.parametrize(
    ("how", "layout", "copied"),
    [
        ("row", "row", False),
        ("padded", "row", False),
        ("col", "row", True),
        ("stepped", "row", True),
        ("col", "col", False),
        ("stepped", "strided", False),
    ],
)
def test_an_operand_is_copied_where_its_rung_needs_another_layout(
    how: str, layout: str, copied: bool
) -> None:
    A = np.arange(70.0).reshape(7, 10)
    given = {"row": A, "padded": A[:, :4], "col": A.T, "stepped": A[:, ::2]}[how]
    seen = launch.as_layout(given, "float64", layout, shared=False)
    np.testing.assert_array_equal(seen, given)
    assert np.shares_memory(seen, A) != copied
    assert seen.flags.c_contiguous or not copied
    shared = launch.as_layout(np.broadcast_to(given, (9, *given.shape)), "float64", layout, True)
    np.testing.assert_array_equal(shared, np.broadcast_to(given, shared.shape))
    assert shared.strides[0] == 0  # one copy serves all entries of the batch


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({}, 32 * 2**20),
        ({"index0/size": "48K\n", "index2/size": "2048K\n", "index1/size": "32K"}, 2**21),
        ({"index0/size": "3M", "index1/size": "1024K"}, 3 * 2**20),
        ({"index0/size": "1G", "index1/size": "6M"}, 2**30),
        ({"index0/size": "", "index1/size": "7", "index2/size": "xK", "index3/size": "5Q"}, 2**25),
        ({"index0/size": "", "index1/size": "12K"}, 12 * 2**10),
    ],
)
def test_the_largest_cache_is_that_which_the_system_tells(
    stored: dict[str, str], expected: int, tmp_path: Path
) -> None:
    for name, text in stored.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    assert launch.last_level_cache_bytes(tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: CPU: fast\nmodel name\t: other\n", "CPU: fast"),
        ("processor\t: 0\n", "fallback"),
        (None, "fallback"),
    ],
)
def test_the_processor_is_called_what_the_system_calls_it(
    text: str | None, name: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    there = tmp_path / "cpuinfo"
    if name != "fallback":
        assert launch.processor_name(there) == name
        return
    with planted(platform, "processor", lambda sound: name):
        assert launch.processor_name(there) == name
    with (
        planted(platform, "processor", lambda sound: ""),
        planted(platform, "machine", lambda sound: name),
    ):
        assert launch.processor_name(there) == name


def test_explain_names_the_prepared_operand_where_operands_are_exchanged() -> None:
    rng = np.random.default_rng(13)
    A, row, x = (small(rng, shape, "float32") for shape in ((30, 20), (1, 30), (30,)))
    for op, left, right in (
        ("vecmat", x, gm.prepare(A)),
        ("matmul", row, gm.prepare(A)),
        ("matmul", row.repeat(4, 0), gm.prepare(A)),
        ("matvec", gm.prepare(A.T, side="left"), x),
    ):
        p = gm.plan(op, left, right)
        side, name = ("left", "A") if op == "matvec" else ("right", "B" if op == "matmul" else "A")
        told = [line for line in p.explain().splitlines() if line.startswith("prepared")]
        assert len(told) == 1
        assert told[0].startswith(f"prepared   {name} on the {side}: read by {p.rung.name} as an")


def test_objects_show_themselves_in_one_line() -> None:
    planned = gm.plan("matvec", np.eye(3), np.ones(3))
    for thing in (planned, planned.rung, gm.quantize(np.eye(8))):
        assert "\n" not in repr(thing)
        assert len(repr(thing)) < 250
    assert "matvec/blas on cpu" in repr(planned)
    assert "<th>sums in    </th><td>float64</td>" in planned._repr_html_()
    shown = repr(gm.ladder("matvec")).splitlines()
    assert [line.split()[:2] for line in shown][:2] == [["1", "scalar_loop"], ["1a", "blas"]]
    assert "<th>four_rows</th>" in gm.ladder("matvec")._repr_html_()


def test_the_package_lists_its_public_names_alone() -> None:
    assert dir(gm) == sorted(gm.__all__)
    assert all(hasattr(gm, name) for name in dir(gm))


@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul"])
def test_plans_take_every_result_that_functions_take(op: str) -> None:
    rng = np.random.default_rng(4)
    A = rng.integers(-3, 4, (40, 30)).astype(np.float32)
    x, B = rng.integers(-3, 4, 30).astype(np.float32), np.ones((30, 8), np.float32)
    pair: tuple[Any, Any] = {"matvec": (A, x), "vecmat": (x, A.T), "matmul": (A, B)}[op]
    expected = getattr(gm, op)(*pair)
    wide = tuple(2 * size for size in expected.shape)
    steps = (slice(None, None, 2),) * expected.ndim
    for dtype in ("float32", "float16", "float64"):
        plan = gm.plan(op, *pair, out_dtype=dtype)
        for out in (
            np.empty(expected.shape, dtype),
            np.empty(expected.shape, dtype, "F"),
            np.empty(wide, dtype)[steps],
            np.empty(expected.shape, dtype)[::-1],
            np.empty(expected.size + 1, dtype)[1:].reshape(expected.shape),
        ):
            assert plan(*pair, out=out) is out
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_stepped_matrix_gives_the_same_bits_into_a_result(dtype: str) -> None:
    rng = np.random.default_rng(4)
    for steps in ((2, 3), (1, 2), (3, 1), (-1, 2), (1, -1)):
        A = rng.standard_normal((90, 700)).astype(dtype)[:: steps[0], :: steps[1]]
        x = rng.standard_normal(A.shape[1]).astype(dtype)
        plan, out = gm.plan("matvec", A, x), np.empty(len(A), dtype)
        for _ in range(3):
            np.testing.assert_array_equal(plan(A, x), plan(A, x, out=out))
            np.testing.assert_array_equal(gm.matvec(A, x), out)


def test_products_without_elements_are_explained_and_computed() -> None:
    zeros = np.zeros
    for m, n, k in ((0, 8, 51), (4, 0, 3), (4, 3, 0)):
        plan = gm.plan("matmul", zeros((m, k)), zeros((k, n)), batch_invariant=True)
        assert "problem" in plan.explain()
        assert plan(zeros((m, k)), zeros((k, n))).shape == (m, n)
    for left, right in (((0, 1, 1, 13), (1, 13, 2)), ((0, 13), (13, 4)), ((2, 0), (0, 3))):
        for name in (*(rung.name for rung in gm.ladder("vecmat", "cpu")), None):
            with contextlib.suppress(ValueError):  # of rungs that read another layout
                found = gm.vecmat(zeros(left), zeros(right), rung=name)
                assert found.shape == np.vecmat(zeros(left), zeros(right)).shape
                assert not found.any()


def test_more_axes_than_numpy_shows_with_other_strides() -> None:
    rng = np.random.default_rng(4)
    A, x = rng.integers(-3, 4, (3, 1, 4, 5)), rng.integers(-3, 4, 5)
    for dtype in ("float32", "float16", "int8", "int64"):
        for axes in (33, 40, 60):
            left = A.astype(dtype).reshape(3, *(1,) * (axes - 2), 1, 4, 5)
            for b in (x, np.stack([x, x], 1)):
                function = gm.matvec if b.ndim == 1 else gm.matmul
                found = function(left, b.astype(dtype))
                expected = np.matmul(left.astype(float), b.astype(float))
                np.testing.assert_array_equal(found, expected)


def test_plans_are_pickled_as_what_was_asked_for() -> None:
    A, x = np.arange(12, dtype=np.float32).reshape(3, 4), np.ones(4, np.float32)
    Q = gm.quantize(A, bits=8)
    asked = (
        gm.plan("matvec", A, x, rung="scalar_loop"),
        gm.plan("matvec", A.astype(np.float16), x.astype(np.float16), out_dtype="float32"),
        gm.plan("matvec", Q, x),
    )
    for plan, matrix in zip(asked, (A, A.astype(np.float16), Q), strict=True):
        copy = pickle.loads(pickle.dumps(plan))
        vector = x.astype(np.float16) if getattr(matrix, "dtype", None) == np.float16 else x
        assert (copy.rung, copy.problem) == (plan.rung, plan.problem)
        np.testing.assert_array_equal(copy(matrix, vector), plan(matrix, vector))


def test_columns_given_for_a_batch_of_vectors_are_told_from_a_wrong_length() -> None:
    A = np.ones((6, 4), np.float32)
    with pytest.raises(ValueError, match=r"for columns call gm\.matmul"):
        gm.matvec(A, np.ones((4, 3), np.float32))
    with pytest.raises(ValueError, match=r"must be equal\.$"):
        gm.matvec(A, np.ones((5, 3), np.float32))


def test_what_writes_columns_takes_no_copy_of_them() -> None:
    if packed_codes.RUNG.available() is not None:
        pytest.skip("this CPU cannot run it")
    rng = np.random.default_rng(5)
    Q = gm.quantize(small(rng, (512, 64), "float32"), bits=4)
    X, out = small(rng, (300, 64), "float32"), np.empty((300, 512), np.float32)
    plan = gm.plan("matmul", X, Q.T, rung="packed_codes")
    assert plan.problem.layout_out == "col"
    plan(X, Q.T, out=out)
    tracemalloc.start()
    plan(X, Q.T, out=out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < out.nbytes / 2
