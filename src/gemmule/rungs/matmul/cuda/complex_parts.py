"""Complex numbers by their parts: one product of floats on the tensor cores for four.

A complex product is four real ones, of real and imaginary parts. In memory the parts lie side by
side, so A and C by rows are real matrices already, with twice as many columns; B alone is written
anew, with i times each row behind it. Then one product of floats by error-corrected halves is the
complex one, sum by sum, with their errors, at four times the speed of multiply-adds. Three real
products would do, by sums of parts, whose errors are those of the larger part: not taken.

Real scalars and complex ones are applied behind the sums. Operands that do not lie along the sum,
and B, are laid out by a kernel that moves tiles through shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gemmule.backends.cuda import complex_parts
from gemmule.core import architectures
from gemmule.core.canonical import Call
from gemmule.core.device_model import Terms
from gemmule.core.problem import Problem
from gemmule.core.registry import kernels_in
from gemmule.core.rung import (
    HEADERS_FOLDER,
    Arithmetic,
    Constraint,
    LibraryRung,
    Machine,
    Params,
    same,
)
from gemmule.quant.cuda.dequantise import digest
from gemmule.rungs._cuda.geometry import ceil_div, modelled
from gemmule.rungs.matmul.cuda import wgmma_3xfp16

PASSES = 2  # of four bytes an element, what it costs to lay out a complex one


def _bind(problem: Problem, call: Call, params: Params) -> Callable[..., None]:
    return complex_parts.ByParts(problem, call, kernels_in("matmul", "wgmma_3xfp16"), params)


def _spec(problem: Problem, call: Call) -> complex_parts.Told:
    texts = complex_parts.SOURCE, HEADERS_FOLDER / "complex.cuh"
    return complex_parts.told(
        problem, call, kernels_in("matmul", "wgmma_3xfp16"), " ".join(map(digest, texts))
    )


def _arithmetic(problem: Problem) -> Arithmetic:
    """Sum as the product of the parts does; a chain here counts two additions of real numbers."""
    real = wgmma_3xfp16.RUNG.arithmetic(complex_parts.real_problem(problem))

    def chain(asked: Problem, params: Params) -> int:
        return ceil_div(real.chain(complex_parts.real_problem(asked), params), 2)

    return Arithmetic(accumulator="complex64", chain=chain, per_add=real.per_add)


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    return kernels_in("matmul", "wgmma_3xfp16").space(complex_parts.real_problem(problem))


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Beside the product of the parts, lay out its factors."""
    real = complex_parts.real_problem(problem)
    alone, *together = wgmma_3xfp16.terms(real, params, machine)
    laid_out = problem.batch * problem.k * (problem.n + problem.m)
    passes = alone["passes"] + PASSES * 4.0 * laid_out / machine.read_bytes_per_s
    return ({**alone, "passes": passes}, *together)


RUNG = LibraryRung(
    title="Complex by parts",
    idea="Parts side by side are real matrices: one product of floats is four of parts.",
    source="the real representation of complex matrices; Van Zee and Smith, the 1M method (2017)",
    signatures=same("complex64"),
    arithmetic=_arithmetic,
    after="wgmma_3xfp16",
    branch="complex64, four real products",
    layouts=("row", "col", "strided"),
    layouts_b=("row", "col", "strided"),
    params=wgmma_3xfp16.RUNG.params,
    constraints=(
        Constraint(
            "C by rows or by columns, complex numbers at whole ones of them",
            lambda problem, params: (
                problem.layout_out != "strided" and problem.alignment >= complex_parts.ITEM
            ),
        ),
        Constraint(
            "of its parts a product that wgmma_3xfp16 takes",
            lambda problem, params: all(
                one.holds(complex_parts.real_problem(problem), params)
                for one in wgmma_3xfp16.RUNG.constraints
            ),
        ),
    ),
    batched=True,
    spec=_spec,
    bind=_bind,
    available=lambda: None,
    archs=(architectures.HOPPER,),
    **modelled("matmul/wgmma_3xfp16", _terms, _choices),
)
