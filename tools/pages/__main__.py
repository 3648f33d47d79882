"""``PYTHONPATH=tools python -m pages``: rewrite what the documents generate, from the evidence."""

from __future__ import annotations

from pathlib import Path

import click

from gemmule_lab.commands import _options as options
from pages import build, cpu_pages, study_pages


@click.command(short_help="Rewrite the generated parts of the documents.")
@options.flag("--check", "Write nothing; exit code 1 where something is stale.")
@options.folder("--root", default=Path(), help="The source tree; default: here.")
@options.flag("--instructions", "First compile every CPU rung anew and record its hot loop.")
@options.file("--measured", help="First keep this run of `gemmule bench --suite ladder`.")
def docs(check: bool, root: Path, instructions: bool, measured: Path | None) -> None:
    """Bring the pages of the ladders and the tables of README.md up to date, in a source tree."""
    if not (root / "src" / "gemmule").is_dir():
        raise click.ClickException(f"{root.resolve()} is no source tree of gemmule.")
    if measured is not None:
        click.echo(f"wrote {cpu_pages.keep(root, measured)}")
    if instructions:
        click.echo(f"wrote {cpu_pages.record(root)}")
    if not check:
        changed = [*build.update(root), *study_pages.update(root)]
        click.echo("\n".join(f"wrote {path}" for path in changed) or "everything is up to date")
        return
    stale = ", ".join(str(path) for path in build.stale(root))
    if stale:
        raise click.ClickException(f"out of date: {stale}. Run `make docs`.")
    click.echo("everything is up to date")


if __name__ == "__main__":
    docs()
