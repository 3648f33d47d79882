"""Grouped products: random ones judged, the loop of products they equal, offsets of every kind."""

from __future__ import annotations

import inspect
import pickle
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import device_tensors
import gemmule as gm
from cuda_emulation import Emulator
from cuemu.toolchain import missing_tools
from device_tensors import Tensor
from emulated_driver import emulated
from gemmule import grouped
from gemmule import routed as routed_calls
from gemmule.core.canonical import Options
from gemmule.core.grouped import Routing
from gemmule.core.problem import FLOAT4_DTYPE, FLOAT8_CODES, numpy_dtype
from gemmule.core.registry import cuda_rungs
from gemmule.core.rung import CudaRung
from gemmule.grouped import GroupedPlan
from gemmule.oracle.inputs import make_inputs
from gemmule.oracle.judge import check
from gemmule.oracle.problems import make_problem
from gemmule.plan import Plan
from gemmule_lab.verify import random_grouped
from proofs import device, proofs

RUNGS = [r for r in cuda_rungs() if r.folder == "grouped"]
needs_emulator = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
ENDS = np.array([0, 5, 5, 20, 33, 40, 48], np.int32)
Array = np.ndarray[Any, Any]


def operands(dtype: str = "float32", k: int = 64, n: int = 40) -> tuple[Array, Array]:
    rng = np.random.default_rng(3)
    shapes = (50, k), (len(ENDS), k, n)
    a, w = (rng.integers(-3, 4, shape).astype(numpy_dtype(dtype)) for shape in shapes)
    return a, w


def looped(a: Array, w: Any, ends: Array) -> Array:
    starts = [0, *ends[:-1]]
    parts = [gm.matmul(a[s:e], w[i]) for i, (s, e) in enumerate(zip(starts, ends, strict=True))]
    return np.concatenate(parts)


@pytest.mark.parametrize("number", range(16))
def test_random_products(number: int) -> None:
    trial = random_grouped.draw(2026, number)
    verdict = random_grouped.run(trial)
    assert verdict.ok, f"{trial}: {verdict.text}"


def test_the_same_seed_draws_the_same_and_reaches_the_corners() -> None:
    trials = [random_grouped.draw(5, number) for number in range(600)]
    assert trials == [random_grouped.draw(5, number) for number in range(600)]
    problems = [trial.case.problem for trial in trials]
    assert max(p.batch for p in problems) > 250
    assert max(p.m for p in problems) > 4000
    assert {p.m for p in problems} >= {0, 1}
    assert {p.layout_b for p in problems if p.quant is None} == {"row", "col", "strided"}
    assert {p.quant.bits for p in problems if p.quant} == {4, 8}


def test_it_equals_a_loop_of_products() -> None:
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        a, w = operands(dtype)
        found = gm.grouped_matmul(a, w, ENDS)
        assert found.dtype == a.dtype
        np.testing.assert_array_equal(found[:48], looped(a, w, ENDS))
        assert not found[48:].any()
        out = np.full_like(found, np.nan)
        assert gm.grouped_matmul(a, w, ENDS, out=out) is out
        np.testing.assert_array_equal(out[:48], found[:48])
        assert np.isnan(out[48:]).all(), "rows behind the last end are left alone"


def test_any_strides_and_orders_of_weights() -> None:
    a, w = operands()
    wanted = gm.grouped_matmul(a, w, ENDS)
    along_k = np.ascontiguousarray(w.swapaxes(1, 2)).swapaxes(1, 2)
    backwards = np.ascontiguousarray(w[::-1, ::-1])[::-1, ::-1]
    spaced = np.repeat(np.repeat(a, 2, 0), 3, 1)[::2, ::3]
    for left, right in ((a, along_k), (spaced, w), (np.asfortranarray(a), backwards)):
        np.testing.assert_array_equal(gm.grouped_matmul(left, right, ENDS), wanted)


@pytest.mark.parametrize("ends", [[0, 0, 0], [7, 7, 7], [0, 0, 7], [2, 2, 3]])
def test_empty_groups_and_all_in_one(ends: list[int]) -> None:
    a, w = np.ones((7, 2)), np.stack([np.full((2, 3), v) for v in (1.0, 10.0, 100.0)])
    starts = [0, *ends[:-1]]
    wanted = np.zeros((7, 3))
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        wanted[start:end] = 2.0 * 10.0**i
    np.testing.assert_array_equal(gm.grouped_matmul(a, w, np.array(ends, np.int32)), wanted)


@pytest.mark.parametrize("shape", [(0, 4, 3, 2), (5, 0, 3, 2), (5, 4, 0, 2), (5, 4, 3, 0)])
def test_sizes_of_zero(shape: tuple[int, int, int, int]) -> None:
    tokens, k, experts, n = shape
    ends = np.full(experts, tokens, np.int32)
    result = gm.grouped_matmul(np.ones((tokens, k)), np.ones((experts, k, n)), ends)
    assert result.shape == (tokens, n)
    assert np.array_equal(result, np.full((tokens, n), float(k if experts else 0)))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (
            {"offsets": ENDS.astype(np.int64)},
            TypeError,
            "offsets has dtype int64; it must be int32",
        ),
        ({"offsets": ENDS[::-1].copy()}, ValueError, "rise from 0 to at most 50"),
        ({"offsets": ENDS + 5}, ValueError, "rise from 0 to at most 50"),
        ({"offsets": np.repeat(ENDS, 2)[::2]}, ValueError, "must be contiguous"),
        ({"offsets": ENDS[:3]}, ValueError, "7 experts and offsets 3 ends"),
        ({"W": np.ones((7, 40, 64), np.float32)}, ValueError, "passed transposed"),
        ({"W": np.ones((7, 64, 40))}, TypeError, "of one dtype"),
        ({"A": np.ones((50, 64), np.int32)}, TypeError, "of one dtype"),
        ({"out": np.ones((50, 41), np.float32)}, ValueError, r"out has shape \(50, 41\)"),
        ({"rung": "blas"}, ValueError, "it computes matmul, not grouped"),
        (
            {"precision": "tf32"},
            TypeError,
            "its options are indices, weights, epilogue, out, out_dtype, rung, params",
        ),
    ],
)
def test_what_is_refused(change: dict[str, Any], kind: type[Exception], words: str) -> None:
    a, w = operands()
    given = {"A": a, "W": w, "offsets": ENDS} | change
    args = [given.pop(name) for name in ("A", "W", "offsets")]
    with pytest.raises(kind, match=words):
        gm.grouped_matmul(*args, **given)
    with pytest.raises(ValueError, match="out overlaps an input"):
        gm.grouped_matmul(np.ones((4, 4)), both := np.ones((1, 4, 4)), ENDS[1:2] - 1, out=both[0])


def test_a_plan_explains_itself_pickles_and_refuses_others() -> None:
    a, w = operands()
    plan = gm.plan("grouped_matmul", a, w, ENDS)
    assert isinstance(plan, GroupedPlan)
    assert plan in {plan: "by what it is, whose parts have no hash"}
    assert "grouped A 50 x 64 row, 7 experts of 64 x 40 row" in plan.explain()
    assert "one_by_one" in plan.explain()
    wanted = gm.grouped_matmul(a, w, ENDS)
    np.testing.assert_array_equal(plan(a, w, ENDS), wanted)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(plan))(a, w, ENDS), wanted)
    with pytest.raises(ValueError, match="this plan computes grouped"):
        plan(a[:4], w, ENDS)
    with pytest.raises(ValueError, match="not tuned"):
        plan.tune()
    with pytest.raises(ValueError, match="offsets go with grouped_matmul"):
        gm.plan("matmul", a, w[0], ENDS)


def test_few_calls_of_groups_are_kept(
    limit: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(grouped, MOST=2)
    rows: list[int] = []
    execute = Plan.execute

    def counted(plan: Plan, left: Any, *others: Any) -> Any:
        rows.append(len(left.array))
        return execute(plan, left, *others)

    monkeypatch.setattr(Plan, "execute", counted)
    a, w = np.ones((6, 5)), np.ones((3, 5, 7))
    for _ in range(2):
        assert (gm.grouped_matmul(a, w, np.array([1, 3, 6], np.int32)) == 5).all()
    assert rows == [1, 2, 3, 3]


def test_a_stack_of_codes() -> None:
    a, w = operands(k=96)
    stack = gm.quantize_experts(w, bits=4, group_size=32)
    assert stack.shape == w.shape == stack.dequantize().shape
    assert stack.nbytes < w.nbytes / 4
    np.testing.assert_array_equal(stack[-1].dequantize(), stack.dequantize()[-1])
    found = gm.grouped_matmul(a, stack, ENDS)
    exact = gm.grouped_matmul(a.astype("f8"), stack.dequantize("float64"), ENDS)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-4)
    again = gm.QuantizedStack.from_matrix(stack.matrix, len(ENDS))
    np.testing.assert_array_equal(gm.grouped_matmul(a, again, ENDS), found)
    assert again != stack, "as matrices are: equal is what is the same"
    with pytest.raises(ValueError, match="are no 9 experts"):
        gm.QuantizedStack.from_matrix(stack.matrix, 9)
    rows = w.swapaxes(1, 2).reshape(-1, 96)
    order = np.arange(96)[::-1].astype(np.int32)
    for other in (
        stack.matrix.T,
        gm.quantize(rows, 4, 32, perm=order),
        gm.quantize(rows, 8, None, symmetric=True),
    ):
        with pytest.raises(ValueError, match="not transposed or permuted"):
            gm.QuantizedStack.from_matrix(other, 1)
    with pytest.raises(TypeError, match="must be a stack"):
        gm.grouped_matmul(a, stack.matrix, ENDS)
    with pytest.raises(ValueError, match=r"A matrix goes to gemmule\.quantize"):
        gm.quantize_experts(w[0])
    with pytest.raises(IndexError, match="expert 7 of 7"):
        stack[7]


def test_what_is_not_said_of_a_stack_is_as_of_a_matrix() -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (gm.quantize_experts, gm.quantize))
    for name, parameter in ours.items():
        assert (parameter.default, parameter.kind) == (theirs[name].default, theirs[name].kind)


@pytest.mark.parametrize("number", range(16))
def test_a_stack_is_each_expert_quantised_alone(number: int) -> None:
    rng = random.Random(number)
    k, n = rng.choice((1, 17, 64, 96)), rng.randint(1, 9)
    w = np.random.default_rng(number).standard_normal((3, k, n)).astype(np.float32)
    options = {
        "bits": rng.choice((4, 8)),
        "group_size": rng.choice((16, 32, -1)),
        "symmetric": rng.random() < 0.5,
        "scale_dtype": rng.choice(("float32", "float16")),
    }
    options["method"] = rng.choice(("rtn", "mse", *([] if options["symmetric"] else ["hqq"])))
    stack = gm.quantize_experts(w, **options)
    dtype = rng.choice(("float32", "float64"))
    whole = stack.dequantize(dtype)
    assert (whole.dtype, whole.shape, len(stack)) == (dtype, w.shape, 3)
    for expert in (0, 1, 2, -1, -3):
        alone = gm.quantize(w[expert].T, **options).T
        for one in (stack[expert], alone):
            assert (one.shape, one.bits, one.group_size) == (
                (k, n),
                options["bits"],
                alone.group_size,
            )
            np.testing.assert_array_equal(one.dequantize(dtype), whole[expert])
        np.testing.assert_array_equal(stack[expert].codes, alone.codes)
        np.testing.assert_array_equal(stack[expert].scales, alone.scales)


@needs_emulator
@pytest.mark.parametrize(("k", "n", "bits"), [(64, 16, 8), (64, 16, 4), (33, 3, 4)])
def test_experts_of_a_stack_on_a_device(k: int, n: int, bits: int) -> None:
    """Views, or where codes begin anywhere, copies."""
    w = np.random.default_rng(k).standard_normal((3, k, n))
    stack = gm.quantize_experts(w, bits=bits, group_size=32)

    def look() -> None:  # its arrays are gone before the device is
        moved = stack.to("cuda:1")
        for expert in (0, 1, -1):
            one, whole = moved[expert].T, moved.matrix.codes
            place = one.codes.pointer - whole.pointer
            assert (place == expert % 3 * n * whole.strides[0]) == (n == 16 or expert == 0)
            for name in ("codes", "scales", "zeros"):
                found = gm.asarray(getattr(one, name), device="cpu")
                np.testing.assert_array_equal(found, getattr(stack[expert].T, name))

    with emulated(1):
        look()


@needs_emulator
def test_public_calls_on_a_device() -> None:
    a, w = operands("bfloat16", k=128, n=48)
    wanted = gm.grouped_matmul(a, w, ENDS)[:48]
    stack = gm.quantize_experts(w.astype("f4"), bits=8, group_size=64, symmetric=True)

    def multiply() -> None:  # its arrays are gone before the device is
        left, right, ends = (gm.asarray(one, device="cuda:1") for one in (a, w, ENDS))
        for rung in ("row_by_row", "streamed_experts", "wgmma_experts", None):
            found = gm.asarray(gm.grouped_matmul(left, right, ends, rung=rung), device="cpu")
            np.testing.assert_array_equal(found[:48], wanted)
        moved = stack.to("cuda:1")
        found = gm.asarray(gm.grouped_matmul(left, moved, ends), device="cpu")
        np.testing.assert_allclose(
            found[:48].astype("f4"), wanted.astype("f4"), rtol=2**-7, atol=0.5
        )
        assert "streamed_codes" in gm.plan("grouped_matmul", left, moved, ends).explain()
        with pytest.raises(TypeError, match="offsets a numpy array on cpu"):
            gm.grouped_matmul(left, right, ENDS)

    with emulated(1):
        multiply()


BROKEN = [[9, 3, 60, -5], [-1, -1, -1, -1], [2**31 - 1, 0, 7, 7], [0, 200, 0, 200]]


@needs_emulator
@pytest.mark.parametrize("rung", RUNGS, ids=lambda r: r.name)
@pytest.mark.parametrize("ends", BROKEN)
def test_no_offsets_make_a_kernel_leave_its_operands(rung: CudaRung, ends: list[int]) -> None:
    """What a device holds is seen by nobody before: the result may be anything, the rest stays."""
    inputs = sample(rung)
    assert inputs.ends is not None
    inputs.ends[:] = ends
    emulator = Emulator(seed=2)
    emulator.run(rung, inputs, rung.check_params(inputs.case.problem, None))
    assert inputs.frames[0].intact_around()


def sample(rung: CudaRung, tokens: int = 24) -> Any:
    quant = None
    if rung.quantized:
        specs = proofs.quant_specs(rung.signatures[0])
        quant = next(q for q in specs if rung.accepts_quant and rung.accepts_quant(
            make_problem("grouped", 8, 8, 128, rung.signatures[0], quant=q)))  # fmt: skip
    problem = make_problem("grouped", tokens, 40, 128, rung.signatures[0], batch=4, quant=quant)
    return make_inputs(problem, "integers", 11)


@needs_emulator
@pytest.mark.parametrize("rung", RUNGS, ids=lambda r: r.name)
def test_bytes_of_untouched_experts_are_not_read(rung: CudaRung) -> None:
    """Experts without tokens hold NaN here; one that is read would show in some sum."""
    inputs = sample(rung)
    assert inputs.ends is not None
    inputs.ends[:] = [0, 24, 24, 24]
    if rung.quantized:
        inputs.b.scales.setflags(write=True)
        scales, each = inputs.b.scales, len(inputs.b.scales) // 4
        scales[:each] = scales[2 * each :] = np.nan
        inputs.b.scales.setflags(write=False)
    else:
        inputs.b[0] = inputs.b[2:] = np.nan
    held = type(inputs)(
        inputs.case, inputs.a, inputs.b, inputs.out, inputs.exact_below, inputs.frames, (),
        inputs.ends,
    )  # fmt: skip
    params = rung.check_params(inputs.case.problem, None)
    result = Emulator(seed=2).run(rung, held, params).astype("f8")
    assert np.isfinite(result).all()


@needs_emulator
def test_an_expert_with_many_tokens_among_empty_ones() -> None:
    """Several pieces of one slab, blocks that begin within an expert, and a ragged last piece."""
    for rung in RUNGS:
        for ends in ([0, 0, 71, 71], [1, 70, 70, 71]):
            inputs = sample(rung, tokens=71)
            assert inputs.ends is not None
            inputs.ends[:] = ends
            fresh = make_fingerprints(inputs)
            params = rung.check_params(inputs.case.problem, None)
            result = Emulator(seed=3).run(rung, fresh, params)
            verdict = check(fresh, rung.arithmetic(inputs.case.problem), params, result)
            assert verdict.ok, f"{rung.name} {ends}: {verdict.text}"


@needs_emulator
@pytest.mark.parametrize("form", [FLOAT4_DTYPE, FLOAT8_CODES])
@pytest.mark.parametrize("rung", [r for r in RUNGS if r.quantized], ids=lambda r: r.name)
def test_many_tokens_of_codes_that_are_floats(rung: CudaRung, form: str) -> None:
    """Of scales above 2 and below, beside either kind of halves, by what proofs meet."""
    for which, signature in enumerate(s for s in rung.signatures if s[1] == form and s[0] != s[2]):
        emulator = Emulator(seed=2 + which)
        emulator.machine = replace(emulator.machine, units=20)
        for index, trial in enumerate(device.trials(rung, signature, few=True)):
            if index % 3 == which % 3:
                verdict = device.judge_trial(rung, trial, emulator.run)
                assert verdict.ok, f"{trial}: {verdict.text}"


SIZES = 2.0 ** np.arange(-60, 61, 20)  # of the experts' weights


def float_stack(form: Any) -> tuple[Array, Any, Array]:
    """Return A, a stack of codes that are floats, and its product with A over `SIZES`."""
    a, w = operands("bfloat16", k=288)
    weights = w.astype("f4") * SIZES[:, None, None].astype("f4")
    stack = gm.quantize_experts(weights, format=form, group_size=32)
    assert stack.matrix.format == form
    rows = zip([0, *ENDS[:-1]], ENDS, range(len(SIZES)), strict=True)
    floats = [one / size for one, size in zip(stack.dequantize("float64"), SIZES, strict=True)]
    exact = [a[begin:end].astype("f8") @ floats[e] for begin, end, e in rows]
    return a, stack, np.concatenate(exact)


def alike(found: Array, wanted: Array) -> None:
    """Compare rows by what their experts' sizes were."""
    sizes = np.repeat(SIZES, np.diff(ENDS, prepend=0))[:, None]
    np.testing.assert_allclose(found.astype("f8") / sizes, wanted, rtol=2.0**-7, atol=2.0**-4)


@needs_emulator
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", "float8"])
def test_stacks_of_floats_go_to_a_device_as_they_are(form: str, only_proved: Any) -> None:
    """Once their rungs are proved; floats of 4 bits become 8-bit codes of twice the bytes else."""
    a, stack, wanted = float_stack(form)

    def multiply(*, proved: bool) -> None:
        there = stack.to("cuda:1")
        stays = proved or form == "float8"
        assert there.matrix.format == (form if stays else None)
        left, ends = (gm.asarray(one, device="cuda:1") for one in (a, ENDS))
        rung = None if proved else "code_by_code"
        found = gm.asarray(gm.grouped_matmul(left, there, ends, rung=rung), device="cpu")
        alike(found[:48], wanted)
        index = np.repeat(np.arange(len(ENDS)), np.diff(ENDS, prepend=0))[:, None]
        given = {"indices": gm.asarray(index, device="cuda:1"), "rung": rung}
        rows = gm.asarray(a[:48], device="cuda:1")
        by_index = gm.asarray(gm.grouped_matmul(rows, there, **given), device="cpu")[:, 0]
        alike(by_index, wanted)
        back = there.to("cpu")
        np.testing.assert_allclose(back.dequantize(), stack.dequantize(), rtol=2e-7, atol=0)

    every = {rung.name for rung in RUNGS}
    for proved in (every, set[str]()):
        with emulated(1):
            only_proved("cuda", proved)
            multiply(proved=bool(proved))


def test_codes_that_are_floats_of_8_bits(tmp_path: Any) -> None:
    """Each weight is the nearest e4m3 number times its group's scale; files keep them."""
    a, stack, wanted = float_stack("float8")
    alike(gm.grouped_matmul(a, stack, ENDS)[:48], wanted)
    rng = np.random.default_rng(7)
    w = rng.standard_normal((3, 70, 5)).astype("f4")
    w[1] = 0
    for scales in ("float32", "float16", "bfloat16"):
        coded = gm.quantize_experts(w, format="float8", group_size=32, scale_dtype=scales)
        error = abs(coded.dequantize() - w)
        most = np.maximum(abs(w) / 16, abs(w).max() / 448 / 1024)  # of three bits, or a subnormal
        assert (error <= 1.01 * most).all()
        assert not coded.dequantize()[1].any()
        coded.matrix.save(tmp_path / f"{scales}.safetensors")
        again = gm.QuantizedMatrix.load(tmp_path / f"{scales}.safetensors")
        np.testing.assert_array_equal(again.dequantize(), coded.matrix.dequantize())
        assert repr(again) == repr(coded.matrix)
    codes, one = np.ones((2, 4), numpy_dtype(FLOAT8_CODES)), np.ones((2, 1), np.float32)
    form: dict[str, Any] = {"shape": (2, 4), "bits": 8, "group_size": -1}
    for change in ({"zeros": one}, {"perm": np.arange(4, dtype=np.int32)}):
        with pytest.raises(ValueError, match="no zero points and no perm"):
            gm.QuantizedMatrix.from_parts(codes, one, **change, **form)
    codes[1, 2] = np.nan
    with pytest.raises(ValueError, match="some are NaN"):
        gm.QuantizedMatrix.from_parts(codes, one, **form)
    with pytest.raises(TypeError, match="no proved cpu rung computes"):
        gm.matvec(stack.matrix, np.ones(288, np.float32))


def make_fingerprints(inputs: Any) -> Any:
    """Return the inputs as if they had been made with the offsets that they hold now."""
    from gemmule.oracle.inputs import Inputs, _fingerprints

    held = inputs.b if isinstance(inputs.b, gm.QuantizedMatrix) else inputs.a
    marks = _fingerprints(held, inputs.frames[1:])
    return Inputs(
        inputs.case, inputs.a, inputs.b, inputs.out, inputs.exact_below, inputs.frames, marks,
        inputs.ends,
    )  # fmt: skip


def test_the_struct_of_codes_says_what_the_header_says() -> None:
    from gemmule.backends.cuda import launch_args
    from proofs import raw_launch

    rung = next(r for r in RUNGS if r.quantized)
    inputs = sample(rung)
    packed = raw_launch.arguments(inputs, [1, 2, 3, 4, 5, 6, 7], 0)
    names = [name for name, _ in launch_args.QUANT_FIELDS]
    fields = dict(zip(names, launch_args.QUANT.unpack(packed), strict=True))
    assert (fields["x"], fields["y"], fields["work"]) == (5, 6, 7)
    assert (fields["m"], fields["n"], fields["columns"], fields["scale_row"]) == (40, 128, 24, 4)
    assert struct.calcsize("<7Q") == 56


class Subclass(Tensor):
    """A tensor of a kind whose memory need not hold its numbers."""


@needs_emulator
def test_tensors_met_before_go_straight_to_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    host_tensors = pytest.importorskip("host_tensors")
    from gemmule import grouped
    from gemmule.core.caches import forget_plans

    current = [1]  # device
    library = device_tensors.library(current, float16="float16")
    host_tensors.put_library(monkeypatch, library, device_tensors.maker, grouped)
    a, w = operands("float16", k=128, n=48)
    wanted = gm.grouped_matmul(a, w, ENDS)[:48]
    stacks = [gm.quantize_experts(w.astype("f4"), bits=bits, group_size=32) for bits in (4, 8)]
    coded = [(stack, gm.grouped_matmul(a, stack, ENDS)[:48]) for stack in stacks]

    def multiply() -> None:
        left, right, ends = (Tensor(gm.asarray(one, device="cuda:1")) for one in (a, w, ENDS))
        general: list[Any] = []
        monkeypatch.setattr(grouped, "multiplied", lambda *given: general.append(given))

        def judge(*operands: Any, straight: bool) -> None:
            """See that a call is right where it goes straight, and does so only where it may."""
            found = grouped.grouped_product(*operands, None, grouped.DEFAULT)
            assert (found is not None) == straight == (not general)
            general.clear()
            if found is not None:
                assert isinstance(found, Tensor)
                assert (found.shape, found.dtype) == ((50, 48), "float16")
                host = gm.asarray(found.array, device="cpu")
                np.testing.assert_array_equal(host[:48], wanted)

        def moved(array: Array, strides: tuple[int, ...], first: int = 0) -> Any:
            """Return the operand of A's or W's shape whose numbers lie so in a device's memory."""
            put = gm.asarray(array, device="cuda:1")
            shape = a.shape if len(strides) == 2 else w.shape
            here = {"shape": shape, "strides": strides, "pointer": put.pointer + 2 * first}
            return Tensor(SimpleNamespace(dtype="float16", ordinal=1, held=put, **here))

        others = [left, moved(np.repeat(a, 2, 0), (256, 1))]
        flat = np.concatenate([np.zeros(1, a.dtype), a.ravel()])
        weights = [right, moved(np.ascontiguousarray(w.swapaxes(1, 2)), (128 * 48, 1, 128))]
        for x in others:  # alike in all but where their numbers lie
            for matrices in weights:
                for offsets in (ends, Tensor(gm.asarray(ENDS, device="cuda:1"))):
                    judge(x, matrices, offsets, straight=True)
        judge(moved(flat, (128, 1), 1), right, ends, straight=False)
        flat = np.concatenate([np.zeros(1, w.dtype), w.ravel()])
        judge(left, moved(flat, (128 * 48, 48, 1), 1), ends, straight=False)
        current[0] = 0
        judge(left, right, ends, straight=False)
        current[0] = 1
        for place in range(3):
            given = [left, right, ends]
            given[place] = Subclass(given[place].array)
            judge(*given, straight=False)
        right.negated = True  # its memory holds other numbers
        judge(left, right, ends, straight=False)
        for stack, of_codes in coded:  # alike in all but their codes
            for _ in range(2):
                there = grouped.of_tensors(left, stack.to("cuda:1"), ends, grouped.DEFAULT)
                assert isinstance(there, Tensor)
                host = gm.asarray(there.array, device="cpu")[:48].astype("f8")
                np.testing.assert_allclose(host, of_codes, rtol=2.0**-9, atol=2.0**-4)
        current[0] = 0
        assert grouped.of_tensors(left, stack.to("cuda:1"), ends, grouped.DEFAULT) is None

    with emulated(1):
        multiply()
    forget_plans()  # the bound call among them


@needs_emulator
def test_tensors_met_before_go_straight_into_out_and_by_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for an out that is another than a fresh result, or lies where an operand does."""
    host_tensors = pytest.importorskip("host_tensors")
    from gemmule.core.caches import forget_plans

    library = device_tensors.library((1,), float16="float16", uint8="uint8")
    for path in (grouped, routed_calls):
        host_tensors.put_library(monkeypatch, library, device_tensors.maker, path)
    a, w = operands("float16", k=128, n=128)
    wanted = gm.grouped_matmul(a, w, ENDS)[:48]
    index = np.repeat(np.arange(len(ENDS)), np.diff(ENDS, prepend=0))[:, None]

    def multiply() -> None:
        put = [gm.asarray(one, device="cuda:1") for one in (a, w, ENDS, np.zeros_like(a), index)]
        left, right, ends, out, names = map(Tensor, put)
        general: list[Any] = []
        monkeypatch.setattr(grouped, "multiplied", lambda *given: general.append(given))

        def judge(into: Any, *, straight: bool) -> None:
            found = grouped.grouped_product(left, right, ends, into, grouped.DEFAULT)
            assert (found is into) == straight == (not general)
            general.clear()
            if straight:
                host = gm.asarray(into.array, device="cpu")
                np.testing.assert_array_equal(host[:48], wanted)

        for times in range(2):
            judge(out, straight=True)
            assert out.written == times + 1, "a gradient that needs what it held has to fail"
        judge(left, straight=False)  # an operand
        for shape, strides in (((50, 64), (128, 1)), ((50, 128), (256, 1)), ((50, 128), (1, 50))):
            judge(Tensor(put[3].view(shape, strides)), straight=False)
        tail = put[0].pointer + 2 * 128 * 49  # which begins within A
        here = {"shape": (50, 128), "strides": (128, 1), "pointer": tail, "held": put[0]}
        judge(Tensor(SimpleNamespace(dtype="float16", ordinal=1, **here)), straight=False)
        out.requires_grad = True
        judge(out, straight=False)
        out.requires_grad = False

        forms = (grouped.unwrap(one, "it").form for one in put[:3])
        plan = grouped.resolve_grouped(*forms, None, "cuda:1", grouped.DEFAULT)
        assert plan(left, right, ends) is None, "the general path, which is no more"
        general.clear()
        for _ in range(2):
            found = plan(left, right, ends)
            np.testing.assert_array_equal(gm.asarray(found.array, device="cpu")[:48], wanted)
            assert plan(left, right, ends, out=out) is out
        assert not general
        with pytest.raises(ValueError, match="this plan computes grouped"):
            plan(Tensor(put[0].view((48, 128), (128, 1))), right, ends)

        rows, slots = (
            Tensor(put[0].view((48, 128), (128, 1))),
            put[3].view((48, 1, 128), (128,) * 2 + (1,)),
        )
        by_index = Routing(names), Tensor(slots)
        given = rows, right, None, Options(), by_index[0]
        for _ in range(2):
            assert routed_calls.of_tensors(*given, by_index[1]) is by_index[1]
            host = gm.asarray(put[3], device="cpu")
            np.testing.assert_array_equal(host[:48], wanted)
        moved = put[0].view((48, 1, 128), (128, 128, 1))
        assert routed_calls.of_tensors(*given, Tensor(moved)) is None

    with emulated(1):
        multiply()
    forget_plans()  # the bound calls among them


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_the_command_shows_the_ladder(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    from gemmule_lab.cli import run

    assert run(["ladder", "grouped", "--backend", backend]) == 0
    shown = capsys.readouterr().out
    assert all(rung.name in shown for rung in gm.ladder("grouped", backend))
