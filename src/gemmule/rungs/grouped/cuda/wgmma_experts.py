"""Tiles of experts: TMA copies what warpgroups multiply, for one token or five hundred.

The matrix instruction of Hopper reads both operands from shared memory, so no lane of a warp loads
or permutes anything: one thread has TMA copy 128 columns of the expert's matrix and a tile of its
tokens, as far ahead as a ring of 4 to 12 stages is long and into the next expert, and two
warpgroups multiply. The matrix takes the instruction's 64 rows and the tokens its columns, 16 to
256 of them: a ragged end costs few of them, and 16 tokens an expert no more than the bytes. An
expert's tokens are cut into even pieces, and each is multiplied by the narrowest instruction that
holds it: at 512 tokens an expert that is a sixth of the time. What a tile holds beyond the group's
end are rows of the next one; they are multiplied and not stored. Tiles that share columns of W run
side by side, so that it is read from memory once.
"""

from __future__ import annotations

from gemmule.core.device_model import Terms
from gemmule.core.problem import Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import grouped, half_tiles
from gemmule.rungs._cuda.geometry import ceil_div, flat, instance, modelled, type_arguments
from gemmule.rungs._cuda.terms import beside

HEIGHT, THREADS = 128, 384
ROOM_BYTES = 227 * 1024 - 1024 - 8192  # for stages, beside barriers and the list
MOST_EXPERTS, MOST_STAGES = 2000, 12


def _stage_bytes(width: int) -> int:
    return (HEIGHT + width) * half_tiles.DEPTH * 2


def _stages(width: int) -> int:
    return min(ROOM_BYTES // _stage_bytes(width), MOST_STAGES)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    width, along = params["tokens"], problem.layout_b == "col"
    template = type_arguments(problem), width, _stages(width), along
    return (
        flat(
            instance("wgmma_experts", *template),
            machine.units,
            THREADS,
            smem=_stages(width) * _stage_bytes(width) + 4 * (problem.batch + 1),
            maps=(
                half_tiles.tile_map("a", min(width, 64), along=True),
                half_tiles.tile_map("b", HEIGHT, along),
            ),
        ),
    )


WIDTHS = (16, 32, 64, 128, 256)


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Wait for stages, by the tokens of a piece, or for bytes, some from the L2 again."""
    width, stages = params["tokens"], ceil_div(problem.k, half_tiles.DEPTH)
    count, touched = grouped.pieces(problem, width)
    each = problem.m / max(count, 1.0)  # tokens of a piece, which are even
    share = touched / max(count, 1.0)  # a slab's other pieces mostly find it in the L2
    slab = 2.0 * HEIGHT * half_tiles.DEPTH * stages
    busy = {f"stage_s {width}": stages, f"token_s {width}": stages * each, "tile_s": 1.0}
    again = {"again_s": slab * (1.0 - share), "tokens_s": slab * each / HEIGHT}
    shape = problem, machine, count * ceil_div(problem.n, HEIGHT), slab * share
    items, left = grouped.items(*shape, f"{width}", busy, again), problem.m * problem.n
    first, listing = grouped.listed(problem, machine, touched), {"listing_s": problem.batch}
    return beside(items, first, {"left_s": left}, {}, listing)


RUNG = CudaRung(
    title="Tiles of experts",
    idea="TMA copies tiles of the touched experts and their tokens; two warpgroups multiply them.",
    source="CUTLASS' grouped kernels for Hopper; DeepGEMM's for groups of rows (2025)",
    signatures=grouped.HALF_SIGNATURES,
    arithmetic=lambda problem: half_tiles.ARITHMETIC,
    after="streamed_experts",
    layouts=("row",),
    layouts_b=("row", "col"),
    archs=("sm_90a",),
    params={"tokens": WIDTHS},
    constraints=(
        half_tiles.ALIGNED,
        half_tiles.COUNTED,
        Constraint(
            f"at most {MOST_EXPERTS} experts", lambda problem, params: problem.batch <= MOST_EXPERTS
        ),
    ),
    steps=_steps,
    **modelled("grouped/wgmma_experts", _terms),
)
