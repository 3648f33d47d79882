"""Hardware counters of one launch, by Nsight Compute in a child process.

Run as a module, this file is that child: it launches one rung on one problem.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from gemmule.lab.studies.grid import Cell, Lane, Measured

SECONDS = 120
METRICS = {
    "load requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "load sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "load sectors hit in L1": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum",
    "bank conflicts, loads": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "bank conflicts, stores": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "shared load wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "barrier stall cycles": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "SM throughput percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "FMA pipe percent": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "memory throughput percent": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
}


def count(cell: Cell, lane: Lane) -> Measured:
    """Return the counters of one launch of a rung, or a note that says why there are none."""
    tool = shutil.which("ncu")
    if tool is None:
        return Measured(note="Nsight Compute (ncu) is not installed")
    job = {
        "op": cell.op,
        "m": cell.m,
        "n": cell.n,
        "columns": cell.columns,
        "layout": cell.layout,
        "rung": lane.rung,
        "params": dict(lane.params),
        "form": lane.form,
    }
    command = [
        tool,
        "--csv",
        "--page",
        "raw",
        "--clock-control",
        "none",
        "--launch-count",
        "1",
        "--kernel-name",
        f"regex:^{lane.rung}",
        "--metrics",
        ",".join(METRICS.values()),
        sys.executable,
        "-m",
        __name__,
        json.dumps(job),
    ]
    source = str(Path(__file__).parents[3])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Measured(note=f"Nsight Compute did not run: {error}"[:300])
    found = parse(done.stdout.splitlines())
    if not found:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["no output"]
        return Measured(note=f"Nsight Compute read no counters: {last[0]}"[:300])
    return Measured(figures=found)


def parse(lines: Iterable[str]) -> dict[str, float]:
    """Return the counters by our names from Nsight Compute's raw CSV page.

    >>> parse(['"ID","sm__throughput.avg.pct_of_peak_sustained_elapsed"', '"","%"', '"0","81.5"'])
    {'SM throughput percent': 81.5}
    """
    table = [row for row in csv.reader(lines) if len(row) > 1]
    begin = next((i for i, row in enumerate(table) if row[0] == "ID"), None)
    if begin is None or len(table) < begin + 3:
        return {}
    values: Mapping[str, str] = dict(zip(table[begin], table[begin + 2], strict=False))
    found = {}
    for name, metric in METRICS.items():
        try:
            found[name] = float(values[metric].replace(",", ""))
        except (KeyError, ValueError):  # a counter that this chip or tool does not have
            continue
    return found


def main(job: str) -> None:
    """Launch the rung of a job once."""
    from gemmule.lab.studies.gpu import GpuBench

    given = json.loads(job)
    lane = Lane(given["rung"], given["rung"], given["params"], form=given["form"])
    cell = Cell(
        "counters",
        given["op"],
        given["m"],
        given["n"],
        (lane,),
        "warm",
        given["columns"],
        given["layout"],
    )
    bench = GpuBench()
    sets = bench.sets(cell, lane)
    made = sets if isinstance(sets, str) else bench.bind(cell, lane, sets)
    if isinstance(made, str):
        raise SystemExit(made)


if __name__ == "__main__":
    main(sys.argv[1])
