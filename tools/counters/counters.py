"""Hardware counters of every CUDA rung at the ladders' fixed problems, by Nsight Compute.

One child process, `counters.counted`, launches each rung once between the profiler's
start and stop and says which kernels it launched; Nsight Compute gives a row of figures for each
kernel. A rung of several kernels gets the sums of what can be added, and means weighted by time of
what cannot.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gemmule.storage import lines
from gemmule_lab.profile import ncu

FILE, SCHEMA = "counters.jsonl", 1
SECONDS = 70  # for launching; Nsight Compute itself needs some more at both ends
LOAD = "pipe_lsu_mem_global_op"
METRICS = {
    "time ns": "gpu__time_duration.sum",
    "DRAM bytes read": "dram__bytes_read.sum",
    "DRAM bytes written": "dram__bytes_write.sum",
    "load requests": f"l1tex__t_requests_{LOAD}_ld.sum",
    "load sectors": f"l1tex__t_sectors_{LOAD}_ld.sum",
    "load sectors hit in L1": f"l1tex__t_sectors_{LOAD}_ld_lookup_hit.sum",
    "L2 sectors read": "lts__t_sectors_op_read.sum",
    "L2 sectors read, hit": "lts__t_sectors_op_read_lookup_hit.sum",
    "shared wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "shared bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "warp instructions": "smsp__inst_executed.sum",
    "occupancy %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "issue slots %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "FMA pipe %": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "tensor pipe %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
}


Params = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True)
class Mark:
    """What the child launched: a rung of a ladder, the product, and the kernels in order."""

    op: str
    rung: str
    title: str
    params: Params
    kernels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Counted:
    """The counters of one rung on one product; none, and a note, where they could not be read."""

    op: str
    rung: str
    title: str
    device: str
    date: str
    params: Params = field(default_factory=dict)
    kernels: tuple[str, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


def count(
    device: str, date: str, ops: Iterable[str], *, ordinal: int = 0, seconds: float = SECONDS
) -> list[Counted]:
    """Return the counters of every rung that there was time for; one note where there are none.

    ops: the ladders. seconds: after which the child launches no more.
    """
    options = ["--print-kernel-base", "function", "--profile-from-start", "off"]
    with tempfile.TemporaryDirectory(prefix="gemmule-counters-") as folder:
        marks = Path(folder) / "marks.jsonl"
        child = ["counters.counted", str(ordinal), str(seconds), ",".join(ops)]
        child.append(str(marks))
        rows, note = ncu.profile(
            METRICS, [*options, "--target-processes", "all"], child, 2 * seconds + 60
        )
        found = list(assign(list(lines.read_records(marks, SCHEMA, Mark)), rows, device, date))
    return found if any(one.counters for one in found) else [_nothing(device, date, note)]


def _nothing(device: str, date: str, note: str) -> Counted:
    return Counted("", "", "", device, date, note=note)


def assign(
    marks: Sequence[Mark], rows: Sequence[tuple[str, Mapping[str, float]]], device: str, date: str
) -> Iterator[Counted]:
    """Give the rows of kernels, which come in the order of launching, to the rungs they belong to.

    From the first kernel of another name on, nothing is assigned: the rest could be shifted.
    """
    at = 0
    for mark in marks:
        mine = rows[at : at + len(mark.kernels)]
        if [name for name, _ in mine] != list(mark.kernels):
            return
        at += len(mark.kernels)
        counted = together([counters for _, counters in mine])
        where = mark.op, mark.rung, mark.title, device, date
        yield Counted(*where, mark.params, mark.kernels, counted)


def together(kernels: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the counters of several kernels as of one: sums, and shares weighted by time."""
    spans = [one.get("time ns", 0.0) for one in kernels]
    whole = sum(spans)
    found = {}
    for name in METRICS:
        if not all(name in one for one in kernels):
            continue
        values = [one[name] for one in kernels]
        if not name.endswith("%"):
            found[name] = sum(values)
        elif whole > 0:
            weighted = sum(v * span for v, span in zip(values, spans, strict=True))
            found[name] = round(weighted / whole, 3)
    return found


def write(path: Path, found: Iterable[Counted]) -> None:
    """Put counters on file, in place of those of the same rungs and products.

    What else is on file stays: there was no time for it, or nobody asked. OSError where the file
    cannot be written.
    """
    anew = {(one.op, one.rung, one.title): one for one in found}
    kept = [
        one
        for one in lines.read_records(path, SCHEMA, Counted)
        if (one.op, one.rung, one.title) not in anew
    ]
    lines.write_records(path, SCHEMA, (*kept, *anew.values()))
