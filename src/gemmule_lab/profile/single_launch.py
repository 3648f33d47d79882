"""Hardware counters of one launch, by Nsight Compute in a child process.

Run as a module, this file is that child: it launches one rung on one problem.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from gemmule_lab.profile import ncu
from gemmule_lab.studies.grid import Bench, Case, Cell, Found, Lane, Measured, Names, Task

SECONDS = 120
SIZES = ("op", "m", "n", "columns", "layout")  # of a cell: what the child is told of it
METRICS = {
    "load requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "load sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "load sectors hit in L1": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum",
    "L2 sectors read": "lts__t_sectors_op_read.sum",
    "DRAM bytes read": "dram__bytes_read.sum",
    "bank conflicts, loads": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "bank conflicts, stores": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "shared load wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared store wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "barrier stall cycles": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "SM throughput percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "FMA pipe percent": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "memory throughput percent": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
}


def count(cell: Cell, lane: Lane) -> Measured:
    """Return the counters of one launch of a rung, or a note that says why there are none."""
    sizes = {name: getattr(cell, name) for name in SIZES}
    job = {"cell": sizes, "rung": lane.rung, "params": dict(lane.params), "form": lane.form}
    options = ["--launch-count", "1", "--kernel-name", f"regex:^{lane.rung}"]
    rows, note = ncu.profile(METRICS, options, [__name__, json.dumps(job)], SECONDS)
    figures = rows[0][1] if rows else {}
    return Measured(figures=figures) if figures else Measured(note=note)


def counting(op: str, lanes: Sequence[Lane], case: Case) -> Task:
    """Return the part of a study that counts one launch of each lane; n alone: all sizes."""
    n = int(case["n"])
    columns = int(case.get("columns", n)) if op == "matmul" else 0
    cell = Cell("counters", op, int(case.get("m", n)), n, (), "warm", columns)
    by_name = {lane.name: lane for lane in lanes}

    def run(bench: Bench, names: Names, case: Case) -> Found:
        return {name: count(cell, by_name[name]) for name in names}

    return Task("counters", tuple(by_name), case, run)


def main(job: str) -> None:
    """Launch the rung of a job once."""
    from gemmule_lab.studies.harness import GpuBench

    given = json.loads(job)
    lane = Lane(given["rung"], given["rung"], given["params"], form=given["form"])
    cell = Cell("counters", lanes=(lane,), temperature="warm", **given["cell"])
    bench = GpuBench()
    sets = bench.sets(cell, lane)
    made = sets if isinstance(sets, str) else bench.bind(cell, lane, sets)
    if isinstance(made, str):
        raise SystemExit(made)


if __name__ == "__main__":
    main(sys.argv[1])
