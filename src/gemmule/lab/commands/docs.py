"""``gemmule docs``: rewrite what the documents generate from the rungs and the evidence."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Rewrite the generated parts of the documents.")
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 where something is stale.")
@click.option(
    "--root",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path(),
    help="The source tree; default: here.",
)
def docs(check: bool, root: Path) -> None:
    """Bring docs/ladder.md and the tables of README.md up to date, in a source tree."""
    from gemmule.lab import docs as pages
    from gemmule.lab.cli import WrongResultError

    if not (root / "src" / "gemmule").is_dir():
        raise ValueError(f"{root.resolve()} is no source tree of gemmule; run it in one.")
    if not check:
        changed = pages.update(root)
        click.echo("\n".join(f"wrote {path}" for path in changed) or "everything is up to date")
        return
    stale = ", ".join(str(path) for path in pages.stale(root))
    if stale:
        raise WrongResultError(f"out of date: {stale}. Run `make docs`.")
    click.echo("everything is up to date")


COMMAND = docs
