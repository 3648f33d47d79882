"""``gemmule bench``: measure a suite product by product, each on disk before the next."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from gemmule.backends.cuda.arrays import ordinal_named
from gemmule_lab.bench.host_cost import HostCostBench
from gemmule_lab.bench.quiet import Patience
from gemmule_lab.bench.suites import Suite
from gemmule_lab.harness.bench import Bench, settled
from gemmule_lab.harness.device import DeviceBench
from gemmule_lab.harness.host import HostBench, absences_in_words
from gemmule_lab.harness.products import Product
from gemmule_lab.peers.peer import Absence
from gemmule_lab.peers.registry import all_peers
from gemmule_lab.progress import say, tracked, working
from gemmule_lab.records import results
from gemmule_lab.records.rows import Environment, Row
from gemmule_lab.report.render import print_tables, wide_console
from gemmule_lab.report.tables import in_words

MIB = 1 << 20


def bench_of(suite: Suite, device: str, seconds: float, peers: tuple[str, ...] = ()) -> Bench:
    """Return what measures a suite on a device, `seconds` a product.

    peers: on a GPU, names of those that run beside the suite's own, or ``all``. DeviceError where
    there is no GPU.
    """
    if device == "cpu":
        return HostBench(seconds, every_rung=suite.every_rung)
    asked = tuple(dict.fromkeys((*suite.peers, *peers)))
    if "all" in peers:
        asked = tuple(peer.name for peer in all_peers("cuda"))
    kind = HostCostBench if suite.host_cost else DeviceBench
    what: dict[str, Any] = {
        "rungs": suite.rungs,
        "warm": suite.warm,
        "every_rung": suite.every_rung,
    }
    return kind(ordinal_named(device), seconds, peers=asked, **what)


@dataclass(slots=True)
class Session:
    """One run of a suite. path: the file that every product's rows are appended to.

    known: rows of an earlier run that this one goes on with; their products are not measured again.
    """

    suite: Suite
    bench: Bench
    environment: Environment
    path: Path
    patience: Patience
    known: tuple[Row, ...] = ()
    rows: list[Row] = field(default_factory=list)
    absent: list[Absence] = field(default_factory=list)

    def run(self, ceiling_seconds: float) -> None:
        """Measure what the file lacks; whatever ends it, show all there is."""
        done = {row.group for row in self.known}
        todo = [product for product in self.suite.products if product.title not in done]
        results.append(self.path, [self.environment])
        try:
            for number, product in enumerate(tracked(todo, len(todo), "measuring"), 1):
                self._measure(product, f"{number}/{len(todo)}")
            where = self.environment, self.path
            self.rows, self.environment = settle(self.bench, self.rows, *where, ceiling_seconds)
        finally:
            self._show()

    def _measure(self, product: Product, place: str) -> None:
        """Measure one product and write it; its operands are let go of on return."""
        start = time.monotonic()
        attempt = self.bench.attempt(product, self.environment)
        found = self.patience.measure(attempt, lambda outcome: outcome[0])
        results.append(self.path, found[0])
        self.rows += found[0]
        self.absent += found[1]
        took = time.monotonic() - start
        say(f"[{place}] {product.title}: {in_words(found[0])} ({took:.1f} s)")

    def _show(self) -> None:
        held = results.read(self.path)
        print_tables(replace(held, rows=suite_rows(held, self.suite)), wide_console())
        for line in absences_in_words(self.absent, self.rows):
            click.echo(f"not timed: {line}")
        click.echo(f"wrote {self.path}; gemmule report {self.path} -o page.html makes a page of it")


def settle(
    bench: Bench, rows: Sequence[Row], environment: Environment, path: Path, seconds: float
) -> tuple[list[Row], Environment]:
    """Hold a run's rows against the ceilings; where those are measured anew, rewrite the file."""
    found, final = settled(rows, environment, functools.partial(bench.ceilings_again, seconds))
    if final.id != environment.id:
        results.replace(path, [*earlier(path, environment), final, *found])
    return found, final


def earlier(path: Path, environment: Environment) -> list[Environment | Row]:
    """Return what a file holds of other environments than this one, in its order."""
    held = results.read(path)
    found: list[Environment | Row] = []
    for key, one in held.environments.items():
        if key != environment.id:
            found += [one, *(row for row in held.rows if row.environment == key)]
    return found


def suite_rows(held: results.Results, suite: Suite) -> tuple[Row, ...]:
    """Return the rows of the suite's products that a results file holds."""
    titles = {product.title for product in suite.products}
    return tuple(row for row in held.rows if row.group in titles)


def measured_environment(bench: Bench, seconds: float) -> Environment:
    """Return a bench's machine with its ceilings, measured now and told."""
    say(f"measuring this machine's ceilings, about {seconds:.0f} s")
    with working("reading, copying, multiplying"):
        found = bench.environment(seconds)
    if bench.backend == "cuda":
        for name, one in found.ceilings.items():
            click.echo(f"{name}: {one.value:,.0f} {one.unit} ({one.shape})")
    elif isinstance(bench, HostBench) and bench.cold_bytes:
        say(f"sets of operands rotate through {bench.cold_bytes / MIB:.0f} MiB")
    return found


def start(
    suite: Suite,
    bench: Bench,
    out: Path,
    *,
    patience: Patience,
    ceiling_seconds: float,
    resume: Path | None = None,
) -> dict[str, Any]:
    """Measure the machine's ceilings, then the suite, into a file of its own or into `resume`."""
    click.echo(f"suite {suite.name}, {suite.title}: {len(suite.products)} products")
    known = () if resume is None else suite_rows(results.read(resume), suite)
    patience.wait()
    environment = measured_environment(bench, ceiling_seconds)
    stamp = environment.timestamp[:19].replace(":", "").replace("-", "")
    path = out / f"{bench.prefix}{suite.name}-{stamp}.jsonl" if resume is None else resume
    session = Session(suite, bench, environment, path, patience, known)
    session.run(ceiling_seconds / 2)
    rows = [*known, *session.rows]
    return {
        "file": path,
        "environment": session.environment,
        "rows": rows,
        "absent": session.absent,
    }
