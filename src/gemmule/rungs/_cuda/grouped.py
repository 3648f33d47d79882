"""What CUDA rungs of grouped products share: which sizes they count, and what they take."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from gemmule.core.device_model import Numbers, Terms
from gemmule.core.problem import FLOAT8_CODES, ITEMSIZE, Problem
from gemmule.core.rung import ByIndex, Constraint, Machine, Params, Step
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, modelled
from gemmule.rungs._cuda.tiles import EVERY_LAYOUT

# What grouped rungs say of themselves that take operands in any order.
ANY_ORDER: dict[str, Any] = {"layouts": EVERY_LAYOUT, "layouts_b": EVERY_LAYOUT}
FEW_SLOTS = 256  # that each block of a product by indices sorts for itself, of few_rows.cuh
HALF_SIGNATURES = tuple((t, t, out) for t in ("bfloat16", "float16") for out in (t, "float32"))

COUNTED = Constraint(
    "tokens, experts and blocks below 2^31",
    lambda problem, params: (
        max(problem.m, problem.batch) < 2**31 - 2**16
        and ceil_div(problem.m, 8) * ceil_div(problem.n, 32) < 2**31
    ),
)
ALIGNED = Constraint(
    "bases and leading strides are multiples of 16 bytes, and k and the unit stride of W of 8",
    lambda problem, params: (
        problem.alignment == 16
        and problem.k % 8 == 0
        and (problem.n % 8 == 0 or problem.layout_b == "col")
    ),
)
ALIGNED_CODES = Constraint(
    "bases and leading strides are multiples of 16 bytes, and k of 32",
    lambda problem, params: problem.alignment == 16 and problem.k % 32 == 0,
)
MOST_EXPERTS = 4096  # whose list fits beside the sums
LISTED = Constraint(
    f"at most {MOST_EXPERTS} experts, and less than 2^31 pieces of work",
    lambda problem, params: (
        problem.batch <= MOST_EXPERTS
        and most_pieces(problem, 8) * ceil_div(problem.n, 32) < 2**31
        and max(problem.m, problem.n, problem.k) < 2**31 - 2**16
    ),
)


def bits(problem: Problem) -> int:
    """Return the width of the codes of W."""
    return 8 if problem.quant is None else problem.quant.bits


def scales(problem: Problem) -> str:
    """Return the C++ type that tells of the scales, and of codes that are floats."""
    name = CTYPE[problem.codes.scale_dtype]
    return f"OfFloat8<{name}>" if problem.b == FLOAT8_CODES else name


def no_zeros(problem: Problem) -> bool:
    """Tell whether codes that are floats of 8 bits have no zero points, or are others."""
    return problem.b != FLOAT8_CODES or problem.quant is None or not problem.quant.has_zeros


def most_pieces(problem: Problem, size: int) -> int:
    """Return the most pieces of `size` tokens that there can be, however tokens are spread."""
    return min(problem.m, problem.batch) + problem.m // size


def pieces(problem: Problem, size: int) -> tuple[float, float]:
    """Return the pieces of `size` tokens, and the experts touched, where tokens choose evenly.

    An expert of as many tokens as a piece holds has one and a half, for half of them have more.
    """
    experts = max(problem.batch, 1)
    touched = experts * (1.0 - (1.0 - 1.0 / experts) ** problem.m)
    each = problem.m / max(touched, 1.0)
    return touched * max(1.0, each / size + 0.5), touched


def items(
    problem: Problem, machine: Machine, count: float, item_bytes: float, kind: str, *more: Numbers
) -> Terms:
    """Return the terms of items that multiprocessors take one after another.

    item_bytes: of a matrix, read at the multiprocessor's share of the ceiling. more: beside that,
    of an item.
    """
    turns = count / machine.units
    turns = math.ceil(turns) if turns <= 4 else turns + 0.5
    read = {f"read {kind}": item_bytes * machine.units / machine.read_bytes_per_s}
    beside = {"token": problem.compulsory_bytes / machine.read_bytes_per_s}
    each = ({name: turns * amount for name, amount in one.items()} for one in (read, *more))
    return {"start_s": 1.0}, *each, beside


def listed(problem: Problem, machine: Machine, touched: float) -> Numbers:
    """Return the terms of finding out what is to be done, and of touched matrices."""
    nbytes = touched * problem.k * problem.n * ITEMSIZE[problem.b]
    return {"expert_s": problem.batch, "matrices": nbytes / machine.read_bytes_per_s}


def routed(step: Step, problem: Problem, way: ByIndex) -> Step:
    """Return the launch of `routed_*` or `gated_*` in the place of `streamed_*`.

    The first has room to sort few rows.
    """
    if way.index is None:
        return replace(step, kernel=step.kernel.replace("streamed", "gated", 1))
    flags = str(way.gated).lower(), "int" if way.index == "int32" else "long long"
    kernel = f"{step.kernel.replace('streamed', 'routed', 1)[:-1]}, {', '.join(flags)}>"
    return replace(step, kernel=kernel, smem=step.smem + 4 * (problem.batch + 2 * FEW_SLOTS))


def by_element(rung: str) -> dict[str, Any]:
    """Return what a rung says of its time of which each thread computes an element by itself."""

    def terms(problem: Problem, params: Params, machine: Machine) -> Terms:
        moved = {"read": problem.compulsory_bytes / machine.read_bytes_per_s}
        return {"start_s": 1.0}, moved, {"flop_s": problem.flops / machine.units}

    return modelled(rung, terms)
