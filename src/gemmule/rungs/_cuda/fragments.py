"""What CUDA rungs that read codes in layout ``mma16`` share: units, groups, what they accept."""

from __future__ import annotations

from gemmule.core.problem import ITEMSIZE, Problem, QuantSpec
from gemmule.core.rung import Constraint, Signature
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div

SIGNATURES: tuple[Signature, ...] = tuple(
    (a, x, x) for a in ("uint4", "uint8") for x in ("float16", "bfloat16", "float32")
)
TILE_ROWS = 16

FITS = Constraint(
    "at most 2^25 rows and columns",
    lambda problem, params: max(problem.m, problem.reduction, problem.n) <= 2**25,
)


def bits(problem: Problem) -> int:
    """Return the width of the codes."""
    return 4 if problem.a == "uint4" else 8


def tile_columns(problem: Problem) -> int:
    """Return the columns of a tile."""
    return 256 // bits(problem)


def quant(problem: Problem) -> QuantSpec:
    """Return the quantisation of a quantised problem."""
    if problem.quant is None:
        raise TypeError(f"{problem.describe()} is not quantised.")
    return problem.quant


def in_fragments(problem: Problem, transposed: bool) -> bool:
    """Tell whether codes lie in fragment order, seen this way round, in groups of whole units."""
    spec = problem.quant
    if spec is None or problem.batch > 1 or spec.activations != "float":
        return False
    if spec.layout != "mma16" or spec.transposed != transposed:
        return False
    group = spec.group_size
    return group in (None, -1) or (group or 0) % (64 // spec.bits) == 0


def is_grouped(problem: Problem) -> bool:
    """Tell whether rows have several scales."""
    return quant(problem).group_size not in (None, -1)


def split(problem: Problem) -> int:
    """Return into how many units the columns of a tile are cut so that each lies in one group."""
    if not is_grouped(problem):
        return 1
    group, columns = quant(problem).group_size or 1, tile_columns(problem)
    return next(s for s in (1, 2, 4) if group % (columns // s) == 0)


def shift(problem: Problem) -> int:
    """Return how many times two units make a group: 31 for all of a row, -1 for no power of two."""
    if not is_grouped(problem):
        return 31
    units = (quant(problem).group_size or 1) // (tile_columns(problem) // split(problem))
    return units.bit_length() - 1 if units & (units - 1) == 0 else -1


def template(problem: Problem) -> str:
    """Return the template arguments that every rung of these begins with."""
    spec = quant(problem)
    types = f"{CTYPE[problem.b]}, {CTYPE[problem.out]}, {CTYPE[spec.scale_dtype]}"
    zeros = str(spec.has_zeros).lower()
    return f"{types}, {spec.bits}, {zeros}, {split(problem)}, {shift(problem)}"


def whole_vectors(problem: Problem) -> bool:
    """Tell whether columns of x, one after the other, all begin at whole 16 bytes."""
    return problem.alignment == 16 or problem.k * ITEMSIZE[problem.b] % 16 == 0


def tiles_across(columns: int, problem: Problem) -> int:
    """Return the tiles that hold this many columns."""
    return ceil_div(columns, tile_columns(problem))
