"""Codes one by one: the experts with tokens in turn, by the quantised product for their size.

Floats of 8 bits become float32 first, an expert at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from gemmule.core.problem import FLOAT8_CODES, Problem
from gemmule.core.rung import Params, beside_codes
from gemmule.rungs.grouped.cpu import one_by_one


def _bind(problem: Problem, params: Params) -> Callable[..., None]:
    run = one_by_one.RUNG.bind(problem, params)
    if problem.b != FLOAT8_CODES:
        return run

    def widened(
        A: Any, W: Any, ends: Any, C: Any, product: Callable[[Any, Any, Any], None]
    ) -> None:
        def multiply(a: Any, w: Any, c: Any) -> None:
            sums = np.empty(c.shape, np.float32)
            product(a.astype(np.float32), w.dequantize(), sums)
            c[...] = sums

        run(A, W, ends, C, multiply)

    return widened


RUNG = replace(
    one_by_one.RUNG,
    title="Codes one by one",
    idea="Each expert's rows meet its codes in a product of their own.",
    signatures=beside_codes("float32", "float16", "bfloat16"),
    after="one_by_one",
    branch="matrices of codes",
    quantized=True,
    bind=_bind,
)
