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

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gemmule.backends.cpu.atomics import call_word, packed, unpacked, unpacked_as, write
from gemmule.backends.cpu.calls.builtin import Job
from gemmule.backends.cpu.intrinsics import enter
from gemmule.backends.cpu.jit import kernel
from gemmule.backends.cpu.pool import SHARES_PER_THREAD, Pooled, share_count
from gemmule.backends.cpu.shares import run_shares
from gemmule.backends.cpu.target import missing_vectors
from gemmule.core.problem import HALVES, ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CpuRung, Machine, Params, Suggestion, floats
from gemmule.rungs import _cpu
from gemmule.rungs.matmul.cpu import _few_kernels
from gemmule.rungs.matmul.cpu._few_tiles import LINE_BYTES, STEP, tile_columns
from gemmule.rungs.vecmat.cpu._joined import FEWEST, join_of

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


class Words(NamedTuple):
    """A product as its shares see it: kernels, addresses, steps in bytes, sizes."""

    pool: int
    helpers: int
    first_task: int
    second_task: int
    last_task: int
    make_ready: int
    multiply: int
    put: int
    A: int
    step: int
    x: int
    x_k: int
    x_j: int
    room: int
    pooled_bytes: int
    C: int
    C_row: int
    C_col: int
    m: int
    n: int
    k: int
    unit: int
    ready_parts: int
    across: int
    slices: int
    joins: int
    turned: int


_words, _plain = unpacked_as(Words), unpacked(len(Words._fields))
_A, _X, _ROOM, _C = (8 * Words._fields.index(name) for name in ("A", "x", "room", "C"))


@kernel
def _ready(at: int, number: int) -> None:
    """Make a share of the columns' terms ready."""
    w = _words(at)
    steps = (w.k + STEP - 1) // STEP
    first, last = number * steps // w.ready_parts, (number + 1) * steps // w.ready_parts
    enter(w.make_ready, (w.x, w.x_k, w.x_j, w.room, w.n, w.k, first, last))


@kernel
def _share(at: int, number: int) -> None:
    """Multiply a share of the rows by a slice of the terms; the last one takes what is left."""
    w = _words(at)
    part, one, units = number // w.slices, number % w.slices, max(w.m // w.unit, 1)
    first, last = part * units // w.across * w.unit, (part + 1) * units // w.across * w.unit
    last = w.m if part + 1 == w.across else last
    begin, end = one * w.k // w.slices, (one + 1) * w.k // w.slices
    places = (w.A, w.step, w.room, w.C + one * 4 * w.m * w.n, w.C_row, w.C_col, w.put)
    enter(w.multiply, (*places, w.n, w.k, first, last, begin, end))


_readied, _shared = Pooled(_ready), Pooled(_share)


@kernel
def _product(at: int, A: int, B: int, C: int) -> int:
    """Multiply: words, and the addresses of both operands and the result."""
    w = _words(at)
    sums = 4 * w.slices * w.m * w.n if w.slices > 1 else 0
    room = np.empty(w.pooled_bytes + sums + LINE_BYTES, np.uint8)
    place, copied = room.ctypes.data, packed(_plain(at))
    place = -place % LINE_BYTES + place
    write(copied + _A, B if w.turned else A)
    write(copied + _X, A if w.turned else B)
    write(copied + _ROOM, place)
    write(copied + _C, C if w.slices == 1 else place + w.pooled_bytes)
    for step in range(3 if w.slices > 1 else 2):
        task, words, count = w.first_task, copied, w.ready_parts
        if step == 1:
            task, count = w.second_task, w.across * w.slices
        elif step == 2:
            words = packed((place + w.pooled_bytes, C, w.m * w.n, w.slices, w.joins))
            task, count = w.last_task, w.joins
        run_shares(w.pool, w.helpers, task, words, count)
    room[0] = 0  # Numba frees it behind the place that names it last
    return 0


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


def _words_of(problem: Problem, params: Params) -> Callable[[Any, Any], Words]:
    """Return what makes the words of a product of operands like these."""
    turned, along = not few_columns(problem), is_along(problem)
    of_large, of_few = (problem.b, problem.a) if turned else (problem.a, problem.b)
    k, (m, n) = problem.k, sorted((problem.m, problem.n), reverse=True)
    columns, unit = tile_columns(n), ROWS if along else UNIT
    terms = -(-k // STEP) * STEP * -(-n // columns) * columns
    tasks = _readied.address, _shared.address, join_of("float32", problem.out).address
    multiply = (_few_kernels.along_kernel if along else _few_kernels.across_kernel)(
        of_large, columns
    )
    ready = _few_kernels.ready_kernel(of_few, columns, along, along and of_large == "bfloat16")
    entries = ready.entry(*[int] * 8), multiply.entry(*[int] * 13)

    def words(A: Any, B: Any) -> Words:
        large, few = (B.T, A.T) if turned else (A, B)
        across, slices = shares_and_slices(problem, params)
        helpers, pool = _shared.helpers(across * slices)
        out = problem.out if slices == 1 else "float32"
        steps = ITEMSIZE[out] * problem.n, ITEMSIZE[out]
        return Words(
            pool,
            helpers,
            *tasks,
            *entries,
            put=_few_kernels.put_kernel(out).entry(*[int] * 8),
            A=0,
            step=large.strides[0 if along else 1],
            x=0,
            x_k=few.strides[0],
            x_j=few.strides[1],
            room=0,
            pooled_bytes=4 * terms,
            C=0,
            C_row=steps[turned],
            C_col=steps[not turned],
            m=m,
            n=n,
            k=k,
            unit=unit,
            ready_parts=share_count(4 * terms, -(-k // STEP), 1),
            across=across,
            slices=slices,
            joins=share_count(4 * m * n * slices, m * n // FEWEST, 1),
            turned=int(turned),
        )

    return words


@kernel
def _by_address(product: int, at: int, A: int, B: int, C: int) -> None:
    """Call a job, which is compiled once: for a builtin function and for this."""
    call_word(product, at, A, B, C)


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, B, C)``."""
    words, product = _words_of(problem, params), _product.address(4, returns=True)

    def run(A: np.ndarray[Any, Any], B: np.ndarray[Any, Any], C: np.ndarray[Any, Any]) -> None:
        held = np.array(words(A, B), np.int64)
        _by_address(product, held.ctypes.data, _cpu.address(A), _cpu.address(B), _cpu.address(C))

    return run


def job(problem: Problem, params: Params, A: np.ndarray[Any, Any], B: Any) -> Job:
    """Return the product as what a builtin function is bound to."""
    words = _words_of(problem, params)(A, B)
    return Job(_product.address(4, returns=True), tuple(words), words.pool)


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
    op="matmul",
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
    bind=bind,
    job=job,
    available=missing_vectors,
)
