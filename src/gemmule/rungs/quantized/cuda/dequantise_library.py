"""Many columns: the matrix dequantised into a workspace, and multiplied by the vendor's library.

A prompt's product is limited by the tensor cores, not by the bytes of the weights: the vendor's own
kernel, the fastest there is, then costs only the time in which a kernel in front of it writes the
weights as floats, at the memory's speed. That is a fixed time for each matrix, so it pays from some
hundreds of columns on. In pieces of rows: 256 MiB of floats at most are there at a time.

Each weight is rounded once to the dtype of x, as the dense weight that it stands for was: by 2^-9
in bfloat16, 2^-12 in float16; in float32 it is what computing it costs anyway. Where weights have
to be exact (`QuantSpec.exact`) plans never choose it for halves.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gemmule.backends.cuda.library import cublas
from gemmule.core.canonical import Call
from gemmule.core.problem import HALVES, ITEMSIZE, Problem
from gemmule.core.rung import (
    Arithmetic,
    LibraryRung,
    Machine,
    Params,
    Suggestion,
)
from gemmule.quant.cuda import by_library
from gemmule.rungs._cuda import fragments
from gemmule.rungs.matmul.cuda import cublas as vendor

# One H200 (November 2026): the share of the read ceiling at which floats are written; what the
# library takes for any product, and for each number of the sum; its flops per second and
# multiprocessor, by the alignment of x and the result. 24 aligned products within 25 %, from 512 x
# 4096 by 24 to 28672 x 8192 by 4096, others within a factor of two.
_WRITE_SHARE, _START_S, _DEEP_S, _ANYWHERE_S = 0.75, 3.5e-6, 0.35e-9, 2e-6
_ANYWHERE_WRITTEN, _ANYWHERE_READ = 2.0, 3.0  # times as long where nothing is aligned
_HALF_FLOPS = {16: 6e12, 8: 1.4e12, 4: 1.3e12, 2: 0.6e12}


def _bind(problem: Problem, call: Call, params: Params) -> Callable[..., None]:
    return by_library.ByLibrary(problem, call, vendor.gemm, params["rank"])


def _arithmetic(problem: Problem) -> Arithmetic:
    halves = problem.b in HALVES
    return Arithmetic(
        accumulator="float32",
        chain=lambda p, params: p.k + 64,
        inputs=problem.b if halves else None,
        per_add=2.0 if halves else 1.0,
    )


def _accepts(problem: Problem) -> bool:
    """Tell whether codes are there to be dequantised; permuted columns only in one piece."""
    spec = problem.quant
    if spec is None or problem.batch > 1 or spec.activations != "float":
        return False
    return not (spec.has_perm and spec.transposed)


def _suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Add up what writing the floats takes and what the library does."""
    floats = problem.m * problem.k * ITEMSIZE[problem.b]
    # A plan may be given a result that lies by columns, though it was made for one by rows.
    aligned = math.gcd(problem.alignment, problem.m * ITEMSIZE[problem.out])
    if problem.layout_out == "row":
        aligned = math.gcd(aligned, problem.n * ITEMSIZE[problem.out])
    written = (problem.matrix_bytes + floats / _WRITE_SHARE) / machine.read_bytes_per_s
    moved = floats / machine.read_bytes_per_s
    if aligned < 16:
        written, moved = _ANYWHERE_WRITTEN * written, _ANYWHERE_READ * moved
    rate = _HALF_FLOPS[aligned] if problem.b in HALVES else vendor.UNIT_FLOPS["float32"]
    product = max(moved, problem.flops / (machine.units * rate))
    product += _START_S + _DEEP_S * problem.k + (0.0 if aligned == 16 else _ANYWHERE_S)
    return Suggestion({"rank": 0}, machine.call_s + written + product)


def _spec(problem: Problem, call: Call) -> by_library.Told:
    return by_library.told(problem, call, vendor.gemm)


RUNG = LibraryRung(
    title="Dequantise, then cuBLAS",
    idea="Pieces of the matrix are written as floats and multiplied by the vendor's library.",
    source="NVIDIA cuBLAS, cublasLtMatmul; dequantising before products of many columns: "
    "Frantar et al., GPTQ (2022)",
    op="matmul",
    after="any_columns",
    branch="many columns, by the vendor's library",
    signatures=fragments.SIGNATURES,
    arithmetic=_arithmetic,
    params=vendor.RUNG.params,
    constraints=vendor.RUNG.constraints,
    accepts_quant=_accepts,
    workspace=lambda problem, params: by_library.workspace(problem),
    suggest=_suggest,
    spec=_spec,
    bind=_bind,
    available=cublas.missing,
)
