"""Document 001's host-to-host products, their GPU half on emulated kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from counters import crosscheck, ladder_times
from counters.ladder_times import Spot
from emulated_driver import TimedDriver, emulated
from fake_cublas import FakeCublas, installed
from gemmule.backends.cuda import launch as cuda_launch
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.registry import ladder
from gemmule.errors import DeviceError
from gemmule.oracle.problems import make_problem
from gemmule.storage import lines
from gemmule_lab import studies
from gemmule_lab.bench import host_to_host
from gemmule_lab.ceilings.device import filled
from gemmule_lab.harness import device as harness_device
from gemmule_lab.harness import device_operands
from gemmule_lab.harness.device import DeviceBench
from gemmule_lab.harness.products import Product
from gemmule_lab.peers.peer import Peer, Prepared, result_shape
from gemmule_lab.records.rows import Environment
from gemmule_lab.report.ladder_gains import before
from gemmule_lab.studies.grid import Cell, Lane, Measured
from gemmule_lab.studies.harness import GpuBench
from gemmule_lab.studies.products import passes
from gemmule_lab.studies.products import totals as host_products
from gemmule_lab.studies.products.passes import CPU_LOOP, NAIVE, NUMPY, PARTS, PINNED, SHARED, Way
from lab_rows import PARTS_OF_THE_WAY


@dataclass
class GpuStandIn:
    """What the study's parts ask of a bench."""

    backend: str = "cuda"
    device: str = "Fake GPU"
    ordinal: int = 0

    def measure(self, cell: Cell, lanes: tuple[Lane, ...]) -> dict[str, Measured]:
        raise AssertionError("no cell is measured here")


@contextlib.contextmanager
def device() -> Iterator[TimedDriver]:
    with emulated(seed=5, kind=TimedDriver) as driver:
        assert isinstance(driver, TimedDriver)
        yield driver


NAMES = (CPU_LOOP, NAIVE, SHARED, SHARED + PINNED, NUMPY)


def test_a_size_is_timed_on_both_sides_and_split() -> None:
    with device() as driver:
        found = host_products.totals(GpuStandIn(), NAMES, {"n": 33})
        assert not driver.memory, "every pass gives its memory back"
        assert not driver.pinned
    assert set(found) == set(NAMES)
    for name in NAMES:
        times, figures = found[name].times_us, found[name].figures
        assert times is not None, found[name].note
        assert passes.FEW_REPEATS <= times.n <= passes.REPEATS
        if name in passes.HOST_NAMES:
            assert figures["product"] == pytest.approx(times.median)
            continue
        assert {*PARTS, *(f"first {part}" for part in PARTS)} <= set(figures)
        assert figures["kernel"] == pytest.approx(2e-3)
    assert found[SHARED].params == {"memory": "pageable"}
    assert found[SHARED + PINNED].params == {"memory": "pinned"}


@pytest.mark.parametrize("op", ["matvec", "matmul"])
def test_the_way_of_one_product_is_split_into_its_parts(op: str) -> None:
    with device() as driver:
        parts = host_to_host.split(op, (33, 33), rounds=2)
        assert not driver.pinned
    assert [part.name.partition(":")[0] for part in parts] == PARTS_OF_THE_WAY
    assert all(part.seconds > 0 for part in parts)
    assert sum(part.gbs is not None for part in parts) == 4


def test_a_size_of_one_is_a_matrix_still(fault: Callable[..., Any]) -> None:
    """Libraries see a 1 x 1 product as a matrix times a vector, and give a vector."""

    def prepare(problem: Any, a: Any, b: Any) -> Prepared:
        out = np.empty(result_shape(problem), a.dtype)
        return Prepared(lambda: np.matmul(a, b, out=out.reshape(a.shape)), lambda: out)

    stand_in = Peer("eigen", "cpu", lambda: None, lambda problem: None, prepare, lambda: "")
    fault(passes, "peer_named", lambda sound, *_: stand_in)
    for n in (1, 5):
        found = host_products.totals(GpuStandIn("cpu"), ("eigen",), {"n": n})["eigen"]
        assert found.times_us is not None


def test_a_library_is_timed_like_a_kernel(modules: Callable[..., None]) -> None:
    modules(torch=...)  # one without a GPU has no streams
    lanes = (Lane("naive", "naive"), Lane("library", "cublas"), Lane("choice", "auto"))
    cell = Cell("test", "matmul", 48, 40, lanes, "warm", columns=24)
    with device(), installed(FakeCublas()):
        found = GpuBench(seconds=1e-3).measure(cell, lanes)
    for lane in lanes:
        assert found[lane.name].times_us is not None, found[lane.name].note
    assert found["library"].params["rung"] == "cublas"


def test_codes_are_timed_as_the_documents_store_them(modules: Callable[..., None]) -> None:
    modules(torch=...)
    narrow = {"p": 32, "rows": 4, "values": 8}
    lanes = tuple(
        Lane(rung, rung, narrow, form=f"{form} codes")
        for form in ("int8", "int4")
        for rung in (f"{form}_codes", f"product_table_{form}")
    )
    cell = Cell("test", "matvec", 9, 64, lanes, "warm")
    with device():
        found = GpuBench(seconds=1e-3).measure(cell, lanes)
    for lane in lanes:
        assert found[lane.name].times_us is not None, found[lane.name].note


@pytest.mark.parametrize(
    ("number", "names"),
    [
        ("000", ("unrolled_rows, blocks of 128",)),
        ("003", ("fp16 4 sections of 32 x 1 x 16", "fp16 shared x 32 x 4 x 16")),
    ],
)
def test_what_was_never_measured_runs(
    number: str, names: tuple[str, ...], modules: Callable[..., None]
) -> None:
    """Lanes that no record has a time of are timed on an emulated device, small."""
    modules(torch=...)
    cells = [s for s in studies.load(number).steps("cuda", True) if isinstance(s, Cell)]
    lanes = {lane.name: lane for cell in cells for lane in cell.lanes}
    chosen = tuple(lanes[name] for name in names)
    cell = Cell("test", "matvec", 9, 64, chosen, "warm")
    with device():
        found = GpuBench(seconds=1e-4).measure(cell, chosen)
    assert {name: one.note for name, one in found.items() if one.times_us is None} == {}


def test_rungs_are_timed_beside_the_one_before(
    modules: Callable[..., None], limit: Callable[..., None], fault: Callable[..., Any]
) -> None:
    modules(torch=...)
    limit(device_operands, MOST_SETS=2)
    names = ("thread_per_row", "warp_per_row", "p_threads")
    product = Product("matvec", "float32", (40, 64))
    spot = Spot("matvec", "40 x 64", tuple((name, product) for name in names), product)
    nobody = [
        replace(peer, absent=lambda: "not here") for peer in ladder_times.named(["torch"], "cuda")
    ]
    fault(ladder_times, "named", lambda sound, *_: nobody)
    environment = Environment("gpu", "cuda", "cpu", (), "Linux", "3", {}, None, 1, {}, {})
    with device():
        rows, notes = ladder_times.time_spot(spot, DeviceBench(), environment, 1e-3)
    assert [(row.name, row.group) for row in rows] == [(name, "40 x 64") for name in names]
    rungs = ladder("matvec", "cuda")
    for row in rows:
        (rung,) = (rung for rung in rungs if rung.name == row.name)
        assert list(row.speedups) == [name for name in [before(rung, rungs, names)] if name]
    assert notes == ["40 x 64, torch: not here"]


def test_proofs_and_checks_judge_every_result(
    fault: Callable[..., Any], limit: Callable[..., None]
) -> None:
    limit(host_products, LARGEST_PROOF=20)
    with device():
        found = host_products.proof(GpuStandIn(), ("all",), {"runs": 2})["all"]
        assert found.figures["products"] >= 2 * 4
        assert found.figures["largest difference"] < 1e-4
        assert "cublas" in found.note  # there is no PyTorch on an emulated device
        checked = host_products.small_check(GpuStandIn(), (NUMPY, SHARED, "cublas"), {"n": 8})
        assert checked[NUMPY].figures == checked[SHARED].figures == {"right": 1.0}
        assert checked["cublas"].note

        def wrong(sound: Any, name: str, hosts: Any, *_: Any) -> Way:
            a, b, c = hosts
            return Way(SHARED, lambda: {"product": float(np.matmul(b, a, out=c)[0, 0])}, c)

        fault(host_products, "gpu_way", wrong)
        with pytest.raises(ArithmeticError, match="shared tile: a product of 8 x 8"):
            host_products.small_check(GpuStandIn(), (SHARED,), {"n": 8})


def test_the_product_itself_meets_the_end_of_memory(limit: Callable[..., None]) -> None:
    limit(host_products, CUBLAS=SHARED)
    with device() as driver:
        driver.free_bytes = 3 * 4 * 64 * 64
        assert host_products.refusal(64, 0) is None
        words = host_products.refusal(65, 0)
        assert words is not None
        assert "no room" in words
        assert not driver.memory
        driver.faults["cuMemAlloc"] = "CUDA_ERROR_LAUNCH_FAILED"
        with pytest.raises(DeviceError):
            host_products.refusal(64, 0)


def test_the_largest_product_is_made_and_judged(limit: Callable[..., None]) -> None:
    limit(host_products, STEP=16)
    limit(host_products, CUBLAS=SHARED)
    with device() as driver:
        driver.free_bytes = 3 * 4 * 40 * 40 + 4096
        names = (host_products.FITS, host_products.REFUSED, host_products.WHOLE)
        found = host_products.largest(GpuStandIn(), names, {})
        assert not driver.memory
    assert found[host_products.REFUSED].figures == {"largest n": 32.0, "next n refused": 1.0}
    assert "no room" in found[host_products.REFUSED].note
    for name in (host_products.FITS, host_products.WHOLE):
        assert found[name].times_us is not None
        assert found[name].figures["n"] == 32.0


def test_numbers_are_normal_or_uniform() -> None:
    with device():
        both = (filled(4000, "float32", 0, 3, uniform=u).to_host() for u in (False, True))
        normal, uniform = both
    assert abs(normal.mean()) < 0.1
    assert normal.std() == pytest.approx(1.0, abs=0.05)
    assert 0.0 <= uniform.min() < 0.01
    assert 0.99 < uniform.max() < 1.0
    assert uniform.mean() == pytest.approx(0.5, abs=0.02)


def test_both_clocks_figures_go_under_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crosscheck.importlib.metadata, "version", lambda name: "0.3.0")
    pairs = [crosscheck.Pair(product, 1e-6, 3e-6) for product in crosscheck.PRODUCTS]
    with device():
        path = crosscheck.write(tmp_path, pairs, 0)
    assert path == tmp_path / "fake-gpu" / "nvbench.jsonl"
    found = list(lines.read(path, crosscheck.SCHEMA))
    assert [(line["ours_s"], line["nvbench_s"]) for line in found] == [(1e-6, 3e-6)] * len(pairs)
    titles = [product.title for product in crosscheck.PRODUCTS]
    assert [line["product"] for line in found] == titles
    assert len(set(titles)) == len(titles)
    named = {product.rung for product in crosscheck.PRODUCTS}
    assert {"thread_per_row", "shared_x", "naive", "shared_tile", "rectangular_tile"} <= named


def test_nvbench_need_not_wait_for_memory(modules: Callable[..., None]) -> None:
    """It holds a stream back until a call is through, and giving out memory waits for streams."""
    registered: list[Callable[[Any], None]] = []

    def register(benchmark: Callable[[Any], None]) -> SimpleNamespace:
        registered.append(benchmark)
        return SimpleNamespace(set_name=lambda name: None)

    def execute(launch: Callable[[Any], None], batched: bool) -> None:
        launch(SimpleNamespace(get_stream=lambda: SimpleNamespace(addressof=lambda: 0)))

    def run_all(arguments: list[str]) -> None:
        driver.faults["cuMemAlloc"] = "CUDA_ERROR_LAUNCH_FAILED"
        registered[0](SimpleNamespace(exec=execute))
        del driver.faults["cuMemAlloc"]

    summary = {crosscheck.COLD_MEAN: SimpleNamespace(value=2e-6)}
    found = {"product 0": [SimpleNamespace(summaries=summary)]}
    result = SimpleNamespace(from_json=lambda path: found)
    bench = SimpleNamespace(register=register, run_all_benchmarks=run_all)
    # Also for `from cuda import bench`.
    results = SimpleNamespace(BenchmarkResult=result)
    modules({"cuda.bench": bench, "cuda.bench.results": results})

    def times() -> dict[str, float]:
        x, a = (DeviceArray.from_host(np.ones(shape, "f4")) for shape in (300, (300, 40)))
        out = DeviceArray.empty((40,), "float32")
        plan = gm.plan("vecmat", x, a, rung="split_columns", params={"splits": 4})
        assert cuda_launch.Launcher(plan.choice).workspace
        found = crosscheck.by_nvbench({"one": lambda index: plan(x, a, out=out)}, 0)
        assert (out.to_host() == 300).all()
        return found

    with device() as driver:
        assert times() == {"one": 2e-6}


def way(name: str, us: float, log: list[str]) -> Way:
    def run() -> dict[str, float]:
        log.append(name)
        return {"product": us}

    return Way(name, run, None)


def test_implementations_take_turns() -> None:
    log: list[str] = []
    times = {"fast": 10.0, "medium": 9e3, "slow": 9e4, "slower": 2e5, "slowest": 6e5}
    ways = [way(name, us, log) for name, us in times.items()]
    firsts = {one.name: one.run() for one in ways}
    log.clear()
    runs = passes.in_turns(ways, firsts, seed=1)
    counts = {name: len(passes.counted(parts)) for name, parts in runs.items()}
    assert counts == {"fast": 30, "medium": 5, "slow": 2, "slower": 2, "slowest": 1}
    assert log.count("slower") == 1, "a first run that is slow counts"
    assert set(log[:4]) == set(times) - {"slowest"}
    assert set(log[4:7]) == {"fast", "medium", "slow"}
    assert len({*zip(log[7:13:2], log[8:13:2], strict=True)}) == 2, "in an order of its own"
    once = passes.in_turns(ways[:1], firsts, seed=1, repeats=0)
    assert len(passes.counted(once["fast"])) == 1


@pytest.mark.parametrize(
    "product",
    [
        Product("matvec", "float32", (70, 40)),
        Product("vecmat", "float16", (40, 70), column_major=True),
        Product("matvec", "float32", (70, 40), transposed=True, uniform=True),
        Product("matmul", "plain int8", (33, 40), 9),
        Product("matvec", "int4 g32 x float16", (64, 64)),
        Product("vecmat", "int8 g32 x float16", (64, 64)),
        Product("matvec", "int8 codes", (40, 64)),
    ],
    ids=lambda product: product.title,
)
def test_a_bench_on_a_gpu_times_every_kind_of_product(
    product: Product, modules: Callable[..., None], limit: Callable[..., None]
) -> None:
    modules(torch=...)
    limit(device_operands, MOST_SETS=3)
    environment = Environment("gpu", "cuda", "cpu", (), "Linux", "3", {}, None, 1, {}, {})
    with device():
        bench = DeviceBench(seconds=1e-3, peers=("jax",))
        rows, absent = bench.attempt(product, environment)()
        warm = bench.ours(bench.sets(product, warm=True), name="again")
        again = warm.name, warm.sets, warm.about.temperature
        del bench, warm  # before the device goes
    (row,) = rows
    assert (row.kind, row.group, row.temperature) == ("rung", product.title, "warm")
    assert row.error_ratio is not None
    assert 0 <= row.error_ratio <= 1
    assert again == ("again", 1, "warm")
    assert [one.name for one in absent] == ["jax"]


def test_a_peer_is_judged_once_for_each_kind_of_product(fault: Callable[..., Any]) -> None:
    peer: Any = SimpleNamespace(name="peer")
    asked = fault(
        harness_device, "check", lambda sound, peer, problem: f"wrong {problem.op} of {problem.a}"
    )
    kinds = [(op, a) for op in ("matvec", "matmul") for a in ("float32", "float16")]
    with device():
        bench = DeviceBench(seconds=1e-3)
        for op, a in 2 * kinds:
            problem = make_problem(op, 500, 400, 30 if op == "matmul" else 1, (a, a, a))
            assert bench.checked(peer, problem) == f"wrong {op} of {a}"
        del bench
    assert [(problem.op, problem.a) for _, problem in asked] == kinds
