"""Even rows: one wave of blocks, each with an equal share of the matrix, wherever rows end.

`split_rows` gives every row the same number of blocks, so that their number follows from the rows'
and the last wave of blocks leaves part of the chip idle; and a block reads as much of x as of A,
which costs as much of the L2's bandwidth where x is long. Here the grid is what the chip holds, and
rows count as one sequence, cut into equal shares: a block has the end of one row and the begin of
the next, or several rows. It writes one sum for each piece of a row to the workspace, at a place
that follows from block and row, and a second kernel, started early, adds the pieces of each row in
a fixed order. Rows may be taken together that begin at the same place of a vector: one x serves
them all.
"""

from __future__ import annotations

from collections.abc import Iterable

from gemmule.core.device_model import Terms
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.geometry import (
    CTYPE,
    accumulator,
    ceil_div,
    instance,
    lies,
    modelled,
    starts_early,
    type_arguments,
)
from gemmule.rungs._cuda.rows import FLOAT_SIGNATURES, sums
from gemmule.rungs._cuda.stream import ALONE
from gemmule.rungs._cuda.terms import streaming

THREADS = 256
LINE = 8  # vectors
MOST_ROWS = 16  # of a multiprocessor
LEAST = 128  # vectors of a share: half of a block's threads


def _groups(problem: Problem, rows: int) -> int:
    """Return the groups of rows that are read together; see Shares in the kernel's file."""
    apart = 1 if problem.alignment == 16 or rows == 1 else 16 // ITEMSIZE[problem.a]
    full, rest = divmod(problem.m, apart * rows)
    return full * apart + min(rest, apart)


def _width(problem: Problem) -> int:
    """Return the vectors of a row, in whole lines."""
    return max(1, ceil_div(problem.n * ITEMSIZE[problem.a] // 16, LINE)) * LINE


def _total(problem: Problem, rows: int) -> int:
    return _groups(problem, rows) * _width(problem)


def _grid(problem: Problem, params: Params, machine: Machine) -> int:
    """Return as many blocks for each multiprocessor as have something to do, at least a line."""
    total = _total(problem, params["rows"])
    if total < LEAST * machine.units:
        return min(machine.units, total // LINE, ceil_div(total, LEAST))
    return int(min(params["blocks"], total // (LEAST * machine.units)) * machine.units)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    aligned, rows = problem.alignment == 16, params["rows"]
    blocks = _grid(problem, params, machine)
    each = 1 if blocks <= 30 * _groups(problem, rows) else 16
    read = instance("even_rows", type_arguments(problem), rows, params["unroll"], aligned)
    add = instance("add_pieces", CTYPE[problem.a], CTYPE[problem.out], rows, aligned, each)
    grid, block = (blocks, 1, 1), (THREADS, 1, 1)
    return Step(read, grid, block), Step(add, grid, block, pdl=starts_early(machine))


def _workspace(problem: Problem, params: Params, machine: Machine) -> int:
    places = _grid(problem, params, machine) + _groups(problem, params["rows"])
    return int(places * params["rows"] * ITEMSIZE[accumulator(problem)])


def _chain(problem: Problem, params: Params) -> int:
    """Return the additions of a row that one block reads, and of as many pieces as it may have."""
    vector = 16 // ITEMSIZE[problem.a]
    turns = ceil_div(_width(problem), THREADS) + 2
    return turns * vector + 1 + 5 + THREADS // 32 + ceil_div(_width(problem), LEAST * 32) + 1 + 5


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    """Take rows that several blocks share, or a few of which one has."""
    return RUNG.space(problem) if problem.m <= MOST_ROWS * machine.units else ()


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Read x again for each row that is read alone, from the L2; pay for rows that begin."""
    rows, blocks = params["rows"], _grid(problem, params, machine)
    share = _total(problem, rows) / max(blocks, 1)
    of_x = problem.n * _groups(problem, rows) * ITEMSIZE[problem.a] / machine.read_bytes_per_s
    turns = share / (THREADS * params["unroll"])
    begun = {"row_s": min(3.0, share / _width(problem))}
    shape = blocks, params["blocks"], turns
    return streaming(problem, machine, shape, lies(problem), begun, {"x": of_x})


RUNG = CudaRung(
    title="Even rows",
    idea="One wave of blocks, an equal share of the matrix each; a second kernel adds the pieces.",
    source="Stream-K (Osama et al. 2023), without atomics, for rows",
    signatures=FLOAT_SIGNATURES,
    arithmetic=sums(_chain),
    after="split_rows",
    params={"blocks": (4, 8, 2), "rows": (1, 2, 4), "unroll": (2, 4, 1)},
    constraints=(
        Constraint(
            "m and n below 2^31, and as many vectors of 16 bytes in all",
            lambda problem, params: (
                max(problem.m, problem.n, _total(problem, params["rows"])) < 2**31
            ),
        ),
        ALONE,
        Constraint(
            "rows x unroll is 1 x 2, 1 x 4, 2 x 2 or 4 x 1",
            lambda problem, params: (
                (params["rows"], params["unroll"]) in ((1, 2), (1, 4), (2, 2), (4, 1))
            ),
        ),
    ),
    workspace=_workspace,
    steps=_steps,
    **modelled("matvec/even_rows", _terms, _choices),
)
