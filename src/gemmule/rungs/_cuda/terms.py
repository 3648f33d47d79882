"""By which terms the time of a product on a GPU grows, as most rungs count them.

`gemmule.core.device_model` says how they add up; the coefficients are data.
"""

from __future__ import annotations

import itertools
import math

from gemmule.core.device_model import Numbers, Terms
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Machine
from gemmule.rungs._cuda.geometry import ceil_div

FILLED_BYTES = 1_000_000  # of a matrix that is as large as what the chip has under way


def streaming(
    problem: Problem, machine: Machine, shape: tuple[int, int, float], kind: str, *more: Numbers
) -> Terms:
    """Return the terms of reading a matrix once.

    shape: the blocks, how many of them a multiprocessor holds, and the turns of loads that a block
    waits for one after another, of which the last may be a part. kind: what has rates of its own.
    more: what else is waited for alone, then beside reading and beside turns.
    """
    blocks, at_once, each = shape
    turns = max(1, math.ceil(each))
    reading = problem.compulsory_bytes / machine.read_bytes_per_s
    waves = blocks / (at_once * machine.units)
    idle = math.ceil(waves) / waves - 1 if waves > 1 else 0.0
    alone = max(0.0, machine.units / max(blocks, 1) - 1)
    empty = reading * (min(turns / each, 9.0) - 1 if each else 0.0)
    filled = min(1.0, problem.compulsory_bytes / FILLED_BYTES)
    terms: Terms = (
        {"start_s": 1.0, "filling_s": filled},
        {f"read {kind}": reading, "idle": reading * idle, "alone": reading * alone, "empty": empty},
        {f"turn_s {kind}": turns * max(1.0, waves)},
    )
    return beside(terms, *more)


def narrow(problem: Problem) -> float:
    """Return 1 for rows that fill few lanes of a strip of 16-byte vectors, else 0."""
    return float(problem.m * ITEMSIZE[problem.a] < (32 if problem.alignment == 16 else 16))


def rounds(
    problem: Problem, machine: Machine, shape: tuple[int, int, int], kind: str, *more: Numbers
) -> Terms:
    """Return the terms of blocks that compute a tile each, one round of them after another.

    shape, kind, more: as `streaming` has them, the turns being those of a tile. Blocks beside each
    other on a multiprocessor share it; one that is alone there waits for itself.
    """
    blocks, at_once, turns = shape
    taken, alone = ceil_div(blocks, machine.units), ceil_div(blocks, machine.units * at_once)
    terms: Terms = (
        {"start_s": 1.0},
        {"read": problem.compulsory_bytes / machine.read_bytes_per_s},
        {f"turn_s {kind}": taken * turns, "block_s": taken},
        {f"alone_s {kind}": alone * turns} if at_once > 1 else {},
    )
    return beside(terms, *more)


def beside(terms: Terms, *more: Numbers) -> Terms:
    """Return terms with more of them in each place."""
    nothing: Numbers = {}
    places = itertools.zip_longest(terms, more, fillvalue=nothing)
    return tuple({**one, **other} for one, other in places)


def settled(problem: Problem, machine: Machine) -> Numbers:
    """Return the term of arithmetic once power limits the clock."""
    return {"settled_s": problem.flops / machine.units}
