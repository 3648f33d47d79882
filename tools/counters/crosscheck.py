"""Our GPU times beside those of NVBench (package cuda-bench), which measures in another way.

NVBench flushes the L2 before every launch and brackets each with events; we replay graphs of calls
over rotating buffers. A difference of a few microseconds is what the events around a single launch
cost; one that grows with the product would be a mistake in one of the two. ``python -m
counters.crosscheck`` prints both figures and the difference.
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console

from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver
from gemmule.errors import DeviceError
from gemmule.storage import lines
from gemmule.storage.evidence import slug
from gemmule.timing.sampler import Budget, sample
from gemmule_lab.cli import run
from gemmule_lab.commands import _options as options
from gemmule_lab.harness.device import DeviceBench
from gemmule_lab.harness.products import Product
from gemmule_lab.peers.peer import module_missing
from gemmule_lab.report.render import terminal_table
from gemmule_lab.report.tables import Column, significant, table_of


class Timed(NamedTuple):
    """A product by one rung; none: by the one that is chosen."""

    product: Product
    rung: str | None = None

    @property
    def title(self) -> str:
        """The product in words, with the rung where one is named."""
        return self.product.title if self.rung is None else f"{self.product.title}, {self.rung}"


LARGE = Product("matmul", "float32", (2048, 2048), 2048)
PRODUCTS = (
    Timed(Product("matvec", "float16", (1024, 1024))),
    Timed(Product("matvec", "float16", (4096, 4096))),
    Timed(Product("matvec", "float32", (8192, 8192))),
    Timed(Product("vecmat", "float32", (8192, 8192))),
    Timed(LARGE),
    # the kernels of documents 000 and 002, which NVBench is the tool of
    *(Timed(Product("matvec", "float32", (8192, 8192)), r) for r in ("thread_per_row", "shared_x")),
    *(Timed(LARGE, rung) for rung in ("naive", "shared_tile", "rectangular_tile")),
)
FILE, SCHEMA = "nvbench.jsonl", 1
COLD_MEAN = "nv/cold/time/gpu/mean"
INSTALL = "pip install 'cuda-bench[cu13]'"


@dataclass(frozen=True, slots=True)
class Pair:
    """One product's time of a call by both ways, in seconds; theirs is a mean."""

    product: Timed
    ours_s: float
    theirs_s: float

    @property
    def difference_s(self) -> float:
        """How much longer NVBench says that a call takes."""
        return self.theirs_s - self.ours_s


def crosscheck(
    products: Sequence[Timed] = PRODUCTS, *, ordinal: int = 0, max_seconds: float = 2.0
) -> list[Pair]:
    """Measure products by both clocks; DeviceError where cuda-bench or a GPU is missing.

    NVBench keeps one registry a process, so this can be called once a process.
    """
    missing = module_missing("cuda.bench")
    if missing is not None:
        raise DeviceError(f"the cross-check needs NVBench's Python package. Install it: {INSTALL}.")
    bench = DeviceBench(ordinal)
    ours: dict[str, float] = {}
    calls: dict[str, Callable[[int], object]] = {}
    for product in products:
        entry = bench.ours(bench.sets(product.product), product.rung, name=product.title)
        found = sample([entry], bench.clock, Budget(max_seconds=max_seconds, min_block_s=0.004))
        ours[product.title], calls[product.title] = found[product.title].median, entry.call
    theirs = by_nvbench(calls, ordinal)
    return [Pair(p, ours[p.title], theirs[p.title]) for p in products]


def write(evidence: Path, pairs: Sequence[Pair], ordinal: int) -> Path:
    """Replace the file of both clocks' figures below a device's folder; return its path."""
    device = driver.device_info(ordinal).name
    path = evidence / slug(device) / FILE
    today, nvbench = dt.datetime.now(dt.UTC).date(), importlib.metadata.version("cuda-bench")
    about = {"schema": SCHEMA, "device": device, "date": today.isoformat(), "nvbench": nvbench}
    found = (
        {**about, "product": p.product.title, "ours_s": p.ours_s, "nvbench_s": p.theirs_s}
        for p in pairs
    )
    lines.write(path, found)
    return path


def by_nvbench(calls: dict[str, Callable[[int], object]], ordinal: int) -> dict[str, float]:
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


def _benchmark(call: Callable[[int], object]) -> Callable[[Any], None]:
    def measured(state: Any) -> None:
        def launch(launched: Any) -> None:
            with device_arrays.using_stream(launched.get_stream().addressof()):
                call(0)

        state.exec(launch, batched=False)

    return measured


@click.command(short_help="Compare our GPU times with NVBench's.")
@options.device("cuda")
@options.folder("--evidence", help="Write both figures to <evidence>/<device>/nvbench.jsonl, too.")
def command(device: str, evidence: Path | None) -> None:
    """Time a few products by our graph replays and by NVBench (package cuda-bench), and print both
    figures and the difference: what NVBench adds is the cost of events around a single launch.
    """
    ordinal = options.ordinal_of(device)
    pairs = crosscheck(ordinal=ordinal)
    columns: tuple[Column[Pair], ...] = (
        ("product", lambda pair: pair.product.title, False),
        ("ours, us", lambda pair: significant(pair.ours_s * 1e6), True),
        ("NVBench, us", lambda pair: significant(pair.theirs_s * 1e6), True),
        ("difference, us", lambda pair: f"{pair.difference_s * 1e6:+.2f}", True),
        ("%", lambda pair: f"{100 * pair.difference_s / pair.ours_s:+.1f}", True),
    )
    Console().print(terminal_table(table_of("two clocks", pairs, columns)))
    if evidence is not None:
        click.echo(f"wrote {write(evidence, pairs, ordinal)}")


if __name__ == "__main__":
    sys.exit(run(command=command, name="crosscheck"))
