"""Across the rows in vector registers: four rows' weights are looked up and added to y."""

from __future__ import annotations

from gemmule.backends.cpu.target import missing_vectors
from gemmule.core.rung import CpuRung
from gemmule.rungs.quantized.cpu._operands import (
    FLOAT32_SIGNATURES,
    float_arithmetic,
    groups_fit_lanes,
    read_time,
    takes_row_across,
)
from gemmule.rungs.quantized.cpu.vector.panels import bind_across, job_across

RUNG = CpuRung(
    title="Panels in vector registers",
    idea="The look-up table of a group holds weights times x[i], so a nibble costs a shift, a "
    "look-up and an addition. Four rows share each load and store of y.",
    source="our own",
    op="matvec",
    signatures=FLOAT32_SIGNATURES,
    arithmetic=float_arithmetic(),
    after="panels",
    accepts_quant=lambda problem: takes_row_across(problem) and groups_fit_lanes(problem),
    suggest=read_time(0.75),
    bind=bind_across,
    job=job_across,
    available=missing_vectors,
)
