"""Streamed codes: the touched experts' codes of 4 or 8 bits go by once, for a few tokens each.

Blocks share the work as in `streamed_experts`. Each warp copies the codes of its next turn to
shared memory of its own while it multiplies those of the last, and has asked for their scales;
lanes read from there what belongs together, so that an instruction stays within 32 codes and so
within one group. Codes less their middle become halves exactly, tensor cores sum a group of
products and, for zero points beside ones, of the inputs alone, and the group's scale and zero point
come to those sums in float32: no weight is rounded.
"""

from __future__ import annotations

from gemmule.core.architectures import SINCE_AMPERE
from gemmule.core.device_model import Terms
from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import grouped
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, flat, instance, modelled

WARPS, ROWS, PITCH = 8, 32, 4
STAGES_BYTES = WARPS * 2 * ROWS * (128 + 16)  # two of each warp, rows 16 bytes apart
MOST_EXPERTS = 4096


def _depth(problem: Problem) -> int:
    """Return how many codes of a row a warp multiplies in a turn."""
    return 8 * (128 // (4 if problem.b == "uint4" else 8))


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    spec, wide, tokens = problem.quant, params["wide"], params["tokens"]
    if spec is None:
        raise TypeError("streamed_codes multiplies codes; the matrices are dense.")
    types = (CTYPE[problem.a], CTYPE[problem.out], CTYPE[spec.scale_dtype])
    sums = 2 * (WARPS // wide) * tokens * (ROWS * wide + PITCH)
    return (
        flat(
            instance("streamed_codes", *types, spec.bits, spec.has_zeros, tokens // 8, wide),
            machine.units * (1 if tokens > 16 else 2),
            32 * WARPS,
            smem=STAGES_BYTES + 4 * (sums + problem.batch + 1),
        ),
    )


def _chain(problem: Problem, params: Params) -> int:
    parts, depth = WARPS // params["wide"], _depth(problem)
    return int(ceil_div(problem.k, parts * depth) * (depth + depth // 32) + parts)


def _takes(problem: Problem) -> bool:
    spec = problem.quant
    if spec is None or spec.transposed or spec.has_perm or spec.layout != "row":
        return False
    size = problem.k if spec.group_size == -1 else spec.group_size
    return size is not None and size > 0 and size % 32 == 0


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Multiply codes at a rate by their bits and tokens, or as the memory brings them."""
    bits, tokens, wide = (4 if problem.b == "uint4" else 8), params["tokens"], params["wide"]
    slab = ROWS * wide * problem.k
    count, _ = grouped.pieces(problem, tokens)
    shape = problem, machine, count * ceil_div(problem.n, ROWS * wide), slab * bits / 8
    return grouped.items(*shape, f"{wide}", {f"code_s {bits} {tokens} {wide}": slab})


RUNG = CudaRung(
    title="Streamed codes",
    idea="Codes become halves exactly, and a group's scale comes to its sum.",
    archs=SINCE_AMPERE,
    source="Marlin (Frantar et al., 2024), for groups of experts",
    signatures=tuple(
        (t, codes, out)
        for codes in ("uint4", "uint8")
        for t in ("bfloat16", "float16")
        for out in (t, "float32")
    ),
    arithmetic=lambda problem: Arithmetic("float32", chain=_chain, per_add=2.0),
    after="code_by_code",
    quantized=True,
    accepts_quant=_takes,
    layouts=("row",),
    layouts_b=("row",),
    params={"tokens": (8, 16, 32), "wide": (1, 2, 4)},
    constraints=(
        Constraint(
            "bases and leading strides are multiples of 16 bytes, and k of 32",
            lambda problem, params: problem.alignment == 16 and problem.k % 32 == 0,
        ),
        Constraint(
            f"at most {MOST_EXPERTS} experts, and less than 2^31 pieces of work",
            lambda problem, params: (
                problem.batch <= MOST_EXPERTS
                and grouped.most_pieces(problem, 8) * ceil_div(problem.n, 32) < 2**31
                and max(problem.m, problem.n, problem.k) < 2**31 - 2**16
                and problem.batch * problem.n * (problem.k // 32) < 2**31
            ),
        ),
        Constraint(
            "32 tokens have room beside each other where one or two warps share a sum",
            lambda problem, params: params["tokens"] <= 16 or params["wide"] > 1,
        ),
    ),
    steps=_steps,
    **modelled("grouped/streamed_codes", _terms),
)
