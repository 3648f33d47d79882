"""Packed blocks and a register tile: each block of A and B is laid out for reading in order.

A tile of 12 rows by two vectors reads them in that order and keeps its 24 sums in registers: two
loads and twelve broadcasts feed 24 multiply-adds. Packing converts halves, float8 and integers to
the working dtype, so one kernel serves all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.jit import unavailable
from gemmule.backends.cpu.steps import A, Step, Steps, Words, X, Y, per_team
from gemmule.backends.cpu.threads import thread_count
from gemmule.core.packing import HostPacking
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs._cpu_rows import Build, Strides, bind_plan, job_of_plan
from gemmule.rungs._cpu_workspace import workspace
from gemmule.rungs.matmul.cpu._packed_blocks import (
    Blocks,
    block_share,
    chunk_kernel,
    workspace_bytes,
)
from gemmule.rungs.matmul.cpu._packed_operands import PITCH, pack, padded_lines
from gemmule.rungs.matmul.cpu._tile import (
    is_narrow,
    pack_kernel,
    pack_rows_kernel,
    register_tile,
    unit_axis,
    unpack_kernel,
)

Array = np.ndarray[Any, Any]
Sides = tuple[bool, bool]  # of A, of B
NEITHER: Sides = (False, False)
ROWS = 480  # rows of A that meet what is packed of B, where several threads share the product
ROWS_ALONE = 1080  # where there is one


def chunk_entry(problem: Problem, ready: Sides = NEITHER) -> tuple[int, int]:
    """Return the entry of `chunk_kernel` for a problem, and the bytes of a number."""
    working, narrow, whole_rows = chunk_kernel_names(problem, ready)
    return chunk_kernel(working, narrow, whole_rows).entry(*[int] * 8), ITEMSIZE[working]


def chunk_kernel_names(problem: Problem, ready: Sides = NEITHER) -> tuple[str, bool, bool]:
    """Return the arguments of `chunk_kernel` for a problem.

    The last tells whether the packing leaves rows of A whole (`pack_rows_kernel`).
    """
    working = _cpu.problem_working_dtype(problem)
    whole_rows = ready[0] or unit_axis(problem.layout_a, 0) == "depth"
    return working, is_narrow(problem.n, working), whole_rows


def pack_addresses(problem: Problem, ready: Sides = NEITHER) -> tuple[int, int, int]:
    """Return the addresses of the kernels that pack A, pack B and store C; 0 of what is packed."""
    working, narrow, whole_rows = chunk_kernel_names(problem, ready)
    tile, (pack_a, pack_b) = register_tile(working, narrow), (0, 0)
    if whole_rows and not ready[0]:
        pack_a = pack_rows_kernel(problem.a, working, tile.rows, PITCH).address(6)
    elif not ready[0]:
        unit = unit_axis(problem.layout_a, 0)
        pack_a = pack_kernel(problem.a, working, tile.rows, unit).address(6)
    if not ready[1]:
        unit = unit_axis(problem.layout_b, 1)
        pack_b = pack_kernel(problem.b, working, tile.columns, unit).address(6)
    return pack_a, pack_b, unpack_kernel(problem.out, working).address(6)


def block_size(m: int, n: int, working: str, columns: int, threads: int) -> tuple[int, int]:
    """Return rows and columns of a block: multiples of the tile, of even size, shared evenly.

    Blocks hold at most ROWS x `columns` elements, those of one thread ROWS_ALONE; the columns are
    cut further until every thread gets the same number of blocks, where the tile allows it.
    """
    tile = register_tile(working, is_narrow(n, working))
    most_rows = ROWS_ALONE if threads == 1 else ROWS
    down, across = max(-(-m // most_rows), 1), max(-(-n // columns), 1)
    most = max(-(-n // tile.columns), 1)
    if down * across < 4 * threads:
        even = range(across, min(most, across + threads) + 1)
        across = next((c for c in even if down * c % threads == 0), across)
    if down * across < threads:  # few columns: cut the rows instead
        down = min(threads, max(-(-m // tile.rows), 1))
    rows = _round_up(-(-m // down), tile.rows)
    return rows, _round_up(-(-n // across), tile.columns)


def _round_up(size: int, multiple: int) -> int:
    return max(-(-size // multiple), 1) * multiple


def plan(problem: Problem, params: Params, ready: Sides = NEITHER, *, alone: bool = True) -> Build:
    """Return the product, on one thread or on all; of `ready` operands it takes what is packed.

    Strides of those are how many lines are packed, and 0.
    """
    working = chunk_kernel_names(problem, ready)[0]
    head = *chunk_entry(problem, ready), *pack_addresses(problem, ready)
    m, n, k, item = problem.m, problem.n, problem.k, ITEMSIZE[problem.out]

    def build(of_A: Strides, of_B: Strides, of_C: Strides) -> Steps:
        threads = 1 if alone else thread_count()
        rows, columns = block_size(m, n, working, params["columns"], threads)
        places: Words = (A, *of_A, X, *of_B, Y, of_C[0], item)
        sizes, count = (m, n, k, rows, columns), -(-m // rows) * -(-n // columns)
        nbytes = workspace_bytes(Blocks._make((*head, *[0] * len(places), *sizes, 0)))
        step = Step(block_share.address(2), count, alone=alone)
        return Steps([step], (*head, *places, *sizes, workspace(nbytes)))

    return build


def bind(
    problem: Problem, params: Params, ready: Sides = NEITHER, *, alone: bool = True
) -> Callable[..., None]:
    """Return ``run(A, B, C)``, on one thread or on all; `ready` operands come packed."""
    if problem.k == 0:
        return fill_zeros
    if not any(ready):
        return bind_plan(functools.partial(plan, alone=alone))(problem, params)
    build = per_team(plan(problem, params, ready, alone=alone))
    lines = padded_lines(problem, "a"), padded_lines(problem, "b")

    def placed(side: int, operand: Any) -> tuple[int, tuple[int, ...]]:
        if ready[side]:
            return operand.at, (lines[side], 0)
        return _cpu.address(operand), operand.strides

    def run(left: Any, right: Any, C: Array) -> None:
        (A, of_A), (B, of_B) = placed(0, left), placed(1, right)
        build(of_A, of_B, C.strides)(A, B, _cpu.address(C))

    return run


def fill_zeros(A: Any, B: Any, C: Array) -> None:
    """Write the sum of no terms."""
    C[...] = np.zeros((), C.dtype)


def suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Expect the rate of one core."""
    calls = problem.batch * machine.rates.call
    return Suggestion({}, calls + _cpu.packed_s(problem, machine, 1))


RUNG = CpuRung(
    title="Packed blocks",
    idea="Blocks are copied into the order the tile reads; the tile of C lives in registers.",
    source="Goto and van de Geijn 2008; BLIS, Van Zee and van de Geijn 2015",
    after="cache_blocks",
    params={"columns": (1024, 512, 2048)},
    suggest=suggest,
    bind=bind,
    job=job_of_plan(plan),
    available=unavailable,
    packing=HostPacking(pack, bind),
    rows_apart=True,
    **_cpu.OF_MATRICES,
)
