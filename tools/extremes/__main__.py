"""``python -m extremes``: 100 reruns of every CUDA rung, and products beyond 2^31 elements."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from extremes import extremes as engine
from gemmule_lab.cli import WrongResultError, run
from gemmule_lab.commands import _options as options
from proofs.proofs import kernel_rungs


@click.command(short_help="Rerun CUDA rungs, and go beyond 2^31 elements.")
@options.rungs
@options.device("cuda")
@options.folder("--evidence", help="Record what passed in this folder.")
@options.workers("Processes.", 8)
def extremes(
    names: tuple[str, ...],
    without: tuple[str, ...],
    device: str,
    evidence: Path | None,
    workers: int,
) -> None:
    """Run every CUDA rung 100 times on each dtype of A, which has to give one result unless the
    rung says "unordered"; and multiply once by a matrix of more than 2^31 elements, and by a batch
    of as many, whose last row is not zero. Takes some 10 GB of device memory for each process.
    """
    chosen = engine.watched(kernel_rungs(names, without))
    ordinal = options.ordinal_of(device)

    def show(found: list[engine.Found]) -> None:
        for one in found:
            figures = ", ".join(f"{name} {value}" for name, value in one.figures.items())
            click.echo(
                f"{one.folder}/{one.rung} {one.variant} {one.check}: {one.wrong or 'passed'}"
                + (f" ({figures})" if figures else "")
            )
        if evidence is not None:
            engine.write(evidence, found)

    found = engine.of_all(chosen, ordinal=ordinal, workers=workers, report=show)
    failed = [one for one in found if one.wrong]
    click.echo(f"{len(chosen)} rungs, {len(found)} checks, {len(failed)} failed")
    if failed:
        raise WrongResultError(f"{len(failed)} of {len(found)} checks failed.")


COMMAND = extremes

if __name__ == "__main__":
    sys.exit(run(command=COMMAND, name="extremes"))
