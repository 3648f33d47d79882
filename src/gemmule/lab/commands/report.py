"""``gemmule report``: result files as one self-contained page."""

from __future__ import annotations

from pathlib import Path

import click

from gemmule.lab.commands import _options as options


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

    The page needs no network and no JavaScript. Files are checked while they are read. With
    --against, a file of results or of a study is compared with an earlier one.
    """
    if against is not None:
        from gemmule.lab.report.agreement import agreement

        if len(files) != 1:
            raise ValueError(f"--against compares one file with another; {len(files)} were given.")
        click.echo("\n".join(agreement(against, files[0]).lines()))
        return
    from gemmule.lab.files.output import check_target
    from gemmule.lab.records import results
    from gemmule.lab.report import render as pages

    if output is not None:
        check_target(output, force=force, suffixes=(".html",), inputs=files)
    read = [results.read(path) for path in files]
    merged = results.Results(
        {name: one for part in read for name, one in part.environments.items()},
        tuple(row for part in read for row in part.rows),
        any(part.torn for part in read),
    )
    for path, one in zip(files, read, strict=True):
        if not one.rows:
            raise ValueError(f"{path} holds no results; `gemmule bench -o FILE` writes some.")
    if output is None:
        from rich.console import Console

        pages.print_tables(merged.rows, Console())
        return
    pages.write_html(merged, output, title=title)
    click.echo(f"wrote {output}: {len(merged.rows)} rows")


COMMAND = report
