"""``gemmule report``: result files as one self-contained page."""

from __future__ import annotations

from pathlib import Path

import click

from gemmule_lab.commands import _options as options


@click.command(short_help="Make a page of result files.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The page, .html. Without it, tables are printed.",
)
@click.option("--title", default="gemmule results", show_default=True)
@click.option("--force", is_flag=True, help="Replace an existing page.")
@options.file(
    "--against", help="An earlier run of the one file given: print on how many rows the two agree."
)
def report(
    files: tuple[Path, ...], output: Path | None, title: str, force: bool, against: Path | None
) -> None:
    """Read the results in FILES (JSON lines) and write one HTML page, or print tables.

    FILES are results of `gemmule bench`, or rows of `gemmule study`; those of `gemmule bench
    --suite distributed` are printed only. The page needs no network and no JavaScript. Files are
    checked while they are read. With --against, a file of results or of a study is compared with an
    earlier one.
    """
    if against is not None:
        from gemmule_lab.report.agreement import agreement

        if len(files) != 1:
            raise ValueError(f"--against compares one file with another; {len(files)} were given.")
        click.echo("\n".join(agreement(against, files[0]).lines()))
        return
    from gemmule_lab.files.output import check_target
    from gemmule_lab.records import distributed, results
    from gemmule_lab.report import render as pages
    from gemmule_lab.report.agreement import first_kind, study_seed
    from gemmule_lab.report.tables import counted

    if output is not None:
        check_target(output, force=force, suffixes=(".html",), inputs=files)
    ours = [first_kind(path) == distributed.KIND for path in files]
    if any(ours):
        _distributed(files, ours, output)
        return
    seeds = [study_seed(path) for path in files]
    if any(seeds):
        _studies(files, seeds, output, title)
        return
    read = [results.read(path) for path in files]
    merged = results.Results(
        {name: one for part in read for name, one in part.environments.items()},
        tuple(row for part in read for row in part.rows),
        any(part.torn for part in read),
    )
    for path, one in zip(files, read, strict=True):
        if not one.rows:
            raise ValueError(
                f"{path} holds no results; `gemmule bench --out DIRECTORY` writes some."
            )
    if output is None:
        from rich.console import Console

        pages.print_tables(merged.rows, Console())
        return
    pages.write_html(merged, output, title=title)
    click.echo(f"wrote {output}: {counted(len(merged.rows), 'row', 'rows')}")


def _distributed(files: tuple[Path, ...], ours: list[bool], output: Path | None) -> None:
    """Print the tables of products over several processes, as the suite itself prints them."""
    from gemmule_lab.records import distributed
    from gemmule_lab.report.distributed_table import tables
    from gemmule_lab.report.render import terminal_table, wide_console

    if output is not None:
        raise ValueError(
            "products of several processes have no page; leave -o away and their tables are "
            "printed. docs/distributed.md tells what they mean."
        )
    if not all(ours):
        raise ValueError(
            "files of products of several processes and other files are reported on apart."
        )
    for path in files:
        for one in tables(distributed.read(path).rows):
            wide_console().print(terminal_table(one))


def _studies(
    files: tuple[Path, ...], seeds: list[str | None], output: Path | None, title: str
) -> None:
    """Write one page of studies, or print their verdicts and their figures beside the printed."""
    from gemmule.storage.atomic import replace_text
    from gemmule_lab.report.render import terminal_table, wide_console
    from gemmule_lab.report.tables import counted
    from gemmule_lab.studies import page

    named = [(path, seed) for path, seed in zip(files, seeds, strict=True) if seed is not None]
    if len(named) < len(files):
        raise ValueError("files of studies and files of results go on pages of their own.")
    sections = [page.section(path, seed) for path, seed in named]
    if output is None:
        for section in sections:
            for table in section.tables:
                wide_console().print(terminal_table(table))
        return
    replace_text(output, page.render(sections, title))
    click.echo(f"wrote {output}: {counted(len(sections), 'study', 'studies')}")


COMMAND = report
