"""Every chip that NVRTC knows: what it is compiled for, served, refused, and asked at first use."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from cuemu.toolchain import missing_tools
from emulated_driver import EmulatedDriver, emulated
from fake_cublas import installed
from fake_driver import FakeDriver, driver_of, forget
from gemmule.backends.cuda import driver, nvrtc, starter
from gemmule.backends.cuda.launch import CudaBackend
from gemmule.choose import choose
from gemmule.core import architectures
from gemmule.core.caches import forget_plans
from gemmule.core.canonical import Options, canonical
from gemmule.core.operand import Form
from gemmule.core.registry import cuda_rungs
from gemmule.core.rung import CudaRung, Machine, Step
from gemmule.errors import DeviceError
from gemmule.plan import Plan
from gemmule.storage import first_use
from gemmule.tuning import first_use as asking
from gemmule_lab import served
from gemmule_lab.doctor import service
from proofs import proofs

needs_emulator = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
needs_nvrtc = pytest.mark.skipif(not nvrtc.known_architectures(), reason="NVRTC does not load")
NEXT = 130  # no compiler knows it yet
KNOWN = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)  # by NVRTC 13.0
CHIPS = tuple(architectures.target(one, KNOWN) for one in (*KNOWN, NEXT))
UNLISTED = tuple(arch for arch in CHIPS if arch not in architectures.LISTED)
# One plain product of each kind: the first rung of a ladder, what is chosen, codes of both orders.
COMPILED = (
    "A x, float32",
    "x A, float16",
    "A B, bfloat16",
    "A B, int8",
    "A x, int4 weights (row) by float16",
    "A x, int4 weights (mma16) by bfloat16",
)


def machine_of(arch: str) -> Machine:
    """Return a small GPU of an architecture, with a block's shared memory there."""
    number = architectures.number(arch)
    return Machine(
        "cuda", f"made up {arch}", arch, 40, 3e11, 4 << 20, architectures.SHARED_BYTES[number]
    )


@pytest.fixture(autouse=True)
def without_library() -> Iterator[None]:
    with installed(None):
        yield


def test_every_chip_has_a_target_and_the_rungs_of_one_that_is_not_newer() -> None:
    assert CHIPS == (
        "sm_75",
        "sm_80",
        "sm_86",
        "sm_87",
        "sm_88",
        "sm_89",
        "sm_90a",
        "sm_100a",
        "sm_103a",
        "sm_110a",
        "sm_120a",
        "sm_121a",
        "compute_121",
    )
    liked = [architectures.like(arch) for arch in UNLISTED]
    assert liked == ["sm_86", "sm_86", "sm_100a", "sm_100a", "sm_120a", "sm_120a"]
    wgmma = next(rung for rung in cuda_rungs() if rung.name == "wgmma_tile")
    assert [arch for arch in (*CHIPS, "compute_90") if wgmma.runs_on(arch)] == ["sm_90a"]
    staged = next(rung for rung in cuda_rungs() if rung.name == "staged_rows")
    assert [arch for arch in CHIPS if not staged.runs_on(arch)] == ["sm_75"]


@needs_nvrtc
def test_the_compiler_here_knows_what_these_tests_take_for_known() -> None:
    missing = set(KNOWN) - set(nvrtc.known_architectures())
    assert not missing or not nvrtc.compiler_version().startswith("13.0")


@pytest.mark.parametrize("arch", CHIPS)
def test_the_usual_products_are_served(arch: str) -> None:
    """By proved rungs whose launches fit the chip, each product of every op and dtype."""
    machine = machine_of(arch)
    found = list(served.served(machine))
    assert {one.product for one in found if one.choice is None} == set()
    wanted = served.HERE if arch == "sm_90a" else served.ELSEWHERE
    assert {one.how for one in found} == {wanted}
    for one in found:
        choice = one.choice
        assert choice is not None
        assert isinstance(choice.rung, CudaRung)
        steps = choice.rung.steps(choice.problem, choice.params, machine)
        assert max(step.smem for step in steps) <= machine.shared_bytes, one.product
        clusters = any(step.cluster != (1, 1, 1) for step in steps)
        assert not clusters or architectures.number(arch) >= 90, one.product


@needs_nvrtc
@pytest.mark.parametrize("arch", [*UNLISTED, "sm_75", "compute_80"])
def test_what_is_chosen_compiles_and_fits(arch: str) -> None:
    """Of the listed ones but the oldest, every rung is compiled in `test_cuda_rungs`."""
    machine, known = machine_of(arch), nvrtc.known_architectures()
    if not architectures.is_ptx(arch) and architectures.number(arch) not in known:
        pytest.skip(f"NVRTC {nvrtc.compiler_version()} does not know it")
    by_turns = COMPILED[CHIPS.index(arch) % 2 :: 2] if arch in CHIPS else COMPILED[:2]
    for one in served.served(machine):
        if one.product not in by_turns:
            continue
        assert one.choice is not None
        assert isinstance(one.choice.rung, CudaRung)
        steps = one.choice.rung.steps(one.choice.problem, one.choice.params, machine)
        module = starter.kernels(one.choice.rung, steps, arch)
        assert module.is_ptx is architectures.is_ptx(arch)
        target = f".target {arch.replace('compute', 'sm')}".encode()
        assert not module.is_ptx or target in module.cubin
        assert set(module.symbols) == {step.kernel for step in steps}
        starter.check_shared(module, steps, machine)


PLAIN = [rung for rung in cuda_rungs() if rung.runs_on("sm_75")]


def compiled(rung: CudaRung, arch: str) -> None:
    variant = next(proofs.variants(rung))
    module, _ = nvrtc.build(rung.source_path, variant.kernels[:1], arch, variant.defines)
    assert module.symbols


@needs_nvrtc
@pytest.mark.parametrize("rung", PLAIN, ids=lambda rung: f"{rung.folder}-{rung.name}")
def test_plain_rungs_compile_where_nothing_is_listed(rung: CudaRung) -> None:
    """Each for one of the chips that no rung declares, by turns; a long run takes them all."""
    known = nvrtc.known_architectures()
    here = [arch for arch in UNLISTED if architectures.number(arch) in known]
    compiled(rung, here[PLAIN.index(rung) % len(here)])


@needs_nvrtc
@pytest.mark.soak
@pytest.mark.parametrize("arch", [arch for arch in UNLISTED if not architectures.is_ptx(arch)])
def test_every_rung_of_an_unlisted_chip_compiles(arch: str) -> None:
    if architectures.number(arch) not in nvrtc.known_architectures():
        pytest.skip(f"NVRTC {nvrtc.compiler_version()} does not know it")
    for rung in cuda_rungs():
        if rung.runs_on(arch):
            compiled(rung, arch)


def test_too_much_shared_memory_is_refused_before_a_launch() -> None:
    module = nvrtc.Module(b"", {"wide": "wide"})
    step = Step("wide", (1, 1, 1), (32, 1, 1), smem=120 << 10)
    starter.check_shared(module, (step,), machine_of("sm_80"))
    with pytest.raises(DeviceError, match=r"wide takes 122,880 bytes .* made up sm_89 has 101,376"):
        starter.check_shared(module, (step,), machine_of("sm_89"))


def test_a_named_rung_of_another_chip_is_refused() -> None:
    square = Form.packed((256, 256), "float16")
    call = canonical("matmul", square, square, None, Options())
    assert choose(call, machine_of("sm_90a"), "wgmma_tile").rung.name == "wgmma_tile"
    for arch in ("sm_80", "sm_103a", "compute_121"):
        with pytest.raises(ValueError, match=f"its kernels are for sm_90a, and made up {arch} is"):
            choose(call, machine_of(arch), "wgmma_tile")


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    with driver_of(FakeDriver(devices=1)) as stand_in:
        forget()
        yield stand_in
    forget()


def test_a_gpu_stands_in_for_an_older_chip(fake: FakeDriver, setting: Callable[..., None]) -> None:
    assert driver.device_info(0).arch == "sm_90a"
    for named, shared in (("sm_80", 163), ("sm_86", 99), ("sm_89", 99), ("sm_75", 64)):
        setting(GEMMULE_ARCH=named)
        forget()
        machine = CudaBackend().machine("cuda")
        assert machine.arch == named.replace("sm", "compute")
        assert machine.name == f"Fake GPU as {named}"
        assert machine.shared_bytes == shared << 10
        rungs = [one.choice.rung for one in served.served(machine) if one.choice]
        assert len(rungs) == len(list(served.products()))
        assert all(isinstance(rung, CudaRung) and rung.runs_on(named) for rung in rungs)
    setting(GEMMULE_ARCH="sm_90")  # its own: nothing changes
    forget()
    assert driver.device_info(0).arch == "sm_90a"


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("sm_120", r"GEMMULE_ARCH is sm_120, and Fake GPU \(sm_90\) can stand in for sm_75, sm_80"),
        ("ampere", "GEMMULE_ARCH is 'ampere'; it must name an architecture, such as sm_80"),
    ],
)
def test_no_gpu_stands_in_for_a_newer_one(
    fake: FakeDriver, setting: Callable[..., None], named: str, words: str
) -> None:
    setting(GEMMULE_ARCH=named)
    with pytest.raises(ValueError, match=words):
        driver.device_info(0)


@pytest.mark.parametrize(
    ("capability", "arch"), [((7, 5), "sm_75"), ((12, 1), "sm_121a"), ((13, 0), "compute_121")]
)
def test_a_device_is_compiled_for_by_its_own_name(
    fake: FakeDriver, capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "known_architectures", lambda: KNOWN)
    major, minor = capability
    fake.attributes |= {"COMPUTE_CAPABILITY_MAJOR": major, "COMPUTE_CAPABILITY_MINOR": minor}
    assert driver.device_info(0).arch == arch


class Spark(EmulatedDriver):
    """An emulated chip that no record of ours is of. wrong: names of kernels that add one."""

    wrong: tuple[str, ...] = ()

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.attributes |= {"COMPUTE_CAPABILITY_MAJOR": 12, "COMPUTE_CAPABILITY_MINOR": 1}
        self.ran: list[str] = []

    def launched(self, function: int, params: int, *geometry: Any) -> None:
        """Run a kernel; of a wrong one spoil the first number that it wrote."""
        super().launched(function, params, *geometry)
        name = self.kernels[function - 1][1]
        self.ran.append(name)
        if name.startswith(self.wrong or ("no kernel",)):
            struct = ctypes.c_void_p.from_address(params).value
            assert struct is not None
            y = ctypes.c_void_p.from_address(struct + (40 if "code" in name else 16)).value
            assert y is not None
            ctypes.c_float.from_address(y).value += 1.0


@pytest.fixture
def spark(tmp_path: Path, setting: Callable[..., None]) -> Iterator[Spark]:
    setting(GEMMULE_CACHE=tmp_path)
    first_use.forget()
    with emulated(kind=Spark) as found:
        assert isinstance(found, Spark)
        yield found
    first_use.forget()


A = np.arange(33 * 64, dtype=np.float32).reshape(33, 64) % 7 - 3
X = np.arange(64, dtype=np.float32) % 5 - 2


def planned() -> Plan:
    return gm.plan("matvec", gm.asarray(A, device="cuda"), gm.asarray(X, device="cuda"))


def multiplied(plan: Plan) -> np.ndarray[Any, Any]:
    return plan(gm.asarray(A, device="cuda"), gm.asarray(X, device="cuda")).to_host()


@needs_emulator
def test_what_is_proved_elsewhere_is_checked_once(
    spark: Spark, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "gemmule"):
        plan = planned()
    told = [record.getMessage() for record in caplog.records if "is proved on" in record.msg]
    assert len(told) == 1
    assert "NVIDIA H200" in told[0]
    assert "checked on Fake GPU" in told[0]
    asked = len(spark.ran)
    assert asked  # by a product that nobody asked for
    assert np.array_equal(multiplied(plan), A @ X)
    assert "proof      proved on NVIDIA H" in plan.explain()
    assert "; checked on this device, 20" in plan.explain()
    assert ", by the times of NVIDIA H" in plan.explain()
    spark.ran.clear()
    first_use.forget()  # as another process
    forget_plans()
    assert np.array_equal(multiplied(planned()), A @ X)
    assert len(spark.ran) == asked  # the product alone


@needs_emulator
def test_what_is_wrong_on_a_device_is_never_chosen_there(
    spark: Spark, caplog: pytest.LogCaptureFixture
) -> None:
    first = planned().rung
    spark.wrong = (first.name,)
    first_use.path_of(CudaBackend().machine("cuda")).unlink()
    first_use.forget()
    forget_plans()
    with caplog.at_level(logging.WARNING, "gemmule"):
        plan = planned()
    assert plan.rung is not first
    assert "; checked on this device" in plan.explain()
    assert f"/{first.name}/" in caplog.text
    assert "fails on Fake GPU, where it is not" in caplog.text
    assert "elements wrong" in caplog.text
    assert np.array_equal(multiplied(plan), A @ X)
    first_use.forget()
    forget_plans()
    spark.ran.clear()
    assert planned().rung is plan.rung
    assert not spark.ran  # nobody had to ask again


@needs_emulator
def test_what_was_wrong_is_asked_again_when_the_driver_is_another(spark: Spark) -> None:
    spark.wrong = ("streamed_rows",)
    assert planned().rung.name != "streamed_rows"
    spark.wrong = ()
    spark.version = 13_010
    driver.version.cache_clear()
    forget_plans()
    assert planned().rung.name == "streamed_rows"


@needs_emulator
@pytest.mark.parametrize(
    ("fault", "stays"),
    [("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", False), ("CUDA_ERROR_ILLEGAL_ADDRESS", True)],
)
def test_a_launch_that_fails_is_kept_where_it_lost_the_device(
    spark: Spark, fault: str, stays: bool
) -> None:
    spark.faults["cuLaunchKernel"] = fault
    with pytest.raises(DeviceError if stays else TypeError, match="lost" if stays else "no proved"):
        planned()
    path = first_use.path_of(CudaBackend().machine("cuda"))
    assert path.exists() is stays
    spark.faults.clear()
    first_use.forget()  # as another process
    forget_plans()
    assert (planned().rung.name != "streamed_rows") is stays


@needs_emulator
def test_what_was_wrong_meanwhile_does_not_pass(spark: Spark) -> None:
    """As where another thread asked first, and the choice was made before."""
    choice = planned().choice
    assert asking.passes(choice, "cuda")
    (right,) = first_use.known(choice.machine).values()
    first_use.keep(choice.machine, replace(right, wrong="[0] is 1, must be 2"))
    assert not asking.passes(choice, "cuda")


@needs_emulator
def test_nothing_waits_while_a_graph_is_captured(
    spark: Spark, caplog: pytest.LogCaptureFixture
) -> None:
    spark.capturing = True
    with caplog.at_level(logging.WARNING, "gemmule"):
        plan = planned()
    assert not spark.ran
    assert "a graph was being captured" in caplog.text
    assert "; not checked on this device" in plan.explain()


@needs_emulator
def test_no_check_where_an_equal_chip_proved_it(spark: Spark) -> None:
    spark.attributes |= {"COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0}
    assert "proof" not in planned().explain()
    assert not spark.ran


@needs_emulator
@pytest.mark.parametrize("coded", [False, True])
def test_grouped_products_are_checked_as_well(
    spark: Spark, coded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    W = np.arange(3 * 64 * 32, dtype=np.float32).reshape(3, 64, 32) % 5 - 2
    tokens, ends = A[:20], np.array([5, 5, 20], np.int32)
    weights: Any = gm.quantize_experts(W, bits=4, group_size=32) if coded else W
    placed = [gm.asarray(one, device="cuda") for one in (tokens, ends)]
    there = weights.to("cuda") if coded else gm.asarray(W, device="cuda")

    def product() -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = gm.grouped_matmul(placed[0], there, placed[1]).to_host()
        return found

    plan = gm.plan("grouped_matmul", placed[0], there, placed[1])
    assert "; checked on this device" in plan.explain()
    held = [weights[e].dequantize() if coded else W[e] for e in range(3)]
    wanted = np.concatenate([tokens[:5] @ held[0], tokens[5:] @ held[2]])
    assert np.allclose(product(), wanted, atol=1e-3)
    first_use.path_of(CudaBackend().machine("cuda")).unlink()
    first_use.forget()
    forget_plans()
    spark.wrong = (plan.rung.name,)
    with caplog.at_level(logging.WARNING, "gemmule"), pytest.raises(TypeError, match="no proved"):
        gm.plan("grouped_matmul", placed[0], there, placed[1])
    assert f"{plan.rung.name}/" in caplog.text


def shown(machine: Machine) -> str:
    return "\n".join(
        f"{one.status} {one.part}: {one.found} -> {one.fix}" for one in service(machine)
    )


def test_doctor_tells_what_a_chip_is_served(tmp_path: Path, setting: Callable[..., None]) -> None:
    setting(GEMMULE_CACHE=tmp_path)
    first_use.forget()
    hopper = shown(machine_of("sm_90a"))
    assert "is sm_90a: kernels are compiled for it ->" in hopper
    assert "usual ones proved on this architecture: " in hopper
    assert "wgmma_specialized" in hopper
    spark = machine_of("sm_121a")
    told = shown(spark)
    assert "kernels are compiled for it; it takes the rungs of sm_120a" in told
    assert "note GPU times: those of NVIDIA H" in told
    assert "-> gemmule tune --device-model --device cuda measures them here" in told
    assert "ok GPU times: shipped for this GPU" in shown(replace(spark, name="NVIDIA H200"))
    assert "proved on NVIDIA H" in told
    assert "checked here at first use: streamed_rows, " in told
    name = ("matvec", "streamed_rows", "float32,float32,float32")
    first_use.keep(spark, first_use.Checked(*name, "0", "5", "", "2026-11-27"))
    assert "streamed_rows (checked here), " in shown(spark)
    assert "note GPU: made up compute_121: kernels are compiled as PTX" in shown(
        machine_of("compute_121")
    )
    standing = replace(machine_of("compute_80"), name="NVIDIA H200 as sm_80")
    assert "GEMMULE_ARCH says so; unset it" in shown(standing)


def test_doctor_tells_what_is_not_served(
    only_proved: Callable[..., None], tmp_path: Path, setting: Callable[..., None]
) -> None:
    setting(GEMMULE_CACHE=tmp_path)
    only_proved("cuda", {"streamed_rows"})
    told = shown(machine_of("sm_87"))
    assert "note GPU products: not served: x A, float32, " in told
    assert "-> no proved cuda rung computes " in told


def test_what_a_device_gave_is_kept_by_device_and_code(
    tmp_path: Path, setting: Callable[..., None]
) -> None:
    setting(GEMMULE_CACHE=tmp_path)
    first_use.forget()
    machine, name = machine_of("sm_89"), ("matvec", "streamed_rows", "float32,float32,float32")
    right = first_use.Checked(*name, "c0de", "50", "", "2026-11-27")
    assert first_use.keep(machine, right)
    assert not first_use.failed(machine, name, lambda: "50")
    assert first_use.keep(machine, replace(right, code="0ther", wrong="[0] is 1, must be 2"))
    first_use.forget()
    assert first_use.failed(machine, name, lambda: "50")
    assert not first_use.failed(machine, ("matvec", "two_step", name[2]), lambda: "50")
    assert not first_use.failed(machine, name, lambda: "other sources, or another driver")
    assert first_use.known(machine)[name, "c0de"] == right
    assert not first_use.known(replace(machine, name="another"))
