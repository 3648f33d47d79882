"""Moving a quantised matrix to another device, or its codes to another layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from gemmule import backends
from gemmule.core.problem import FLOAT4, FLOAT4_DTYPE, Problem, QuantSpec
from gemmule.core.registry import rungs_for
from gemmule.core.rung import CudaRung
from gemmule.quant import checks, library
from gemmule.quant.cuda import fragment_order
from gemmule.quant.float4 import GROUP_SIZES
from gemmule.quant.layouts import get_layout, unwoven, woven

Matrix = TypeVar("Matrix", bound=Any)
_X = "float32", "float16", "bfloat16"


def on(matrix: Matrix, device: str) -> Matrix:
    """Return the matrix on a device, in the layout that it has."""
    if device == matrix.device:
        return matrix
    name, move = library.mover(device)
    if name == matrix.device:
        return matrix
    return replace(
        matrix,
        codes=move(matrix.codes),
        scales=move(matrix.scales),
        zeros=None if matrix.zeros is None else move(matrix.zeros),
        perm=None if matrix.perm is None else move(matrix.perm),
        device=name,
    )


def reads_floats(form: str, device: str, *, experts: bool = False) -> bool:
    """Tell whether a GPU multiplies the 4-bit floats of a format as they are.

    So it is where each rung there that takes them is proved, for plans choose no other: by vectors
    and by matrices, in either direction, in every dtype that x may have. experts: of a stack, whose
    products are grouped ones.
    """
    backend = backends.get("cuda")
    machine = backend.machine(device)
    for problem in _of_experts(form) if experts else _of_matrices(form):
        for rung in rungs_for("cuda", problem.op, quantized=True):
            elsewhere = isinstance(rung, CudaRung) and not rung.runs_on(machine.arch)
            if elsewhere or rung.refusal(problem) is not None:
                continue
            if not backend.proved(rung, problem, machine):
                return False
    return True


def _of_matrices(form: str) -> Iterator[Problem]:
    kinds = ("matvec", "matmul"), _X, (False, True)
    for op, x, turned in itertools.product(*kinds):
        spec = _spec(form, fragment_order.LAYOUT, turned)
        sizes = (4096, 4096, 1) if op == "matvec" else (4096, 16, 4096)
        yield Problem(op, *sizes, a=FLOAT4_DTYPE, b=x, out=x, quant=spec)


def _of_experts(form: str) -> Iterator[Problem]:
    spec = _spec(form, "row", False)
    for x, out in itertools.product(_X, _X):
        if out in (x, "float32"):
            types = x, FLOAT4_DTYPE, out
            yield Problem("grouped", 64, 4096, 4096, 8, *types, alignment=16, quant=spec)


def _spec(form: str, layout: str, turned: bool) -> QuantSpec:
    (scales,) = (name for name, known in FLOAT4.items() if known == form)
    return QuantSpec(4, GROUP_SIZES[form], False, layout, scales, turned)


def in_layout(matrix: Matrix, layout: str) -> Matrix:
    """Return a matrix on the host in another layout."""
    m, n = matrix.stored_shape
    apart = matrix.format is not None
    held = matrix.codes
    if apart and matrix.layout == fragment_order.LAYOUT:
        held = unwoven(held)
    row = get_layout(matrix.layout).to_row(held, m, n, matrix.bits)
    target = get_layout(layout)
    codes = target.from_row(row, m, n, matrix.bits)
    if apart and layout == fragment_order.LAYOUT:
        codes = woven(codes)
    scales, zeros = (
        None if part is None else checks.read_only(part, target.scale_order)
        for part in (matrix.scales, matrix.zeros)
    )
    return replace(matrix, codes=checks.read_only(codes), scales=scales, zeros=zeros, layout=layout)


def reordered(matrix: Matrix, layout: str) -> Matrix:
    """Return a matrix on a CUDA device in the other layout there is."""
    m, n = matrix.stored_shape
    floats = matrix.format is not None
    codes = fragment_order.reordered(matrix.codes, layout, (m, n), matrix.bits, floats=floats)
    scales, zeros = (
        None if part is None else fragment_order.turned(part)
        for part in (matrix.scales, matrix.zeros)
    )
    return replace(matrix, codes=codes, scales=scales, zeros=zeros, layout=layout)
