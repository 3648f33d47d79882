"""Across the rows in vector registers: four rows' weights are looked up and added to y."""

from __future__ import annotations

from gemmule.backends.cpu.target import missing_vectors
from gemmule.core.rung import CpuRung
from gemmule.rungs.quantized.cpu import _operands as operands
from gemmule.rungs.quantized.cpu.vector.panels import bind_across, job_across

RUNG = CpuRung(
    title="Panels in vector registers",
    idea="The look-up table of a group holds weights times x[i], so a nibble costs a shift, a "
    "look-up and an addition. Four rows share each load and store of y.",
    source="our own",
    op="matvec",
    signatures=operands.VECTOR_SIGNATURES,
    arithmetic=operands.float_arithmetic(),
    after="panels",
    accepts_quant=operands.takes_lanes_across,
    suggest=operands.read_time(0.75),
    bind=bind_across,
    job=job_across,
    available=missing_vectors,
)
