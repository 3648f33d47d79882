"""``gemmule bench``: measure a suite product by product, each on disk before the next."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import click
from rich.console import Console

from gemmule.backends.cuda import launch as cuda_launch
from gemmule.backends.cuda.arrays import ordinal_named
from gemmule.backends.cuda.graph_clock import GraphClock
from gemmule_lab.bench import device as device_bench
from gemmule_lab.bench import host as host_bench
from gemmule_lab.bench import host_cost
from gemmule_lab.bench.entries import settled
from gemmule_lab.bench.lanes import Speeds
from gemmule_lab.bench.products import Maker
from gemmule_lab.bench.quiet import Patience
from gemmule_lab.bench.suites import Product, Suite
from gemmule_lab.ceilings.cold import rotating_bytes
from gemmule_lab.ceilings.device import measure_ceilings, summary
from gemmule_lab.peers.peer import Absence
from gemmule_lab.peers.registry import all_peers
from gemmule_lab.progress import tracked
from gemmule_lab.records import results
from gemmule_lab.records.rows import Ceiling, Environment, Row
from gemmule_lab.report.render import print_tables, terminal_table, wide_console
from gemmule_lab.report.tables import in_words, products_table
from gemmule_lab.report.targets import bars_table, standings

MIB = 1 << 20

Found: TypeAlias = tuple[list[Row], list[Absence]]


@dataclass(frozen=True, slots=True)
class Meter:
    """What differs between a CPU and a GPU.

    environment(seconds): the machine with its ceilings, measured now. attempt(product,
    environment): the measurement of a product, which may be made more than once. ceilings(seconds):
    those that count where a row rises above the read ceiling. show(rows, console): print the
    tables. prefix: of the names of files.
    """

    environment: Callable[[float], Environment]
    attempt: Callable[[Product, Environment], Callable[[], Found]]
    ceilings: Callable[[float], Mapping[str, Ceiling]]
    show: Callable[[Sequence[Row], Console], None]
    prefix: str = ""


def cpu_meter(suite: Suite, seconds: float) -> Meter:
    """Return what measures on this machine's processors, `seconds` a product."""
    maker, speeds = Maker(suite.every_rung), Speeds()

    def environment(max_seconds: float) -> Environment:
        found = host_bench.measured_environment(max_seconds)
        maker.cold_bytes = rotating_bytes(found.ceilings)
        if maker.cold_bytes:
            click.echo(
                f"sets of operands rotate through {maker.cold_bytes / MIB:.0f} MiB", err=True
            )
        return found

    def attempt(product: Product, environment: Environment) -> Callable[[], Found]:
        one = maker.bench(product)
        return functools.partial(
            host_bench.run, one, environment, max_seconds=seconds, speeds=speeds
        )

    return Meter(environment, attempt, host_bench.ceilings_again, print_tables)


def cuda_meter(suite: Suite, seconds: float, device: str, peers: tuple[str, ...] = ()) -> Meter:
    """Return what measures on a GPU beside the suite's peers and those named, or ``all``.

    DeviceError where there is no GPU.
    """
    name = cuda_launch.CudaBackend().machine(device).name
    clock = GraphClock(ordinal_named(device))
    asked = tuple(dict.fromkeys((*suite.peers, *peers)))
    if "all" in peers:
        asked = tuple(peer.name for peer in all_peers("cuda"))

    def environment(max_seconds: float) -> Environment:
        found = device_bench.measured_environment(clock.ordinal, max_seconds)
        for line in summary(found.ceilings):
            click.echo(line)
        return found

    def attempt(product: Product, environment: Environment) -> Callable[[], Found]:
        if suite.host_cost:
            return functools.partial(host_cost.measure, environment, clock.ordinal)
        return functools.partial(
            device_bench.run,
            product,
            environment,
            clock,
            peers=asked,
            rungs=suite.rungs,
            max_seconds=seconds,
        )

    def ceilings(max_seconds: float) -> Mapping[str, Ceiling]:
        return measure_ceilings(clock.ordinal, max_seconds=max_seconds, seed=1)

    def show(rows: Sequence[Row], console: Console) -> None:
        console.print(terminal_table(products_table(name, rows)))

    return Meter(environment, attempt, ceilings, show, "cuda-")


@dataclass(slots=True)
class Session:
    """One run of a suite. path: the file that every product's rows are appended to.

    known: rows of an earlier run that this one goes on with; their products are not measured again.
    """

    suite: Suite
    meter: Meter
    environment: Environment
    path: Path
    patience: Patience
    known: tuple[Row, ...] = ()
    rows: list[Row] = field(default_factory=list)
    absent: list[Absence] = field(default_factory=list)

    def run(self, ceiling_seconds: float) -> None:
        """Measure what the file lacks; whatever ends it, show all there is and how bars stand."""
        done = {row.group for row in self.known}
        todo = [product for product in self.suite.products if product.title not in done]
        results.append(self.path, [self.environment])
        try:
            for number, product in enumerate(tracked(todo, len(todo), "measuring"), 1):
                self._measure(product, f"{number}/{len(todo)}")
            self._settle(ceiling_seconds)
        finally:
            self._show()

    def _measure(self, product: Product, place: str) -> None:
        """Measure one product and write it; its operands are let go of on return."""
        start = time.monotonic()
        attempt = self.meter.attempt(product, self.environment)
        found = self.patience.measure(attempt, lambda outcome: outcome[0])
        results.append(self.path, found[0])
        self.rows += found[0]
        self.absent += found[1]
        took = time.monotonic() - start
        click.echo(f"[{place}] {product.title}: {in_words(found[0])} ({took:.1f} s)", err=True)

    def _settle(self, seconds: float) -> None:
        """Hold the new rows against the ceiling; if that is measured anew, rewrite the file."""
        again = functools.partial(self.meter.ceilings, seconds)
        rows, environment = settled(self.rows, self.environment, again)
        if environment.id == self.environment.id:
            return
        earlier = [] if not self.known else _earlier(self.path, self.environment)
        results.replace(self.path, [*earlier, environment, *rows])
        self.rows, self.environment = rows, environment

    def _show(self) -> None:
        rows = [*self.known, *self.rows]
        console = wide_console()
        self.meter.show(rows, console)
        for line in host_bench.absences_in_words(self.absent):
            click.echo(f"not timed: {line}")
        if self.suite.bars:
            console.print(terminal_table(bars_table(standings(self.suite.bars, rows))))
        click.echo(f"wrote {self.path}; gemmule report {self.path} -o page.html makes a page of it")


def _earlier(path: Path, environment: Environment) -> list[Environment | Row]:
    """Return what a file holds of other environments than this one, in its order."""
    held = results.read(path)
    found: list[Environment | Row] = []
    for key, one in held.environments.items():
        if key != environment.id:
            found += [one, *(row for row in held.rows if row.environment == key)]
    return found


def known_rows(path: Path, suite: Suite) -> tuple[Row, ...]:
    """Return the rows of the suite's products that a results file holds."""
    titles = {product.title for product in suite.products}
    return tuple(row for row in results.read(path).rows if row.group in titles)


def start(
    suite: Suite,
    meter: Meter,
    out: Path,
    *,
    patience: Patience,
    ceiling_seconds: float,
    resume: Path | None = None,
) -> None:
    """Measure the machine's ceilings, then the suite, into a file of its own or into `resume`."""
    click.echo(f"suite {suite.name}, {suite.title}: {len(suite.products)} products")
    known = () if resume is None else known_rows(resume, suite)
    patience.wait()
    click.echo(f"measuring this machine's ceilings, about {ceiling_seconds:.0f} s", err=True)
    environment = meter.environment(ceiling_seconds)
    stamp = environment.timestamp[:19].replace(":", "").replace("-", "")
    path = out / f"{meter.prefix}{suite.name}-{stamp}.jsonl" if resume is None else resume
    Session(suite, meter, environment, path, patience, known).run(ceiling_seconds / 2)
