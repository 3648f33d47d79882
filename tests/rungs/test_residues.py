"""Doubles by residues, under the emulator: within the bound of sums of doubles, always."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from cuemu.toolchain import missing_tools
from emulated_driver import emulated
from gemmule.backends.cuda import driver, residues
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.registry import device_rungs, kernels_in
from gemmule.core.rung import Machine
from gemmule.oracle.problems import make_problem
from proofs import device as verify_device
from proofs import proofs
from proofs.device_runner import DeviceRunner

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
RUNG = next(rung for rung in device_rungs() if rung.name == "residues")
DOUBLES = ("float64",) * 3
U = 2.0**-53


@pytest.fixture(scope="module")
def device() -> Iterator[None]:
    with emulated(seed=1):
        yield
        gc.collect()


def multiply(
    A: Any,
    B: Any,
    *,
    most: int = residues.ROWS,
    moduli: int = 14,
    old: Any = None,
    scale: tuple[float, float] = (1.0, 0.0),
) -> tuple[Any, Any]:
    """Return the product, and which tiles of it were multiplied as doubles."""
    problem = make_problem("matmul", A.shape[0], B.shape[1], A.shape[1], DOUBLES)
    call, kernels = proofs.packed_call(problem), kernels_in("matmul", "wgmma_float8")
    run = residues.ByResidues(problem, call, kernels, {"moduli": moduli}, most)
    a, b = (gm.asarray(np.ascontiguousarray(one), device="cuda") for one in (A, B))
    old = np.full((problem.m, problem.n), np.nan) if old is None else old
    c = gm.asarray(old, device="cuda")
    work = DeviceArray.empty((run.workspace_bytes(0),), "uint8", 0)
    with driver.on_device(0):
        run.starter(0)(0, a.pointer, b.pointer, c.pointer, work.pointer, scale)
    begin, across = run.plan.places()["flags"], run.plan.across
    flags = work.to_host()[begin:][: -(-problem.m // residues.TILE) * across]
    return c.to_host(), flags.reshape(-1, across)


def worst(C: Any, A: Any, B: Any) -> float:
    """Return the largest error in units of the bound k u |A||B|."""
    truth = A.astype(np.longdouble) @ B.astype(np.longdouble)
    bound = A.shape[1] * U * (abs(A).astype(np.longdouble) @ abs(B).astype(np.longdouble))
    assert np.array_equal(C[bound == 0], np.zeros((bound == 0).sum()))
    return float((abs(C - truth) / np.where(bound == 0, 1, bound)).max())


def test_right_under_the_emulator() -> None:
    with emulated(seed=3):
        runner = DeviceRunner(0, arena_bytes=1 << 28)
        count = 0
        for trial in list(verify_device.trials(RUNG, DOUBLES))[::9]:
            verdict = verify_device.judge_trial(RUNG, trial, runner.run)
            assert verdict.ok, f"{trial}: {verdict.text}"
            count += trial.kind == "nonfinite"
        assert count > 3
        runner.close()
        gc.collect()


def test_numbers_of_one_size_are_integers_alone(device: None) -> None:
    """Then no tile is one of doubles, and errors are below those of sums one after the other."""
    rng = np.random.default_rng(1)
    for draw in (rng.standard_normal, rng.random, lambda size: rng.laplace(size=size)):
        A, B = draw((70, 300)), draw((300, 150))
        C, flags = multiply(A, B)
        assert not flags.any()
        in_turn = np.zeros_like(C)
        for step in range(A.shape[1]):
            in_turn += np.outer(A[:, step], B[step])
        assert worst(C, A, B) < worst(in_turn, A, B) < 0.2


def test_sums_that_cancel_keep_the_bound(device: None) -> None:
    rng = np.random.default_rng(2)
    A, B = rng.standard_normal((64, 400)), rng.standard_normal((400, 64))
    A[:, 200:], B[200:] = A[:, :200], -B[:200] * (1 + 2.0**-40)
    C, flags = multiply(A, B)
    assert not flags.any()
    assert 0 < worst(C, A, B) < 0.1


@pytest.mark.parametrize("moduli", RUNG.params["moduli"])
def test_integers_at_the_ends_are_exact(device: None, moduli: int) -> None:
    """Lines of one number, as large as it may be: sums come next to half the moduli's product."""
    k = 96
    largest = float(int(residues.largest_norm(k, moduli) / math.sqrt(k)) >> 8 << 8)
    for value in (1.0, 3.0, -1.0, 2.0**50 - 1, 1 - 2.0**-13, largest, largest / 2 + 512):
        A, B = np.full((3, k), value), np.full((k, 5), value)
        B[:, 3], B[:, 4], A[2] = -value, value * 2.0**-300, 0
        C, flags = multiply(A, B, moduli=moduli)
        truth = float(int(value * 2.0**60) ** 2 * k) * 2.0**-120
        wanted = [truth, truth, truth, -truth, truth * 2.0**-300]
        assert np.array_equal(C, [wanted, wanted, np.zeros(5)])
        assert not flags.any()


def test_ranges_too_wide_for_integers_are_doubles(device: None) -> None:
    """One row and one column: the tiles that they cross, no others, are multiplied as doubles."""
    rng = np.random.default_rng(3)
    A, B = rng.standard_normal((300, 100)), rng.standard_normal((100, 260))
    A[140] *= np.exp2(rng.integers(-300, 300, 100))
    B[:, 3] *= np.exp2(rng.integers(-60, 60, 100))
    C, flags = multiply(A, B)
    assert np.array_equal(flags, [[1, 0, 0], [1, 1, 1], [1, 0, 0]])
    assert worst(C, A, B) < 1


def test_small_beside_large_numbers_meet_the_bound(device: None) -> None:
    """What is large in A meets nothing in B: all that counts is small beside the norms."""
    rng = np.random.default_rng(4)
    A, B = rng.standard_normal((64, 128)), rng.standard_normal((128, 64))
    for power in (0, 3, 20, 60):
        A[:, 5], B[5] = 2.0**power, 0
        B[7], A[:, 7] = 2.0**power, 0
        C, flags = multiply(A, B)
        assert flags.any() == (power > 3)
        assert worst(C, A, B) < 1


def test_large_numbers_that_cancel_leave_small_ones(device: None) -> None:
    A, B = np.zeros((2, 64)), np.zeros((64, 2))
    A[:, :3], B[:3] = [2.0**48 - 1, 2.0**48 + 1, 3], [[2.0**48 + 1], [1 - 2.0**48], [1]]
    C, flags = multiply(A, B)
    assert np.array_equal(C, np.full((2, 2), 3.0))
    assert not flags.any()


def test_the_last_bit_that_integers_keep(device: None) -> None:
    """Half of it is rounded away, and nothing large is there to hide that."""
    A, B = np.zeros((2, 64)), np.zeros((64, 2))
    A[:, 0], B[1] = 1, 1
    power = math.floor(math.log2(residues.largest_norm(64, 14)))
    for lost in (0, 1):
        A[:, 1] = 2.0 ** (-power - lost)
        C, flags = multiply(A, B)
        assert np.array_equal(C, np.full((2, 2), A[0, 1]))
        assert flags.all() == lost


def test_what_is_not_finite_or_far_off(device: None) -> None:
    rng = np.random.default_rng(5)
    A, B = rng.standard_normal((130, 80)), rng.standard_normal((80, 130))
    A[3, 5], B[7, 9], A[100, 2] = np.inf, np.nan, -np.inf
    A[20], B[:, 30] = A[20] * 1e-200, B[:, 30] * 1e-150
    A[21], B[:, 31] = A[21] * 2.0**-1040, B[:, 31] * 2.0**-1030
    A[22], B[:, 32], A[23] = A[22] * 1e140, B[:, 32] * 1e150, 0
    C, flags = multiply(A, B)
    with np.errstate(all="ignore"):
        plain = np.zeros_like(C)
        for step in range(80):
            plain += np.outer(A[:, step], B[step])
    assert np.array_equal(np.isnan(C), np.isnan(plain))
    assert np.array_equal(np.isinf(C), np.isinf(plain))
    assert flags.tolist() == [[1, 1], [1, 0]]
    C[~np.isfinite(plain)] = plain[~np.isfinite(plain)] = 0
    assert np.allclose(C, plain, rtol=1e-12, atol=1e-13)
    assert C[21, 40] != 0 or C[21, 41] != 0


def lying(array: Any, steps: tuple[int, int]) -> Any:
    """Return a matrix on the device whose elements lie so many doubles apart along its axes."""
    begin = 2 - max(steps) % 2  # at whole pairs where their lines are
    reach = (
        begin + 1 + sum((size - 1) * step for size, step in zip(array.shape, steps, strict=True))
    )
    memory = np.zeros(reach)
    window = np.lib.stride_tricks.as_strided(
        memory[begin:], array.shape, [8 * step for step in steps]
    )
    window[:] = array
    owner = gm.asarray(memory, device="cuda")
    return DeviceArray(owner.pointer + 8 * begin, array.shape, steps, "float64", 0, owner)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("of_a", [(67, 1), (68, 1), (1, 131), (3, 400)])
def test_matrices_that_lie_anyhow(device: None, of_a: tuple[int, int], wide: bool) -> None:
    """By rows, by columns, apart along both axes, at whole pairs of doubles or not."""
    rng = np.random.default_rng(9)
    A, B = rng.standard_normal((130, 67)), rng.standard_normal((67, 133))
    if wide:
        A *= np.exp2(rng.integers(-300, 300, 67))
    for of_b in ((133, 1), (134, 1), (1, 67), (1, 70), (300, 2)):
        C = gm.matmul(lying(A, of_a), lying(B, of_b), rung="residues").to_host()
        assert worst(C, A, B) < 1


def test_panels_are_parts_of_one_product(device: None) -> None:
    rng = np.random.default_rng(6)
    A, B = rng.standard_normal((300, 90)), rng.standard_normal((90, 530))
    A[10], B[2, 500] = 0, np.inf
    A[299, 3] = 2.0**200
    C, flags = multiply(A, B, most=256)
    whole, other = multiply(A, B)
    assert np.array_equal(C, whole, equal_nan=True)
    assert np.array_equal(flags, other)
    assert 0 < flags.sum() < flags.size


def test_scalars_and_the_old_result(device: None) -> None:
    """Tiles of integers and of doubles read C once; without beta never."""
    rng = np.random.default_rng(7)
    A, B, C = rng.standard_normal((150, 70)), rng.standard_normal((70, 140)), np.ones((150, 140))
    B[:, 130] *= np.exp2(rng.integers(-200, 200, 70))
    for alpha, beta in ((2.5, -0.5), (-1.0, 0.0)):
        D, flags = multiply(A, B, old=C if beta else C * np.nan, scale=(alpha, beta))
        assert 0 < flags.sum() < flags.size
        assert np.allclose(D, alpha * (A @ B) + beta * C, rtol=1e-12)


@pytest.mark.parametrize("named", [True, False])
def test_plans_take_it_by_the_name_of_a_precision(
    device: None, only_proved: Any, named: bool
) -> None:
    only_proved("cuda", {"residues"} if named else {"residues", "vector_tile"})
    A = gm.asarray(np.ones((256, 256)), device="cuda")
    p = gm.plan("matmul", A, A, **({"precision": "float64"} if named else {}))
    assert p.rung.name == ("residues" if named else "vector_tile")
    assert "workspace" in p.explain()
    assert ("or integers within" in p.explain()) == named
    assert p(A, A).to_host()[3, 5] == 256


def test_it_stands_back_where_tiles_are_cut() -> None:
    machine = Machine("cuda", "NVIDIA H200", "sm_90a", 132, 4.5e12, 50 << 20, 227 << 10)
    assert RUNG.choices is not None
    for sides, some in (((4096, 8192, 512), 1), ((4095, 8192, 512), 0), ((4096, 8192, 520), 0)):
        assert len(list(RUNG.choices(make_problem("matmul", *sides, DOUBLES), machine))) == some


def test_other_precisions_and_products() -> None:
    problem = make_problem("matmul", 64, 64, 64, DOUBLES)
    assert RUNG.refusal(problem) is None
    assert RUNG.refusal(replace(problem, k=131_072)) is not None
    assert RUNG.refusal(replace(problem, precision="ieee")) is not None
    assert RUNG.refusal(replace(problem, batch=2)) is not None
    assert RUNG.runs_on("sm_90a")
    assert not RUNG.runs_on("sm_100a")
    for dtype in ("float32", "int8", "complex128"):
        with pytest.raises(ValueError, match="is for products of float64"):
            gm.matmul(np.ones((2, 2), dtype), np.ones((2, 2), dtype), precision="float64")
    A = np.arange(6.0).reshape(2, 3)
    assert np.array_equal(gm.matmul(A, A.T, precision="float64"), A @ A.T)
    assert np.array_equal(gm.matvec(A, A[0], precision="float64"), A @ A[0])


def test_moduli_and_the_remainder() -> None:
    assert all(
        math.gcd(m, n) == 1 for i, m in enumerate(residues.MODULI) for n in residues.MODULI[:i]
    )
    rng = np.random.default_rng(8)
    for count in RUNG.params["moduli"]:
        pieces, weights = residues.remainders(count)
        whole = math.prod(residues.MODULI[:count])
        assert sum(map(int, pieces)) == whole
        number = int(rng.integers(2**62)) ** 2 % whole
        parts = [number % m for m in residues.MODULI[:count]]
        told = sum(part * sum(map(int, one)) for part, one in zip(parts, weights, strict=True))
        assert told % whole == number
        largest = residues.largest_norm(8192, count) + math.sqrt(8192) / 2
        assert largest**2 < whole / 2


def test_the_workspace_is_bounded() -> None:
    sizes = (8192,) * 3, (32768,) * 3, (20000, 20000, 131071)
    used = [residues.size_of(make_problem("matmul", *size, DOUBLES), 14) for size in sizes]
    assert used[0] < 2.2e9
    assert max(used) < 7.5e9
    row, col = (
        residues.size_of(make_problem("matmul", 9000, 70, 300, DOUBLES, layout_out=one), 14)
        for one in ("row", "col")
    )
    assert row != col
