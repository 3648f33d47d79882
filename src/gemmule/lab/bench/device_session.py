"""``gemmule bench --device cuda``: run a suite, print one table, write the results."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from gemmule.backends.cuda import launch as cuda_launch
from gemmule.backends.cuda.arrays import ordinal_named
from gemmule.backends.cuda.graph_clock import GraphClock
from gemmule.lab.bench import device as device_bench
from gemmule.lab.bench import host_cost, host_to_host
from gemmule.lab.bench.device_suites import CUDA_SUITES, Product, narrowed
from gemmule.lab.bench.host import absences_in_words
from gemmule.lab.ceilings.device import summary
from gemmule.lab.peers.peer import Absence
from gemmule.lab.peers.registry import all_peers
from gemmule.lab.progress import tracked
from gemmule.lab.records import results
from gemmule.lab.records.rows import Environment, Row
from gemmule.lab.report.render import terminal_table
from gemmule.lab.report.tables import TableData, significant, speedup_text, without_empty_columns
from gemmule.storage.atomic import write_atomically

SPLIT_SIDES = (64, 1024, 4096)
FILE_WIDTH = 160  # columns where no terminal tells its width: the table is wide, and goes to a file


def bench(
    suite: str,
    device: str,
    ops: tuple[str, ...],
    dtypes: tuple[str, ...],
    sizes: tuple[int, ...],
    peers: tuple[str, ...],
    seconds: float,
    ceiling_seconds: float,
    out: Path,
) -> None:
    """Measure a suite on a GPU; DeviceError where there is none."""
    ordinal = ordinal_named(device)
    cuda_launch.CudaBackend().machine(device)
    if suite == "split":
        show_split(ordinal, sizes or SPLIT_SIDES, out)
        return
    environment = device_bench.measured_environment(ordinal, ceiling_seconds)
    for line in summary(environment.ceilings):
        click.echo(line)
    if suite == "host":
        rows, absent = host_cost.measure(environment, ordinal)
    else:
        chosen = narrowed(CUDA_SUITES[suite], ops, dtypes, sizes)
        names = _peer_names(peers, CUDA_SUITES[suite].peers)
        click.echo(f"suite {suite}, {CUDA_SUITES[suite].title}: {len(chosen)} products")
        rungs = CUDA_SUITES[suite].rungs
        rows, absent = _measure(chosen, environment, ordinal, names, rungs, seconds)
        rows, environment = device_bench.settled(rows, environment, ordinal, ceiling_seconds / 2)
    _console().print(terminal_table(table(f"{environment.device}, {suite}", rows)))
    for line in absences_in_words(absent):
        click.echo(f"not timed: {line}")
    _write(out, suite, environment, rows)


def _peer_names(asked: tuple[str, ...], usual: tuple[str, ...]) -> tuple[str, ...]:
    if "all" in asked:
        return tuple(peer.name for peer in all_peers("cuda"))
    return tuple(dict.fromkeys((*usual, *asked)))


def _measure(
    products: Sequence[Product],
    environment: Environment,
    ordinal: int,
    peers: tuple[str, ...],
    rungs: tuple[str | None, ...],
    seconds: float,
) -> tuple[list[Row], list[Absence]]:
    clock = GraphClock(ordinal)
    rows: list[Row] = []
    absent: list[Absence] = []
    for product in tracked(products, len(products), "measuring"):
        found, missing = device_bench.run(
            product, environment, clock, peers=peers, rungs=rungs, max_seconds=seconds
        )
        rows += found
        absent += missing
    return rows, absent


def table(title: str, rows: Sequence[Row]) -> TableData:
    """Return one line for each of our rows: time, bandwidth, share of the ceiling, ratios."""
    ours = [row for row in rows if row.kind == "rung"]
    peers = list(dict.fromkeys(name for row in ours for name in row.speedups))
    times = {(row.group, row.name): row.times_us.median for row in rows if row.kind == "peer"}
    header = ["product", "rung", "us", "GB/s", "TFLOP/s", "% of read ceiling", "error / bound"]
    for peer in peers:
        header += [f"{peer}, us", f"x over {peer}"]
    body = []
    for row in ours:
        share = row.percent_of_ceiling
        cells = [
            row.group,
            row.name,
            significant(row.times_us.median),
            significant(row.gbs),
            significant(row.tflops),
            "" if share is None else f"{share:.0f}",
            "" if row.error_ratio is None else f"{row.error_ratio:.2g}",
        ]
        for peer in peers:
            time_us = times.get((row.group, peer))
            cells.append("" if time_us is None else significant(time_us))
            cells.append(speedup_text(row.speedups.get(peer)))
        body.append((*cells, "; ".join(row.flags)))
    numeric = (False, False, *[True] * (len(header) - 2), False)
    return without_empty_columns(TableData(title, (*header, "remarks"), tuple(body), numeric))


def show_split(ordinal: int, sides: Sequence[int], out: Path) -> None:
    """Print and write the parts of a product's way from host to host, for square matrices."""
    lines = []
    for op in ("matvec", "matmul"):
        for side in sides:
            parts = host_to_host.split(op, (side, side), ordinal=ordinal)
            _console().print(terminal_table(_split_table(f"{op}, {side} x {side}, float32", parts)))
            lines += [
                json.dumps({"schema": 1, "op": op, "side": side, **dataclasses.asdict(part)})
                for part in parts
            ]
    stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%S")
    path = out / f"cuda-split-{stamp}.jsonl"
    if not write_atomically(path, "".join(f"{line}\n" for line in lines).encode()):
        raise OSError(f"{path} cannot be written.")
    click.echo(f"wrote {path}")


def _split_table(title: str, parts: Sequence[host_to_host.Part]) -> TableData:
    body = tuple(
        (
            part.name,
            significant(part.seconds * 1e3),
            "" if part.gbs is None else significant(part.gbs),
        )
        for part in parts
    )
    return TableData(title, ("part", "ms", "GB/s"), body, (False, True, True))


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def _write(out: Path, suite: str, environment: Environment, rows: Sequence[Row]) -> None:
    stamp = environment.timestamp[:19].replace(":", "").replace("-", "")
    path = out / f"cuda-{suite}-{stamp}.jsonl"
    results.append(path, [environment, *rows])
    click.echo(f"wrote {path}; gemmule report {path} -o page.html makes a page of it")
