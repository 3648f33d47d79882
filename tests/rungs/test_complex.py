"""Complex numbers on a GPU: public calls under the emulator, cuBLAS's stand-in, and parts."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from cuemu.toolchain import missing_tools
from emulated_driver import emulated
from fake_cublas import FakeCublas, installed
from gemmule.arrays.interop import check_out
from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import complex_parts
from gemmule.core.problem import COMPLEX
from gemmule.core.registry import device_rungs, rung_in
from gemmule.oracle.problems import make_problem
from proofs import device as verify_device
from proofs import proofs
from proofs.device_runner import DeviceRunner

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
TAKING = [rung.name for rung in device_rungs() if ("complex64",) * 3 in rung.signatures]
PARTS = next(rung for rung in device_rungs() if rung.name == "complex_parts")


@pytest.fixture
def device(only_proved: Any) -> Iterator[None]:
    """A device whose rungs for complex numbers are proved, and a library without one."""
    with emulated(seed=2), installed(FakeCublas()):
        only_proved("cuda", set(TAKING))
        yield
        gc.collect()


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """Return small whole complex numbers, whose products are exact."""
    rng = np.random.default_rng(seed)
    return (rng.integers(-4, 5, shape) + 1j * rng.integers(-4, 5, shape)).astype(dtype)


def on(array: Any) -> Any:
    return gm.asarray(array, device="cuda")


@pytest.mark.parametrize("dtype", COMPLEX)
def test_every_product(device: None, dtype: str) -> None:
    A, B, x, z = (numbers(s, dtype, i) for i, s in enumerate(((37, 70), (70, 21), (70,), (37,))))
    assert np.array_equal(gm.matvec(on(A), on(x)).to_host(), A @ x)
    assert np.array_equal(gm.vecmat(on(z), on(A)).to_host(), z @ A)
    assert np.array_equal(gm.matmul(on(A), on(B)).to_host(), A @ B)
    for rung in ("register_tile", "cublas"):
        assert np.array_equal(gm.matmul(on(A), on(B), rung=rung).to_host(), A @ B)


@pytest.mark.parametrize("alpha", [1, 2.5, 2 - 1j])
@pytest.mark.parametrize("beta", [0, -1, 1 + 3j])
@pytest.mark.parametrize("rung", ["register_tile", "cublas", "complex_parts", "thread_per_row"])
def test_scalars_have_imaginary_parts(
    device: None, only_proved: Any, rung: str, alpha: complex, beta: complex
) -> None:
    only_proved("cuda", {rung})
    A, B = numbers((33, 40), "complex64"), numbers((40, 19), "complex64", 1)
    right, C = (B[:, 0].copy(), B)[rung != "thread_per_row"], numbers((33, 19), "complex64", 3)
    old = C[:, 0].copy() if right.ndim == 1 else C
    if beta == 0:
        old[...] = np.nan
    given, call = on(old), gm.gemv if right.ndim == 1 else gm.gemm
    call(on(A), on(right), given, alpha=alpha, beta=beta)
    assert np.array_equal(given.to_host(), alpha * (A @ right) + (beta * old if beta else 0))


def test_reals_beside_them_are_converted(device: None) -> None:
    A, x = numbers((9, 17), "complex64").real.astype(np.float32), numbers((17,), "complex128", 1)
    assert np.array_equal(gm.matvec(on(A), on(x)).to_host(), A @ x)
    half = A.astype(np.float16)
    assert np.array_equal(gm.vecmat(on(x.astype("c8")), on(half.T.copy())).to_host(), x @ A.T)


@pytest.mark.parametrize("layout_out", ["row", "col"])
@pytest.mark.parametrize(("batch", "shared"), [(1, ""), (3, ""), (3, "a"), (3, "b")])
def test_by_parts_in_every_order(layout_out: str, batch: int, shared: str) -> None:
    with emulated(seed=1):
        runner = DeviceRunner(0, arena_bytes=1 << 26)
        for a, b in itertools.product(("row", "col"), repeat=2):
            problem = make_problem("matmul", 35, 33, 45, ("complex64",) * 3, layout_a=a, layout_b=b)
            shares = {"shared_a": shared == "a", "shared_b": shared == "b"}
            problem = replace(problem, batch=batch, layout_out=layout_out, **shares)
            for view in ("contiguous", "padded"):
                trial = verify_device.Trial(problem, PARTS.defaults(), "normal", view, 5)
                verdict = verify_device.judge_trial(PARTS, trial, runner.run)
                assert verdict.ok, f"{trial}: {verdict.text}"
        runner.close()


def test_by_parts_is_for_hopper_and_rows_of_numbers() -> None:
    assert PARTS.runs_on("sm_90a")
    assert not PARTS.runs_on("sm_80")
    problem = make_problem("matmul", 64, 64, 64, ("complex64",) * 3)
    assert PARTS.refusal(problem) is None
    assert PARTS.refusal(replace(problem, k=16)) is not None
    assert PARTS.refusal(replace(problem, precision="ieee")) is not None
    assert PARTS.refusal(replace(problem, layout_out="strided")) is not None
    assert PARTS.refusal(replace(problem, alignment=4)) is not None


def test_what_parts_ask_for_tells_products_apart() -> None:
    problem = make_problem("matmul", 64, 64, 64, ("complex64",) * 3)
    seen = {
        PARTS.spec(one, proofs.packed_call(one))
        for one in (problem, replace(problem, layout_a="col"), replace(problem, layout_b="col"))
    }
    assert len(seen) == 3
    real = complex_parts.real_problem(problem)
    assert (real.m, real.n, real.k, real.a) == (64, 128, 128, "float32")
    assert rung_in("matmul", "cuda", "wgmma_3xfp16").refusal(real) is None


def test_a_number_at_half_of_one_is_taken_by_plain_loads_alone() -> None:
    problem = make_problem("matvec", 64, 64, 1, ("complex128",) * 3)
    for rung in device_rungs():
        if rung.refusal(problem) is None:
            fine = rung.refusal(replace(problem, alignment=8)) is None
            assert fine == (rung.name == "thread_per_row")


def test_a_lazily_conjugated_tensor_of_a_device_is_read_as_it_counts() -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(64, dtype=torch.complex64)
    lazy = x.conj()
    assert lazy.is_conj()
    operand = device_arrays.from_torch(lazy, "complex64")
    assert operand.pointer == operand.array.data_ptr() != x.data_ptr()
    assert torch.equal(operand.array, lazy.resolve_conj())
    with pytest.raises(ValueError, match="lazily negated or conjugated"):
        check_out(operand, (64,), "complex64", [])
