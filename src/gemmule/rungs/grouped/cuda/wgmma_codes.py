"""Tiles of codes: a code becomes a weight once for up to 256 tokens, in the registers of wgmma.

`streamed_codes` multiplies codes exactly as they are, and takes each apart again for every 8 or 16
tokens. From some 32 tokens an expert on that is what limits. Here 192 columns of a matrix meet up
to 128 tokens, or 128 columns 256: TMA copies rows of codes as they lie, and tiles of the tokens,
and a warpgroup for each 64 columns makes weights of codes where the instruction reads them. A
weight is rounded once to the dtype of the tokens, as the dense weight that it stands for was: the
difference to the zero point is exact, and the scale has two parts. Pieces of an expert's tokens are
even, and no wider instruction is given than they need.
"""

from __future__ import annotations

from collections.abc import Iterable

from gemmule.core.device_model import Terms
from gemmule.core.packing import TensorMap
from gemmule.core.problem import FLOAT4_DTYPE, Problem
from gemmule.core.rung import Arithmetic, Constraint, CudaRung, Machine, Params, Step, beside_codes
from gemmule.rungs._cuda import grouped, half_tiles
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, flat, instance, modelled

LINE, LINES, MXFP4_GROUP = 128, 2, 32
ROOM_BYTES = 227 * 1024 - 1024 - 8192  # for codes and tokens
MOST_EXPERTS, MOST_STAGES = 2000, 12


def _columns(width: int) -> int:
    return 128 if width > 128 else 192


def _unit(width: int) -> int:
    return 64 if width > 128 else 32


def _stages(width: int) -> int:
    room = ROOM_BYTES - LINES * LINE * _columns(width)
    return min(room // (width * 2 * half_tiles.DEPTH), MOST_STAGES)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    spec, width = problem.codes, params["tokens"]
    types = (CTYPE[problem.a], CTYPE[problem.out], grouped.scales(problem))
    stages, columns = _stages(width), _columns(width)
    room = stages * width * 2 * half_tiles.DEPTH + LINES * columns * LINE
    return (
        flat(
            instance("wgmma_codes", *types, spec.bits, spec.has_zeros, width, stages),
            machine.units,
            128 + 2 * columns,  # a warpgroup that asks for copies, and one for each 64
            smem=room + 4 * (problem.batch + 1),
            maps=(
                half_tiles.tile_map("a", _unit(width), along=True),
                TensorMap("b", (LINE, columns)),
            ),
        ),
    )


def _takes(problem: Problem) -> bool:
    spec = problem.quant
    if spec is None or spec.transposed or spec.has_perm or spec.layout != "row" or spec.exact:
        return False
    if not grouped.no_zeros(problem):
        return False
    if spec.has_zeros and problem.a == "float16":  # far zero points want scales that halves lack
        return False
    size = spec.group_size
    if problem.b == FLOAT4_DTYPE:  # whose weights are bfloat16 as they are
        return size == MXFP4_GROUP
    return size == -1 or (size is not None and size > 0 and size % half_tiles.DEPTH == 0)


WIDTHS = (128, 256)
EXACT_TOKENS = 8  # an expert, up to which no weight is rounded


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Wait for stages, by the tokens of a piece in whole instructions, or for the codes."""
    width, bits = params["tokens"], grouped.bits(problem)
    columns, unit = _columns(width), _unit(width)
    stages = ceil_div(problem.k, half_tiles.DEPTH)
    count, touched = grouped.pieces(problem, width)
    shape = problem, machine, count * ceil_div(problem.n, columns)
    moved = columns * problem.k * bits / 8 * touched / max(count, 1.0)
    each = stages * min(width, ceil_div(int(problem.m / max(count, 1.0)), unit) * unit)
    zeros = problem.quant is not None and problem.quant.has_zeros
    kind = " floats" if problem.b == FLOAT4_DTYPE else " zeros" * zeros
    busy = {f"stage_s {width}{kind}": stages, f"token_s {width}": each, "tile_s": 1.0}
    return grouped.items(*shape, moved, "", busy)


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    few = problem.m <= EXACT_TOKENS * problem.batch
    return [] if few else RUNG.space(problem)


RUNG = CudaRung(
    title="Tiles of codes",
    idea="A code becomes a weight once for up to 256 tokens, in the registers that wgmma reads.",
    source="PTX ISA: wgmma with A in registers; Machete's mixed operands, for groups of experts",
    # Beside float16, scales of 8 bits below what halves hold cost more than the bound allows, and
    # a power of two may be none.
    signatures=tuple(
        one for one in beside_codes("bfloat16", "float16") if "uint4" in one or "bfloat16" in one
    ),
    arithmetic=lambda problem: Arithmetic(
        "float32", chain=half_tiles.ARITHMETIC.chain, per_add=2.0, inputs=problem.a
    ),
    after="streamed_codes",
    quantized=True,
    accepts_quant=_takes,
    layouts=("row",),
    layouts_b=("row",),
    archs=("sm_90a",),
    params={"tokens": WIDTHS},
    constraints=(
        half_tiles.COUNTED,
        grouped.ALIGNED_CODES,
        Constraint(
            f"at most {MOST_EXPERTS} experts, and less than 2^31 columns of all",
            lambda problem, params: (
                problem.batch <= MOST_EXPERTS and problem.batch * problem.n < 2**31
            ),
        ),
    ),
    steps=_steps,
    **modelled("grouped/wgmma_codes", _terms, _choices),
)
