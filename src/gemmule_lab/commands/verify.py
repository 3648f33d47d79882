"""``gemmule verify``: random products by the thousand, each judged by the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gemmule_lab.commands import _options as options

if TYPE_CHECKING:
    from gemmule_lab.verify.random_products import Choice
    from gemmule_lab.verify.workers import Tally

SHOWN = 3
TOLD = ("ok", "done", "wrong", "raised", "refused", "worst_ratio", "rungs", "deaths")


@options.command("maintain", "Judge random products by the oracle.")
@options.one("--cases", options.Whole(1, 10**9), 20_000)
@options.one("--op", (*options.OPS, "quantized"), None)
@options.one(
    "--rung",
    str,
    None,
    "Only this rung, at random points of its parameter space.",
    shell_complete=options.rung_names,
)
@options.one("--seed", options.Whole(0), 0)
@options.device()
@options.workers("Processes; default: one a core, on a GPU one.")
@click.option(
    "--share",
    type=click.Path(path_type=Path, dir_okay=False),
    help="On a GPU: also check what it is served, measure a little, and pack all into this archive "
    "(.zip) for the project, without names of host or user.",
)
@click.option("--evidence", help="Of the repository's tool `proofs`.", hidden=True)
@click.option("--stale", is_flag=True, hidden=True)
@click.option("--check", is_flag=True, hidden=True)
@click.option("--anew", is_flag=True, hidden=True)
def verify(
    cases: int,
    op: str | None,
    rung: str | None,
    seed: int,
    device: str,
    workers: int | None,
    share: Path | None,
    **of_proofs: object,
) -> Any:
    """Multiply random matrices through the public API and judge every element.

    Sizes mostly 0 to 33, all dtypes, layouts, views, batches and quantisations; exact integers must
    come out equal, other numbers within the bound derived from how the kernel rounds. The same
    seed gives the same cases. A failing case is printed as Python that repeats it.
    """
    import os
    import time

    from gemmule_lab.cli import WrongResultError, tool_sentence
    from gemmule_lab.progress import bar
    from gemmule_lab.verify import on_device
    from gemmule_lab.verify.random_products import Choice
    from gemmule_lab.verify.workers import run_trials

    if any(of_proofs.values()):
        raise ValueError(tool_sentence("gemmule verify --evidence, --stale or --check", "proofs"))
    options.check_device(device)
    if share is not None and (device == "cpu" or share.exists()):
        raise ValueError(
            f"--share is {share}; it must be a file that is not there yet, with --device cuda."
        )
    if device != "cpu":
        options.ordinal_of(device)
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
    if share is not None:  # also where something was wrong
        from gemmule_lab import sharing

        click.echo(sharing.in_words(sharing.share(share, device, tally, seed)))
        click.echo(f"wrote {share}; evidence/README.md of the repository says where it goes")
    told = {name: getattr(tally, name) for name in TOLD}
    if not tally.ok:
        raise WrongResultError(
            f"{tally.wrong:,} wrong, {tally.raised:,} raised, {len(tally.deaths)} workers died, of "
            f"{tally.done:,} cases.",
            told,
        )
    return told


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
