"""gemv and gemm on the host: alpha and beta are applied in the dtype that a rung sums in.

A half's product is taken in float32, scaled and added to there, and rounded once: alpha may bring
back what a half cannot hold. Integers are modulo a power of two whatever they are summed in, so
their scalars act on the result's own dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from gemmule.core.choice import Choice
from gemmule.core.problem import HALVES, INTEGERS, numpy_dtype

Array = np.ndarray[Any, Any]


def summed(choice: Choice) -> Choice:
    """Return the choice with the rung's sums as its result: halves become float32.

    TypeError where the rung has no such result.
    """
    out = "float32" if choice.problem.out in HALVES else choice.problem.out
    problem = replace(choice.problem, out=out)
    refusal = choice.rung.refusal(problem)
    if refusal is not None:
        raise TypeError(
            f"rung {choice.rung.folder}/{choice.rung.name} gives {choice.problem.out} only, to "
            f"which alpha and beta are not applied: {refusal}. Name another rung."
        )
    asked = replace(choice.call.problem, out=out)
    return replace(choice, call=replace(choice.call, problem=asked), problem=problem)


def scaling(
    choice: Choice, product: Callable[[], Callable[[Any, Array, Array], None]]
) -> Callable[[Any, Array, Array, complex, complex], None]:
    """Return ``run(a, b, out, alpha, beta)``: out = alpha * product + beta * out.

    product: makes the product of the `summed` choice when it is first wanted. beta == 0 does not
    read out, alpha == 0 reads neither operand.
    """
    made = numpy_dtype("float32" if choice.problem.out in HALVES else choice.problem.out)
    given = numpy_dtype(choice.call.problem.out)
    kept = given if given.name in INTEGERS else np.promote_types(made, given)
    scalar: Any = kept.type

    def run(a: Any, b: Array, out: Array, alpha: complex, beta: complex) -> None:
        if out.size == 0:
            return
        with np.errstate(all="ignore"):
            total: Array = np.zeros(out.shape, kept)
            if alpha != 0:
                sums = np.empty(out.shape, made)
                product()(a, b, sums)
                total = sums.astype(kept, copy=False)
                if alpha != 1:
                    total = total * scalar(alpha)
            if beta != 0:
                total = total + scalar(beta) * out.astype(kept)
            out[...] = total.astype(out.dtype)

    return run
