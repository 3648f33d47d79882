"""Streamed rows: enough independent 16-byte loads in flight to keep the memory busy.

Adds to `warp_vector`: as many lanes share a row, and as many loads are in flight, as the shape
needs to fill the chip. A matvec reads its matrix once and computes next to nothing, so its speed is
the number of bytes under way. By Little's law that is bandwidth times latency, about 25 KB per
multiprocessor with HBM3. Each lane issues `unroll` times `rows` loads before it uses the first,
past the L1 (nothing is read twice); loads past the end of a row are predicated off rather than
branched around, so that the last turn too has all of its loads in flight at once. From 8 lanes to a
whole block share a row, by its length; lanes, threads and rows are chosen so that the grid covers
the chip whatever the shape is. Indices are 32 bits, because every instruction before the first load
delays a whole wave of blocks.

Rows of any alignment are read by the aligned vectors inside them, and x is shifted to match; a warp
takes rows that begin at the same place of a vector, so that one shifted x serves all of them.
"""

from __future__ import annotations

from gemmule.core.device_model import Terms
from gemmule.core.problem import FLOAT8, ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.geometry import (
    COMPLEX_SIGNATURES,
    FLOAT8_SIGNATURES,
    STREAMED_SIGNATURES,
    ceil_div,
    instance,
    lies,
    modelled,
    type_arguments,
)
from gemmule.rungs._cuda.rows import sums
from gemmule.rungs._cuda.stream import INDEXED, WHOLE, flags
from gemmule.rungs._cuda.terms import streaming


def _threads(params: Params) -> int:
    return 128 if params["lanes"] == 128 else 256


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    threads, lanes, rows = _threads(params), params["lanes"], params["rows"]
    template = type_arguments(problem), threads, lanes, rows, params["unroll"], flags(problem)
    grid = (ceil_div(problem.m, threads // lanes * rows), min(problem.batch, 65_535), 1)
    return (Step(instance("streamed_rows", *template), grid, (threads, 1, 1)),)


def _most_of_float8(problem: Problem) -> int:
    """Return the most loads in flight of float8, whose x takes registers, and so do its halves."""
    return 4 if ITEMSIZE[problem.b] <= 2 else 2


def _may_be(problem: Problem, params: Params) -> bool:
    """Whether a lane has 2 or 4 loads in flight, of rows that it can keep apart.

    Unaligned rows are shared by warps or blocks; a warp takes several that begin at the same place
    of a vector, whose neighbours go to the other warps of its block: 8 of halves, not 16 of bytes.
    """
    shape = (params["rows"], params["unroll"])
    if problem.a in FLOAT8 and (shape[0] > 1 or shape[1] > _most_of_float8(problem)):
        return False
    if problem.alignment == 16:
        return shape in ((1, 2), (1, 4)) or (params["lanes"], *shape) == (32, 4, 1)
    if shape == (1, 2):
        return bool(params["lanes"] >= 32)
    several = shape in ((2, 2), (4, 1)) and ITEMSIZE[problem.a] > 1
    return bool(params["lanes"] == 32 and (several or (shape == (1, 4) and problem.a == "float32")))


def _chain(problem: Problem, params: Params) -> int:
    vector = 16 // ITEMSIZE[problem.a]
    turns = ceil_div(problem.n, vector * params["lanes"]) + 2
    return turns * vector + 5 + int(params["lanes"]) // 32


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    threads, lanes, rows = _threads(params), params["lanes"], params["rows"]
    blocks = problem.batch * ceil_div(problem.m, threads // lanes * rows)
    turns = problem.n * ITEMSIZE[problem.a] / (16 * lanes * params["unroll"])
    kind = f"{lies(problem)} {lanes} {rows}"
    return streaming(problem, machine, (blocks, 1024 // threads, turns), kind)


RUNG = CudaRung(
    title="Streamed rows",
    idea="Several 16-byte loads in flight a lane; from 8 lanes to a block share a row.",
    source="Little's law; Hopper GEMV kernels of SGLang and vLLM",
    signatures=(*STREAMED_SIGNATURES, *FLOAT8_SIGNATURES, *COMPLEX_SIGNATURES),
    arithmetic=sums(_chain),
    after="warp_vector",
    params={"lanes": (256, 128, 32, 8), "rows": (1, 4, 2), "unroll": (2, 4, 1)},
    constraints=(
        INDEXED,
        WHOLE,
        Constraint(
            "rows x unroll is 1 x 2, 1 x 4, or 4 x 1 by 32 lanes; for unaligned rows 1 x 2, "
            "or 2 x 2, 4 x 1, of floats 1 x 4 by 32 lanes; of float8 one row, by float32 1 x 2",
            _may_be,
        ),
    ),
    batched=True,
    steps=_steps,
    sends=True,
    **modelled("matvec/streamed_rows", _terms),
)
