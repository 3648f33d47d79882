"""A bias that the kernel of a quantised product adds: right in the kernels, and one launch."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from cuda_emulation import Emulator
from cuemu.toolchain import missing_tools
from emulated_driver import EmulatedDriver, emulated, stream_on
from gemmule.backends.cuda import launch_args
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.backends.cuda.launch import Launcher
from gemmule.core.problem import Problem, QuantSpec
from gemmule.core.registry import cuda_rungs
from gemmule.core.rung import HEADERS_FOLDER, Rung
from gemmule.oracle import biased
from gemmule.oracle.truth import reference
from gemmule.storage import evidence
from host_tensors import put_library
from proofs import device as verify_device
from proofs import proofs
from proofs import status as proof_status

torch = pytest.importorskip("torch")
from gemmule.dispatch import torch as torch_calls  # noqa: E402
from gemmule.dispatch.torch_repeats import RepeatGuard  # noqa: E402

ADDING = [pytest.param(r, id=r.name) for r in cuda_rungs() if r.adds]
needs_emulator = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


def rung_named(name: str) -> Any:
    return next(r for r in cuda_rungs() if r.name == name)


@needs_emulator
@pytest.mark.parametrize("rung", ADDING)
def test_kernels_add_it_to_every_row_and_column(rung: Rung) -> None:
    signature = rung.signatures[len(rung.name) % 2]
    trials = list(biased.some(rung, verify_device.trials(rung, signature, few=True)))
    emulator = Emulator()
    assert len(trials) > 2
    for emulator.seed, trial in enumerate(trials):
        verdict = biased.judge_trial(rung, trial, emulator.run)
        assert verdict.ok, f"{trial}: {verdict.text}"


# --- its truth ------------------------------------------------------------------------------------

FAULTS: dict[str, Callable[..., Any]] = {
    "right": lambda made, bias, alpha, old: alpha * made + bias + old,
    "forgotten": lambda made, bias, alpha, old: alpha * made + old,
    "scaled too": lambda made, bias, alpha, old: alpha * (made + bias) + old,
    "of another row": lambda made, bias, alpha, old: alpha * made + np.roll(bias, 1, 0) + old,
    "instead of what was there": lambda made, bias, alpha, old: alpha * made + bias,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_added_otherwise_is_seen(fault: str) -> None:
    def run(
        rung: Any, inputs: Any, params: Any, alpha: float, beta: float, *, bias: Any
    ) -> np.ndarray[Any, Any]:
        made = reference(problem, inputs.a, inputs.b, exact=True).values
        old = beta * inputs.out.astype(np.float64) if beta else 0.0
        added = bias.astype(np.float64)[:, None]
        inputs.out[...] = FAULTS[fault](made, added, alpha, old)
        return inputs.out

    rung = rung_named("staged_fragments")
    quant = QuantSpec(4, 128, True, "mma16", "float32", False)
    problem = Problem(
        "matmul", 35, 3, 128, a="uint4", b="float16", out="float16", layout_b="col", quant=quant
    )
    params, found = rung.check_params(problem, None), []
    for seed in range(len(biased.SCALARS)):
        trial = verify_device.Trial(problem, params, "integers", "contiguous", seed)
        found.append(biased.judge_trial(rung, trial, run).ok)
    assert all(found) if fault == "right" else not all(found)


# --- the launch -----------------------------------------------------------------------------------


def test_the_struct_ends_with_its_address() -> None:
    header = (HEADERS_FOLDER / "bias.cuh").read_text()
    found = re.search(r"struct BiasQuantArgs : QuantArgs \{ (.*?) \};", header)
    assert found is not None
    assert found[1] == "const void* bias;"
    assert launch_args.BIAS.size == struct.calcsize("P")
    assert launch_args.QUANT.size % launch_args.BIAS.size == 0, "no gap in front of it"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDriver]:
    """A device whose launches by ctypes run under the emulator; arrays stand for tensors."""
    with emulated(seed=2) as stand_in:
        native = SimpleNamespace(
            _cuda_getDevice=lambda: 1,
            _cuda_getCurrentRawStream=stream_on,
            _increment_version=lambda tensors: None,
        )
        library = SimpleNamespace(
            _C=native,
            float16="float16",
            uint8="uint8",
            autograd=torch.autograd,
            Size=torch.Size,
        )
        maker = lambda shape, dtype, ordinal: lambda: empty(shape, dtype)  # noqa: E731
        put_library(monkeypatch, library, maker)
        monkeypatch.setattr(RepeatGuard, "admits", lambda *given: True)
        yield stand_in


def prove(monkeypatch: pytest.MonkeyPatch, proved: bool) -> None:
    """Let there be a proof of kernels that add a bias, or none; others keep theirs."""
    real = evidence.is_proved
    monkeypatch.setattr(
        evidence,
        "is_proved",
        lambda *given, bias=False, **more: proved if bias else real(*given, **more),
    )


def empty(shape: tuple[int, ...], dtype: str) -> Any:
    return tensor(DeviceArray.empty(shape, dtype, 1))


def tensor(array: Any) -> Any:
    return SimpleNamespace(array=array, data_ptr=lambda: array.pointer)


def placed(host: np.ndarray[Any, Any]) -> Any:
    return tensor(gm.asarray(host, device="cuda:1"))


@needs_emulator
@pytest.mark.parametrize(("columns", "rung"), [(1, "fragment_codes"), (3, "staged_fragments")])
def test_a_layer_is_one_launch(
    columns: int, rung: str, gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove(monkeypatch, True)
    rng = np.random.default_rng(columns)
    Q = gm.quantize(rng.standard_normal((512, 512)), bits=4, group_size=128)
    X, bias = (rng.integers(-3, 4, shape).astype("f2") for shape in ((columns, 512), 512))
    exact = X.astype("f8") @ np.asarray(Q, "f8").T + bias
    matrix, x = Q.to("cuda:1", layout="mma16"), placed(X)
    right = x.array if columns > 1 else gm.asarray(X[0], device="cuda:1")
    plan = gm.plan("matvec", matrix, right)
    assert plan.rung.name == rung
    biased = Launcher(plan.choice).with_bias()
    assert biased is not None, plan
    added = torch_calls.bound_call(biased, plan.choice.call, plan.forms, 1, asks=False)
    gpu.launches.clear()
    for _ in range(2):  # the second finds its arguments made
        found = added(matrix, tensor(right), placed(bias)).array.to_host()
        assert np.abs(found - exact).max() <= 2e-2 * np.abs(exact).max()
    assert [launch[-1] for launch in gpu.launches] == [stream_on(1)] * 2


@needs_emulator
@pytest.mark.parametrize(
    ("rung", "shape", "launches"),
    [
        ("rounded_columns", (1, 32, 1, 1, 2), 1),
        ("rounded_columns", (1, 64, 2, 1, 2), 1),
        ("rounded_columns", (1, 32, 1, 4, 2), 2),
        ("arranged_columns", (2, 2, 2, 4, 2, 4), 2),
    ],
)
def test_a_layer_of_many_rows_adds_it_in_its_last_launch(
    rung: str,
    shape: tuple[int, ...],
    launches: int,
    gpu: EmulatedDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By whatever shape: of whole vectors, of rows that are none, of shared sums and of parts."""
    prove(monkeypatch, True)
    rng = np.random.default_rng(launches)
    Q = gm.quantize(rng.standard_normal((260, 512)), bits=4, group_size=128)
    X, bias = (rng.integers(-3, 4, size).astype("f2") for size in ((21, 512), 260))
    exact = X.astype("f8") @ np.asarray(Q, "f8").T + bias
    matrix, x = Q.to("cuda:1", layout="mma16"), gm.asarray(X, device="cuda:1")
    given, plan = rung_named(rung), gm.plan("matvec", matrix, x)
    params = given.check_params(plan.choice.problem, dict(zip(given.params, shape, strict=True)))
    biased = Launcher(replace(plan.choice, rung=given, params=params)).with_bias()
    assert biased is not None, plan
    added = torch_calls.bound_call(biased, plan.choice.call, plan.forms, 1, asks=False)
    gpu.launches.clear()
    found = added(matrix, tensor(x), placed(bias)).array.to_host()
    assert np.abs(found - exact).max() <= 2e-2 * np.abs(exact).max()
    assert len(gpu.launches) == launches


def test_there_is_none_without_a_proof_or_a_kernel(
    gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    Q = gm.quantize(np.ones((35, 256)), bits=4, group_size=128).to("cuda:1", layout="mma16")
    plan = gm.plan(
        "matvec", Q, gm.asarray(np.ones(256, "f2"), device="cuda:1"), rung="fragment_codes"
    )
    prove(monkeypatch, True)
    assert Launcher(plan.choice).with_bias() is not None
    assert Launcher(replace(plan.choice, rung=rung_named("any_codes"))).with_bias() is None
    prove(monkeypatch, False)
    assert Launcher(plan.choice).with_bias() is None


def test_without_a_proof_of_it_the_evidence_still_fits() -> None:
    plain, added = (("quantized", "fragment_codes", name) for name in ("a,b,c", "a,b,c,bias"))
    record = evidence.Record(*plain, "sm_90a", "k", "NVIDIA X", "2026-11-21", 3, 0.5)
    standing = proof_status.judge({plain: "k", added: "j"}, [record])
    assert (standing.current, standing.missing, standing.unproved) == ([plain], [], [added])
    assert standing.ok
    assert standing.to_prove() == {plain[:2]: frozenset({added[2]})}
    assert standing.lines()[0].startswith(
        "unproved, a bias, scales or an epilogue take another launch"
    )
    stale = proof_status.judge({added: "new"}, [replace(record, variant=added[2])])
    assert stale.stale == [added]


def test_a_proof_without_it_is_none_with_it(fault: Callable[..., Any]) -> None:
    (plain, added), name = list(proofs.variants(rung_named("fragment_codes")))[:2], "fragment_codes"
    assert not proofs.adds_bias(plain)
    assert proofs.adds_bias(added)
    assert proofs.signature_of(plain) == proofs.signature_of(added)
    assert set(added.defines) == {*plain.defines, "BIAS"}
    assert set(added.kernels) <= set(plain.kernels)
    assert [plain.name, added.name] == list(proofs.names(rung_named(name)))[:2]
    a, b, out = proofs.signature_of(plain)
    quant = QuantSpec(4, 128, True, "mma16", "float32", False)
    problem = Problem("matvec", 64, 128, a=a, b=b, out=out, quant=quant)
    for known, proved in (((plain,), (True, False)), ((plain, added), (True, True))):
        names = frozenset(("quantized", name, one.name) for one in known)
        fault(evidence, "proved_variants", lambda sound, names=names: names)
        rung = rung_named(name)
        assert evidence.is_proved(rung, problem, "sm_90a") is proved[0]
        assert evidence.is_proved(rung, problem, "sm_90a", bias=True) is proved[1]
