"""What CUDA rungs for few columns share: which operand is streamed, and the packed other.

`few_columns.cuh` says how the columns are packed; the sizes here are the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemmule.core.device_model import Terms
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, Machine, Params, Step
from gemmule.rungs._cuda import terms
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, instance
from gemmule.rungs._cuda.terms import beside

MOST = 16  # columns that are multiplied together; more of them stream the matrix again


@dataclass(frozen=True, slots=True)
class Seen:
    """A product as the kernels see it: `m` rows are streamed along `k` and meet `n` columns."""

    m: int
    n: int
    k: int
    matrix: str
    columns: str
    turned: bool
    shared_columns: bool
    columns_along_k: bool

    @property
    def lanes(self) -> int:
        """Elements of the matrix in 16 bytes."""
        return 16 // ITEMSIZE[self.matrix]

    @property
    def packed(self) -> str:
        """The dtype of the packed columns: the wider of both."""
        wider = ITEMSIZE[self.matrix] > ITEMSIZE[self.columns]
        return self.matrix if wider else self.columns


def seen(problem: Problem) -> Seen:
    """Return the product, turned into C^T = B^T A^T where B's columns are what can be streamed."""
    p = problem
    by_rows, by_columns = p.layout_a == "row", p.layout_b == "col"
    if by_columns and (not by_rows or p.m < p.n):
        return Seen(p.n, p.m, p.k, p.b, p.a, True, p.shared_a, by_rows)
    return Seen(p.m, p.n, p.k, p.a, p.b, False, p.shared_b, by_columns)


def width_of(problem: Problem, most: int = MOST) -> int:
    """Return the columns that are multiplied together: of a few numbers the least, or `most`."""
    columns = seen(problem).n
    return next((w for w in (2, 4, 8, 12) if columns <= w <= most), most)


def vectors(problem: Problem, width: int, lanes: int) -> int:
    """Return how many vectors are packed: groups of `width` columns, read by `lanes` lanes."""
    view = seen(problem)
    chunks = ceil_div(view.k, lanes * view.lanes)
    groups = ceil_div(view.n, width)
    return (1 if view.shared_columns else problem.batch) * groups * chunks * width * lanes


def packed_bytes(problem: Problem, width: int, lanes: int) -> int:
    """Return the bytes of the packed columns."""
    view = seen(problem)
    return vectors(problem, width, lanes) * view.lanes * ITEMSIZE[view.packed]


def after_packing(problem: Problem, width: int, lanes: int, product: Step) -> tuple[Step, ...]:
    """Return the launch that packs the columns, where there is anything to pack, and `product`."""
    view = seen(problem)
    types = CTYPE[view.packed], CTYPE[view.columns]
    pack = Step(
        kernel=instance("pack_columns", *types, view.lanes, lanes, width, view.turned),
        grid=(ceil_div(vectors(problem, width, lanes), 256), 1, 1),
        block=(256, 1, 1),
    )
    return (pack, product) if view.k else (product,)


def slabs(problem: Problem, rows: int, width: int) -> int:
    """Return how many blocks of `rows` rows and `width` columns there are."""
    view = seen(problem)
    return ceil_div(view.m, rows) * ceil_div(view.n, width) * problem.batch


def _fits(problem: Problem, params: Params) -> bool:
    view = seen(problem)
    return (
        max(view.m, view.n, view.k) < 2**31
        and slabs(problem, 16, 2) < 2**31
        and vectors(problem, MOST, 8) < 2**32
    )


STREAMED = Constraint(
    "A row-major or B column-major: what is streamed has unit stride along the sum",
    lambda problem, params: problem.layout_a == "row" or problem.layout_b == "col",
)
FITS = Constraint("sizes below 2^31, and so many blocks", _fits)


def rows_aligned(problem: Problem) -> bool:
    """Tell whether streamed rows begin at whole vectors, as far as a problem tells."""
    view = seen(problem)
    return view.k * ITEMSIZE[view.matrix] % 16 == 0 or problem.alignment == 16


def streaming(
    problem: Problem,
    machine: Machine,
    shape: tuple[int, int, float],
    tile: tuple[int, int, int],
    packed: int = 0,
) -> Terms:
    """Return the terms of streaming the matrix once for each of a tile's columns.

    shape: as `gemmule.rungs._cuda.terms.streaming` has it. tile: rows and columns of a block, whose
    vectors are copied and multiplied, and the steps of a chunk; what is left of the sum goes
    element by element. packed: bytes that are packed before.
    """
    view, (rows, width, chunk), kind = seen(problem), tile, str(ITEMSIZE[problem.a])
    again = view.m * view.k * ITEMSIZE[view.matrix] * (ceil_div(view.n, width) - 1)
    steps = max(1.0, shape[0] / machine.units) * view.k
    crooked, waves = not rows_aligned(problem), max(1.0, shape[0] / (shape[1] * machine.units))
    alone = {"pack_s": float(packed > 0), "packed": packed / machine.read_bytes_per_s}
    read = {"again": again / machine.read_bytes_per_s}
    late = {f"wave_s {kind}": waves, f"tail_s {kind}": waves * rows * (view.k % chunk)}
    late[f"out_s {kind}"] = waves * rows * width
    work = {f"sum_s {kind}": steps * rows * width, f"copy_s {kind}": steps * (rows + width)}
    work[f"element_s {kind}"] = waves * shape[1] * rows * view.k * crooked
    kind += " crooked" * crooked
    return beside(terms.streaming(problem, machine, shape, kind), alone, read, late, work)
