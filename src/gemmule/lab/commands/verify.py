"""``gemmule verify``: random products by the thousand, each judged by the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from gemmule.lab.verify import Choice
    from gemmule.lab.verify_workers import Tally

SHOWN = 3


@click.command(short_help="Judge random products by the oracle.")
@click.option("--cases", type=click.IntRange(1, 10**9), default=20_000, show_default=True)
@click.option("--op", type=click.Choice(["matvec", "vecmat", "matmul", "quantized"]))
@click.option("--rung", help="Only this rung, at random points of its parameter space.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:<index>.")
@click.option(
    "--workers", type=click.IntRange(1, 64), help="Processes; default: one a core, on a GPU one."
)
def verify(
    cases: int, op: str | None, rung: str | None, seed: int, device: str, workers: int | None
) -> None:
    """Multiply random matrices through the public API and judge every element.

    Sizes mostly 0 to 33, all dtypes, layouts, views, batches and quantisations; exact integers must
    come out equal, other numbers within the bound derived from how the kernel rounds. The same
    seed gives the same cases. A failing case is printed as Python that repeats it.
    """
    import os
    import re
    import time

    from gemmule.lab.cli import WrongResultError
    from gemmule.lab.progress import bar
    from gemmule.lab.verify import Choice
    from gemmule.lab.verify_workers import run_trials

    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"--device is {device!r}; it must be cpu, cuda or cuda:<index>.")
    choice = Choice(op, rung, device)
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


def _report(tally: Tally, choice: Choice, seed: int, elapsed_s: float) -> None:
    from gemmule.lab.verify import snippet

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
    ranked = tally.rungs.most_common()
    click.echo("rungs: " + ", ".join(f"{name or 'none'} {count:,}" for name, count in ranked))


COMMAND = verify
