"""``gemmule study``: the published experiments that this project starts from, redone and judged."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gemmule_lab.commands import _options as options

if TYPE_CHECKING:
    from gemmule_lab.records.study import Rows

DOCUMENTS = ("000", "001", "002", "003", "004")


class _Number(click.Choice[str]):
    """The number of a document; 3 is 003."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(str(value).zfill(3), param, ctx)


def _experiments(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of an experiment of the documents that stand before it."""
    known = _known(ctx.params.get("documents") or DOCUMENTS)
    return sorted(name for name in known if name.startswith(incomplete))


@options.command("measure", "Redo the published experiments and judge their claims.")
@click.argument("documents", nargs=-1, type=_Number(DOCUMENTS), metavar="[NUMBER]...")
@options.flag("--list", "Only list what the documents ask, with our answers on record.")
@options.flag("--full", "The documents' exact grids; may take hours.")
@options.one("--device", ("cpu", "cuda"), None, "Only this; default: both.")
@options.out("Folder of the rows and plots.")
@options.folder("--evidence", help="Write the rows to <evidence>/<device>/ instead.")
@options.flag("--show", "Only judge the rows on file, or our own; draws where --out is given.")
@options.some(
    "--only", "only", "Only this experiment; may be repeated.", shell_complete=_experiments
)
@options.flag("--times", "Print every row as well.")
@options.flag("--csv", "Write every row to study-<number>.csv, too.")
@options.file("--take", help="First take in the rows of this file of the one study named.")
@options.file(
    "--against",
    multiple=True,
    help="Compare with another machine's rows of the one study named; may be repeated.",
)
def study(
    documents: tuple[str, ...], take: Path | None, against: tuple[Path, ...], **given: Any
) -> Any:
    """Redo the experiments of documents 000 to 004 on this machine; default: all five.

    Every result is held against the oracle before it is timed. Rows go to a file as they are made:
    after Ctrl-C the same command goes on where it stopped. Rows of another run are taken in with
    --take: newer ones take the place of those on file, and none on file is lost. --against FILE
    sets verdicts and times beside those of other machines' files, all in one table and one chart.
    """
    if (take or against) and len(documents) != 1:
        raise ValueError(
            "--take and --against name a file of one study: give its number, and no other."
        )
    if given.pop("list"):
        return _list(documents or DOCUMENTS)
    if given["only"]:
        _check_known(documents or DOCUMENTS, given["only"])
    return [_one(number, take, against, **given) for number in documents or DOCUMENTS]


def _known(documents: tuple[str, ...]) -> set[str]:
    """Return the experiments of documents."""
    from gemmule_lab import studies

    grids = [studies.load(number).steps(b, True) for number in documents for b in ("cuda", "cpu")]
    return {step.experiment for grid in grids for step in grid}


def _check_known(documents: tuple[str, ...], only: tuple[str, ...]) -> None:
    """Raise ValueError for an experiment that none of the documents has."""
    known = _known(documents)
    if not known >= set(only):
        asked, there = (", ".join(sorted(names)) for names in (set(only) - known, known))
        raise ValueError(f"no document named has the experiment {asked}; there are: {there}.")


def _list(documents: tuple[str, ...]) -> list[dict[str, Any]]:
    """Print each document's title, question, answer and verdicts, of the rows on record."""
    from gemmule_lab.studies import rules, show

    told = []
    for number in documents:
        about, rows = rules.document(number)["study"], _on_record(number)
        found = show.findings(number, rows)
        click.echo(f"{number}  {about['title']}\n     {about['question']}")
        answer = show.answer(number, found)
        click.echo(f"     {answer}")
        click.echo(f"     {show.counts(found)}; gemmule study {number} --show\n")
        told.append({"study": number, "question": about["question"], "answer": answer})
    return told


def _on_record(number: str) -> Rows:
    from gemmule_lab.records import study as store
    from gemmule_lab.records.study import Rows

    for path in store.on_record(number):
        return store.of_last_devices(store.read(path, number))
    return Rows(())


def _one(
    number: str,
    take: Path | None,
    against: tuple[Path, ...],
    *,
    full: bool,
    device: str | None,
    out: Path,
    evidence: Path | None,
    show: bool,
    only: tuple[str, ...],
    times: bool,
    csv: bool,
) -> dict[str, Any]:
    from gemmule.storage.evidence import slug
    from gemmule_lab import studies
    from gemmule_lab.progress import working
    from gemmule_lab.records import study as store
    from gemmule_lab.studies import harness, rules
    from gemmule_lab.studies import show as results

    one, about = studies.load(number), rules.document(number)["study"]
    here, missing = harness.benches("cpu" if show and not evidence else device)
    folder = out if evidence is None else evidence / slug(here[0].device)
    path = folder / f"study-{number}.jsonl"
    if show and evidence is None and take is None and not path.is_file():
        path = next(iter(store.on_record(number)), path)
    click.echo(f"document {number}: {about['title']}")
    if not show and (missing or device == "cpu"):
        click.echo(f"left out: everything on a GPU ({missing or '--device cpu'})")
    for line in () if show else (*([] if full else [about["thin"]]), *about["left_out"]):
        click.echo(f"left out: {line}")
    if take is not None:
        taken = store.add(path, store.read(take, number), number)
        click.echo(f"took in {taken} rows of {take}")
    if one.together and any(bench.backend == "cuda" for bench in here):
        here = here[:1]  # which times what runs on the CPU in turns with its own
    for bench in [] if show else here:
        _measure(number, bench, path, full, only)
    rows = store.of_last_devices(store.read(path, number))
    results.print_tables(number, rows, times=times)
    if not rows:
        click.echo(f"{path} holds no rows yet")
        return {"study": number, "rows": []}
    told = {"study": number, "file": path, "verdicts": results.verdict_table(number, rows).rows}
    if csv:
        target = out / f"study-{number}.csv"
        results.write(target, results.as_csv(rows))
        click.echo(f"wrote {target}: {len(rows)} rows")
    if against:
        _beside(number, rows, against, out)
    chosen = click.get_current_context().get_parameter_source("out")
    if evidence is not None or (show and chosen is click.core.ParameterSource.DEFAULT):
        click.echo(f"rows in {path}")  # `make docs` draws from evidence
        return told
    with working("drawing"):
        results.write_plots(number, rows, out)
    click.echo(f"rows in {path}, plots in {out}")
    return told


def _measure(number: str, bench: Any, path: Path, full: bool, only: tuple[str, ...]) -> None:
    from gemmule_lab import studies
    from gemmule_lab.progress import tracked
    from gemmule_lab.studies import harness, runner

    runner.run(
        studies.load(number),
        bench,
        functools.partial(harness.environment_of, bench),
        path,
        full=full,
        only=only,
        progress=lambda todos: tracked(todos, len(todos), "measuring"),
    )


def _beside(number: str, rows: Rows, against: tuple[Path, ...], out: Path) -> None:
    """Print verdicts and times of machines side by side, and draw how the times relate."""
    from gemmule_lab.records import study as store
    from gemmule_lab.report.plots import draw
    from gemmule_lab.studies import show

    devices = {show.device_of(rows): rows}
    for path in against:
        theirs = store.of_last_devices(store.read(path, number))
        if not theirs:
            raise ValueError(f"{path} holds no rows of document {number}.")
        name = show.device_of(theirs)
        names = (name, f"{name}, {path.name}", f"{name}, {path}")
        devices[next((one for one in names if one not in devices), names[-1])] = theirs
    show.print_all((show.device_verdicts(number, devices), show.device_times(number, devices)))
    drawn = show.device_chart(number, devices)
    if drawn is not None:
        target = out / f"{drawn[0]}.svg"
        show.write(target, draw(drawn[1]))
        click.echo(f"wrote {target}")


COMMAND = study
