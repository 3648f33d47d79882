"""``gemmule study``: the published experiments that this project starts from, redone and judged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gemmule_lab.commands import _options as options

if TYPE_CHECKING:
    from gemmule_lab.studies.grid import Study
    from gemmule_lab.studies.records import Rows

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
    csv: bool
    take: Path | None


@click.command(short_help="Redo the published experiments and judge their claims.")
@click.argument("seeds", nargs=-1, type=click.Choice(SEEDS))
@click.option("--full", is_flag=True, help="The documents' exact grids; may take hours.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Only this; default: both.")
@options.out("Folder of the rows and plots.")
@options.folder("--evidence", help="Write the rows to <evidence>/<device>/ instead.")
@click.option("--show", is_flag=True, help="Only judge the rows on file, or gemmule's own.")
@click.option("--times", is_flag=True, help="Print every row as well.")
@click.option("--csv", is_flag=True, help="Write every row to study-<number>.csv, too.")
@options.file("--take", help="First take in the rows of this file of the one study named.")
def study(seeds: tuple[str, ...], **given: Any) -> None:
    """Redo the experiments of documents 000 to 004 on this machine; default: all five.

    Every result is held against the oracle before it is timed. Rows go to a file as they are made:
    after Ctrl-C the same command goes on where it stopped. Rows of another run are taken in with
    --take: newer ones take the place of those on file, and none on file is lost.
    """
    from gemmule_lab import studies

    if given["take"] is not None and len(seeds) != 1:
        raise ValueError("--take names a file of one study: give its number as well, and no other.")
    for seed in seeds or SEEDS:
        _one(studies.load(seed), Asked(**given))


def _one(one: Study, asked: Asked) -> None:
    from gemmule_lab.progress import tracked
    from gemmule_lab.studies import devices, runner, store

    here, missing = devices.benches("cpu" if asked.show and not asked.evidence else asked.device)
    path = devices.path_of(one.seed, asked.out, asked.evidence, here)
    if asked.show and asked.evidence is None and asked.take is None and not path.is_file():
        path = store.on_record(one.seed) or path
    click.echo(f"document {one.seed}: {one.title}")
    if missing or asked.device == "cpu":
        click.echo(f"left out: everything on a GPU ({missing or '--device cpu'})")
    for line in one.left_out(asked.full):
        click.echo(f"left out: {line}")
    if asked.take is not None:
        click.echo(f"took in {store.take(path, asked.take, one.seed)} rows of {asked.take}")
    if one.together and any(bench.backend == "cuda" for bench in here):
        here = here[:1]  # which times what runs on the CPU in turns with its own
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

    from gemmule.storage.atomic import replace_text
    from gemmule_lab.report.plots import draw
    from gemmule_lab.report.render import terminal_table
    from gemmule_lab.studies import show

    console = Console()
    if asked.times:
        for backend in ("cuda", "cpu"):
            table = show.times_table(one, rows, backend)
            if table.rows:
                console.print(terminal_table(table))
    console.print(terminal_table(show.comparison_table(one, rows)))
    console.print(terminal_table(show.verdict_table(one, rows)))
    if absent := show.absences(rows):
        click.echo(f"not timed: {absent}")
    if not rows:
        click.echo(f"{path} holds no rows yet")
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.csv:
        target = asked.out / f"study-{one.seed}.csv"
        replace_text(target, show.as_csv(rows))
        click.echo(f"wrote {target}: {len(rows)} rows")
    if asked.evidence is not None:  # `make docs` draws from evidence
        click.echo(f"rows in {path}")
        return
    for backend in ("cuda", "cpu"):
        for name, chart in one.pictures(rows, backend):
            replace_text(asked.out / f"{name}.svg", draw(chart))
    click.echo(f"rows in {path}, plots in {asked.out}")


COMMAND = study
