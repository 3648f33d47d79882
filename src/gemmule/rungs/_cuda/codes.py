"""What document 003's quantised rungs share: signatures, what they accept, alignment, chains."""

from __future__ import annotations

from gemmule.core.problem import Problem, QuantSpec
from gemmule.core.rung import Constraint, Params, Signature
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div
from gemmule.rungs._cuda.rows import WIDE, tree

FITS = Constraint(
    "p x rows is at most 1024 threads, 512 with 32 values a load",
    lambda problem, params: (
        params["p"] * params["rows"] <= (512 if params["values"] > 16 else 1024)
    ),
)


def signatures(bits: int) -> tuple[Signature, ...]:
    """Return the products of codes of this width with half and float vectors."""
    a = f"uint{bits}"
    halves = [(a, t, out) for t in ("float16", "bfloat16") for out in (t, "float32")]
    return (*halves, (a, "float32", "float32"))


def _plain(problem: Problem) -> QuantSpec | None:
    """Return the quantisation if the matrix is stored as rows, unpermuted, and not batched."""
    spec = problem.quant
    if spec is None or problem.batch > 1:
        return None
    plain = spec.layout == "row" and not spec.transposed and not spec.has_perm
    return spec if plain and spec.activations == "float" else None


def takes_groups(problem: Problem) -> bool:
    """Tell whether every piece of up to 32 columns lies in one group."""
    spec = _plain(problem)
    return spec is not None and (spec.group_size in (None, -1) or (spec.group_size or 0) % 32 == 0)


def takes_one_scale(problem: Problem) -> bool:
    """Tell whether one scale and one zero point serve the whole matrix, as in document 003."""
    spec = _plain(problem)
    return spec is not None and spec.group_size is None


def scale_type(problem: Problem) -> str:
    """Return the C++ type of the scales."""
    return CTYPE["float32" if problem.quant is None else problem.quant.scale_dtype]


def load_width(problem: Problem, bits: int, values: int) -> int:
    """Return the codes of one load: `values`, or those of a byte where rows are not aligned."""
    row_bytes = ceil_div(problem.n * bits, 8)
    aligned = problem.alignment >= WIDE and row_bytes % (values * bits // 8) == 0
    return values if aligned else 8 // bits


def alignment(problem: Problem, bits: int, values: int) -> int:
    """Return the ALIGN argument of codes.cuh."""
    return WIDE if load_width(problem, bits, values) == values else 1


def product_chain(problem: Problem, params: Params, bits: int) -> int:
    """Return the most additions with a sum for each piece (share_of_codes)."""
    p, width = params["p"], load_width(problem, bits, params["values"])
    pieces = ceil_div(problem.n // width, p) + ceil_div(problem.n % width, p)
    return pieces + width + 2 * tree(32)


def table_chain(problem: Problem, params: Params, bits: int) -> int:
    """Return the most additions with one running sum (share_of_table)."""
    p, width = params["p"], load_width(problem, bits, params["values"])
    return ceil_div(problem.n // width, p) * width + ceil_div(problem.n % width, p) + 2 * tree(32)
