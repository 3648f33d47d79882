"""What CUDA rungs that read codes in layout ``mma16`` share: units, groups, what they accept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemmule.core.problem import FLOAT4_DTYPE, ITEMSIZE, Problem
from gemmule.core.rung import Arithmetic, Constraint, Params, Signature
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div

SIGNATURES: tuple[Signature, ...] = tuple(
    (a, x, x) for a in ("uint4", "uint8") for x in ("float16", "bfloat16", "float32")
)
OF_HALVES = tuple(s for s in SIGNATURES if s[1] != "float32")
FLOATS: tuple[Signature, ...] = tuple(
    (FLOAT4_DTYPE, x, x) for x in ("float16", "bfloat16", "float32")
)
"""Those of codes that are 4-bit floats; their groups are halves and quarters of a tile."""

FITS = Constraint(
    "at most 2^25 rows and columns",
    lambda problem, params: max(problem.m, problem.reduction, problem.n) <= 2**25,
)


def along(chain: Callable[[Problem, Params], int], *, transposed: bool = False) -> dict[str, Any]:
    """Return what rungs of these say of themselves whose sums have chains of so many additions."""
    return {
        "signatures": SIGNATURES + FLOATS,
        # Tensor cores align the products of an instruction and cut off.
        "arithmetic": lambda problem: Arithmetic("float32", chain=chain, per_add=2.0),
        "accepts_quant": lambda problem: in_fragments(problem, transposed=transposed),
    }


class Shapes:
    """Parameter sets of a rung that are no product of values: the only ones it is made for.

    names: of the parameters; points: their values. `params` is the search space that holds them.
    """

    def __init__(self, names: tuple[str, ...], points: tuple[tuple[int, ...], ...]) -> None:
        self.names = names
        self.sets = [dict(zip(names, point, strict=True)) for point in points]
        self.params = {name: tuple(dict.fromkeys(one[name] for one in self.sets)) for name in names}

    def arguments(self, params: Params) -> str:
        """Return parameters as template arguments, in their order."""
        return ", ".join(str(params[name]) for name in self.names)


def bits(problem: Problem) -> int:
    """Return the width of the codes."""
    return 8 if problem.a == "uint8" else 4


def form(problem: Problem) -> str:
    """Return what codes are: ``int4``, ``int8``, or a format of 4-bit floats."""
    return problem.codes.format


def tile_columns(problem: Problem) -> int:
    """Return the columns of a tile."""
    return 256 // bits(problem)


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
    return problem.codes.group_size not in (None, -1)


def split(problem: Problem) -> int:
    """Return into how many units the columns of a tile are cut so that each lies in one group."""
    if not is_grouped(problem):
        return 1
    group, columns = problem.codes.group_size or 1, tile_columns(problem)
    return next(s for s in (1, 2, 4) if group % (columns // s) == 0)


def shift(problem: Problem) -> int:
    """Return how many times two units make a group: 31 for all of a row, -1 for no power of two."""
    if not is_grouped(problem):
        return 31
    units = (problem.codes.group_size or 1) // (tile_columns(problem) // split(problem))
    return units.bit_length() - 1 if units & (units - 1) == 0 else -1


def template(problem: Problem) -> str:
    """Return the template arguments that every rung of these begins with."""
    spec = problem.codes
    types = f"{CTYPE[problem.b]}, {CTYPE[problem.out]}, {CTYPE[spec.scale_dtype]}"
    zeros = str(spec.has_zeros).lower()
    return f"{types}, {spec.bits}, {zeros}, {split(problem)}, {shift(problem)}"


def across(problem: Problem) -> bool:
    """Tell whether results that a thread holds, rows below each other, lie apart."""
    return problem.layout_out != "col"


def whole_vectors(problem: Problem) -> bool:
    """Tell whether columns of x, one after the other, all begin at whole 16 bytes."""
    return problem.alignment == 16 or problem.k * ITEMSIZE[problem.b] % 16 == 0


def tiles_across(columns: int, problem: Problem) -> int:
    """Return the tiles that hold this many columns."""
    return ceil_div(columns, tile_columns(problem))
