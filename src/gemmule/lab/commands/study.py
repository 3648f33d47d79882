"""``gemmule study``: the published experiments that this project starts from, redone and judged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gemmule.lab.commands import _options as options

if TYPE_CHECKING:
    from gemmule.lab.studies.grid import Study
    from gemmule.lab.studies.records import Rows

SEEDS = ("000", "001", "002", "003", "004")


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for, as the options of the command say."""

    full: bool
    device: str | None
    out: Path
    evidence: Path | None
    show: bool
    times: bool


@click.command(short_help="Redo the published experiments and judge their claims.")
@click.argument("seeds", nargs=-1, type=click.Choice(SEEDS))
@click.option("--full", is_flag=True, help="The documents' exact grids; may take hours.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Only this; default: both.")
@options.out("Folder of the rows and plots.")
@options.folder("--evidence", help="Write the rows to <evidence>/<device>/ instead.")
@click.option("--show", is_flag=True, help="Measure nothing; judge the rows on file.")
@click.option("--times", is_flag=True, help="Print every row as well.")
def study(seeds: tuple[str, ...], **given: Any) -> None:
    """Redo the experiments of documents 000 to 004 on this machine; default: all five.

    Every result is held against the oracle before it is timed. Rows go to a file as they are made:
    after Ctrl-C the same command goes on where it stopped.
    """
    from gemmule.lab import studies

    for seed in seeds or SEEDS:
        _one(studies.load(seed), Asked(**given))


def _one(one: Study, asked: Asked) -> None:
    from gemmule.lab.progress import tracked
    from gemmule.lab.studies import devices, runner, store

    here, missing = devices.benches("cpu" if asked.show and not asked.evidence else asked.device)
    path = devices.path_of(one.seed, asked.out, asked.evidence, here)
    click.echo(f"document {one.seed}: {one.title}")
    if missing or asked.device == "cpu":
        click.echo(f"left out: everything on a GPU ({missing or '--device cpu'})")
    for line in one.left_out(asked.full):
        click.echo(f"left out: {line}")
    for bench in [] if asked.show else here:
        known = {row.key for row in store.read(path, one.seed)}
        if not runner.todo(one, bench, asked.full, known):
            continue
        rows = runner.run(
            one,
            bench,
            devices.environment_of(bench),
            path,
            full=asked.full,
            progress=lambda todos: tracked(todos, len(todos), "measuring"),
        )
        if runner.above_ceiling(runner.of_last_devices(rows), bench.backend):
            # Something slowed the ceilings down: of both measurements the higher one counts.
            store.append(path, [devices.environment_of(bench)])
    rows = runner.of_last_devices(store.read(path, one.seed))
    _report(one, rows, asked, path)


def _report(one: Study, rows: Rows, asked: Asked, path: Path) -> None:
    from rich.console import Console

    from gemmule.lab.report.render import terminal_table
    from gemmule.lab.studies import show
    from gemmule.storage.atomic import replace_text

    console = Console()
    if asked.times:
        for backend in ("cuda", "cpu"):
            table = show.times_table(one, rows, backend)
            if table.rows:
                console.print(terminal_table(table))
    console.print(terminal_table(show.comparison_table(one, rows)))
    console.print(terminal_table(show.verdict_table(one, rows)))
    for line in show.absences(rows):
        click.echo(f"not timed: {line}")
    if not rows:
        click.echo(f"{path} holds no rows yet")
        return
    if asked.evidence is not None:  # `make docs` draws from evidence
        click.echo(f"rows in {path}")
        return
    for backend in ("cuda", "cpu"):
        for name, drawing in show.plots(one, rows, backend):
            replace_text(asked.out / f"{name}.svg", drawing)
    click.echo(f"rows in {path}, plots beside them")


COMMAND = study
