"""``gemmule bench`` on a CPU: measure a suite product by product, each on disk before the next."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console

from gemmule.lab.bench import host as engine
from gemmule.lab.bench.lanes import Speeds
from gemmule.lab.bench.products import Maker, Product
from gemmule.lab.bench.quiet import Patience
from gemmule.lab.bench.suites import Suite
from gemmule.lab.ceilings.cold import rotating_bytes
from gemmule.lab.peers.peer import Absence
from gemmule.lab.progress import tracked
from gemmule.lab.records import results
from gemmule.lab.records.rows import Environment, Row
from gemmule.lab.report.render import print_tables, terminal_table
from gemmule.lab.report.tables import significant
from gemmule.lab.report.targets import bars_table, standings

FILE_WIDTH = 160  # columns where no terminal tells its width: the tables are wide


@dataclass(slots=True)
class Session:
    """One run of a suite. path: the file that every product's rows are appended to.

    known: rows of an earlier run that this one goes on with; their products are not measured again.
    """

    suite: Suite
    environment: Environment
    path: Path
    seconds: float
    patience: Patience
    known: tuple[Row, ...] = ()
    rows: list[Row] = field(default_factory=list)
    absent: list[Absence] = field(default_factory=list)
    speeds: Speeds = field(default_factory=Speeds)

    def run(self, ceiling_seconds: float) -> None:
        """Measure what the file lacks; whatever ends it, show all there is and how bars stand."""
        done = {row.group for row in self.known}
        todo = [product for product in self.suite.products if product.title not in done]
        maker = Maker(self.suite.every_rung, cold_bytes=rotating_bytes(self.environment.ceilings))
        results.append(self.path, [self.environment])
        try:
            for number, product in enumerate(tracked(todo, len(todo), "measuring"), 1):
                self._measure(maker, product, f"{number}/{len(todo)}")
            self._settle(ceiling_seconds)
        finally:
            self._show()

    def _measure(self, maker: Maker, product: Product, place: str) -> None:
        """Measure one product and write it; its operands are let go of on return."""
        start = time.monotonic()
        one = maker.bench(product)
        attempt = functools.partial(
            engine.run, one, self.environment, max_seconds=self.seconds, speeds=self.speeds
        )
        found, missing = self.patience.measure(attempt, lambda outcome: outcome[0])
        results.append(self.path, found)
        self.rows += found
        self.absent += missing
        took = time.monotonic() - start
        click.echo(f"[{place}] {product.title}: {in_words(found)} ({took:.1f} s)", err=True)

    def _settle(self, seconds: float) -> None:
        """Hold the new rows against the ceiling; if that is measured anew, rewrite the file."""
        rows, environment = engine.settled(self.rows, self.environment, seconds)
        if environment.id == self.environment.id:
            return
        earlier = [] if not self.known else _earlier(self.path, self.environment)
        fresh = self.path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        results.append(fresh, [*earlier, environment, *rows])
        fresh.replace(self.path)
        self.rows, self.environment = rows, environment

    def _show(self) -> None:
        rows = [*self.known, *self.rows]
        console = Console() if Console().is_terminal else Console(width=FILE_WIDTH)
        print_tables(rows, console)
        for line in engine.absences_in_words(self.absent):
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


def in_words(rows: Sequence[Row]) -> str:
    """Return one line on what was found: our fastest, its bandwidth, the fastest peer's share."""
    ours = [row for row in rows if row.kind == "rung"]
    if not ours:
        return "nothing was timed"
    best = min(ours, key=lambda row: row.times_us.median)
    words = f"{best.name} {significant(best.times_us.median)} us, {significant(best.gbs)} GB/s"
    if best.percent_of_ceiling is not None:
        words += f", {best.percent_of_ceiling:.0f} % of the read ceiling"
    for name, speedup in best.speedups.items():
        words += f", {speedup.value:.2f} x {name}"
    return words + "".join(f", {flag}" for flag in best.flags)


def known_rows(path: Path, suite: Suite) -> tuple[Row, ...]:
    """Return the rows of the suite's products that a results file holds."""
    titles = {product.title for product in suite.products}
    return tuple(row for row in results.read(path).rows if row.group in titles)


def start(
    name: str,
    suite: Suite,
    out: Path,
    *,
    seconds: float,
    patience: Patience,
    ceiling_seconds: float,
    resume: Path | None,
) -> None:
    """Measure the machine's ceilings, then the suite, into a file of its own or into `resume`."""
    known = () if resume is None else known_rows(resume, suite)
    patience.wait()
    environment = engine.measured_environment(ceiling_seconds)
    if rotating := rotating_bytes(environment.ceilings):
        click.echo(f"sets of operands rotate through {rotating / 2**20:.0f} MiB", err=True)
    stamp = environment.timestamp[:19].replace(":", "").replace("-", "")
    path = out / f"{name}-{stamp}.jsonl" if resume is None else resume
    Session(suite, environment, path, seconds, patience, known).run(ceiling_seconds / 2)
