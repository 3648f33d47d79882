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
from collections.abc import Callable, Iterable
from dataclasses import replace

from gemmule.backends.cuda.library import cublas
from gemmule.core.canonical import Call
from gemmule.core.device_model import Terms
from gemmule.core.problem import FLOAT4, HALVES, ITEMSIZE, Problem
from gemmule.core.rung import (
    Arithmetic,
    LibraryRung,
    Machine,
    Params,
)
from gemmule.quant.cuda import by_library
from gemmule.rungs._cuda import fragments
from gemmule.rungs._cuda.geometry import modelled
from gemmule.rungs._cuda.terms import beside
from gemmule.rungs.matmul.cuda import cublas as vendor


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


def _aligned(problem: Problem) -> int:
    """Return how x and the result lie: a plan may be given one by columns, though made for rows."""
    aligned = math.gcd(problem.alignment, problem.m * ITEMSIZE[problem.out])
    if problem.layout_out == "row":
        aligned = math.gcd(aligned, problem.n * ITEMSIZE[problem.out])
    return aligned


def _spec(problem: Problem, call: Call) -> by_library.Told:
    return by_library.told(problem, call, vendor.gemm)


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    return [{"rank": 0}]


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Write the floats, then do what the library does."""
    floats = problem.m * problem.k * ITEMSIZE[problem.b]
    written = (problem.matrix_bytes + floats) / machine.read_bytes_per_s
    dense = replace(problem, a=problem.b, quant=None)
    terms = vendor.product(dense, params, machine, problem.b, _aligned(problem))
    floats = problem.m * problem.k * (fragments.form(problem) in FLOAT4.values())
    decoded = {f"written {_aligned(problem)}": written, "float_s": floats / machine.units}
    return beside(terms, decoded)


RUNG = LibraryRung(
    title="Dequantise, then cuBLAS",
    idea="Pieces of the matrix are written as floats and multiplied by the vendor's library.",
    source="NVIDIA cuBLAS, cublasLtMatmul; dequantising before products of many columns: "
    "Frantar et al., GPTQ (2022)",
    op="matmul",
    after="any_columns",
    branch="many columns, by the vendor's library",
    signatures=fragments.SIGNATURES + fragments.FLOATS,
    arithmetic=_arithmetic,
    params=vendor.RUNG.params,
    constraints=vendor.RUNG.constraints,
    accepts_quant=_accepts,
    workspace=lambda problem, params: by_library.workspace(problem),
    spec=_spec,
    bind=_bind,
    available=cublas.missing,
    **modelled("quantized/dequantise_library", _terms, _choices),
)
