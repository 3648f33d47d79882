"""Streamed codes: the touched experts' codes of 4 or 8 bits go by once, for a few tokens each.

Blocks share the work as in `streamed_experts`. Each warp copies the codes of its next turn to
shared memory of its own while it multiplies those of the last, and has asked for their scales;
lanes read from there what belongs together, so that an instruction stays within 32 codes and so
within one group. Codes less their middle become halves exactly, tensor cores sum a group of
products and, for zero points beside ones, of the inputs alone, and the group's scale and zero point
come to those sums in float32: no weight is rounded.
"""

from __future__ import annotations

from dataclasses import replace

from gemmule.core.architectures import SINCE_AMPERE
from gemmule.core.device_model import Terms
from gemmule.core.problem import FLOAT4_DTYPE, FLOAT8_CODES, Problem
from gemmule.core.rung import (
    Arithmetic,
    ByIndex,
    Constraint,
    CudaRung,
    Machine,
    Params,
    Step,
    beside_codes,
)
from gemmule.rungs._cuda import grouped
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, flat, instance, modelled

WARPS, ROWS, LINE, PITCH = 8, 32, 128, 4
STAGES_BYTES = WARPS * 2 * ROWS * LINE  # two of each warp


_KINDS = {FLOAT4_DTYPE: "floats", FLOAT8_CODES: "float8"}  # of coefficients


def _depth(problem: Problem) -> int:
    """Return how many codes of a row a warp multiplies in a turn."""
    return 8 * (128 // grouped.bits(problem))


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    spec, wide, tokens = problem.codes, params["wide"], params["tokens"]
    types = (CTYPE[problem.a], CTYPE[problem.out], grouped.scales(problem))
    about = spec.bits, spec.has_zeros, tokens // 8, wide
    sums = (WARPS // wide) * tokens * (ROWS * wide + PITCH)
    return (
        flat(
            instance("streamed_codes", *types, *about),
            2 * machine.units,
            32 * WARPS,
            smem=STAGES_BYTES + 4 * (sums + problem.batch + 1),
        ),
    )


def _routed(problem: Problem, params: Params, machine: Machine, way: ByIndex) -> Step:
    """Return the launch that sorts few rows for itself; a slab of gates and ups has two warps."""
    wide = max(params["wide"], 2 if way.gated else 1)
    (step,) = _steps(replace(problem, out=way.out), {**params, "wide": wide}, machine)
    return grouped.routed(step, problem, way)


def _chain(problem: Problem, params: Params) -> int:
    parts, depth = WARPS // params["wide"], _depth(problem)
    return int(ceil_div(problem.k, parts * depth) * (depth + depth // 32) + parts)


def _takes(problem: Problem) -> bool:
    spec = problem.quant
    if spec is None or spec.transposed or spec.has_perm or spec.layout != "row":
        return False
    size = problem.k if spec.group_size == -1 else spec.group_size
    return size is not None and size > 0 and size % 32 == 0 and grouped.no_zeros(problem)


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Multiply codes at a rate by their bits and tokens, or as the memory brings them."""
    bits, tokens, wide = grouped.bits(problem), params["tokens"], params["wide"]
    slab, kind = ROWS * wide * problem.k, _KINDS.get(problem.b, f"{bits}")
    count, _ = grouped.pieces(problem, tokens)
    shape = problem, machine, count * ceil_div(problem.n, ROWS * wide), slab * bits / 8
    return grouped.items(*shape, f"{wide}", {f"code_s {kind} {tokens} {wide}": slab})


RUNG = CudaRung(
    title="Streamed codes",
    idea="Codes become halves exactly, and a group's scale comes to its sum.",
    archs=SINCE_AMPERE,
    spills=True,  # some tens of bytes beside 16 tokens
    source="Marlin (Frantar et al., 2024), for groups of experts",
    signatures=beside_codes("bfloat16", "float16"),
    arithmetic=lambda problem: Arithmetic("float32", chain=_chain, per_add=2.0),
    after="code_by_code",
    quantized=True,
    accepts_quant=_takes,
    layouts=("row",),
    layouts_b=("row",),
    params={"tokens": (8, 16), "wide": (2, 1)},
    constraints=(
        grouped.ALIGNED_CODES,
        grouped.LISTED,
        Constraint(
            "less than 2^31 groups of 32 codes",
            lambda problem, params: problem.batch * problem.n * (problem.k // 32) < 2**31,
        ),
    ),
    steps=_steps,
    routed=_routed,
    **modelled("grouped/streamed_codes", _terms),
)
