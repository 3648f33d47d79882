"""``python -m sanitizer``: CUDA rungs under compute-sanitizer's four tools."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from gemmule_lab.cli import WrongResultError, run
from gemmule_lab.commands import _options as options
from proofs.proofs import kernel_rungs
from sanitizer import sanitize as engine


@click.command(short_help="Run CUDA rungs under compute-sanitizer.")
@options.rungs
@options.some("--tool", "tools", "Only this tool; repeatable.", engine.TOOLS)
@options.device("cuda")
@options.folder("--evidence", help="Record what was clean in this folder.")
@options.one("--limit", click.IntRange(10, 86_400), 1800, "Seconds for each tool and rung.")
@options.workers("Processes; default: one a core but two.")
def sanitize(
    names: tuple[str, ...],
    without: tuple[str, ...],
    tools: tuple[str, ...],
    device: str,
    evidence: Path | None,
    limit: int,
    workers: int | None,
) -> None:
    """Watch a sample of every CUDA rung's proof for bad memory accesses, races, reads of memory
    that nobody wrote, and wrong barriers: one child process for each tool and rung. What is clean
    is recorded as soon as it is known.
    """
    chosen = kernel_rungs(names, without)
    engine.find_sanitizer()
    ordinal = options.ordinal_of(device)

    def show(found: engine.Report) -> None:
        cases, shapes = (sum(getattr(o, n) for o in found.outcomes) for n in ("cases", "shapes"))
        errors = "no summary" if found.errors is None else f"{found.errors} errors"
        words = f"{len(found.outcomes)} variants, {cases:,} cases of {shapes:,} shapes"
        click.echo(f"{found.tool} {found.rung}: {errors}, {words}")
        wrong = [outcome for outcome in found.outcomes if outcome.failures]
        for one in wrong[:3]:
            click.echo(f"  {one.folder}/{one.rung} {one.variant}: {one.failures[0]}")
        if not found.clean:
            click.echo(found.text)
        if evidence is not None:
            engine.write(evidence, [found])

    reports = engine.sanitize(
        chosen,
        tools or engine.TOOLS,
        ordinal=ordinal,
        limit_s=limit,
        workers=workers or max(1, (os.cpu_count() or 3) - 2),
        report=show,
    )
    dirty = [f"{report.tool} {report.rung}" for report in reports if not report.clean]
    if dirty:
        raise WrongResultError(f"not clean: {', '.join(dirty)}.")


COMMAND = sanitize

if __name__ == "__main__":
    sys.exit(run(command=COMMAND, name="sanitizer"))
