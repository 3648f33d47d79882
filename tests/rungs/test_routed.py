"""Grouped products by indices, weighted, through a gate: the loop they equal, and the judge."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

import device_tensors
import gemmule as gm
import gemmule.routed as routed_calls
from cuemu.toolchain import missing_tools
from device_tensors import Tensor
from emulated_driver import Poisoned, emulated
from gemmule.arrays.interop import unwrap
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.caches import forget_plans
from gemmule.core.canonical import Options
from gemmule.core.grouped import Routing, routed
from gemmule.core.problem import numpy_dtype
from gemmule.oracle.problems import make_problem
from gemmule.oracle.routed import judge_routed
from gemmule.routed import plan_within
from gemmule_lab.verify import random_grouped

needs_emulator = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
Array = np.ndarray[Any, Any]
EXPERTS, K, N = 6, 64, 40


def operands(dtype: str, tokens: int = 9, top_k: int = 3) -> tuple[Array, Array, Array, Array]:
    """Return A, W, indices of which some name no expert, and weights: small integers."""
    rng = np.random.default_rng(5)
    a = rng.integers(-2, 3, (tokens, K)).astype(numpy_dtype(dtype))
    w = rng.integers(-2, 3, (EXPERTS, K, N)).astype(numpy_dtype(dtype))
    indices = rng.integers(-1, EXPERTS + 1, (tokens, top_k))
    return a, w, indices, rng.integers(-2, 3, indices.shape).astype(np.float32)


def looped(a: Array, w: Any, indices: Array, weights: Array | None, *, gated: bool) -> Array:
    """Return a product for each slot, one by one, in float64."""
    each = np.zeros((*indices.shape, w.shape[2]))
    for t, j in np.ndindex(*indices.shape):
        if 0 <= indices[t, j] < len(w):
            row = a[t] if a.ndim == 2 else a[t, j]
            each[t, j] = row.astype("f8") @ np.asarray(w[indices[t, j]], "f8")
    if gated:
        gates, ups = np.split(each, 2, axis=2)
        each = gates / (1 + np.exp(-gates)) * ups
    return each if weights is None else np.einsum("tj,tjn->tn", weights.astype("f8"), each)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_it_equals_a_loop_of_products(dtype: str) -> None:
    a, w, indices, weights = operands(dtype)
    by_slot = np.stack([a, 2 * a, 3 * a], axis=1).astype(a.dtype)
    for rows in (a, by_slot):
        for shares in (None, weights, weights.astype(a.dtype)):
            found = gm.grouped_matmul(rows, w, indices=indices, weights=shares)
            wanted = looped(rows, w, indices, shares, gated=False)
            assert found.dtype == a.dtype
            np.testing.assert_array_equal(found, wanted.astype(a.dtype))
            out = np.full_like(found, np.nan)
            options = {"indices": indices, "weights": shares, "out": out}
            assert gm.grouped_matmul(rows, w, **options) is out
            np.testing.assert_array_equal(out, found)
    error = 2.0**-7 if dtype == "bfloat16" else 2.0**-9
    gate = {"weights": weights, "epilogue": "silu_gate"}
    found = gm.grouped_matmul(a, w, indices=indices, **gate)
    wanted = looped(a, w, indices, weights, gated=True)
    np.testing.assert_allclose(found.astype("f8"), wanted, rtol=error, atol=1e-5)


def test_a_gate_behind_offsets_leaves_rows_of_no_group() -> None:
    a, w, *_ = operands("float32")
    ends = np.array([0, 2, 2, 5, 7, 7], np.int32)
    indices = np.repeat(np.arange(EXPERTS), np.diff(ends, prepend=0))[:, None]
    wanted = looped(a[:7], w, indices, None, gated=True)[:, 0]
    found = gm.grouped_matmul(a, w, ends, epilogue="silu_gate")
    np.testing.assert_allclose(found[:7], wanted, rtol=1e-5, atol=1e-6)
    assert not found[7:].any()
    out = np.full((9, N // 2), np.nan, np.float32)
    gm.grouped_matmul(a, w, ends, epilogue="silu_gate", out=out)
    np.testing.assert_array_equal(out[:7], found[:7])
    assert np.isnan(out[7:]).all()


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"indices": None}, ValueError, "either offsets or indices"),
        ({"offsets": np.zeros(6, np.int32)}, ValueError, "either offsets or indices"),
        (
            {"indices": np.zeros(9, np.int64)},
            ValueError,
            r"A \(tokens, k\) or \(tokens, top_k, k\)",
        ),
        ({"A": np.zeros(K, np.float32)}, ValueError, r"A \(tokens, k\) or"),
        ({"indices": np.zeros((9, 3))}, TypeError, "must be int32 or int64"),
        ({"indices": np.zeros((9, 6), int)[:, ::2]}, ValueError, "must be contiguous"),
        ({"weights": np.zeros((9, 2))}, ValueError, "they must be equal"),
        ({"weights": np.zeros((9, 3), int)}, TypeError, "weights has dtype int64"),
        ({"epilogue": "gelu"}, ValueError, "it must be None or 'silu_gate'"),
        (
            {"W": np.zeros((6, K, 41), np.float32), "epilogue": "silu_gate"},
            ValueError,
            "41 columns",
        ),
        ({"W": np.zeros((6, 41, K), np.float32)}, ValueError, "passed transposed"),
        ({"out": np.zeros((9, 3, N), np.float16)}, TypeError, "out"),
    ],
)
def test_what_is_refused(change: dict[str, Any], kind: type[Exception], words: str) -> None:
    a, w, indices, _ = operands("float32")
    given = {"A": a, "W": w, "indices": indices} | change
    positional = [given.pop("A"), given.pop("W"), given.pop("offsets", None)]
    with pytest.raises(kind, match=words):
        gm.grouped_matmul(*positional, **given)
    if "weights" in change:
        del given["indices"]
        with pytest.raises(ValueError, match="weights were given without indices"):
            gm.grouped_matmul(a, w, np.zeros(6, np.int32), **given)


@pytest.mark.parametrize("number", [n for n in range(30) if n % 5 < 2])
def test_random_products(number: int) -> None:
    trial = random_grouped.draw(77, number)
    assert trial.around is not None
    verdict = random_grouped.run(trial)
    assert verdict.ok, f"{trial}: {verdict.text}"


def test_the_judge_sees_what_is_wrong() -> None:
    a, w, indices, weights = operands("float32")
    a = a + np.float32(0.25)
    w = (w * np.float32(0.3)).astype(np.float32)
    forms = [unwrap(one, "it").form for one in (a, w, indices, weights)]

    def verdict(found: Array, epilogue: str | None = None) -> bool:
        about = routed(*forms[:2], (*forms[2:], None), epilogue, Options())
        plan = plan_within(about, forms[0], forms[1], None, "cpu", Options())
        problem = make_problem(
            "grouped", about.slots, N, K, ("float32", "float32", about.sums), batch=EXPERTS
        )
        given = (a, w, indices, weights, None)
        arithmetic = plan.rung.arithmetic(plan.problem)
        return judge_routed(about, problem, arithmetic, plan.params, given, found).ok

    right = gm.grouped_matmul(a, w, indices=indices, weights=weights)
    assert verdict(right)
    assert not verdict(right + np.float32(0.01))
    assert not verdict(gm.grouped_matmul(a, w, indices=indices, weights=weights[:, ::-1].copy()))
    assert not verdict(gm.grouped_matmul(a, w, indices=indices.clip(0, 5), weights=weights))
    assert not verdict(right.astype("f8"))
    gated = gm.grouped_matmul(a, w, indices=indices, weights=weights, epilogue="silu_gate")
    assert verdict(gated, "silu_gate")
    other = np.concatenate([w[:, :, N // 2 :], w[:, :, : N // 2]], axis=2)  # ups, then gates
    wrong = gm.grouped_matmul(a, other, indices=indices, weights=weights, epilogue="silu_gate")
    assert not verdict(wrong, "silu_gate")


@needs_emulator
@pytest.mark.parametrize("tokens", [9, 100])
def test_on_a_device(tokens: int) -> None:
    """Few slots, which every block sorts for itself, and many; memory holds NaN that none wrote."""
    a, w, indices, weights = operands("bfloat16", tokens)
    by_slot = np.stack([a, 2 * a, 3 * a], axis=1).astype(a.dtype)
    stack = gm.quantize_experts(w.astype("f4"), bits=8, group_size=32, symmetric=True)

    def multiply() -> None:
        put = {}
        for name, one in {"a": a, "s": by_slot, "w": w, "i": indices, "v": weights}.items():
            put[name] = gm.asarray(one, device="cuda:1")
        put["i32"], put["q"] = (
            gm.asarray(indices.astype(np.int32), device="cuda:1"),
            stack.to("cuda:1"),
        )
        slots, first = put["s"], indices[:, :1]  # the first of three slots, far from each other
        put["1"] = DeviceArray(slots.pointer, (tokens, 1, K), slots.strides, "bfloat16", 1, slots)
        put["i1"] = gm.asarray(np.ascontiguousarray(first), device="cuda:1")
        cases = [("a", "w", "i", None, None), ("s", "w", "i32", "v", None)]
        cases += [("1", "w", "i1", None, None), ("1", "q", "i1", None, None)]
        cases += [("a", "w", "i32", "v", "silu_gate"), ("s", "q", "i", None, "silu_gate")]
        for rows, matrices, names, shares, epilogue in cases:
            options = {"indices": put[names], "epilogue": epilogue}
            options["weights"] = None if shares is None else put[shares]
            found = gm.asarray(gm.grouped_matmul(put[rows], put[matrices], **options), device="cpu")
            host = stack.dequantize("float64") if matrices == "q" else w
            given = {"a": a, "s": by_slot, "1": by_slot[:, :1]}[rows]
            gated, slot = epilogue is not None, first if rows == "1" else indices
            wanted = looped(given, host, slot, weights if shares else None, gated=gated)
            error = np.abs(found.astype("f8") - wanted)
            assert (error <= 2.0**-7 * np.abs(wanted) + 2.0**-5).all()
        none = {"indices": indices[:, :0], "weights": weights[:, :0]}
        put_none = {name: gm.asarray(one.copy(), device="cuda:1") for name, one in none.items()}
        sums = gm.asarray(gm.grouped_matmul(put["a"], put["w"], **put_none), device="cpu")
        assert (sums == 0).all()
        assert np.array_equal(sums, gm.grouped_matmul(a, w, **none))
        ends = gm.asarray(np.array([0, 2, 2, 5, 7, 7], np.int32), device="cuda:1")
        gated = gm.grouped_matmul(put["a"], put["w"], ends, epilogue="silu_gate")
        found = gm.asarray(gated, device="cpu")[:7].astype("f8")
        each = np.repeat(np.arange(EXPERTS), [0, 2, 0, 3, 2, 0])[:, None]
        wanted = looped(a[:7], w, each, None, gated=True)[:, 0]
        np.testing.assert_allclose(found, wanted, rtol=2.0**-7, atol=2.0**-7)

    with emulated(1, Poisoned):
        multiply()


class Named(Poisoned):
    """A device that tells what was launched."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.names: list[str] = []

    def launched(self, function: int, *how: Any) -> None:
        self.names.append(self.kernels[function - 1][1])
        super().launched(function, *how)


@needs_emulator
@pytest.mark.parametrize(("bits", "other"), [(4, False), (8, True), (16, False), (16, True)])
def test_products_that_find_few_rows_themselves(bits: Literal[4, 8, 16], other: bool) -> None:
    """In one launch, whose blocks sort all slots; weighted sums take a second one.

    other: symmetric codes, or matrices along k.
    """
    a, w, indices, weights = operands("bfloat16")
    by_slot = np.stack([a, 2 * a, 3 * a], axis=1).astype(a.dtype)
    kernel, params = "experts" if bits == 16 else "codes", {"tokens": 8}

    def placed() -> tuple[Any, Any]:
        if bits == 16:
            along = gm.asarray(w.swapaxes(1, 2).copy(), device="cuda:1").view(
                w.shape, (K * N, 1, K)
            )
            return along if other else gm.asarray(w, device="cuda:1"), w
        stack = gm.quantize_experts(w.astype("f4"), bits=bits, group_size=32, symmetric=other)
        return stack.to("cuda:1"), stack.dequantize("float64")

    def multiply(device: Named) -> None:
        put, (matrices, host) = gm.asarray(weights, device="cuda:1"), placed()
        for rows, index, weighted, epilogue in itertools.product(
            (a, by_slot), (np.int32, np.int64), (False, True), (None, "silu_gate")
        ):
            held = [gm.asarray(x, device="cuda:1") for x in (rows, indices.astype(index))]
            given: dict[str, Any] = {"indices": held[1], "epilogue": epilogue}
            gated = epilogue is not None
            if weighted:
                given["weights"] = put
            else:  # into rows that lie apart
                apart = gm.asarray(np.full((9, 3, 44), np.nan, a.dtype), device="cuda:1")
                width = N // 2 if gated else N
                given["out"] = apart.view((9, 3, width), (3 * 44, 44, 1))
            device.names.clear()
            given |= {"rung": f"streamed_{kernel}", "params": params}
            found = gm.grouped_matmul(held[0], matrices, **given)
            if not gated or bits < 16 or other:  # 20 ups of a row begin within a vector
                assert len(device.names) == 1 + weighted
                assert f"routed_{kernel}" in device.names[0]
            shares = weights if weighted else None
            wanted = looped(rows, host, indices, shares, gated=gated)
            result = gm.asarray(found if weighted else apart, device="cpu").astype("f8")
            if not weighted:
                assert np.isnan(result[:, :, width:]).all(), "what lies between is left alone"
                result = result[:, :, :width]
            error = np.abs(result - wanted)
            assert (error <= 2.0**-7 * np.abs(wanted) + 2.0**-5).all()
        ends, rung = np.array([0, 2, 2, 5, 7, 7], np.int32), f"streamed_{kernel}"
        given = {"rung": rung, "params": params, "epilogue": "silu_gate"}
        held = [gm.asarray(x, device="cuda:1") for x in (a, ends)]
        device.names.clear()
        gates = gm.asarray(gm.grouped_matmul(held[0], matrices, held[1], **given), device="cpu")
        if bits < 16 or other:
            assert [f"gated_{kernel}" in name for name in device.names] == [True]
        each = np.repeat(np.arange(EXPERTS), np.diff(ends, prepend=0))[:, None]
        wanted = looped(a[:7], host, each, None, gated=True)[:, 0]
        np.testing.assert_allclose(gates[:7].astype("f8"), wanted, rtol=2.0**-7, atol=2.0**-5)

    with emulated(1, Named) as device:
        assert isinstance(device, Named)
        multiply(device)


@needs_emulator
@pytest.mark.parametrize(
    ("tokens", "names"), [(16, ["routed_experts"]), (150, ["sort", "gather", "wgmma", "deliver"])]
)
def test_few_rows_go_to_what_finds_them_itself(tokens: int, names: list[str]) -> None:
    """Where another product is quicker by less than the launches in front and behind."""
    rng = np.random.default_rng(4)
    w = rng.integers(-2, 3, (8, 256, 256)).astype(numpy_dtype("bfloat16"))
    a = rng.integers(-2, 3, (tokens, 256)).astype(w.dtype)
    indices = rng.integers(0, 8, (tokens, 2))

    def multiply(device: Named) -> None:
        put = gm.asarray(w.swapaxes(1, 2).copy(), device="cuda:1")
        along = put.view(w.shape, (256 * 256, 1, 256))
        held = [gm.asarray(one, device="cuda:1") for one in (a, indices)]
        found = gm.grouped_matmul(held[0], along, indices=held[1])
        launched = device.names
        assert len(launched) == len(names)
        assert all(part in one for part, one in zip(names, launched, strict=True))
        wanted = looped(a, w, indices, None, gated=False)
        result = gm.asarray(found, device="cpu").astype("f8")
        np.testing.assert_allclose(result, wanted, rtol=2.0**-7)

    with emulated(1, Named) as device:
        assert isinstance(device, Named)
        multiply(device)


@needs_emulator
def test_random_products_on_a_device() -> None:
    def judged() -> list[str]:
        trials = [random_grouped.draw(11, number, "cuda:1") for number in range(150)]
        small = [
            replace(t, rung="code_by_code" if t.case.problem.quant else "row_by_row")
            for t in trials
            if t.around is not None
            and t.case.problem.batch < 100
            and t.case.problem.m * t.case.problem.k * t.case.problem.n < 1e5
        ]
        assert len(small) > 5
        verdicts = [(trial, random_grouped.run(trial)) for trial in small]
        return [f"{trial}: {verdict.text}" for trial, verdict in verdicts if not verdict.ok]

    with emulated(2, Poisoned):
        assert not judged()


@needs_emulator
def test_tensors_met_before_go_straight_to_the_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    host_tensors = pytest.importorskip("host_tensors")
    library = device_tensors.library((1,), float16="float16", uint8="uint8")
    host_tensors.put_library(monkeypatch, library, device_tensors.maker, routed_calls)
    a, w, indices, weights = operands("float16")
    stack = gm.quantize_experts(w.astype("f4"), bits=8, group_size=32, symmetric=True)

    def multiply() -> None:
        put = [Tensor(gm.asarray(one, device="cuda:1")) for one in (a, w, indices, weights)]
        left, right, names, shares = put
        for matrices in (right, stack.to("cuda:1")):
            host = w if matrices is right else stack.dequantize("float64")
            for routing in (
                Routing(names),
                Routing(names, shares),
                Routing(names, shares, "silu_gate"),
            ):
                for _ in range(2):
                    found = routed_calls.of_tensors(left, matrices, None, Options(), routing)
                    assert isinstance(found, Tensor)
                    gated = routing.epilogue is not None
                    given = None if routing.weights is None else weights
                    wanted = looped(a, host, indices, given, gated=gated)
                    result = gm.asarray(found.array, device="cpu").astype("f8")
                    np.testing.assert_allclose(result, wanted, rtol=2.0**-9, atol=2.0**-4)
        for negated in (left, right, shares):  # which kernels would read without its sign
            negated.negated = True
            routing = Routing(names, shares)
            assert routed_calls.of_tensors(left, right, None, Options(), routing) is None
            negated.negated = False

    with emulated(1, Poisoned):
        multiply()
    forget_plans()  # the bound calls among them
