"""Verifying one configuration: exactly on a smaller problem, then on the operands to be timed.

The smaller problem keeps the sum's length and every size's remainder by 128, so the same tails and
the same templates are met; its results must be bitwise equal to the truth, its inputs unchanged,
the bytes around its output intact. On the timed operands themselves a sample of rows and columns
that meets every tile is held to the bound that the rung's arithmetic implies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.base import Backend
from gemmule.backends.cuda.grouped import prepare as prepare_grouped
from gemmule.core.canonical import Call
from gemmule.core.choice import Choice
from gemmule.core.grouped import groups
from gemmule.core.operand import Operand
from gemmule.core.problem import COMPLEX, INTEGERS, Problem
from gemmule.core.rung import Arithmetic
from gemmule.oracle import judge as oracle
from gemmule.oracle.inputs import Frame, Inputs, make_inputs
from gemmule.oracle.truth import Truth, reference
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.tuning.operands import Host, Place, canonical_call, of_inputs

Array: TypeAlias = NDArray[Any]
Placed: TypeAlias = tuple[Operand, ...]
AnyRun: TypeAlias = Callable[..., None]  # of operands as they are put, and `scalars_of`
Ints: TypeAlias = NDArray[np.int64]

MODULUS = 128
MOST_ELEMENTS = 1 << 22  # of the smaller problem's matrix
LONGEST_SUM = 1 << 16
LARGEST_TILE, LONGEST_TILE_SUM = 256, 1024  # of the smaller problem of a matmul
SAMPLED_ELEMENTS = 1 << 23  # of each operand that a sample of the timed operands reads
MOST_TOKENS = 64  # of an expert, of a sample of a grouped product
WHOLE_QUANTIZED = 1 << 24  # codes; larger quantised matrices are judged on the smaller problem only


def smaller(problem: Problem) -> Problem:
    """Return the problem to verify on: itself where it is small, else one of the same remainders.

    >>> p = smaller(Problem("matvec", 100_003, 4096))
    >>> (p.m % 128, p.n)
    (35, 4096)
    """
    batch = min(problem.batch, 3)
    if problem.op == "matvec":
        n = _shrunk(problem.n, LONGEST_SUM)
        m = _shrunk(problem.m, max(MOST_ELEMENTS // max(n, 1), 2 * MODULUS))
        return replace(problem, m=m, n=n, batch=batch)
    m, n = _shrunk(problem.m, LARGEST_TILE), _shrunk(problem.n, LARGEST_TILE)
    return replace(problem, m=m, n=n, k=_shrunk(problem.k, LONGEST_TILE_SUM), batch=batch)


def _shrunk(size: int, most: int) -> int:
    return size if size <= most else most // MODULUS * MODULUS + size % MODULUS


@dataclass(frozen=True, slots=True)
class Exact:
    """The smaller problem of small integers, and its truth."""

    inputs: Inputs
    host: Host
    call: Call
    truth: Truth

    def choice(self, full: Choice) -> Choice | None:
        """Return a choice on the smaller problem, or None where its parameters are not legal."""
        mine = self.call.problem
        problem = replace(full.problem, m=mine.m, n=mine.n, k=mine.k, batch=mine.batch)
        if full.rung.refusal(problem) is not None:
            return None
        if dict(full.params) not in list(full.rung.space(problem)):
            return None
        return replace(full, call=self.call, problem=problem)

    def compute(self, place: Place, operands: Placed, run: AnyRun) -> None:
        """Compute it on operands put to a place, and bring back everything that lies around."""
        self.inputs.poison()
        place.send(self.host.out, operands[-1])
        run(*operands, *scalars_of(self.call.problem))
        place.wait()
        for part, operand in zip(self.host.parts(), operands, strict=True):
            if isinstance(part, Frame):
                place.fetch(operand, part)

    def judge(self, choice: Choice) -> oracle.Verdict:
        """Judge what lies in the inputs' own output, computed by `choice`."""
        problem, out = self.call.problem, self.inputs.out
        arithmetic = _fixed(choice)
        return oracle.judge(problem, arithmetic, choice.params, self.inputs, out, self.truth)


def exact(problem: Problem, seed: int, *, whole: bool = False) -> Exact:
    """Make the smaller problem of `problem`; whole: make it at its own size."""
    inputs = make_inputs(problem if whole else smaller(problem), "integers", seed)
    host = of_inputs(inputs)
    truth = oracle.truth_of(inputs)
    return Exact(inputs, host, canonical_call(inputs.case.problem, host), truth)


def prepared(choice: Choice, backend: Backend) -> AnyRun:
    """Compile or bind what a choice needs."""
    if choice.problem.op == "grouped":
        return prepare_grouped(choice)
    return backend.prepare(choice)


def scalars_of(problem: Problem) -> tuple[float, ...]:
    """Return what a run takes behind its operands: alpha and beta, a grouped product none."""
    return () if problem.op == "grouped" else (1.0, 0.0)


def _fixed(choice: Choice) -> Arithmetic:
    """Return the rung's arithmetic with its chain at the problem that the rung itself is given.

    Where operands are converted first, the judged problem is another than the rung's.
    """
    arithmetic = choice.rung.arithmetic(choice.problem)
    longest = arithmetic.chain(choice.problem, choice.params)
    return replace(arithmetic, chain=lambda problem, params: longest)


@dataclass(frozen=True, slots=True)
class Part:
    """A sample of a product: which entry of the batch, rows and columns, and their truth."""

    entry: int | None
    rows: Ints
    columns: Ints | None
    truth: Truth


@dataclass(frozen=True, slots=True)
class Sampled:
    """Samples of the timed operands; none where their truth would take too long."""

    problem: Problem
    parts: tuple[Part, ...]

    def complaint(self, choice: Choice, out: Array) -> str:
        """Return what is wrong with the result of `choice`, or ``""``."""
        for part in self.parts:
            found = out if part.entry is None else out[part.entry]
            found = (
                found[part.rows]
                if part.columns is None
                else (found[np.ix_(part.rows, part.columns)])
            )
            wrong = self._wrong(choice, part, found)
            if wrong.any():
                place = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
                row = int(part.rows[place[0]])
                where = (
                    f"row {row}"
                    if part.columns is None
                    else (f"[{row}, {int(part.columns[place[1]])}]")
                )
                return (
                    f"{where} is {found[place]}, {int(np.count_nonzero(wrong))} of {wrong.size} "
                    "sampled elements are wrong at the full size"
                )
        return ""

    def _wrong(self, choice: Choice, part: Part, found: Array) -> NDArray[np.bool_]:
        values = part.truth.values
        values = values[..., 0] if self.problem.op == "matvec" else values
        if self.problem.out in INTEGERS:
            return np.asarray(found != values.astype(found.dtype), np.bool_)
        bound = oracle.tolerance(self.problem.alone(), _fixed(choice), choice.params, part.truth)
        with np.errstate(invalid="ignore"):
            return np.asarray(~(np.abs(found.astype(np.float64) - values) <= bound), np.bool_)


def sampled(problem: Problem, host: Host, seed: int) -> Sampled:
    """Compute the truth of a sample of the timed operands: first and last entry of the batch."""
    if problem.out in COMPLEX or problem.outputs == 0 or problem.batch == 0:
        return Sampled(problem, ())
    codes = problem.m * problem.reduction if problem.quant is not None else 0
    if codes > WHOLE_QUANTIZED or not isinstance(host.b, Frame):  # a stack of codes
        return Sampled(problem, ())
    rng = np.random.default_rng(seed)
    if host.ends is not None:
        alone = replace(problem, op="matmul", batch=1)
        a, w, ends, _ = host.arrays()
        return Sampled(alone, tuple(_of_groups(alone, a, w, ends, rng)))
    entries = sorted({0, problem.batch - 1})
    return Sampled(problem, tuple(_part(problem, host, entry, rng) for entry in entries))


def _part(problem: Problem, host: Host, entry: int, rng: np.random.Generator) -> Part:
    given, right, _ = host.arrays()
    b = right if problem.batch == 1 or problem.shared_b else right[entry]
    columns = None
    if problem.op == "matmul":
        columns = spread(problem.n, max(1, SAMPLED_ELEMENTS // max(problem.k, 1)), rng)
        b = b[:, columns]
    if isinstance(host.a, QuantizedMatrix):
        rows = np.arange(problem.m)
        a: Any = host.a
    else:
        whole = given if problem.batch == 1 or problem.shared_a else given[entry]
        rows = spread(problem.m, max(1, SAMPLED_ELEMENTS // max(problem.reduction, 1)), rng)
        a = whole[rows]
    which = entry if problem.batch > 1 else None
    return Part(which, rows, columns, reference(problem.alone(), a, b))


def _of_groups(
    problem: Problem, a: Array, w: Array, ends: Array, rng: np.random.Generator
) -> Iterator[Part]:
    """Yield a sample of what the first and the last expert that has tokens makes of them."""
    columns = spread(problem.n, max(1, SAMPLED_ELEMENTS // max(problem.k, 1)), rng)
    touched = list(groups(ends))
    for expert, tokens in dict(touched[:1] + touched[-1:]).items():
        rows = tokens.start + spread(tokens.stop - tokens.start, MOST_TOKENS, rng)
        truth = reference(problem, a[rows], w[expert][:, columns])
        yield Part(None, rows, columns, truth)


def spread(size: int, most: int, rng: np.random.Generator) -> Ints:
    """Return at most `most` sorted indices below `size`: first, last, one at random in each band.

    >>> spread(5, 8, np.random.default_rng(0)).tolist()
    [0, 1, 2, 3, 4]
    >>> some = spread(1000, 10, np.random.default_rng(0))
    >>> (len(some), int(some[0]), int(some[-1]))
    (10, 0, 999)
    """
    if size <= most:
        return np.arange(size)
    edges = np.linspace(0, size, most + 1).astype(np.int64)
    chosen = rng.integers(edges[:-1], edges[1:])
    chosen[-1] = size - 1
    chosen[0] = 0 if most > 1 else chosen[0]
    return np.asarray(chosen, np.int64)
