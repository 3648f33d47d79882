"""``python -m counters``: the CUDA ladders' times at fixed problems, and hardware counters."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection
from pathlib import Path

import click

from counters import counters as engine
from counters import ladder_times
from gemmule.storage.evidence import slug
from gemmule_lab.cli import WrongResultError, run
from gemmule_lab.commands import _options as options
from gemmule_lab.harness.bench import settled
from gemmule_lab.harness.device import DeviceBench
from gemmule_lab.records import results
from gemmule_lab.records.rows import Environment, Row

CEILING_SECONDS = 6.0


@click.command(short_help="Time and count every CUDA rung at fixed problems.")
@options.device("cuda")
@options.folder("--evidence", required=True, help="Write both files into the device's folder here.")
@options.some("--op", "ops", "Only this ladder; may be repeated.")
@options.seconds(0.02, 60, "Time spent on each rung and product.", 0.25)
@options.flag("--no-ncu", "Leave the hardware counters as they are on file.")
def counters(
    device: str, evidence: Path, ops: tuple[str, ...], seconds: float, no_ncu: bool
) -> None:
    """Renew what the pages of the CUDA ladders show: times of every rung, cold and interleaved with
    the rung before it and PyTorch, and the counters of one launch of each, by Nsight Compute.
    """
    known = dict.fromkeys(spot.op for spot in ladder_times.spots())
    unknown = set(ops) - set(known)
    if unknown:
        raise ValueError(f"--op {unknown.pop()} is no ladder: matvec, vecmat, matmul, quantized.")
    ordinal = options.ordinal_of(device)
    bench = DeviceBench(ordinal)
    environment = bench.environment(CEILING_SECONDS)
    folder = evidence / slug(environment.device)
    rows: list[Row] = []
    wrong: list[str] = []
    chosen = [spot for spot in ladder_times.spots() if spot.op in (ops or known)]
    for spot in chosen:
        found, notes = ladder_times.time_spot(spot, bench, environment, seconds)
        rows += found
        _show(found, environment)
        wrong += [note for note in notes if ladder_times.WRONG in note]
        for note in notes:
            click.echo(f"not timed: {note}")
    again = functools.partial(bench.ceilings_again, CEILING_SECONDS / 2)
    rows, environment = settled(rows, environment, again)
    path = folder / ladder_times.FILE
    others = {spot.title for spot in ladder_times.spots()} - {spot.title for spot in chosen}
    results.replace(path, [*kept(path, others), environment, *rows])
    click.echo(f"wrote {path}: {len(rows)} rows")
    if not no_ncu:
        _count(folder, environment, ordinal, ops or tuple(known))
    if wrong:
        raise WrongResultError("; ".join(wrong))


def kept(path: Path, titles: Collection[str]) -> list[Environment | Row]:
    """Return the rows on file of these products, behind their environments."""
    if not path.is_file():
        return []
    found = results.read(path)
    rows = [row for row in found.rows if row.group in titles]
    used = dict.fromkeys(row.environment for row in rows)
    return [*(found.environments[one] for one in used), *rows]


def _count(folder: Path, environment: Environment, ordinal: int, ops: tuple[str, ...]) -> None:
    counted = engine.count(environment.device, environment.timestamp[:10], ops, ordinal=ordinal)
    for one in counted:
        if one.note:
            click.echo(f"not counted: {one.note}")
    if any(one.counters for one in counted):
        engine.write(folder / engine.FILE, counted)
        click.echo(f"wrote {folder / engine.FILE}: {len(counted)} rungs and products")


def _show(rows: list[Row], environment: Environment) -> None:
    for row in rows:
        ratios = ", ".join(f"{s.value:.2f} x {name}" for name, s in row.speedups.items())
        click.echo(f"{row.group}: {row.name} {row.times_us.median:.2f} us {ratios}".rstrip())


COMMAND = counters

if __name__ == "__main__":
    sys.exit(run(command=COMMAND, name="counters"))
