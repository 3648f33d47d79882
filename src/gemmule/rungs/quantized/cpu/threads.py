"""Four rows at a time on all threads."""

from __future__ import annotations

from dataclasses import replace

from gemmule.rungs.quantized.cpu import four_rows
from gemmule.rungs.quantized.cpu._operands import ROWS_PER_TASK, read_time

RUNG = replace(
    four_rows.RUNG,
    title="Threads",
    idea="Tasks of some rows each go to all threads. Small matrices stay on one.",
    after="four_rows",
    params={"rows_per_task": ROWS_PER_TASK},
    suggest=read_time(0.40),
)
