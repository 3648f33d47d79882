"""``gemmule report``: result files as one self-contained page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gemmule_lab.commands import _options as options


@options.command("measure", "Make a page of result files.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@options.path("-o", "--output", words="The page, .html. Without it, tables are printed.")
@options.one("--title", str, "", "Of the page; by default the machines.")
@options.flag("--force", "Replace an existing page.")
@options.file(
    "--against",
    help="An earlier run of the one file given: print, as Markdown, what became faster or slower.",
)
def report(
    files: tuple[Path, ...], output: Path | None, title: str, force: bool, against: Path | None
) -> Any:
    """Read the results in FILES (JSON lines) and write one HTML page, or print tables.

    FILES are results of `gemmule bench`, or rows of `gemmule study`; those of `gemmule bench
    --suite distributed` are printed only. The page needs no network. Files are
    checked while they are read. With --against, a file of results or of a study is compared with an
    earlier one, and the exit code is 1 where a product became surely slower.
    """
    from gemmule_lab.cli import WrongResultError
    from gemmule_lab.files.output import check_target
    from gemmule_lab.records import distributed, log
    from gemmule_lab.report.against import changes, pull_request

    if against is not None:
        if len(files) != 1:
            raise ValueError(f"--against compares one file with another; {len(files)} were given.")
        found = changes(against, files[0])
        click.echo(pull_request(found, against, files[0]))
        slower = sum(one.verdict == "slower" for one in found)
        if slower:
            raise WrongResultError(f"surely slower than before: {slower} of {len(found)}.", found)
        return found
    if output is not None:
        check_target(output, force=force, suffixes=(".html",), inputs=files)
    firsts = {path: log.first_row(path) for path in files}
    kinds = {first.get("line") for first in firsts.values()}
    told: list[str] = []
    if distributed.KIND in kinds:
        _distributed(files, kinds, output)
    elif "study" in kinds:
        _studies(firsts, kinds, output, title)
    else:
        told = _results(files, output, title)
    return {"files": files, "page": output, "sentences": told}


def _results(files: Sequence[Path], output: Path | None, title: str) -> list[str]:
    """Write one page of all results, or print their tables; return what they allow to be said."""
    from gemmule_lab.progress import working
    from gemmule_lab.records import results
    from gemmule_lab.report import claims
    from gemmule_lab.report import render as pages
    from gemmule_lab.report.tables import counted

    read = {path: results.read(path) for path in files}
    for path, one in read.items():
        if not one.rows:
            raise ValueError(
                f"{path} holds no results; `gemmule bench --out DIRECTORY` writes some."
            )
    merged = results.Results(
        {name: one for part in read.values() for name, one in part.environments.items()},
        tuple(row for part in read.values() for row in part.rows),
        any(part.torn for part in read.values()),
    )
    if output is None:
        pages.print_tables(merged, pages.wide_console())
    else:
        with working("drawing"):
            pages.write_html(merged, output, title=title)
        click.echo(f"wrote {output}: {counted(len(merged.rows), 'row', 'rows')}")
    devices = claims.devices(merged)
    return [one for _, rows, runs in devices for one in claims.takeaway(rows, runs)]


def _distributed(files: Sequence[Path], kinds: set[Any], output: Path | None) -> None:
    """Print the tables of products over several processes, as the suite itself prints them."""
    from gemmule_lab.records import distributed
    from gemmule_lab.report.render import print_table
    from gemmule_lab.report.tables import distributed_tables

    if output is not None:
        raise ValueError(
            "products of several processes have no page; leave -o away and their tables are "
            "printed. docs/distributed.md tells what they mean."
        )
    if len(kinds) > 1:
        raise ValueError(
            "files of products of several processes and other files are reported on apart."
        )
    for path in files:
        for one in distributed_tables(distributed.read(path).rows):
            print_table(one)


def _studies(
    firsts: Mapping[Path, Mapping[str, Any]], kinds: set[Any], output: Path | None, title: str
) -> None:
    """Write one page of studies, or print their verdicts and their figures beside the printed."""
    from gemmule.storage.atomic import replace_text
    from gemmule_lab.report.render import page, print_table
    from gemmule_lab.report.tables import counted
    from gemmule_lab.studies import show

    if len(kinds) > 1:
        raise ValueError("files of studies and files of results go on pages of their own.")
    sections = [show.section(path, str(first["seed"])) for path, first in firsts.items()]
    if output is None:
        for section in sections:
            for table in section.tables:
                print_table(table)
        return
    replace_text(output, page(title or "gemmule studies", studies=sections))
    click.echo(f"wrote {output}: {counted(len(sections), 'study', 'studies')}")


COMMAND = report
