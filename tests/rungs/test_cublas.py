"""The rung that calls cuBLAS, judged by the oracle over a library that does what it is told."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from cuemu.toolchain import missing_tools
from emulated_driver import Poisoned, emulated
from fake_cublas import FakeCublas, installed
from fake_driver import FakeDriver, driver_of
from gemmule.arrays.interop import unwrap
from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.backends.cuda.launch import CudaBackend
from gemmule.backends.cuda.library import cublas
from gemmule.choose import choose
from gemmule.core.caches import forget_plans
from gemmule.core.canonical import Options, canonical
from gemmule.core.operand import Form, c_strides
from gemmule.core.problem import PRECISIONS, Problem, numpy_dtype
from gemmule.core.registry import device_rungs
from gemmule.errors import DeviceError
from gemmule.oracle.problems import make_problem
from gemmule.plan import Plan, rebound
from gemmule.rungs.matmul.cuda import cublas as rung_module
from gemmule.storage import evidence, lines, margins, models
from gemmule.storage import tuned as tuned_store
from gemmule_lab import doctor
from proofs import device as verify_device
from proofs import proofs
from proofs.device_runner import DeviceRunner

(RUNG,) = (rung for rung in device_rungs() if rung.name == "cublas")


@pytest.fixture
def fake(setting: Callable[..., None], tmp_path: Any) -> Iterator[FakeCublas]:
    """A library and a driver of two devices, without a GPU."""
    setting(GEMMULE_CACHE=tmp_path)
    library = FakeCublas()
    with driver_of(FakeDriver()), installed(library):
        yield library
        gc.collect()
    assert not library.faults


def on(device: int, array: Any) -> DeviceArray:
    return DeviceArray.from_host(np.asarray(array), device)


def host(array: DeviceArray) -> Any:
    return array.to_host()


def test_a_stored_choice_of_the_library_does_not_scale_what_it_has_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    form = Form.packed((64, 64), "float16")
    call, machine = canonical("matmul", form, form, None, Options()), proofs.proof_machine()
    stored = tuned_store.Tuned(RUNG, RUNG.check_params(call.problem, None), 1e-6, "2026-11-21")
    monkeypatch.setattr(tuned_store, "lookup", lambda *_: stored)
    assert choose(call, machine).rung is RUNG
    assert choose(call, machine, scaled=True).rung is not RUNG


# --- the product ----------------------------------------------------------------------------------


@pytest.mark.parametrize("signature", RUNG.signatures, ids=",".join)
def test_every_layout_stride_and_batch_is_told_rightly(
    fake: FakeCublas, signature: tuple[str, str, str]
) -> None:
    runner = DeviceRunner(0, arena_bytes=1 << 26)
    seen = set()
    for trial in verify_device.trials(RUNG, signature, few=True):
        verdict = verify_device.judge_trial(RUNG, trial, runner.run)
        assert verdict.ok, f"{trial}: {verdict.text}"
        seen.add((trial.problem.layout_a, trial.problem.layout_b, trial.view))
    assert {pair[:2] for pair in seen} == {(a, b) for a in ("row", "col") for b in ("row", "col")}
    assert {"padded", "contiguous"} <= {view for _, _, view in seen}
    runner.close()


@pytest.mark.parametrize("layout_out", ["row", "col"])
@pytest.mark.parametrize("shared", ["", "a", "b"])
def test_batches_and_results_by_columns(fake: FakeCublas, layout_out: str, shared: str) -> None:
    runner = DeviceRunner(0, arena_bytes=1 << 24)
    signature = ("float32",) * 3
    for layout_a, layout_b in (("row", "col"), ("col", "row")):
        problem = replace(
            make_problem("matmul", 5, 7, 9, signature, layout_a=layout_a, layout_b=layout_b),
            batch=3,
            layout_out=layout_out,
            shared_a=shared == "a",
            shared_b=shared == "b",
        )
        trial = verify_device.Trial(problem, RUNG.defaults(), "integers", "contiguous", 3)
        verdict = verify_device.judge_trial(RUNG, trial, runner.run)
        assert verdict.ok, verdict.text
    runner.close()


@pytest.mark.parametrize("kind", ["step", "result", "one turned", "both turned", "batch"])
def test_the_oracle_sees_a_product_told_wrongly(
    fake: FakeCublas, fault: Callable[..., Any], kind: str
) -> None:
    def wrong(sound: Any, problem: Any, call: Any) -> cublas.Gemm:
        told = sound(problem, call)
        if kind == "step":
            return replace(told, first=replace(told.first, step=told.first.step + 1))
        if kind == "result":
            return replace(told, result=replace(told.result, step=told.result.step + 1))
        if kind == "one turned":
            return replace(told, transposed=(told.transposed[0], not told.transposed[1]))
        if kind == "both turned":
            return replace(told, transposed=(not told.transposed[0], not told.transposed[1]))
        return replace(told, second=replace(told.second, batch_step=0))

    fault(rung_module, "gemm", wrong)
    runner = DeviceRunner(0, arena_bytes=1 << 24)
    problem = replace(make_problem("matmul", 6, 6, 6, ("float32",) * 3), batch=2)
    trial = verify_device.Trial(problem, RUNG.defaults(), "integers", "padded", 3)
    assert not verify_device.judge_trial(RUNG, trial, runner.run).ok
    runner.close()


def test_scalars_that_the_library_does_not_round_in(fake: FakeCublas) -> None:
    a, b, c = (np.arange(12.0).reshape(s) for s in ((3, 4), (4, 3), (4, 3)))
    plan = gm.plan("matmul", on(0, a), on(0, b), rung="cublas")
    for old, alpha, beta in ((c[:3], -1.0, -3.0), (np.full((3, 3), np.nan), 1.0, 0.0)):
        left, right, out = (unwrap(on(0, one), "operand") for one in (a, b, old))
        plan.launch(left, right, out, alpha, beta)
        expected = alpha * (a @ b) + (beta * old if beta else 0.0)
        assert np.array_equal(host(out.array), expected)


class NotedScalars(FakeCublas):
    """A library that notes the scalars of each product."""

    def __init__(self, workspace: int) -> None:
        super().__init__(workspace=workspace)
        self.scalars: set[tuple[float, float]] = set()

    def _Matmul(self, *values: int) -> None:
        kind = {0: ctypes.c_float, 1: ctypes.c_double}[self.things[values[1]].scale]
        scale, keep = (kind.from_address(values[at]).value for at in (2, 7))
        self.scalars.add((scale, keep))
        super()._Matmul(*values)


@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("workspace", [0, 500])
def test_other_scalars_meet_whole_sums(dtype: str, workspace: int) -> None:
    """By a pass over the result: infinities, and old values, come through as sums first have it."""
    a, b, c = (whole(shape, dtype) for shape in ((5, 7), (7, 3), (5, 3)))
    a[1] = 0
    library = NotedScalars(workspace)
    with emulated(3, Poisoned), installed(library):
        assert gm.plan("matmul", on(0, a), on(0, b)).rung.vendor
        wide = on(0, np.zeros((5, 6), dtype))
        part = DeviceArray(wide.pointer + 2 * a.itemsize, (5, 3), (6, 1), dtype, 0, wide)
        for alpha, beta, old in ((1 / 3, 0.7, c), (np.inf, 2.0, c), (3.0, 0.0, c * np.nan)):
            with np.errstate(all="ignore"):
                number = np.dtype(dtype).type
                expected = number(alpha) * (a @ b) + (number(beta) * old if beta else 0)
            for out in (on(0, old), on(0, np.asfortranarray(old)), part):
                if out is part:
                    room = np.pad(old, ((0, 0), (2, 1)))
                    ctypes.memmove(wide.pointer, room.ctypes.data, room.nbytes)
                gm.gemm(on(0, a), on(0, b), out, alpha=alpha, beta=beta)
                found = wide.to_host()[:, 2:5] if out is part else host(out)
                assert np.allclose(found, expected, rtol=1e-6, equal_nan=True), (alpha, beta)
            edges = wide.to_host()[:, [0, 1, 5]]
            assert not edges.any(), "what lies between stays"
        del wide, part, out
    assert library.scalars == {(1.0, 0.0)}


def whole(shape: tuple[int, int], dtype: str) -> Any:
    return np.random.default_rng(sum(shape)).integers(-3, 4, shape).astype(dtype)


@pytest.mark.parametrize("alpha", [0, 1, -1, 2, 1e-3, np.inf])
def test_halves_go_to_a_rung_that_scales_before_it_rounds(
    fake: FakeCublas, fault: Callable[..., Any], alpha: float
) -> None:
    """A library's kernels multiply operands or partial sums by alpha, or round to halves first."""
    ran = []
    fault(Plan, "launch", lambda sound, plan, *_: ran.append((plan.rung.vendor, _[-2:])))
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        a = on(0, np.ones((8, 8), numpy_dtype(dtype)))
        assert gm.plan("matmul", a, a).rung.vendor
        gm.gemm(a, a, on(0, np.ones((8, 8), numpy_dtype(dtype))), alpha=alpha, beta=3)
    plain = alpha in (0, 1, -1)
    assert ran == [(vendor, (alpha, 3)) for vendor in (True, plain, plain, True)]


@pytest.mark.parametrize("by_columns", [False, True])
def test_a_result_in_part_of_a_wider_array(fake: FakeCublas, by_columns: bool) -> None:
    a, b = (np.arange(12.0).reshape(s) for s in ((3, 4), (4, 3)))
    whole = on(0, np.full((3, 8), -1.0))
    strides = (1, 8) if by_columns else (8, 1)
    out = DeviceArray(whole.pointer, (3, 3), strides, "float64", 0, whole)
    gm.matmul(on(0, a), on(0, b), out=out, rung="cublas")
    found = host(whole)
    assert np.array_equal(found[:, :3], (a @ b).T if by_columns else a @ b)
    assert (found[:, 3:] == -1).all()


# --- what the library is asked --------------------------------------------------------------------


def told(**changes: Any) -> cublas.Gemm:
    problem = make_problem("matmul", 8, 8, 8, ("float32",) * 3)
    problem = replace(problem, **changes)
    return rung_module.gemm(problem, proofs.packed_call(problem))


def test_float32_is_never_tf32_unless_asked_for() -> None:
    assert told().compute == "float32"
    assert told(precision="ieee").compute == "float32"
    assert told(precision="tf32").compute == "tf32"
    halves = {"a": "float16", "b": "float16", "out": "float16"}
    assert told(**halves, precision="tf32").compute == "float32"
    every = {"float32": 68, "tf32": 77, "float64": 70, "complex64": 68, "complex128": 70}
    assert every == cublas.COMPUTE_TYPES


def test_tf32_is_used_where_it_is_asked_for(fake: FakeCublas) -> None:
    a = on(0, np.ones((64, 64), np.float32))
    asked = gm.plan("matmul", a, a, precision="tf32", rung="cublas")
    assert "no use" not in asked.explain()
    assert RUNG.arithmetic(asked.problem).inputs == "tf32"
    assert not RUNG.arithmetic(asked.problem).at_least_float32


def test_partial_sums_stay_in_the_type_of_the_sum(fake: FakeCublas) -> None:
    a = on(0, np.ones((4, 4), np.float16))
    gm.matmul(a, a, rung="cublas")
    (asked,) = fake.asked
    assert asked[cublas.PREF_REDUCTION] == 2
    assert asked[cublas.PREF_WORKSPACE] == 32 << 20
    assert [asked[which] for which in cublas.PREF_ALIGNMENTS] == [8] * 4


def test_the_heuristic_is_asked_once_a_plan_and_device(fake: FakeCublas) -> None:
    for device in (0, 1, 0, 1, 0):
        a = on(device, np.ones((4, 4)))
        gm.matmul(a, a, rung="cublas")
    assert len(fake.asked) == 2
    assert len(fake.handles) == 2


def test_each_call_has_a_workspace_of_its_own_and_the_callers_stream(fake: FakeCublas) -> None:
    fake.workspace = 4096
    a = on(0, np.ones((4, 4)))
    with device_arrays.using_stream(17):
        gm.matmul(a, a, rung="cublas")
    ((stream, work),) = fake.calls
    assert stream == 17
    assert work


def test_threads_share_a_prepared_product(fake: FakeCublas) -> None:
    a = on(0, np.eye(16))
    plan = gm.plan("matmul", a, a, rung="cublas")
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(plan(a, a))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(np.array_equal(host(r), np.eye(16)) for r in results)
    assert len(fake.handles) == 1


def test_what_was_made_is_given_back(fake: FakeCublas) -> None:
    made = cublas.Prepared(told(), 0)
    assert len(fake.things) == 6
    del made
    gc.collect()
    assert len(fake.things) == 1  # the handle, which lives as long as the process


# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout_out": "strided"}, "C by rows or by columns"),
        ({"layout_a": "strided"}, "it reads A as row or col"),
        ({"k": 0}, "sizes of 1 to"),
        ({"m": 2**31}, "sizes of 1 to"),
        ({"batch": 65_536}, "65,535 products"),
        ({"batch_invariant": True}, "equal bits"),
        ({"a": "int8", "b": "int8", "out": "int32"}, "dtypes"),
    ],
)
def test_what_the_library_does_not_take_is_refused(changes: dict[str, Any], words: str) -> None:
    problem = replace(Problem("matmul", 8, 8, 8), **changes)
    refused = RUNG.mismatch(problem)
    assert refused is not None
    assert words in refused


def test_without_the_library_the_rung_says_so_and_plans_take_another() -> None:
    with installed(None):
        assert "not found" in str(RUNG.refusal(Problem("matmul", 8, 8, 8)))


@pytest.mark.parametrize(
    ("function", "status", "words"),
    [
        ("cublasLtCreate", 1, "opening cuBLAS on cuda:0: cuBLAS answered NOT_INITIALIZED"),
        ("cublasLtMatmulAlgoGetHeuristic", 14, "answered INTERNAL_ERROR"),
        ("cublasLtMatmul", 13, "multiplying .* answered EXECUTION_FAILED"),
        ("cublasLtMatmul", 99, "answered 99"),
    ],
)
def test_failures_of_the_library_are_typed(
    fake: FakeCublas, function: str, status: int, words: str
) -> None:
    fake.answers[function] = status
    a = on(0, np.ones((4, 4)))
    with pytest.raises(DeviceError, match=words):
        gm.matmul(a, a, rung="cublas")


def test_ranks_name_what_the_heuristic_knows(fake: FakeCublas) -> None:
    fake.known, a = 2, on(0, np.ones((4, 4)))
    for rank in (0, 1, 3):  # the last one where it knows fewer
        gm.matmul(a, a, rung="cublas", params={"rank": rank})
    assert fake.used == [0, 1, 1]
    fake.known = 0
    with pytest.raises(DeviceError, match=r"asking how to multiply .* answered NOT_SUPPORTED"):
        gm.matmul(on(0, np.ones((4, 5))), on(0, np.ones((5, 4))), rung="cublas")


def test_the_version_reads_as_the_vendor_writes_it(fake: FakeCublas) -> None:
    assert cublas.version() == "13.1.2"


# --- when plans choose it -------------------------------------------------------------------------


def margin(of: str = "few_columns", **changes: Any) -> margins.Margin:
    """Return a margin of 4096 x 4096 by 4, float32, on the fake device."""
    key = next(
        r.key for r in evidence.read() if (r.rung, r.variant) == (of, "float32,float32,float32")
    )
    fields: dict[str, Any] = {"device": "Fake GPU", "arch": "sm_90a", "folder": "matmul"}
    fields |= {"rung": of, "key": key, "a": "float32", "b": "float32"}
    fields |= {"out": "float32", "layout_a": "row", "layout_b": "row", "m": 4096, "n": 4}
    fields |= {"k": 4096, "batch": 1, "alignment": 16, "ratio": 1.5, "date": "2026-11-22"}
    return margins.Margin(**{**fields, **changes})


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Any]:
    """Write margins for the fake device, beside the proofs that there are."""
    records = list(evidence.read())

    def write(*found: margins.Margin) -> None:
        rows = ({"schema": margins.SCHEMA, **asdict(one)} for one in found)
        lines.write(tmp_path / "fake-gpu" / margins.FILE, rows)
        margins.known.cache_clear()

    monkeypatch.setattr(evidence, "read", lambda root=None: iter(records))
    monkeypatch.setattr(evidence, "folder", lambda: tmp_path)
    margins.known.cache_clear()
    yield write
    margins.known.cache_clear()


def chosen(m: int, n: int, k: int, precision: str = "float32") -> tuple[str, str]:
    """Return the rung that a plan takes on the fake device for float32 by rows, and why."""
    forms = [Form(shape, c_strides(shape), "float32", 16) for shape in ((m, k), (k, n))]
    call = canonical("matmul", *forms, None, Options(precision=precision))
    choice = choose(call, CudaBackend().machine("cuda:0"))
    return choice.rung.name, choice.reason


def test_plans_choose_it_until_another_is_known_to_be_faster(fake: FakeCublas, known: Any) -> None:
    assert chosen(4096, 4, 4096)[0] == "cublas"
    known(margin(ratio=1.09))
    assert chosen(4096, 4, 4096)[0] == "cublas"
    known(margin())
    assert chosen(4096, 4, 4096) == (
        "few_columns",
        "1.50 x the vendor's library at 4096 x 4096 x 4 on this device, 2026-11-22",
    )
    with installed(None):
        assert chosen(4096, 4, 4096)[0] in ("few_columns", "few_columns_unpacked")
        assert chosen(4096, 4096, 4096)[0] != "cublas"


def test_a_model_of_the_device_tells_where_no_margin_of_the_rung_was_recorded(
    fake: FakeCublas, known: Any
) -> None:
    machine = CudaBackend().machine("cuda:0")
    forget_plans()
    assert chosen(4096, 4, 4096)[0] == "cublas"  # by a model of another device nothing is told
    names = {"device": machine.name, "arch": machine.arch, "units": machine.units}
    few = ("few_columns", "few_columns_unpacked")
    errors = {f"matmul/{name}": 0.2 for name in few}
    own = replace(models.of(machine), errors=errors, **names)

    def count_with(rung: str, times: float) -> None:
        told = {name: n * times for name, n in own.numbers[rung].items()}
        models.save(replace(own, numbers={**own.numbers, rung: told}))
        forget_plans()

    for times, is_ours in ((1.0, True), (0.2, False)):
        count_with("matmul/cublas", times)
        name, reason = chosen(4096, 4, 4096)
        assert (name in few) == is_ours
        assert (name == "cublas") != is_ours
        assert ("a model of this device expects" in reason) == is_ours
    for first, other in (few, few[::-1]):
        count_with(f"matmul/{first}", 0.5)
        assert chosen(4096, 4, 4096)[0] == first
        assert chosen(4096, 4, 4096, "tf32")[0] == "cublas"
        known(margin(first, ratio=1.09))  # what was recorded of the rung goes before
        assert chosen(4096, 4, 4096)[0] == "cublas"
        known(margin(other))  # and what is expected to be quicker than that, before that
        name, reason = chosen(4096, 4, 4096)
        assert name == first
        assert reason.startswith(f"expected to be quicker than {other}, which is 1.50 x")
        known(margin(first), margin(other))
        assert chosen(4096, 4, 4096)[1].startswith("1.50 x the vendor's library")
        known()
    models.save(replace(own, errors={}))
    forget_plans()
    assert chosen(4096, 4, 4096)[0] == "cublas"
    forget_plans()


def test_precision_says_how_floats_are_multiplied(fake: FakeCublas, known: Any) -> None:
    known(margin("wgmma_3xfp16", n=4096))
    names = {word: chosen(4096, 4096, 4096, word)[0] for word in PRECISIONS}
    assert names == {"float32": "wgmma_3xfp16", "ieee": "cublas", "tf32": "cublas"}
    a = on(0, np.ones((64, 64), np.float32))
    said = {word: gm.plan("matmul", a, a, precision=word).explain() for word in PRECISIONS}
    assert "sums in    float32, of operands rounded to tf32" in said["tf32"]
    assert "rounded" not in said["float32"] + said["ieee"]
    with installed(None):
        words = {word: chosen(4096, 4096, 4096, word)[0] for word in PRECISIONS}
    assert words == {"float32": "wgmma_3xfp16", "ieee": "vector_tile", "tf32": "wgmma_3xfp16"}


@pytest.mark.parametrize("rung", [r for r in device_rungs() if r.op == "matmul"], ids=str)
def test_ieee_reaches_no_rung_on_tensor_cores(rung: Any) -> None:
    """Products of floats there are of halves or TF32: their sums are cut off, twice a roundoff."""
    problem = Problem("matmul", 256, 256, 256, precision="ieee")
    if rung.mismatch(problem) is None:
        arithmetic = rung.arithmetic(problem)
        assert (arithmetic.accumulator, arithmetic.per_add) == ("float32", 1.0)
        assert arithmetic.inputs is None


def test_a_measured_product_speaks_for_its_neighbours_alone(fake: FakeCublas, known: Any) -> None:
    known(margin())
    assert chosen(2048, 8, 8192)[0] == "few_columns"
    assert chosen(2047, 4, 4096)[0] == "cublas"
    assert chosen(4096, 12, 4096)[0] == "cublas"
    assert chosen(2048, 4, 2048)[0] == "few_columns"  # a quarter of the work
    assert chosen(2048, 3, 2048)[0] == "cublas"
    known(margin(), margin(m=2048, ratio=0.8))
    assert chosen(3000, 4, 4096)[0] == "few_columns"
    assert chosen(2500, 4, 4096)[0] == "cublas"


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "Other GPU"},
        {"arch": "sm_80"},
        {"layout_b": "col"},
        {"key": "0" * 64},
        {"rung": "none"},
        {"a": "float16"},
        {"ratio": 1},
        {"ratio": float("nan")},
        {"m": -1},
        {"date": "\x1b[1m"},
    ],
)
def test_margins_of_other_products_or_code_count_for_nothing(
    fake: FakeCublas, known: Any, changes: dict[str, Any]
) -> None:
    known(margin(**changes))
    assert chosen(4096, 4, 4096)[0] == "cublas"


def test_margins_need_the_alignment_and_the_precision_they_had(
    fake: FakeCublas, known: Any
) -> None:
    known(margin(k=4095))
    assert chosen(4096, 4, 4095)[0] == "cublas"  # rows of 4095 floats are aligned to 4 bytes
    known(margin(alignment=4))
    assert chosen(4096, 4, 4096)[0] == "cublas"  # the vendor's is faster at whole 16 bytes
    known(margin())
    assert chosen(4096, 4, 4096, "tf32")[0] == "cublas"


def test_a_result_that_the_library_does_not_take_goes_to_another_rung(fake: FakeCublas) -> None:
    a, b = on(0, np.ones((8, 8), np.float32)), on(0, np.ones((8, 8), np.float32))
    plan = gm.plan("matmul", a, b)
    assert plan.rung.name == "cublas"
    left, right = unwrap(a, "A"), unwrap(b, "B")
    wide = DeviceArray(
        on(0, np.ones((8, 64), np.float32)).pointer, (8, 8), (64, 4), "float32", 0, b
    )
    assert rebound(plan, left.form, right.form, unwrap(wide, "out").form).rung.name != "cublas"


def test_shipped_margins_are_of_rungs_as_they_are() -> None:
    margins.known.cache_clear()
    names = {(r.folder, r.name) for r in device_rungs()}
    paths = list(evidence.folder().glob(f"*/{margins.FILE}"))
    assert paths
    for path in paths:
        everything = list(margins.read_file(path))
        assert {(one.folder, one.rung) for one in everything} <= names
        (device,) = {one.device for one in everything}
        found = margins.known(device)
        assert sum(map(len, found.values())) == len(everything), "measure again: tools/margins.py"


def test_doctor_says_what_there_is(fake: FakeCublas) -> None:
    (found,) = doctor.cublas_library()
    assert (found.status, found.found.split(",")[0]) == ("ok", "13.1.2")
    with installed(None):
        (found,) = doctor.cublas_library()
    assert (found.status, "nvidia-cublas" in found.fix) == ("note", True)
