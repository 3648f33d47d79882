"""``gemmule tune --device-model``: make a device's model, show what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from gemmule.core.host_rates import HostRates
from gemmule.core.problem import Problem
from gemmule.settings import tuning_enabled
from gemmule.tuning import models
from gemmule_lab.progress import bar
from gemmule_lab.report.render import print_table
from gemmule_lab.report.tables import TableData

UNITS = {
    **dict.fromkeys(("read", "core_read", "core_cached"), (1e9, "GB/s")),
    "fma": (1e9, "G multiply-adds/s"),
    "blas": (1e9, "GFLOP/s"),
    "convert": (1e9, "G elements/s"),
    **dict.fromkeys(("call", "spread", "blas_call"), (1e-6, "us")),
    "asked": (1.0, "times"),
}


def _in_units(name: str, value: float | str) -> str:
    """Return one of a CPU's rates for people."""
    if isinstance(value, str):
        return value
    scale, unit = UNITS[name]
    return f"{value / scale:.3g} {unit}"


def make(
    device: str,
    *,
    seed: int = 0,
    products: int | None = None,
    only: str | None = None,
    beside: Sequence[Problem] = (),
) -> dict[str, Any]:
    """Measure the sample, fit and keep the model; print errors and losses, and return them.

    beside: products besides those of the seed. Ctrl-C keeps what was measured so far.
    """
    try:
        with bar() as progress:
            task = progress.add_task("measuring")

            def told(what: str, done: int, total: int) -> None:
                progress.update(task, description=what, completed=done, total=total)

            made = models.make(device, told, seed=seed, products=products, only=only, beside=beside)
    except KeyboardInterrupt:
        click.echo("what was measured so far is kept; the same command goes on behind it")
        raise
    judged = made.judged
    rows = tuple((name, f"{error:.0%}") for name, error in sorted(judged.errors.items()))
    if rows:
        title = "errors of nine in ten estimates, of products that they were not fitted to"
        print_table(TableData(title, ("rung", "within"), rows, (False, True)))
    if isinstance(judged.model, HostRates):
        for name, value in asdict(judged.model).items():
            click.echo(f"{name:12} {_in_units(name, value)}")
    click.echo(f"products measured: {made.products}, ways: {made.rows}")
    if not judged.after.products:
        click.echo("too few to fit to or to judge by; --products N measures more")
    if judged.after.products:
        click.echo(f"choices by the model before lose {judged.before.words()}")
        click.echo(f"choices by the fitted one lose {judged.after.words()}")
    click.echo("the cache cannot be written" if made.path is None else f"wrote {made.path}")
    if not tuning_enabled():
        click.echo("GEMMULE_TUNE is 0: what was measured is ignored until it is unset.")
    return {
        "file": made.path,
        "products": made.products,
        "rows": made.rows,
        "errors": dict(judged.errors),
        "before": judged.before,
        "after": judged.after,
        "rates": judged.model if isinstance(judged.model, HostRates) else None,
    }
