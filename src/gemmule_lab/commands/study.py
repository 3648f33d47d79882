"""``gemmule study``: the published experiments that this project starts from, redone and judged."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gemmule_lab.commands import _options as options

if TYPE_CHECKING:
    from gemmule_lab.studies.grid import Study

DOCUMENTS = ("000", "001", "002", "003", "004")


@options.command("measure", "Redo the published experiments and judge their claims.")
@click.argument("documents", nargs=-1, type=click.Choice(DOCUMENTS))
@options.flag("--full", "The documents' exact grids; may take hours.")
@options.one("--device", ("cpu", "cuda"), None, "Only this; default: both.")
@options.out("Folder of the rows and plots.")
@options.folder("--evidence", help="Write the rows to <evidence>/<device>/ instead.")
@options.flag("--show", "Only judge the rows on file, or gemmule's own.")
@options.flag("--times", "Print every row as well.")
@options.flag("--csv", "Write every row to study-<number>.csv, too.")
@options.file("--take", help="First take in the rows of this file of the one study named.")
def study(documents: tuple[str, ...], take: Path | None, **given: Any) -> Any:
    """Redo the experiments of documents 000 to 004 on this machine; default: all five.

    Every result is held against the oracle before it is timed. Rows go to a file as they are made:
    after Ctrl-C the same command goes on where it stopped. Rows of another run are taken in with
    --take: newer ones take the place of those on file, and none on file is lost.
    """
    from gemmule_lab import studies

    if take is not None and len(documents) != 1:
        raise ValueError("--take names a file of one study: give its number as well, and no other.")
    return [_one(studies.load(number), take, **given) for number in documents or DOCUMENTS]


def _one(
    one: Study,
    take: Path | None,
    *,
    full: bool,
    device: str | None,
    out: Path,
    evidence: Path | None,
    show: bool,
    times: bool,
    csv: bool,
) -> dict[str, Any]:
    from gemmule.storage.evidence import slug
    from gemmule_lab.progress import tracked, working
    from gemmule_lab.studies import harness, runner, store
    from gemmule_lab.studies import show as results

    here, missing = harness.benches("cpu" if show and not evidence else device)
    folder = out if evidence is None else evidence / slug(here[0].device)
    path = folder / f"study-{one.number}.jsonl"
    if show and evidence is None and take is None and not path.is_file():
        path = store.on_record(one.number) or path
    click.echo(f"document {one.number}: {one.title}")
    if missing or device == "cpu":
        click.echo(f"left out: everything on a GPU ({missing or '--device cpu'})")
    for line in one.left_out(full):
        click.echo(f"left out: {line}")
    if take is not None:
        click.echo(f"took in {store.take(path, take, one.number)} rows of {take}")
    if one.together and any(bench.backend == "cuda" for bench in here):
        here = here[:1]  # which times what runs on the CPU in turns with its own
    for bench in [] if show else here:
        environment = functools.partial(harness.environment_of, bench)
        runner.run(
            one,
            bench,
            environment,
            path,
            full=full,
            progress=lambda todos: tracked(todos, len(todos), "measuring"),
        )
    rows = runner.of_last_devices(store.read(path, one.number))
    results.print_tables(one, rows, times=times)
    if not rows:
        click.echo(f"{path} holds no rows yet")
        return {"study": one.number, "rows": []}
    told = {"study": one.number, "file": path, "verdicts": results.verdict_table(one, rows).rows}
    if csv:
        target = out / f"study-{one.number}.csv"
        results.write(target, results.as_csv(rows))
        click.echo(f"wrote {target}: {len(rows)} rows")
    if evidence is not None:  # `make docs` draws from evidence
        click.echo(f"rows in {path}")
        return told
    with working("drawing"):
        results.write_plots(one, rows, out)
    click.echo(f"rows in {path}, plots in {out}")
    return told


COMMAND = study
