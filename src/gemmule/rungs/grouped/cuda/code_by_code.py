"""Code by code: `row_by_row` beside codes of any bits and groups.

A thread finds the expert of its row by halving, and walks a row of that expert's codes: each less
its zero point meets an element of A in float32, and a group's scale comes to the group's sum. It
takes what the rungs for many tokens do not: float32 beside codes, groups that are no multiples of
32, sizes and strides that do not fit vectors. Floats of 4 and 8 bits have no zero points.
"""

from __future__ import annotations

from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, CudaRung, Machine, Params, Step, beside_codes
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, flat, instance
from gemmule.rungs._cuda.grouped import COUNTED, by_element, no_zeros, scales
from gemmule.rungs._cuda.tiles import EVERY_LAYOUT

HEIGHT, WIDTH = 8, 32


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    types = CTYPE[problem.a], CTYPE[problem.out], scales(problem), problem.codes.bits
    blocks = ceil_div(problem.m, HEIGHT) * ceil_div(problem.n, WIDTH)
    return (flat(instance("code_by_code", *types), blocks, HEIGHT * WIDTH),)


def _takes(problem: Problem) -> bool:
    spec = problem.quant
    if spec is None or spec.transposed or spec.has_perm or spec.layout != "row":
        return False
    return spec.group_size is not None and no_zeros(problem)


RUNG = CudaRung(
    title="Code by code",
    idea="One thread computes one element of C of any codes, after it looked up its row's expert.",
    source="textbook; binary search",
    signatures=beside_codes("float32", "float16", "bfloat16"),
    # The sum of a group, then of groups; a difference and a scaling are what codes are allowed.
    arithmetic=lambda problem: Arithmetic(
        "float32", chain=lambda p, params: 2 * p.k, product="float32"
    ),
    after="row_by_row",
    branch="matrices of codes",
    quantized=True,
    accepts_quant=_takes,
    layouts=EVERY_LAYOUT,
    layouts_b=("row",),
    constraints=(COUNTED,),
    steps=_steps,
    **by_element("grouped/code_by_code"),
)
