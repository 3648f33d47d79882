"""Across the rows in vector registers: four rows' weights are looked up and added to y."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from gemmule.backends.cpu.calls.builtin import Job
from gemmule.backends.cpu.target import missing_vectors
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Params
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.rungs.quantized.cpu._operands import (
    FLOAT32_SIGNATURES,
    Run,
    Stored,
    bound,
    float_arithmetic,
    groups_fit_lanes,
    read_time,
    takes_row_across,
)
from gemmule.rungs.quantized.cpu.vector.panels import spread_job, spread_rows


def _bind(problem: Problem, params: Params) -> Run:
    def core(parts: Stored, x: NDArray[Any], y: NDArray[Any]) -> None:
        spread_rows(parts, x, y)

    return bound(core, "float32")


def _job(problem: Problem, params: Params, matrix: QuantizedMatrix, x: Any) -> Job | None:
    return spread_job(problem, matrix)


RUNG = CpuRung(
    title="Panels in vector registers",
    idea="The look-up table of a group holds weights times x[i], so a nibble costs a shift, a "
    "look-up and an addition. Four rows share each load and store of y.",
    source="our own",
    op="matvec",
    signatures=FLOAT32_SIGNATURES,
    arithmetic=float_arithmetic(),
    after="panels",
    quantized=True,
    accepts_quant=lambda problem: takes_row_across(problem) and groups_fit_lanes(problem),
    suggest=read_time(0.75),
    bind=_bind,
    job=_job,
    available=missing_vectors,
)
