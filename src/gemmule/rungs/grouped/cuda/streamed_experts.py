"""Streamed experts: what each block works on is listed on the device, and W goes by once.

With up to some 16 tokens an expert the product is as fast as the touched matrices are read. Blocks
stay: each counts the pieces of at most 8, 16 or 32 tokens of all experts from their ends, takes an
equal share of (piece, slab of columns), and loads the first vectors of its next item before the
sums of the last one meet. Tensor cores take 16 columns of W and 8 tokens in an instruction, whose
fragments come straight from global memory: W as `torch.nn.Linear` keeps it, along k, as it lies;
along n after two steps of a column are put together in registers. Bytes of an expert without tokens
are not read, and no token is padded. An expert with many tokens has its matrix read once for each
piece, from the L2 as a rule: that is for the tiles of the next rung.
"""

from __future__ import annotations

from dataclasses import replace

from gemmule.core.architectures import SINCE_AMPERE
from gemmule.core.device_model import Terms
from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, ByIndex, Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import grouped
from gemmule.rungs._cuda.geometry import ceil_div, flat, instance, modelled, type_arguments
from gemmule.rungs._cuda.terms import beside

WARPS, FEWEST = 8, 8


def _shape(problem: Problem, params: Params) -> tuple[int, int]:
    """Return how many columns of W a warp multiplies in a turn, and over how many steps."""
    return (32, 64) if problem.layout_b == "col" else (64, 32)


def _shared_bytes(problem: Problem, params: Params) -> int:
    columns, _ = _shape(problem, params)
    along, wide = problem.layout_b == "col", params["wide"]
    pitch = columns * wide + (4 if along else 1)
    return int(4 * (WARPS // wide * params["tokens"] * pitch + problem.batch + 1))


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    along = problem.layout_b == "col"
    template = type_arguments(problem), along, params["tokens"] // 8, params["wide"]
    resident = 1 if params["tokens"] > 16 else 2
    return (
        flat(
            instance("streamed_experts", *template),
            machine.units * resident,
            32 * WARPS,
            smem=_shared_bytes(problem, params),
        ),
    )


def _routed(problem: Problem, params: Params, machine: Machine, way: ByIndex) -> Step | None:
    """Return the launch that sorts few rows for itself; a slab of gates and ups has two warps.

    Ups begin at whole vectors.
    """
    vectors = problem.layout_b == "col" or problem.n % 16 == 0
    if (way.gated and not vectors) or (way.index is not None and params["tokens"] != FEWEST):
        return None
    wide = max(params["wide"], 2 if way.gated else 1)
    (step,) = _steps(replace(problem, out=way.out), {**params, "wide": wide}, machine)
    return grouped.routed(step, problem, way)


def _chain(problem: Problem, params: Params) -> int:
    parts, (_, depth) = WARPS // params["wide"], _shape(problem, params)
    return int(ceil_div(problem.k, parts * depth) * depth + parts)


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Read W along k, or along n by the warps side by side."""
    wide, tokens = params["wide"], params["tokens"]
    slab = _shape(problem, params)[0] * wide
    count, touched = grouped.pieces(problem, tokens)
    shape = problem, machine, count * ceil_div(problem.n, slab), 2.0 * slab * problem.k
    kind = f"{problem.layout_b} {tokens} {wide}"
    items = grouped.items(*shape, kind, {f"step_s {tokens}": slab * problem.k})
    products = {"product_s": float(problem.m * problem.n * problem.k)}
    loaded = {"loaded_s": count * problem.n * problem.k * tokens}
    return beside(items, grouped.listed(problem, machine, touched), {}, loaded, products)


RUNG = CudaRung(
    title="Streamed experts",
    idea="Blocks list on the device what is to be done, and stream the touched matrices once.",
    archs=SINCE_AMPERE,
    source="skinny products on tensor cores as in Marlin (Frantar et al., 2024); persistent blocks",
    signatures=grouped.HALF_SIGNATURES,
    # Tensor cores align the products of an instruction and cut off.
    arithmetic=lambda problem: Arithmetic("float32", chain=_chain, per_add=2.0),
    after="row_by_row",
    layouts=("row",),
    layouts_b=("row", "col"),
    params={"tokens": (FEWEST, 16, 32), "wide": (1, 2, 4)},
    constraints=(
        grouped.ALIGNED,
        grouped.LISTED,
        Constraint(
            "32 tokens have room beside each other where one or two warps share a sum",
            lambda problem, params: params["tokens"] <= 16 or params["wide"] > 1,
        ),
    ),
    steps=_steps,
    routed=_routed,
    **modelled("grouped/streamed_experts", _terms),
)
