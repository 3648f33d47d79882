"""``gemmule sanitize``: CUDA rungs under compute-sanitizer's four tools."""

from __future__ import annotations

from pathlib import Path

import click

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


@click.command(short_help="Run CUDA rungs under compute-sanitizer.")
@click.option("--rung", help="Only this rung.")
@click.option(
    "--tool", "tools", multiple=True, type=click.Choice(TOOLS), help="Only this tool; repeatable."
)
@click.option("--device", default="cuda", show_default=True, help="cuda or cuda:<index>.")
@click.option(
    "--evidence",
    type=click.Path(path_type=Path, file_okay=False),
    help="Record what was clean in this folder.",
)
@click.option(
    "--limit",
    "limit_s",
    type=click.IntRange(10, 86_400),
    default=1800,
    show_default=True,
    help="Seconds for each tool.",
)
def sanitize(
    rung: str | None, tools: tuple[str, ...], device: str, evidence: Path | None, limit_s: int
) -> None:
    """Watch a sample of every CUDA rung's proof for bad memory accesses, races, reads of memory
    that nobody wrote, and wrong barriers: one child process for each tool.
    """
    from gemmule import backends
    from gemmule.backends.cuda_arrays import ordinal_named
    from gemmule.lab import sanitize as engine
    from gemmule.lab.cli import WrongResultError
    from gemmule.rung import all_rungs

    chosen = [r for r in all_rungs("cuda") if rung in (None, r.name)]
    if not chosen:
        raise ValueError(f"no cuda rung is called {rung!r}; see gemmule ladder --backend cuda.")
    engine.find_sanitizer()
    backends.get("cuda").machine(device)  # says what is missing before anything starts
    reports = engine.sanitize(
        chosen, tools or TOOLS, ordinal=ordinal_named(device), limit_s=limit_s
    )
    for report in reports:
        cases = sum(outcome.cases for outcome in report.outcomes)
        errors = "no summary" if report.errors is None else f"{report.errors} errors"
        click.echo(f"{report.tool}: {errors}, {len(report.outcomes)} variants, {cases:,} cases")
        wrong = [outcome for outcome in report.outcomes if outcome.failures]
        for one in wrong[:3]:
            click.echo(f"  {one.folder}/{one.rung} {one.variant}: {one.failures[0]}")
        if not report.clean:
            click.echo(report.text)
    if evidence is not None:
        click.echo(f"wrote {engine.write(evidence, reports)}")
    dirty = [report.tool for report in reports if not report.clean]
    if dirty:
        raise WrongResultError(f"not clean: {', '.join(dirty)}.")


COMMAND = sanitize
