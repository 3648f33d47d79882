"""The lab on a device: peers compute A B, wrong results are caught before they are timed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gemmule as gm
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.backends.cuda.graph_clock import GraphClock
from gemmule.core.problem import Problem, QuantSpec
from gemmule.core.registry import all_rungs
from gemmule.errors import DeviceError
from gemmule.timing.clock import Entry
from gemmule_lab.bench import host_to_host
from gemmule_lab.ceilings.device import filled, measure_ceilings
from gemmule_lab.harness import device_operands
from gemmule_lab.harness.device import DeviceBench
from gemmule_lab.harness.products import Product
from gemmule_lab.peers.peer import check
from gemmule_lab.peers.registry import all_peers
from gemmule_lab.records.environment import capture_environment
from lab_rows import PARTS_OF_THE_WAY
from sanitizer import sanitize


@pytest.mark.parametrize("peer", list(all_peers("cuda")), ids=lambda peer: peer.name)
def test_peers_multiply_a_by_b(peer) -> None:
    if peer.absent() is not None:
        pytest.skip(peer.absent())
    served = 0
    plain = [
        Problem(op, 512, 512, 512, a=dtype, b=dtype, out=dtype, layout_a=layout, layout_b=layout_b)
        for op in ("matvec", "matmul")
        for dtype in ("float16", "bfloat16", "float32", "float64")
        for layout in ("row", "col")
        for layout_b in (("row", "col") if op == "matmul" else ("row",))
    ]
    coded = [
        Problem(
            op,
            512,
            512,
            512,
            a=f"uint{bits}",
            b=dtype,
            out=dtype,
            quant=QuantSpec(bits, group, zeros, "row", "float32", False),
        )
        for op in ("matvec", "matmul")
        for bits in (4, 8)
        for dtype in ("float16", "bfloat16", "float32")
        for group in (-1, 32, 128)
        for zeros in (False, True)
    ]
    for problem in (*plain, *coded):
        if peer.refuses(problem) is None and not (peer.name == "triton" and problem.n < 8):
            reason = check(peer, problem)
            if reason is not None and "failed its check: " in reason and "Error" in reason:
                continue  # the library has no kernel for it here, and says so
            assert reason is None, (problem.describe(), reason)
            served += 1
    if not served:
        pytest.skip(f"{peer.name} serves none of these problems here")


@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_operands_are_normal_and_wrong_results_are_caught(op: str, dtype: str) -> None:
    product = Product(op, dtype, (300, 200), 40)
    sets = device_operands.device_sets(product)
    assert sets.cold
    values = sets.items[0].a.to_host().astype(np.float64)
    assert abs(values.mean()) < 0.05
    assert abs(values.std() - 1) < 0.05
    one = sets.items[0]
    left, right = one.operands(op)
    plan = gm.plan(op, left, right)
    plan(left, right, out=one.out)
    driver.synchronize(0)
    problem, rung = plan.choice.problem, plan.rung
    arithmetic = rung.arithmetic(problem)
    assert device_operands.judge(op, one, problem, arithmetic, plan.params) <= 1
    spoiled = one.out.to_host()
    spoiled.reshape(-1)[-1] *= 1.5
    driver.copy(one.out.pointer, spoiled.ctypes.data, spoiled.nbytes, 0, 0)
    with pytest.raises(ArithmeticError, match="1 of"):
        device_operands.judge(op, one, problem, arithmetic, plan.params)


def test_the_reference_is_the_double_product() -> None:
    rng = np.random.default_rng(0)
    for order in "CF":
        host = np.asarray(rng.standard_normal((67, 131)), order=order)
        x = rng.standard_normal(131)
        matrix, vector = DeviceArray.from_host(host), DeviceArray.from_host(x)
        sums, sizes = device_operands.reference(matrix, vector)
        np.testing.assert_allclose(sums, host @ x, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(sizes, np.abs(host) @ np.abs(x), rtol=1e-12)


def test_a_bench_gives_rows_of_ours_and_of_the_peers() -> None:
    ceilings = measure_ceilings(max_seconds=1.0, store=False)
    assert set(ceilings) == {"read", "copy", "fma float32", "fma float64", "tensor bfloat16"}
    assert all(ceiling.value == max(ceiling.tried.values()) for ceiling in ceilings.values())
    environment = capture_environment("test", "cuda", ceilings=ceilings, threads=1)
    bench = DeviceBench(seconds=0.2, peers=("torch", "jax"))
    rows, absent = bench.attempt(Product("matvec", "float32", (1000, 500)), environment)()
    assert [row.kind for row in rows] in (["rung", "peer"], ["rung"])
    assert rows[0].error_ratio is not None
    assert rows[0].error_ratio <= 1
    assert "jax" in [one.name for one in absent]
    with pytest.raises(ValueError, match="no peer is called 'torhc'"):
        DeviceBench(peers=("torhc",))


def test_captured_calls_run_on_every_replay() -> None:
    """A clock that captured nothing would measure nothing, and look very fast."""
    a, x = filled(64 * 64, "float32", 0, 0), filled(64, "float32", 0, 1)
    matrix = DeviceArray(a.pointer, (64, 64), (64, 1), "float32", 0, a)
    out = DeviceArray.from_host(np.full(64, np.nan, np.float32))
    runner = GraphClock().prepare(Entry("ours", lambda _: gm.matvec(matrix, x, out=out) and None))
    driver.synchronize(0)
    nans = np.full(64, np.nan, np.float32)
    driver.copy(out.pointer, nans.ctypes.data, nans.nbytes, 0, 0)
    runner(0, 1)
    driver.synchronize(0)
    assert np.isfinite(out.to_host()).all()


@pytest.mark.parametrize("op", ["matvec", "matmul"])
def test_the_way_is_split_into_its_parts(op: str) -> None:
    parts = host_to_host.split(op, (64, 64), rounds=2)
    assert [part.name.partition(":")[0] for part in parts] == PARTS_OF_THE_WAY
    moved = {part.name: part.nbytes for part in parts if part.nbytes}
    size = 64 * 64 * 4
    assert moved["host to device, pinned"] == size + (256 if op == "matvec" else size)


def test_the_sanitizer_watches_a_rung(tmp_path: Path) -> None:
    try:
        sanitize.find_sanitizer()
        rung = next(r for r in all_rungs("cuda") if r.name == "p_threads")
        reports = sanitize.sanitize([rung], ["memcheck"], limit_s=120)
    except DeviceError as error:
        pytest.skip(str(error))
    assert reports
    assert all(report.clean for report in reports), [report.text for report in reports]
    assert sanitize.write(tmp_path, reports) is not None
