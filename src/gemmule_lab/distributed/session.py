"""``gemmule bench --suite distributed`` under torchrun: the ways of a matvec, one process a share.

    torchrun --nproc-per-node 2 -m gemmule bench --suite distributed --device cuda

Processes talk by NCCL on GPUs, by gloo else. All ways are checked, then timed by turns in an order
of chance, the same on every process; a time is that of the slowest process. On a GPU a time is that
of a captured graph's product, cold, and all GPUs begin together.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist

from gemmule.sharded.agree import together
from gemmule_lab.bench.grouped import clock
from gemmule_lab.distributed.ways import ALONE, Operands, Way, all_gather, operands, ways
from gemmule_lab.records import log
from gemmule_lab.records.distributed import KIND, DistributedRow
from gemmule_lab.records.environment import capture_environment, cpu_name
from gemmule_lab.records.rows import Times, times_of_us
from gemmule_lab.report.render import print_table
from gemmule_lab.report.tables import distributed_table

SIZES = {"cuda": (4096, 8192, 16384), "cpu": (512, 1024, 2048)}
DTYPES = {"cuda": torch.float16, "cpu": torch.float32}
SET_BYTES = {"cuda": 600_000_000, "cpu": 64_000_000}
CALLS = {"cuda": 40, "cpu": 4}  # in a sample
ROUNDS = 15


def start(device: str, sizes: Sequence[int], out: Path) -> dict[str, Any]:
    """Measure, print, write, and return the file; every process of a torchrun calls it.

    ValueError outside torchrun; PeerError on all where one fails (out of memory, say).
    """
    if "RANK" not in os.environ:
        raise ValueError(
            "--suite distributed runs once for each process of a group; start it as torchrun "
            "--nproc-per-node 2 -m gemmule bench --suite distributed."
        )
    kind = device.partition(":")[0]
    place = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(place)
        dist.init_process_group("nccl", device_id=place)
    else:
        dist.init_process_group("gloo")
    try:
        return _measure(place, sizes or SIZES[kind], out)
    finally:
        dist.destroy_process_group()


def _measure(place: torch.device, sizes: Sequence[int], out: Path) -> dict[str, Any]:
    kind, dtype, world = place.type, DTYPES[place.type], dist.get_world_size()
    transport = dist.get_backend()
    gpus = tuple(filter(None, together(None, "naming the GPUs", lambda: _gpu(place))))
    environment = capture_environment(
        (*gpus, cpu_name())[0], kind, ceilings={}, threads=torch.get_num_threads(), gpus=gpus
    )
    environment = replace(environment, data="integers from -1 to 1")
    path, leads = log.fresh(out, f"distributed-{transport}-{world}"), dist.get_rank() == 0
    about = (str(dtype).removeprefix("torch."), world, transport, topology())
    if leads:
        log.append(path, KIND, [environment])
    for n in sizes:
        found = timed(prepared(n, dtype, place), place)
        alone = found[0][1].median
        rows = []
        for way, times in found:
            cost = times, times.median / alone, way.sent_bytes, way.messages
            rows.append(DistributedRow(environment.id, way.name, n, *about, *cost))
        if leads:
            log.append(path, KIND, rows)
            print_table(distributed_table(rows))
    if leads:
        click.echo(f"wrote {path}")
    return {"file": path} if leads else {}


def prepared(n: int, dtype: torch.dtype, place: torch.device) -> list[Way]:
    """Return the ways of n x n products, each checked; what fails on one process is told by all.

    ValueError where n is no multiple of the processes, or a way gives another result.
    """
    world = dist.get_world_size()
    if n % world:
        raise ValueError(f"--size {n} is no multiple of {world} processes.")
    made: list[Operands] = []
    together(
        None,
        f"making operands of {n} x {n}",
        lambda: made.append(operands(n, dtype, place, SET_BYTES[place.type])),
    )
    part = (made[0].rows[0].double() @ made[0].x.double()).to(dtype)
    whole = part.new_empty(n)
    all_gather(whole, part)
    found = list(ways(made[0]))
    for way in found:
        wanted = part if way.name == ALONE else whole
        if not torch.equal(way.run(), wanted):
            raise ValueError(f"{way.name} of {n} x {n} gave another result than the exact one.")
    return found


def timed(found: Sequence[Way], place: torch.device) -> list[tuple[Way, Times]]:
    """Return each way's times, that of the slowest process in each round."""
    samples: dict[str, list[float]] = {way.name: [] for way in found}
    clocks = [(way, _clock(way, place)) for way in found]
    order = np.random.default_rng(0)
    for _ in range(ROUNDS):
        for at in order.permutation(len(clocks)):
            way, sample = clocks[at]
            dist.barrier()
            slowest = torch.tensor([sample()], dtype=torch.float64, device=place)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            samples[way.name].append(float(slowest))
    return [(way, times_of_us(samples[way.name])) for way in found]


def _clock(way: Way, place: torch.device) -> Callable[[], float]:
    """Return what times calls of a way; on GPUs a captured graph, which an all-reduce begins."""

    def call(_: int) -> Any:
        return way.run()

    if place.type == "cpu":
        return clock(call, None, CALLS["cpu"])
    together_now = torch.zeros(1, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        for turn in range(3):
            call(turn)
    begun = functools.partial(dist.all_reduce, together_now)
    return clock(call, torch.cuda.current_device(), CALLS["cuda"], begun)


def _gpu(place: torch.device) -> str:
    return str(torch.cuda.get_device_name(place)) if place.type == "cuda" else ""


def topology() -> str:
    """Return how the GPUs of this machine are linked, as ``nvidia-smi topo -m`` draws it; or ""."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    drawn = done.stdout.partition("Legend")[0] if done.returncode == 0 else ""
    return re.sub(r"\x1b\[[0-9;]*m", "", drawn).strip()  # terminals underline the head
