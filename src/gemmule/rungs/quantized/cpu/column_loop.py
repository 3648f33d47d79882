"""A quantised matrix times a matrix in plain loops: that of one vector for every column."""

from __future__ import annotations

from dataclasses import replace

from gemmule.rungs.quantized.cpu import unpack_loop
from gemmule.rungs.quantized.cpu._operands import read_time

RUNG = replace(
    unpack_loop.RUNG,
    title="Unpack in a loop, for every column",
    idea="The plain loop once for every column of B.",
    op="matmul",
    after="unpack_loop",
    branch="several columns",
    suggest=read_time(0.015, alone=True),
)
