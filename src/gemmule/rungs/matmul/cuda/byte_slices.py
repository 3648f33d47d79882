"""Wide integers by slices: digits of a byte through the tensor cores, exact modulo 2^64.

Tensor cores multiply bytes. An integer of four bytes is five digits of 8 bits with a sign, one of
eight is eight modulo 2^64, and their product the sum of the digits' products times powers of 256,
of which those below 256^8 count: 24 products of bytes for one of four, 36 for one of eight, each
some 40 times as fast as multiply-adds of 64 bits. Those of one power are a single product along
lines that lie behind each other, whose sums int32 holds for some ten thousand steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from gemmule.backends.cuda import byte_slices
from gemmule.core import architectures
from gemmule.core.canonical import Call
from gemmule.core.device_model import Terms
from gemmule.core.problem import ITEMSIZE, Problem, longest_int32_sum
from gemmule.core.registry import kernels_in
from gemmule.core.rung import (
    Arithmetic,
    Constraint,
    LibraryRung,
    Machine,
    Params,
    integers,
)
from gemmule.quant.cuda.dequantise import digest
from gemmule.rungs._cuda.geometry import ceil_div, modelled
from gemmule.rungs._cuda.half_tiles import COUNTED
from gemmule.rungs._cuda.stream import ALONE
from gemmule.rungs._cuda.tiles import EVERY_LAYOUT
from gemmule.rungs.matmul.cuda import wgmma_int8, wgmma_specialized

LONGEST = longest_int32_sum("int8", "int8")


def _bind(problem: Problem, call: Call, params: Params) -> Callable[..., None]:
    return byte_slices.BySlices(problem, call, kernels_in("matmul", "wgmma_int8"), params)


def _spec(problem: Problem, call: Call) -> byte_slices.Told:
    return byte_slices.told(
        problem, call, kernels_in("matmul", "wgmma_int8"), digest(byte_slices.SOURCE)
    )


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    return [{"tile": tile} for tile in wgmma_int8.TILES]


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Count the products of all powers as one long one, and what lies around them as copies."""
    powers = byte_slices.powers(problem)
    steps = sum(one.lines for one in powers) * byte_slices.line(problem)
    halves = replace(
        problem, a="int8", b="int8", out="int32", k=ceil_div(steps, 2), layout_out="row"
    )
    moved = problem.compulsory_bytes + 2 * byte_slices.places(problem)[2]
    more = {"copied": moved / machine.read_bytes_per_s, "copy_s": float(len(powers))}
    return wgmma_specialized.tiled(halves, machine, wgmma_int8.TILES[params["tile"]], 1, more)


RUNG = LibraryRung(
    title="Byte slices",
    idea="Integers as digits of a byte: one product of bytes for each power of 256.",
    source="Ootomo, Ozaki and Yokota 2024: integer tensor cores for wider products",
    signatures=tuple(one for one in integers() if ITEMSIZE[one[0]] > 1),
    arithmetic=lambda problem: Arithmetic(problem.out, chain=lambda p, params: p.k),
    after="wgmma_int8",
    branch="integers of several bytes",
    layouts=EVERY_LAYOUT,
    layouts_b=EVERY_LAYOUT,
    params={"tile": tuple(wgmma_int8.TILES)},
    constraints=(
        ALONE,
        COUNTED,
        Constraint(
            f"sums of at most {LONGEST:,} products of digits",
            lambda problem, params: (
                problem.k * max(one.lines for one in byte_slices.powers(problem)) <= LONGEST
            ),
        ),
        Constraint(
            "whole elements at every address",
            lambda problem, params: problem.alignment >= ITEMSIZE[problem.a],
        ),
    ),
    spec=_spec,
    bind=_bind,
    available=lambda: None,
    archs=(architectures.HOPPER,),
    **modelled("matmul/wgmma_int8", _terms, _choices),
)
