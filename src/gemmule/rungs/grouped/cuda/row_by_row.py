"""Row by row: one thread an element of C, which looks up the expert of its row.

Where each expert's rows end is known on the device alone, so nothing is launched for an expert: the
grid covers C, and a thread finds its row among the ends by halving. Neighbouring threads hold
neighbouring columns of one row and so read one matrix; rows of one expert read it again, from the
caches where they can. Every stride and every float dtype is taken.
"""

from __future__ import annotations

from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, CudaRung, Machine, Params, Step, floats
from gemmule.rungs._cuda.geometry import accumulator, ceil_div, flat, instance, type_arguments
from gemmule.rungs._cuda.grouped import ANY_ORDER, COUNTED, by_element

HEIGHT, WIDTH = 8, 32


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    blocks = ceil_div(problem.m, HEIGHT) * ceil_div(problem.n, WIDTH)
    return (flat(instance("row_by_row", type_arguments(problem)), blocks, HEIGHT * WIDTH),)


def _arithmetic(problem: Problem) -> Arithmetic:
    acc = accumulator(problem)
    return Arithmetic(acc, chain=lambda p, params: p.k, product=acc)


RUNG = CudaRung(
    title="Row by row",
    idea="One thread computes one element of C, after it looked up the expert of its row.",
    source="textbook; binary search",
    signatures=tuple(
        s for s in floats("float32", "float64", "float16", "bfloat16") if s[0] == s[1]
    ),
    arithmetic=_arithmetic,
    constraints=(COUNTED,),
    steps=_steps,
    **ANY_ORDER,
    **by_element("grouped/row_by_row"),
)
