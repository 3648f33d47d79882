"""What document 003's quantised rungs share: all but their kernels, and what they teach."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gemmule.core.device_model import Terms
from gemmule.core.problem import Problem, QuantSpec
from gemmule.core.rung import Constraint, Machine, Params, Signature, Step
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, flat, instance, modelled
from gemmule.rungs._cuda.rows import WIDE, sums, tree
from gemmule.rungs._cuda.terms import streaming

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


def _timed(rung: str) -> dict[str, Any]:
    """Return what such a rung says of its time: it serves codes stored as rows.

    A weight's instructions limit it, or the memory.
    """

    def choices(problem: Problem, machine: Machine) -> Iterable[Params]:
        spec = _plain(problem)
        values = 32 if spec and spec.bits == 4 else 16
        if spec and _takes_groups(problem) and _load_width(problem, spec.bits, values) == values:
            yield {"p": 256, "rows": 1, "values": values}  # byte by byte: not measured
            yield {"p": 32, "rows": 4, "values": values}

    def terms(problem: Problem, params: Params, machine: Machine) -> Terms:
        p, rows = params["p"], params["rows"]
        turns = ceil_div(problem.n, p * params["values"])
        shape = ceil_div(problem.m, rows), max(1, 2048 // (p * rows)), turns
        decoded = {"code_s": problem.m * problem.n / machine.units}
        return streaming(problem, machine, shape, "", {}, {}, {}, decoded)

    return modelled(rung, terms, choices)


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
        "workspace": lambda problem, params, machine: 4 * (problem.n << bits) if fill else 0,
        "steps": steps,
        **(_timed(f"quantized/int{bits}_codes") if fill is None else {}),
    }
