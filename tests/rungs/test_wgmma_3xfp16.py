"""float32 by three products of halves: what the rungs' common tests do not reach, emulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from cuda_emulation import Emulator
from cuemu.toolchain import missing_tools
from emulated_driver import emulated
from gemmule.backends.cuda import launch_args, tensor_maps
from gemmule.core.packing import HalvesMap
from gemmule.core.problem import Problem
from gemmule.core.registry import all_rungs
from gemmule.core.rung import Step
from gemmule.oracle.inputs import Inputs, make_inputs
from gemmule.oracle.judge import check
from gemmule.oracle.problems import make_problem
from proofs import proofs

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
FLOAT = ("float32", "float32", "float32")
(RUNG,) = (rung for rung in all_rungs("cuda") if rung.name == "wgmma_3xfp16")
WIDE, NARROW = {"tile": "128x128"}, {"tile": "128x64"}


def run(
    inputs: Inputs,
    params: dict[str, Any],
    *,
    seed: int = 3,
    units: int = 2,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> np.ndarray[Any, Any]:
    """Run on a device of so few multiprocessors that blocks take several tiles."""
    emulator = Emulator(seed=seed)
    emulator.machine = replace(proofs.proof_machine(), units=units)
    return emulator.run(RUNG, inputs, params, alpha, beta)


def judged(inputs: Inputs, params: dict[str, Any], **how: Any) -> float:
    """Run, have the oracle judge, and return the largest error over its bound."""
    arithmetic = RUNG.arithmetic(inputs.case.problem)
    verdict = check(inputs, arithmetic, params, run(inputs, params, **how))
    assert verdict.ok, f"{inputs.case} {params}: {verdict.text}"
    return verdict.ratio


def problem(m: int, n: int, k: int, **options: Any) -> Problem:
    return make_problem("matmul", m, n, k, FLOAT, **options)


def filled(m: int, n: int, k: int, a: Any, b: Any) -> Inputs:
    """Return inputs that hold these values."""
    inputs = make_inputs(problem(m, n, k), "normal", 1)
    a, b = np.broadcast_to(a, (m, k)), np.broadcast_to(b, (k, n))
    inputs.a[...], inputs.b[...] = a, b
    return replace(inputs, fingerprints=tuple(f.buffer.tobytes() for f in inputs.frames[1:]))


@pytest.mark.parametrize("params", [WIDE, NARROW])
@pytest.mark.parametrize("kind", ["integers", "normal"])
def test_several_tiles_a_block_in_every_layout(params: dict[str, Any], kind: str) -> None:
    layouts = [("row", "row", "col"), ("col", "row", "row"), ("row", "col", "row")]
    for which, (a, b, out) in enumerate([*layouts, ("strided", "strided", "row")]):
        shared = {"shared_a": which == 1, "shared_b": which == 2}
        sizes = {"layout_a": a, "layout_b": b, "layout_out": out, "batch": 1 + which % 3}
        sizes |= shared if sizes["batch"] > 1 else {}
        case = problem(136 + which, 130 - which, 200 + which, **sizes)
        judged(make_inputs(case, kind, 11), params, seed=2 + which % 2)


def test_stages_that_are_filled_again() -> None:
    """Sums so long that each stage serves more than twice, copies early and late."""
    for seed, params in ((2, WIDE), (3, WIDE), (2, NARROW), (3, NARROW)):
        judged(make_inputs(problem(70, 72, 64 * 9 + 5), "normal", 17), params, seed=seed)


def test_sums_leave_the_tensor_cores_every_64_steps() -> None:
    """Behind a 1, 16 terms are 0.3 of its last place: one by one such sums would all vanish."""
    k = 64 * 20
    inputs = filled(64, 64, k, np.full(k, 2.0**-14), np.full((k, 1), 1.1875 * 2.0**-15))
    inputs.a[:, 0] = inputs.b[0] = 1.0
    exact = inputs.a.astype(float) @ inputs.b.astype(float)
    error = np.abs(run(inputs, WIDE) - exact).max()
    assert 0.0 < error <= 0.5 * 2.0**-23 * (k // 64)
    assert abs(1.0 - exact).max() > 2 * 0.5 * 2.0**-23 * (k // 64)


def test_errors_are_those_of_the_last_place() -> None:
    """The bound leaves room for what tensor cores cut off, which the emulator rounds."""
    rng = np.random.default_rng(5)
    a, b = rng.uniform(0.5, 1.0, (64, 128)), rng.uniform(0.5, 1.0, (128, 64))
    inputs = filled(64, 64, 128, a, b)
    exact = inputs.a.astype(float) @ inputs.b.astype(float)
    assert np.abs(run(inputs, WIDE) / exact - 1.0).max() < 4 * 2.0**-24


@pytest.mark.parametrize("side", ["a", "b"])
def test_elements_far_below_the_largest_of_their_row(side: str) -> None:
    """Times the identity each element has to come out, whatever else its row holds."""
    rng = np.random.default_rng(3)
    wide = np.ldexp(rng.uniform(1.0, 2.0, (70, 70)), rng.integers(-60, 61, (70, 70)))
    wide *= rng.choice([-1.0, 1.0], wide.shape)
    one = np.eye(70)
    inputs = filled(70, 70, 70, *((wide, one) if side == "a" else (one, wide)))
    judged(inputs, WIDE)
    found = inputs.out.astype(float)
    assert np.abs(found / wide.astype(np.float32) - 1.0).max() < 2.0**-20


def test_only_sums_that_are_suspect_are_computed_anew() -> None:
    emulator = Emulator(seed=3)
    emulator.machine = replace(proofs.proof_machine(), units=2)
    inputs = filled(64, 64, 64, 1.0, 1.0)
    for smaller, alone, anew in ((28, False, False), (40, False, False), (40, True, True)):
        inputs.a[:, 1] = 1.2345678 * 2.0**-smaller
        inputs.b[...] = 1.0
        if alone:  # no larger term covers what the halves lack of it
            inputs.b[0], inputs.b[2:] = 0.0, 0.0
        emulator.run(RUNG, inputs, NARROW)
        assert (emulator.reports[-1].barriers > 0) == anew
        exact = inputs.a.astype(float) @ inputs.b.astype(float)
        assert np.abs(inputs.out / exact - 1.0).max() < 8 * 2.0**-24


@pytest.mark.parametrize(
    ("a", "b", "exact"),
    [
        (2.0**-149, 2.0**120, 2.0**-29 * 64),
        (3 * 2.0**-140, 2.0**20, 3 * 2.0**-120 * 64),
        ((2**22 - 1) * 2.0**-149, 2.0**20, (2**22 - 1) * 2.0**-129 * 64),  # as wide as there are
        (2.0**-100, 2.0**-52, 2.0**-146),
        (2.0**-140, 2.0**-140, 0.0),
        (2.0**127, 2.0**-149, 2.0**-22 * 64),
        (2.0**120, 2.0**7, np.inf),
        (-(2.0**100), 2.0**21, -(2.0**127)),
    ],
)
def test_the_ends_of_the_range(a: float, b: float, exact: float) -> None:
    for swapped in (False, True):
        inputs = filled(65, 40, 64, *((b, a) if swapped else (a, b)))
        assert (run(inputs, NARROW) == exact).all()


def test_subnormal_elements_beside_large_ones() -> None:
    inputs = filled(64, 64, 66, 2.0**-130, np.eye(66)[:, :64])
    inputs.a[:, 0] = 2.0**100
    assert (run(inputs, WIDE) == inputs.a[:, :64]).all()


def test_infinities_and_nan_with_a_scaled_old_result() -> None:
    """Parts of tiles computed anew read the old C, which nobody has overwritten."""
    for special in (np.inf, -np.inf, np.nan):
        inputs = filled(200, 70, 80, 1.0, 0.5)
        inputs.a[7, 5] = inputs.b[79, 69] = special
        old = np.arange(200.0 * 70).reshape(200, 70) % 16
        inputs.out[...] = old
        with np.errstate(invalid="ignore"):
            exact = -2.0 * (inputs.a @ inputs.b) + 0.5 * old
        found = run(inputs, WIDE, alpha=-2.0, beta=0.5)
        assert np.array_equal(found, exact.astype(np.float32), equal_nan=True), special


def test_alpha_and_beta_where_c_lies_either_way() -> None:
    for layout, beta in (("row", 0.5), ("col", 0.5), ("col", 0.0)):
        inputs = make_inputs(problem(150, 72, 72, layout_out=layout), "integers", 5)
        old = np.arange(150 * 72).reshape(150, 72) % 16
        inputs.out[...] = old if beta else np.nan
        exact = -2.0 * (inputs.a.astype(float) @ inputs.b.astype(float)) + beta * old
        assert np.array_equal(run(inputs, NARROW, alpha=-2.0, beta=beta), exact), (layout, beta)


def test_what_it_does_not_promise_is_refused() -> None:
    assert "64 terms" in str(RUNG.refusal(problem(64, 64, 63)))
    assert RUNG.refusal(problem(1, 3, 64)) is None
    for change in ({"precision": "ieee"}, {"batch_invariant": True}):
        assert RUNG.refusal(replace(problem(64, 64, 64), **change)) is not None


def test_a_public_call_reaches_it() -> None:
    rng = np.random.default_rng(3)
    left, right = rng.standard_normal((72, 136)), rng.standard_normal((136, 64))
    with emulated():
        a = gm.asarray(left.astype(np.float32), device="cuda")
        b = gm.asarray(right.astype(np.float32), device="cuda")
        for _ in range(2):  # the second call finds its maps encoded
            got = gm.matmul(a, b, rung="wgmma_3xfp16").to_host()
            assert np.abs(got - left @ right).max() < 1e-4
        with pytest.raises(ValueError, match="multiply-adds"):
            gm.matmul(a, b, rung="wgmma_3xfp16", precision="ieee")
        del a, b


def test_a_map_of_halves_says_how_they_lie() -> None:
    fields = dict.fromkeys((name for name, _ in launch_args.GEMM_FIELDS), 0)
    fields |= {"m": 24, "n": 40, "k": 61, "batch": 3, "a_batch": 5, "c_row": 40}
    packed = launch_args.GEMM.pack(*fields.values())
    maps = (HalvesMap("a", (64, 8), packed_at=0), HalvesMap("b", (64, 8), packed_at=512))
    for layout in ("row", "col", "strided"):
        case = problem(24, 40, 61, layout_a=layout, layout_b=layout)
        step = Step("kernel", (1, 1, 1), (1, 1, 1), maps=maps)
        assert tensor_maps.declared((step,), case, packed) == (
            (3, 2, (61, 24, 6), (128, 3072), (64, 8, 1), 0),
            (3, 2, (61, 40, 2), (128, 5120), (64, 8, 1), 512),
        )
