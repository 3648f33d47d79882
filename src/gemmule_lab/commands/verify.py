"""``gemmule verify``: random products by the thousand, each judged by the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gemmule_lab.commands import _options as options

if TYPE_CHECKING:
    from gemmule_lab.verify.random_products import Choice
    from gemmule_lab.verify.workers import Tally

SHOWN = 3


@click.command(short_help="Judge random products by the oracle.")
@click.option("--cases", type=click.IntRange(1, 10**9), default=20_000, show_default=True)
@click.option("--op", type=click.Choice(["matvec", "vecmat", "matmul", "quantized"]))
@click.option("--rung", help="Only this rung, at random points of its parameter space.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@options.device()
@options.workers("Processes; default: one a core, on a GPU one.")
@options.folder(
    "--evidence",
    help="On a GPU: prove every CUDA rung at its edge sizes and parameters, and record it here.",
)
@click.option("--stale", is_flag=True, help="With --evidence: only what changed since its proof.")
@click.option(
    "--check",
    "check_only",
    is_flag=True,
    help="With --stale, no GPU needed: compare the kernels, as built here, with the evidence.",
)
@click.option("--anew", is_flag=True, help="With --check: build also what is on record as built.")
def verify(
    cases: int,
    op: str | None,
    rung: str | None,
    seed: int,
    device: str,
    workers: int | None,
    evidence: Path | None,
    stale: bool,
    check_only: bool,
    anew: bool,
) -> None:
    """Multiply random matrices through the public API and judge every element.

    Sizes mostly 0 to 33, all dtypes, layouts, views, batches and quantisations; exact integers must
    come out equal, other numbers within the bound derived from how the kernel rounds. The same
    seed gives the same cases. A failing case is printed as Python that repeats it.
    """
    import os
    import time

    from gemmule_lab.cli import WrongResultError
    from gemmule_lab.progress import bar
    from gemmule_lab.verify import on_device
    from gemmule_lab.verify.random_products import Choice
    from gemmule_lab.verify.workers import run_trials

    options.check_device(device)
    if stale and evidence is None and not check_only:
        raise ValueError("--stale chooses what is proved or compared; pass --evidence or --check.")
    if anew and not check_only:
        raise ValueError("--anew says what --check builds; pass --check with it.")
    if check_only:
        _check_evidence(evidence, rung, anew)
        return
    if device != "cpu":
        options.ordinal_of(device)
    if evidence is not None:
        _prove(evidence, rung, device, stale, workers)
        return
    libraries = on_device.present() if device != "cpu" else ("own",)
    choice = Choice(op, rung, device, libraries)
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)), cases) if device == "cpu" else 1
    start = time.monotonic()
    with bar() as progress:
        task = progress.add_task("verify", total=cases)
        tally = run_trials(
            choice, cases, seed, workers, lambda done: progress.update(task, completed=done)
        )
    _report(tally, choice, seed, time.monotonic() - start)
    if not tally.ok:
        raise WrongResultError(
            f"{tally.wrong:,} wrong, {tally.raised:,} raised, {len(tally.deaths)} workers died, of "
            f"{tally.done:,} cases."
        )


def _check_evidence(root: Path | None, rung: str | None, anew: bool) -> None:
    """Compare the evidence with the code; raise where a rung that plans choose lacks a proof."""
    from gemmule_lab.cli import WrongResultError
    from gemmule_lab.verify import status as proof_status
    from gemmule_lab.verify.proofs import named_rungs

    found = proof_status.take(root, named_rungs([rung] if rung else ()), anew=anew)
    for line in found.lines():
        click.echo(line)
    if not found.ok:
        raise WrongResultError(
            "the evidence does not fit the code. On a machine with a GPU: "
            "gemmule verify --device cuda --evidence evidence --stale"
        )


def _prove(
    root: Path, rung: str | None, device: str, only_stale: bool, workers: int | None
) -> None:
    """Prove CUDA rungs on the device and write the records; raise where one fails."""
    from gemmule_lab.cli import WrongResultError
    from gemmule_lab.progress import bar
    from gemmule_lab.verify import device as verify_device
    from gemmule_lab.verify import status as proof_status
    from gemmule_lab.verify.proofs import named_rungs

    if device == "cpu":
        raise ValueError("--evidence records what a GPU proved; pass --device cuda with it.")
    chosen, only = named_rungs([rung] if rung else ()), None
    if only_stale:
        only = proof_status.take(root, chosen, workers=workers or 8).to_prove()
        chosen = tuple(r for r in chosen if (r.folder, r.name) in only)
    with bar() as progress:
        task = progress.add_task("prove", total=len(chosen))
        outcomes = verify_device.verify_all(
            chosen,
            workers=workers,
            ordinal=options.ordinal_of(device),
            only=only,
            report=lambda found: progress.advance(task),
        )
    failed = [outcome for outcome in outcomes if outcome.failures]
    for one in failed:
        click.echo(f"{one.folder}/{one.rung} {one.variant}: {one.failures[0]}")
    click.echo(
        f"{len(chosen)} rungs, {len(outcomes)} variants, {sum(o.cases for o in outcomes):,} cases"
    )
    path = verify_device.write_evidence(root, outcomes)
    click.echo(f"wrote {path}" if path else "nothing ran on a device; nothing was written")
    if failed:
        raise WrongResultError(f"{len(failed)} of {len(outcomes)} variants failed.")


def _report(tally: Tally, choice: Choice, seed: int, elapsed_s: float) -> None:
    from gemmule_lab.verify.random_products import snippet

    for number, trial, outcome in tally.bad[:SHOWN]:
        click.echo(f"\ntrial {number}, {outcome.status} by {outcome.rung or '?'}: {outcome.text}")
        click.echo(snippet(trial))
    for death in tally.deaths:
        click.echo(death)
    click.echo(
        f"\n{tally.done:,} cases on {choice.device}, seed {seed}, in {elapsed_s:.0f} s "
        f"({tally.done / max(elapsed_s, 1e-9):,.0f} a second): {tally.wrong:,} wrong, "
        f"{tally.raised:,} raised; largest error {tally.worst_ratio:.3g} of its bound"
    )
    if tally.refused:
        click.echo(
            f"{tally.refused:,} cases refused: the rung does not take those operands as they lie."
        )
    ranked = tally.rungs.most_common()
    click.echo("rungs: " + ", ".join(f"{name or 'none'} {count:,}" for name, count in ranked))


COMMAND = verify
