"""Nsight Compute: finding it, running a module of the lab under it, reading what it counted."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

from gemmule_lab.processes import environment_of_child, in_toolkit

Rows = list[tuple[str, dict[str, float]]]


def find_ncu() -> str | None:
    """Return the path of Nsight Compute, or None where it is not installed."""
    found = shutil.which("ncu") or in_toolkit("ncu")
    return None if found is None else str(found)


def profile(
    metrics: Mapping[str, str], options: Sequence[str], child: Sequence[str], timeout_s: float
) -> tuple[Rows, str]:
    """Run ``python -m CHILD...`` under Nsight Compute.

    Returns (kernel, counters by our names) for each kernel that was watched, in their order, and
    what is to be said where there is none. metrics: Nsight Compute's name of each counter.
    """
    ncu = find_ncu()
    if ncu is None:
        return [], "Nsight Compute (ncu) is not installed"
    page = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    watched = [*options, "--metrics", ",".join(metrics.values())]
    try:
        done = subprocess.run(
            [ncu, *page, *watched, sys.executable, "-P", "-m", *child],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env=environment_of_child(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"Nsight Compute did not run: {error}"[:300]
    last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["no output"]
    note = f"Nsight Compute read no counters: {last[0]}"[:300]
    return parse(done.stdout.splitlines(), metrics), note


def parse(lines: Iterable[str], metrics: Mapping[str, str]) -> Rows:
    """Return (kernel, counters by our names) for each row of Nsight Compute's raw CSV page.

    >>> header = '"ID","Kernel Name","smsp__inst_executed.sum"'
    >>> lines = ["==PROF== Connected", header, '"","","inst"', '"0","naive","1,024"']
    >>> parse(lines, {"warp instructions": "smsp__inst_executed.sum"})
    [('naive', {'warp instructions': 1024.0})]
    """
    table = [row for row in csv.reader(lines) if len(row) > 1]
    begin = next((i for i, row in enumerate(table) if row[0] == "ID"), None)
    if begin is None:
        return []
    found = []
    for row in table[begin + 1 :]:
        values = dict(zip(table[begin], row, strict=False))
        if not row[0].isdigit():  # the row of units, and whatever the program itself printed
            continue
        counters = {}
        for name, metric in metrics.items():
            try:
                counters[name] = float(values[metric].replace(",", ""))
            except (KeyError, ValueError):  # a counter that this chip or tool does not have
                continue
        found.append((values.get("Kernel Name", ""), counters))
    return found
