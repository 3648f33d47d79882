"""A few columns of halves: each weight is read once, as stored, for all of them.

It is widened in registers and meets 2 to 8 columns there, as float32 numbers that were made ready
once. A row-major A is read along its rows: a tile of 4 rows by 4 columns keeps 16 sums, each spread
over a register's lanes, and the rows lie a quarter of a share apart, so that each is of a stretch
of memory read in order. A column-major one is read across: 16 lines of A pass over sums that stay
in a near cache. Few rows times a matrix, as x W^T of a linear layer, are the same seen transposed.

Up to 4 columns the memory sets the time, which is that of one vector; from 8 on the multipliers do,
at nine tenths of what a core has.
"""

from __future__ import annotations

from typing import NamedTuple

from gemmule.backends.cpu.atomics import unpacked_as
from gemmule.backends.cpu.intrinsics import enter
from gemmule.backends.cpu.jit import kernel
from gemmule.backends.cpu.pool import SHARES_PER_THREAD, share_count
from gemmule.backends.cpu.steps import A, Place, Step, Steps, X, Y, buffer
from gemmule.backends.cpu.target import missing_vectors
from gemmule.core.problem import HALVES, ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CpuRung, Machine, Params, Suggestion, floats
from gemmule.rungs import _cpu
from gemmule.rungs._cpu_rows import Build, Strides, by_plan, join_step
from gemmule.rungs.matmul.cpu import _few_kernels
from gemmule.rungs.matmul.cpu._few_tiles import STEP, tile_columns

MOST = 32  # columns, or rows, that are few
# What all cores together reach of the rate of one, and what products across the rows reach of that
# along them; what surrounds a multiply-add, in multiply-adds of a core: a weight widened for some
# columns, a term of a column made ready, a sum stored (EPYC Zen 4, 2026-11, 37 to 53 of 54 a
# nanosecond on one core).
TOGETHER, ACROSS = 0.88, 0.87
WIDENING, READY_FMAS, STORE_FMAS = 0.5, 19, 70
UNIT = 64  # results across rows of a share, or more
SUMS_SHARE = 16  # a share reads so many times the bytes of the sums that are joined
ROWS = 4  # rows along memory of a share, or more


def few_columns(problem: Problem) -> bool:
    """Whether the few are columns of B, not rows of A."""
    return problem.n <= problem.m


def is_along(problem: Problem) -> bool:
    """Whether the large matrix lies along the sum."""
    along = problem.layout_a == "row" if few_columns(problem) else problem.layout_b == "col"
    return along or problem.k <= 1


Address = int | Place  # a place before a product is called


class Words(NamedTuple):
    """A product as its shares see it: kernels, addresses, steps in bytes, sizes."""

    make_ready: int
    multiply: int
    put: int
    A: Address
    step: int
    x: Address
    x_k: int
    x_j: int
    ready: Address
    C: Address
    C_row: int
    C_col: int
    m: int
    n: int
    k: int
    unit: int
    ready_parts: int
    across: int
    slices: int


_words = unpacked_as(Words)


@kernel
def _ready(at: int, number: int) -> None:
    """Make a share of the columns' terms ready."""
    w = _words(at)
    steps = (w.k + STEP - 1) // STEP
    first, last = number * steps // w.ready_parts, (number + 1) * steps // w.ready_parts
    enter(w.make_ready, (w.x, w.x_k, w.x_j, w.ready, w.n, w.k, first, last))


@kernel
def _share(at: int, number: int) -> None:
    """Multiply a share of the rows by a slice of the terms; the last one takes what is left."""
    w = _words(at)
    part, one, units = number // w.slices, number % w.slices, max(w.m // w.unit, 1)
    first, last = part * units // w.across * w.unit, (part + 1) * units // w.across * w.unit
    last = w.m if part + 1 == w.across else last
    begin, end = one * w.k // w.slices, (one + 1) * w.k // w.slices
    places = (w.A, w.step, w.ready, w.C + one * 4 * w.m * w.n, w.C_row, w.C_col, w.put)
    enter(w.multiply, (*places, w.n, w.k, first, last, begin, end))


def shares_and_slices(problem: Problem, params: Params) -> tuple[int, int]:
    """Return into how many shares the large side of C is cut, and into how many slices the sum."""
    m, n = max(problem.m, problem.n), min(problem.m, problem.n)
    nbytes, per_thread = problem.compulsory_bytes, params["shares_per_thread"]
    if is_along(problem):
        return share_count(nbytes, max(m // ROWS, 1), per_thread), 1
    wanted = share_count(nbytes, max(m // UNIT, 1) * problem.k, per_thread)
    across = min(wanted, max(m // params["piece"], 1))
    most = max(nbytes // (SUMS_SHARE * 4 * max(m * n, 1)), 1)
    return across, max(1, min(-(-wanted // across), most, problem.k))


def plan(problem: Problem, params: Params) -> Build:
    """Return the product: columns made ready, shares of the rows, and slices of sums added."""
    turned, along = not few_columns(problem), is_along(problem)
    of_large, of_few = (problem.b, problem.a) if turned else (problem.a, problem.b)
    k, (m, n) = problem.k, sorted((problem.m, problem.n), reverse=True)
    columns, unit = tile_columns(n), ROWS if along else UNIT
    ready_bytes = 4 * (-(-k // STEP) * STEP * -(-n // columns) * columns)
    kernel_of = _few_kernels.along_kernel if along else _few_kernels.across_kernel
    multiply = kernel_of(of_large, columns)
    ready = _few_kernels.ready_kernel(of_few, columns, along, along and of_large == "bfloat16")

    def build(of_A: Strides, of_B: Strides, of_C: Strides) -> Steps:
        large, few = (of_B[::-1], of_A[::-1]) if turned else (of_A, of_B)
        across, slices = shares_and_slices(problem, params)
        ready_parts = share_count(ready_bytes, -(-k // STEP), 1)
        out, C = (problem.out, Y) if slices == 1 else ("float32", buffer(ready_bytes))
        C_steps = ITEMSIZE[out] * problem.n, ITEMSIZE[out]
        words = Words(
            ready.entry(*[int] * 8),
            multiply.entry(*[int] * 13),
            _few_kernels.put_kernel(out).entry(*[int] * 8),
            A=X if turned else A,
            step=large[0 if along else 1],
            x=A if turned else X,
            x_k=few[0],
            x_j=few[1],
            ready=buffer(),
            C=C,
            C_row=C_steps[turned],
            C_col=C_steps[not turned],
            m=m,
            n=n,
            k=k,
            unit=unit,
            ready_parts=ready_parts,
            across=across,
            slices=slices,
        )
        steps = [Step(_ready.address(2), ready_parts), Step(_share.address(2), across * slices)]
        if slices == 1:
            return Steps(steps, words, buffer_bytes=ready_bytes)
        join, told = join_step("float32", problem.out, C, m * n, slices, len(words))
        nbytes = ready_bytes + 4 * slices * m * n
        return Steps([*steps, join], (*words, *told), buffer_bytes=nbytes)

    return build


def suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Expect the multipliers' rate and a part of the reading beside it, or the read ceiling."""
    along, few = is_along(problem), min(problem.m, problem.n)
    large = max(problem.m, problem.n) if along else -(-max(problem.m, problem.n) // UNIT) * UNIT
    alone = problem.compulsory_bytes < _cpu.SMALL_BYTES
    fma = machine.rates.fma * (1 if alone else TOGETHER * machine.units)
    columns = tile_columns(few)
    groups = -(-few // columns)
    met = large * problem.k * groups * (columns + WIDENING)
    ready, stored = READY_FMAS * columns * groups * problem.k, STORE_FMAS * large * few
    busy = problem.batch * (met + ready + stored) / (fma * (1 if along else ACROSS))
    reading = _cpu.streaming_s(problem, machine, 1.0)
    share, beside = (0.95, 0.1) if along else (0.76, 0.6)
    calls = problem.batch * _cpu.spread_s(machine, problem.compulsory_bytes)
    params = {}
    if not along and problem.compulsory_bytes > machine.cache_bytes // 2:
        params = {"shares_per_thread": 4, "piece": 2048}
    return Suggestion(params, calls + max(reading / share, busy + beside * reading))


def _is_few(problem: Problem, params: Params) -> bool:
    return min(problem.m, problem.n) <= MOST


def _is_of_halves(problem: Problem, params: Params) -> bool:
    return (problem.a if few_columns(problem) else problem.b) in HALVES


def _has_a_unit_stride(problem: Problem, params: Params) -> bool:
    return (problem.layout_a if few_columns(problem) else problem.layout_b) != "strided"


def _has_a_tile(problem: Problem, params: Params) -> bool:
    return is_along(problem) or max(problem.m, problem.n) >= UNIT


RUNG = CpuRung(
    title="A few columns in registers",
    idea="A weight is widened as it comes from memory, and meets 2 to 8 columns in registers.",
    source="our own; register blocking as in BLAS level 3",
    signatures=(
        *floats("float16", "bfloat16"),
        *(("float32", half, "float32") for half in HALVES),  # rows of float32 times a matrix
    ),
    layouts=("row", "col", "strided"),
    layouts_b=("row", "col", "strided"),
    arithmetic=_cpu.summed(_cpu.whole_reduction),
    after="packed_threads",
    branch="few columns of halves",
    params={"shares_per_thread": SHARES_PER_THREAD, "piece": (64, 2048)},
    constraints=(
        Constraint(f"at most {MOST} rows or columns", _is_few),
        Constraint("the large matrix holds halves", _is_of_halves),
        Constraint(f"{UNIT} results or more side by side in memory", _has_a_tile),
        Constraint("the large matrix has a unit stride", _has_a_unit_stride),
    ),
    suggest=suggest,
    available=missing_vectors,
    **by_plan(plan),
)
