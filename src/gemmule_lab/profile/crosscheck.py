"""Our GPU times beside those of NVBench (package cuda-bench), which measures in another way.

NVBench flushes the L2 before every launch and brackets each with events; we replay graphs of calls
over rotating buffers. A difference of a few microseconds is what the events around a single launch
cost; one that grows with the product would be a mistake in one of the two.
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gemmule as gm
from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.graph_clock import GraphClock
from gemmule.errors import DeviceError
from gemmule.storage import lines
from gemmule.storage.evidence import slug
from gemmule.timing.sampler import Budget, Contestant, sample
from gemmule_lab.bench.device import calls as calls_of
from gemmule_lab.bench.device_operands import make_sets
from gemmule_lab.bench.suites import Product
from gemmule_lab.peers.peer import module_missing

PRODUCTS = (
    Product("matvec", "float16", (1024, 1024)),
    Product("matvec", "float16", (4096, 4096)),
    Product("matvec", "float32", (8192, 8192)),
    Product("vecmat", "float32", (8192, 8192)),
    Product("matmul", "float32", (2048, 2048), 2048),
)
FILE, SCHEMA = "nvbench.jsonl", 1
COLD_MEAN = "nv/cold/time/gpu/mean"
INSTALL = "pip install 'cuda-bench[cu13]'"


@dataclass(frozen=True, slots=True)
class Pair:
    """One product's time of a call by both ways, in seconds; theirs is a mean."""

    product: Product
    ours_s: float
    theirs_s: float

    @property
    def difference_s(self) -> float:
        """How much longer NVBench says that a call takes."""
        return self.theirs_s - self.ours_s


def crosscheck(
    products: Sequence[Product] = PRODUCTS, *, ordinal: int = 0, max_seconds: float = 2.0
) -> list[Pair]:
    """Measure products by both clocks; DeviceError where cuda-bench or a GPU is missing.

    NVBench keeps one registry a process, so this can be called once a process.
    """
    missing = module_missing("cuda.bench")
    if missing is not None:
        raise DeviceError(f"the cross-check needs NVBench's Python package. Install it: {INSTALL}.")
    clock = GraphClock(ordinal)
    ours: dict[str, float] = {}
    calls: dict[str, Callable[[int], None]] = {}
    for product in products:
        sets, _ = make_sets(
            product.op, product.shape, product.format, width=product.width, ordinal=ordinal
        )
        call = calls_of(product.op, gm.plan(product.op, *sets[0].operands(product.op)), sets)
        contestant = Contestant(product.title, call, len(sets))
        found = sample([contestant], clock, Budget(max_seconds=max_seconds, min_block_s=0.004))
        ours[product.title], calls[product.title] = found[product.title].median, call
    theirs = _by_nvbench(calls, ordinal)
    return [Pair(p, ours[p.title], theirs[p.title]) for p in products]


def write(evidence: Path, pairs: Sequence[Pair], ordinal: int) -> Path:
    """Replace the file of both clocks' figures below a device's folder; return its path."""
    device = driver.device_info(ordinal).name
    path = evidence / slug(device) / FILE
    about = {
        "schema": SCHEMA,
        "device": device,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "nvbench": importlib.metadata.version("cuda-bench"),
    }
    lines.write(
        path,
        (
            {**about, "product": p.product.title, "ours_s": p.ours_s, "nvbench_s": p.theirs_s}
            for p in pairs
        ),
    )
    return path


def _by_nvbench(calls: dict[str, Callable[[int], None]], ordinal: int) -> dict[str, float]:
    """Return NVBench's mean cold GPU time of each call, by title."""
    from cuda import bench
    from cuda.bench.results import BenchmarkResult

    names = {f"product {index}": title for index, title in enumerate(calls)}
    for name, title in names.items():
        bench.register(_benchmark(calls[title])).set_name(name)
    with tempfile.TemporaryDirectory(prefix="gemmule-nvbench-") as folder:
        path = Path(folder) / "times.json"
        with device_arrays.sharing_workspaces():
            # A stream that NVBench holds back until all is given to it must not wait for memory.
            for call in calls.values():
                call(0)
            driver.synchronize(ordinal)
            bench.run_all_benchmarks(
                [sys.argv[0], "--json", str(path), "--devices", str(ordinal), "--timeout", "5"]
            )
        result = BenchmarkResult.from_json(path)
    driver.synchronize(ordinal)
    found = {}
    for name, title in names.items():
        summary = result[name][0].summaries.get(COLD_MEAN)
        if summary is None or summary.value is None:
            raise DeviceError(f"NVBench gave no cold time for {title}.")
        found[title] = float(summary.value)
    return found


def _benchmark(call: Callable[[int], None]) -> Callable[[Any], None]:
    def measured(state: Any) -> None:
        def launch(launched: Any) -> None:
            with device_arrays.using_stream(launched.get_stream().addressof()):
                call(0)

        state.exec(launch, batched=False)

    return measured
