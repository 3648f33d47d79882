"""What document 003's quantised rungs share: all but their kernels, and what they teach."""

from __future__ import annotations

from typing import Any

from gemmule.core.problem import Problem, QuantSpec
from gemmule.core.rung import Constraint, Machine, Params, Signature, Step, Suggestion
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, flat, instance
from gemmule.rungs._cuda.rows import WIDE, sums, tree

FITS = Constraint(
    "p x rows is at most 1024 threads, 512 with 32 values a load",
    lambda problem, params: (
        params["p"] * params["rows"] <= (512 if params["values"] > 16 else 1024)
    ),
)


def _signatures(bits: int) -> tuple[Signature, ...]:
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


def _takes_groups(problem: Problem) -> bool:
    """Tell whether every piece of up to 32 columns lies in one group."""
    spec = _plain(problem)
    return spec is not None and (spec.group_size in (None, -1) or (spec.group_size or 0) % 32 == 0)


def _takes_one_scale(problem: Problem) -> bool:
    """Tell whether one scale and one zero point serve the whole matrix, as in document 003."""
    spec = _plain(problem)
    return spec is not None and spec.group_size is None


def _load_width(problem: Problem, bits: int, values: int) -> int:
    """Return the codes of one load: `values`, or those of a byte where rows are not aligned."""
    row_bytes = ceil_div(problem.n * bits, 8)
    aligned = problem.alignment >= WIDE and row_bytes % (values * bits // 8) == 0
    return values if aligned else 8 // bits


def _product_chain(problem: Problem, params: Params, bits: int) -> int:
    """Return the most additions with a sum for each piece (share_of_codes)."""
    p, width = params["p"], _load_width(problem, bits, params["values"])
    pieces = ceil_div(problem.n // width, p) + ceil_div(problem.n % width, p)
    return pieces + width + 2 * tree(32)


def _table_chain(problem: Problem, params: Params, bits: int) -> int:
    """Return the most additions with one running sum (share_of_table)."""
    p, width = params["p"], _load_width(problem, bits, params["values"])
    return ceil_div(problem.n // width, p) * width + ceil_div(problem.n % width, p) + 2 * tree(32)


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Serve codes stored as rows, which no other fast rung reads.

    One H100 (November 2026), one scale, halves as x: 16384 squared in 105 us of 8 bits, 85 of 4; a
    weight's instructions limit the latter. 4096 squared in 9.7 both.
    """
    spec = _plain(problem)
    if spec is None or not _takes_groups(problem):
        return None
    values = 32 if spec.bits == 4 and problem.n > 4096 else 16
    if _load_width(problem, spec.bits, values) != values:  # byte by byte: how fast is not known
        return None
    few = problem.m < 2 * machine.units  # rows, of which each then needs more than a warp
    p, rows = (256, 1) if few else (32, 4)
    params = {"p": p, "rows": rows, "values": values}
    fill = min(1.0, problem.m * p / (512 * machine.units))
    read = problem.compulsory_bytes / (0.8 * machine.read_bytes_per_s)
    decoded = problem.m * problem.n / (2.4e10 * machine.units)
    return Suggestion(params, machine.call_s + max(read, decoded) / max(fill, 1e-3))


def card(
    kernel: str, bits: int, values: tuple[int, ...], *, fill: str | None = None
) -> dict[str, Any]:
    """Return what a rung of codes of `bits` bits says of itself beside its idea.

    kernel: the product's. values: how many codes a thread may take from one load. fill: the kernel
    of a first launch, which fills a table with all products of a code and a value of x.
    """

    def steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
        scale = CTYPE["float32" if problem.quant is None else problem.quant.scale_dtype]
        x, y = CTYPE[problem.b], CTYPE[problem.out]
        loaded = params["values"]
        align = WIDE if _load_width(problem, bits, loaded) == loaded else 1
        types = (x, y, scale) if fill is None else (y, scale)
        blocks = ceil_div(problem.m, params["rows"])
        name = instance(kernel, *types, align, loaded)
        product = flat(name, blocks, (params["p"], params["rows"]))
        if fill is None or problem.n == 0:
            return (product,)
        return flat(instance(fill, x, scale), ceil_div(problem.n << bits, 256), 256), product

    chain = _product_chain if fill is None else _table_chain
    return {
        "op": "matvec",
        "signatures": _signatures(bits),
        "arithmetic": sums(lambda problem, params: chain(problem, params, bits)),
        "params": {"p": (128, 32, 64, 256, 512), "rows": (4, 1, 2, 8), "values": values},
        "constraints": (FITS,),
        "accepts_quant": _takes_groups if fill is None else _takes_one_scale,
        "suggest": _suggest if fill is None else lambda problem, machine: None,
        "workspace": lambda problem, params, machine: 4 * (problem.n << bits) if fill else 0,
        "steps": steps,
    }
