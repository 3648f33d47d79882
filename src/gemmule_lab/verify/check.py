"""Results on the user's own numbers, judged by the oracle element by element.

The oracle's bound follows from how the chosen rung rounds, so no tolerance is chosen here; the
largest error is reported as a share of that bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import gemmule as gm
from gemmule.core.problem import FLOAT4, FLOAT4_DTYPE, Problem
from gemmule.core.rung import Arithmetic
from gemmule.oracle import judge as oracle
from gemmule.oracle.inputs import Case, Inputs
from gemmule.oracle.truth import Truth, reference

if TYPE_CHECKING:
    from gemmule_lab.files.multiply import Job

Array: TypeAlias = NDArray[Any]

Truths: TypeAlias = dict[tuple[Problem, int], Truth]

SCRATCH_BYTES = 32 << 20
"""Truth takes three float64 copies of a block of the matrix; the block is cut to this."""


class UserOperands(Inputs):
    """Operands that no guard bytes surround, so that side effects cannot be seen."""

    def side_effects(self) -> str:
        """Return that nothing was found."""
        return ""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How the rung of a plan rounds on the planned problem."""

    arithmetic: Arithmetic
    params: dict[str, Any]

    @classmethod
    def of(cls, plan: gm.Plan) -> Rounding:
        """Return the rounding of a plan, its longest chain fixed at the plan's own problem."""
        choice = plan.choice
        arithmetic = choice.rung.arithmetic(choice.problem)
        chain = arithmetic.chain(choice.problem, choice.params)
        return cls(replace(arithmetic, chain=lambda problem, params: chain), dict(choice.params))


def judge(
    op: str, left: Any, right: Any, out: Array, rounding: Rounding, known: Truths | None = None
) -> oracle.Verdict:
    """Return the worst verdict over a result of ``op`` on host operands of up to two dimensions.

    left, right: as given to the public function, NumPy arrays or one QuantizedMatrix. The ratio of
    the verdict is the largest error over its bound; its index is that of the result. known: what
    was found of these very operands before, which is taken and added to.
    """
    a, b, result = _canonical(op, left, right, out)
    worst: oracle.Verdict | None = None
    for rows in _row_blocks(a, b, result):
        part = a if rows is None else rows_of(a, rows)
        piece = np.ascontiguousarray(result if rows is None else result[rows])
        problem = _problem(part, b, piece)
        inputs = UserOperands(Case(problem, _kind(problem)), part, b, piece, math.inf, (), ())
        truth = _truth(problem, part, b, rounding, known, 0 if rows is None else rows.start)
        verdict = oracle.judge(problem, rounding.arithmetic, rounding.params, inputs, piece, truth)
        if rows is not None and verdict.worst_index:
            index = (verdict.worst_index[0] + rows.start, *verdict.worst_index[1:])
            verdict = replace(verdict, worst_index=index)
        if worst is None or (verdict.ok, -verdict.ratio) < (worst.ok, -worst.ratio):
            worst = verdict
    return worst or oracle.Verdict(True, 0.0, (), "no elements", "bound")


def _truth(
    problem: Problem, part: Any, b: Array, rounding: Rounding, known: Truths | None, start: int
) -> Truth:
    """Return the right result of A's rows from `start` on, computed once for all that is known.

    Sizes of the operands are as large as these, and asked for by those alone that round them first:
    they are not kept, nor are results that would take more than the scratch.
    """
    rounds = rounding.arithmetic.inputs or rounding.arithmetic.activations_bits
    if known is None or rounds:
        return reference(problem, part, b)
    if (problem, start) not in known:
        truth = reference(problem, part, b)
        if truth.sizes is None or truth.values.nbytes > SCRATCH_BYTES:
            return truth
        nothing = np.zeros((1, 1))
        known[problem, start] = replace(truth, sizes=replace(truth.sizes, a=nothing, b=nothing))
    return known[problem, start]


def result_shape(op: str, left: Any, right: Any) -> tuple[int, ...]:
    """Return the shape of a product of operands of one or two dimensions."""
    if op == "matvec":
        return (left.shape[0],)
    return (right.shape[1],) if op == "vecmat" else (left.shape[0], right.shape[1])


def _kind(problem: Problem) -> str:
    return "integers" if problem.out.startswith(("int", "uint")) else "normal"


def _canonical(op: str, left: Any, right: Any, out: Array) -> tuple[Any, Array, Array]:
    """Return A, x or B, and the result, such that A stands first."""
    if op == "matvec":
        return left, right, out
    if op == "vecmat":
        return right.T, left, out
    if isinstance(right, gm.QuantizedMatrix):
        return right.T, left.T, out.T
    return left, right, out


def _problem(a: Any, b: Array, out: Array) -> Problem:
    spec = None
    name = "uint8"
    if isinstance(a, gm.QuantizedMatrix):
        vector = np.zeros(a.shape[1], b.dtype)
        spec = gm.plan("matvec", a, vector).problem.quant
        name = FLOAT4_DTYPE if a.scale_dtype in FLOAT4 else f"uint{a.bits}"
    else:
        name = a.dtype.name
    m, k = a.shape
    if b.ndim == 1:
        return Problem("matvec", m, k, a=name, b=b.dtype.name, out=out.dtype.name, quant=spec)
    return Problem(
        "matmul", m, b.shape[1], k, a=name, b=b.dtype.name, out=out.dtype.name, quant=spec
    )


def _row_blocks(a: Any, b: Array, out: Array) -> Iterator[slice | None]:
    """Yield slices of A's rows that keep the float64 copies small; None: all at once."""
    columns = a.shape[1] + (b.shape[1] if b.ndim == 2 else 1)
    step = max(1, SCRATCH_BYTES // (24 * max(columns, 1)))
    if isinstance(a, gm.QuantizedMatrix):
        if a.perm is not None or a.layout != "row" or a.device != "cpu":
            yield None
            return
        unit = row_unit(a)
        step = max(unit, step // unit * unit)
    for start in range(0, max(a.shape[0], 1), step):
        yield slice(start, min(start + step, a.shape[0]))


def row_unit(a: Any) -> int:
    """Return what a slice of A's rows begins at a multiple of.

    Rows of a transposed quantised matrix are stored columns: whole groups, whole bytes of nibbles.
    """
    transposed = isinstance(a, gm.QuantizedMatrix) and a.transposed
    return 2 * max(1, a.group_size or 1) if transposed else 1


def rows_of(a: Any, rows: slice) -> Any:
    """Return some rows of A, from a multiple of `row_unit` on."""
    if not isinstance(a, gm.QuantizedMatrix):
        return a[rows]
    count, per_byte = rows.stop - rows.start, 8 // a.bits
    stored_rows, stored_columns = a.stored_shape
    if a.transposed:
        width = max(1, a.group_size or 1)
        codes = (slice(None), slice(rows.start // per_byte, -(-rows.stop // per_byte)))
        groups = (slice(None), slice(rows.start // width, -(-rows.stop // width)))
        shape = (stored_rows, count)
        whole = a.group_size in (None, -1)
    else:
        codes = groups = (rows, slice(None))
        shape, whole = (count, stored_columns), a.group_size is None
    scales = a.scales if whole else a.scales[groups]
    zeros = a.zeros if whole or a.zeros is None else a.zeros[groups]
    return gm.QuantizedMatrix.from_parts(
        np.ascontiguousarray(a.codes[codes]),
        scales,
        zeros,
        shape=shape,
        bits=a.bits,
        group_size=a.group_size,
        transposed=a.transposed,
    )


class BlockCheck:
    """Watches the blocks of a `gemmule_lab.files.multiply.multiply` and keeps the worst verdict.

    seconds: what judging took.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._elements = 0
        self.ok = True
        self.ratio = self.seconds = 0.0
        self.worst = ""
        self._quantised = ""

    def __call__(self, part: slice, left: Any, right: Any, result: Array) -> None:
        """Judge one block: the operands that the public function was given, and its result."""
        job, start = self._job, time.perf_counter()
        device = job.device or "cpu"
        operands = left, right
        if device != "cpu":
            operands = gm.asarray(left, device=device), gm.asarray(right, device=device)
        plan = gm.plan(job.op, *operands, out_dtype=job.out_dtype, rung=job.rung)
        rounding = Rounding.of(plan)
        for index, one_left, one_right, one in _singles(job.op, left, right, result):
            self._keep(judge(job.op, one_left, one_right, one, rounding), index, part)
        self._elements += result.size
        if job.bits is not None:
            moved = quantisation_error(job, result)
            self._quantised = (
                f"check: what was compared is the product of the {job.bits}-bit matrix; it is "
                f"{moved:.3g} % off that of the file's own matrix (norm of the difference)"
            )
        self.seconds += time.perf_counter() - start

    def _keep(self, verdict: oracle.Verdict, index: tuple[int, ...], part: slice) -> None:
        self.ratio = max(self.ratio, verdict.ratio)
        if not verdict.ok and self.ok:
            self.ok = False
            place = f", in batch entry {index}" if index else ""
            self.worst = f"{verdict.text} (counted from result index {part.start}{place})"

    def summary(self) -> str:
        """Return a line on what was checked, and one on what quantising did to the product."""
        return "\n".join(line for line in (self._judged(), self._quantised) if line)

    def _judged(self) -> str:
        if not self.ok:
            return f"check: WRONG, {self.worst}"
        how = (
            "without any error"
            if self.ratio == 0.0
            else (f"largest error is {self.ratio:.3g} of its bound")
        )
        return f"check: all {self._elements:,} elements right, {how}"


def quantisation_error(job: Job, result: Array) -> float:
    """Return how far a result is from the product of the matrix as the file holds it, in percent.

    It is the norm of the difference over the norm of that product, which is computed in float64.
    """
    matrix, rows = job.matrix, max(1, SCRATCH_BYTES // (8 * max(job.matrix.shape[1], 1)))
    other = (job.left if job.op == "vecmat" else job.right).astype(np.float64)
    exact = np.zeros(result.shape)
    with np.errstate(all="ignore"):
        for first in range(0, matrix.shape[0], rows):
            part = slice(first, first + rows)
            block = matrix[part].astype(np.float64)
            if job.op == "vecmat":
                exact += other[..., part] @ block
            elif other.ndim > 1 and job.op == "matmul":
                exact[..., part, :] = block @ other
            else:
                exact[..., part] = np.matvec(block, other)
        difference = float(np.linalg.norm(result.astype(np.float64) - exact))
        size = float(np.linalg.norm(exact))
    return 100 * difference / size if size else (0.0 if difference == 0 else math.inf)


def _singles(
    op: str, left: Any, right: Any, out: Array
) -> Iterator[tuple[tuple[int, ...], Any, Any, Array]]:
    """Yield the products of a batch one by one, as operands of one or two dimensions."""
    left_core = 1 if op == "vecmat" else 2
    right_core = 1 if op == "matvec" else 2
    out_core = 2 if op == "matmul" else 1
    lead = out.shape[: out.ndim - out_core]
    if not lead:
        yield (), left, right, out
        return
    for index in np.ndindex(lead):
        yield index, _one(left, index, left_core), _one(right, index, right_core), out[index]


def _one(operand: Any, index: tuple[int, ...], core: int) -> Any:
    """Return the part of an operand that broadcasting pairs with one entry of the batch."""
    if isinstance(operand, gm.QuantizedMatrix):
        return operand
    own = operand.shape[: operand.ndim - core]
    tail = index[len(index) - len(own) :]
    return operand[tuple(0 if size == 1 else i for size, i in zip(own, tail, strict=True))]
