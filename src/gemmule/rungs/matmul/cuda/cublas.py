"""cuBLAS: the vendor's own product, by its library's choice of kernel.

Nothing here is ours but the way in: cublasLt is told how the operands lie and asked for its best
algorithm once; each call starts that on the caller's stream. Matrices by rows go in as transposes
of matrices by columns, so any operand or result with one unit stride is taken where it lies, also
strided batches and a matrix that a batch shares. What users have without this package is what a
plan takes, until another rung is known on the same device to be 10 % faster.

float32 is IEEE's, complex64's parts too: products and sums in float32, TF32 only for
`precision="tf32"`. Halves are summed
in float32 to the end, also where the library divides the reduction. With the same version of the
library on the same kind of device the bits are the same at each run, but not for rows computed
alone: `batch_invariant=True` never comes here. The library's own environment variables
(``NVIDIA_TF32_OVERRIDE``, ``CUBLAS_EMULATE_SINGLE_PRECISION``) are the user's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from gemmule.backends.cuda.library import cublas
from gemmule.backends.cuda.library.run import LibraryRun, by_columns
from gemmule.core.canonical import Call
from gemmule.core.device_model import Terms
from gemmule.core.problem import COMPLEX, HALVES, ITEMSIZE, Problem
from gemmule.core.rung import (
    Arithmetic,
    Constraint,
    LibraryRung,
    Machine,
    Params,
    same,
)
from gemmule.rungs._cuda.geometry import ceil_div, modelled
from gemmule.rungs._cuda.half_tiles import ROWS_TOGETHER
from gemmule.rungs._cuda.tiles import PARTS, tiles

LONGEST, MOST_PRODUCTS = 2**31 - 1, 65_535
TILE = (128, 128)


def compute(problem: Problem) -> str:
    """Return the type that products and sums have."""
    if problem.a in ("float64", *COMPLEX):
        return problem.a
    return "tf32" if problem.a == "float32" and problem.precision == "tf32" else "float32"


def gemm(problem: Problem, call: Call) -> cublas.Gemm:
    """Return the product as the library is told of it.

    A result by rows is, by columns, its transpose: ``C^T = B^T A^T``, so B comes first.
    """
    inside = len(call.outer)
    steps = [view.strides[inside:] for view in (call.a, call.b, call.out)]
    batch_steps = [step[0] if problem.batch > 1 else 0 for step in steps]
    shapes = ((problem.m, problem.k), (problem.k, problem.n), (problem.m, problem.n))
    layouts = (problem.layout_a, problem.layout_b, problem.layout_out)
    dtypes = (problem.a, problem.b, problem.out)
    a, b, c = (
        replace(by_columns(dtype, layout, shape, (step[-2], step[-1])), batch_step=batch_step)
        for dtype, layout, shape, step, batch_step in zip(
            dtypes, layouts, shapes, steps, batch_steps, strict=True
        )
    )
    by_rows = problem.layout_out == "row"
    turned = [(layout == "col") == by_rows for layout in layouts[:2]]
    if by_rows:
        a, b, turned = b, a, turned[::-1]
    # Batches that lie backwards are walked from outside.
    batch = 1 if min(batch_steps) < 0 else problem.batch
    if batch == 1:
        a, b, c = (replace(matrix, batch_step=0) for matrix in (a, b, c))
    kind, aligned = compute(problem), problem.alignment
    return cublas.Gemm(a, b, c, (turned[0], turned[1]), batch, kind, aligned)


def bind(problem: Problem, call: Call, params: Params) -> Callable[..., None]:
    """Return ``run(a, b, out, alpha, beta)`` over device operands."""
    told = gemm(problem, call)
    exchanged = problem.layout_out == "row"
    return LibraryRun(told, problem, call, exchanged=exchanged, rank=params["rank"])


def _arithmetic(problem: Problem) -> Arithmetic:
    kind = compute(problem)
    return Arithmetic(
        accumulator="float32" if kind == "tf32" else kind,
        chain=lambda p, params: p.k + 64,
        inputs="tf32" if kind == "tf32" else None,
        # Tensor cores align the products of an instruction and cut off.
        per_add=2.0 if problem.a in HALVES or kind == "tf32" else 1.0,
    )


def _fits(problem: Problem, params: Params) -> bool:
    sizes = (problem.m, problem.n, problem.k)
    return min(sizes) >= 1 and max(sizes) <= LONGEST and problem.batch <= MOST_PRODUCTS


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    yield {"rank": 0}


def product(problem: Problem, params: Params, machine: Machine, dtype: str, aligned: int) -> Terms:
    """Return the terms of the library's product of operands of a dtype.

    It shares long sums among multiprocessors, and is slower where there are few tiles even so. One
    row or column is a product by a vector, which has kernels of its own.
    """
    kind = f"{'halves' if dtype in HALVES else dtype} {aligned}"
    size = replace(problem, m=ceil_div(problem.m, 32) * 32, n=ceil_div(problem.n, 32) * 32)
    flops = size.flops / machine.units
    thin = max(0.0, 1 - tiles(problem, *TILE) / machine.units)
    begin = "one" if min(problem.m, problem.n) == 1 else kind
    return (
        {f"start_s {begin}": 1.0, f"deep_s {kind}": math.sqrt(problem.k), "rank_s": params["rank"]},
        {"read": problem.compulsory_bytes / machine.read_bytes_per_s},
        {f"flop_s {kind}": flops, f"thin_s {kind}": flops * thin},
    )


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    dtype = problem.a if problem.a in HALVES else compute(problem)
    if dtype in COMPLEX:  # a product of parts, of twice as many columns and twice as long sums
        dtype, problem = PARTS[dtype], replace(problem, n=2 * problem.n, k=2 * problem.k)
    return product(problem, params, machine, dtype, problem.alignment)


RUNG = LibraryRung(
    title="cuBLAS",
    idea="The vendor's library: asked once for its best algorithm, then called.",
    source="NVIDIA cuBLAS, cublasLtMatmul and its heuristic",
    signatures=(
        *same("float32", "float64", "float16", "bfloat16", *COMPLEX),
        *((half, half, "float32") for half in HALVES),
    ),
    arithmetic=_arithmetic,
    branch="the vendor's library",
    layouts=("row", "col"),
    params={"rank": (0, 1, 2, 3)},
    constraints=(
        Constraint(
            f"sizes of 1 to {LONGEST:,} and at most {MOST_PRODUCTS:,} products in a batch", _fits
        ),
        Constraint(
            "C by rows or by columns",
            lambda problem, params: problem.layout_out != "strided",
        ),
        Constraint(
            "whole elements at every address",
            lambda problem, params: problem.alignment >= ITEMSIZE[problem.b],
        ),
        ROWS_TOGETHER,
    ),
    batched=True,
    vendor=True,
    spec=gemm,
    bind=bind,
    available=cublas.missing,
    **modelled("matmul/cublas", _terms, _choices),
)
