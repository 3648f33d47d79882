"""``python -m proofs``: what a GPU proves of every CUDA rung, and how the records fit the code."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from gemmule_lab.cli import WrongResultError, run
from gemmule_lab.commands import _options as options

PROVE = "python -m proofs --evidence evidence --stale"


@click.command(short_help="Prove CUDA rungs on a GPU, or compare the proofs with the code.")
@click.option("--rung", help="Only this rung.")
@options.device("cuda")
@options.workers("Processes; default: one a core but two.")
@options.folder("--evidence", help="Record what is proved here; default, of --check: our own.")
@options.flag("--stale", "Only what changed since its proof.")
@options.flag("--check", "No GPU needed: compare the kernels, as built here, with the evidence.")
@options.flag("--anew", "With --check: build also what is on record as built.")
@click.option("--archs", help="No GPU needed: build every kernel for these, such as 75,121 or all.")
def proofs(
    rung: str | None,
    device: str,
    workers: int | None,
    evidence: Path | None,
    stale: bool,
    check: bool,
    anew: bool,
    archs: str | None,
) -> None:
    """Prove every CUDA rung on a GPU at its edge sizes and parameters, and record it; or, with
    --check, tell which records are of older code, and which rungs that plans choose lack one.
    """
    if anew and not check:
        raise ValueError("--anew says what --check builds; pass --check with it.")
    options.check_device(device)
    if archs is not None:
        _build(archs, rung, workers or 2)
        return
    if check:
        _check(evidence, rung, anew)
        return
    if evidence is None or device == "cpu":
        raise ValueError("what a GPU proves is recorded: pass --evidence FOLDER, no --device cpu.")
    _prove(evidence, rung, options.ordinal_of(device), stale, workers)


def _build(archs: str, rung: str | None, workers: int) -> None:
    """Build every kernel for some architectures; raise where one does not compile, or spills."""
    from proofs import everywhere
    from proofs.proofs import kernel_rungs

    chosen, faults = kernel_rungs([rung] if rung else ()), 0
    for arch in everywhere.named(archs):
        variants = kernels = 0
        for one in everywhere.build(chosen, arch, workers):
            variants, kernels = variants + 1, kernels + one.kernels
            if one.fault:
                faults += 1
                click.echo(f"{arch} {one.name}: {one.fault}")
        click.echo(f"{arch}: {variants} variants, {kernels:,} kernels")
    if faults:
        raise WrongResultError(f"{faults} variants do not compile as they should.")


def _check(root: Path | None, rung: str | None, anew: bool) -> None:
    """Compare the evidence with the code; raise where a rung that plans choose lacks a proof."""
    from proofs import status
    from proofs.proofs import named_rungs

    found = status.take(root, named_rungs([rung] if rung else ()), anew=anew)
    for line in found.lines():
        click.echo(line)
    if not found.ok:
        raise WrongResultError(
            f"the evidence does not fit the code. On a machine with a GPU: {PROVE}"
        )


def _prove(root: Path, rung: str | None, ordinal: int, stale: bool, workers: int | None) -> None:
    """Prove CUDA rungs on the device and write the records; raise where one fails."""
    from gemmule.backends.cuda import driver
    from gemmule_lab.progress import bar
    from proofs import device, status
    from proofs.proofs import PROOF_ARCH, named_rungs

    arch = driver.device_info(ordinal).arch
    if arch != PROOF_ARCH:  # keys are digests of that code
        raise ValueError(
            f"proofs are of code for {PROOF_ARCH}, and cuda:{ordinal} runs {arch}. What another "
            "chip shows is packed by gemmule verify --device cuda --share."
        )
    chosen, only = named_rungs([rung] if rung else ()), None
    if stale:
        only = status.take(root, chosen, workers=workers or 8).to_prove()
        chosen = tuple(r for r in chosen if (r.folder, r.name) in only)
    with bar() as progress:
        task = progress.add_task("prove", total=len(chosen))
        outcomes = device.verify_all(
            chosen,
            workers=workers,
            ordinal=ordinal,
            only=only,
            report=lambda found: progress.advance(task),
        )
    failed = [outcome for outcome in outcomes if outcome.failures]
    for one in failed:
        click.echo(f"{one.folder}/{one.rung} {one.variant}: {one.failures[0]}")
    click.echo(
        f"{len(chosen)} rungs, {len(outcomes)} variants, {sum(o.cases for o in outcomes):,} cases"
    )
    path = device.write_evidence(root, outcomes)
    click.echo(f"wrote {path}" if path else "nothing ran on a device; nothing was written")
    if failed:
        raise WrongResultError(f"{len(failed)} of {len(outcomes)} variants failed.")


COMMAND = proofs

if __name__ == "__main__":
    sys.exit(run(command=COMMAND, name="proofs"))
