"""From a choice to what binds it as a builtin function, where its rung has a job for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.calls.builtin import Call, bound
from gemmule.core.choice import Choice
from gemmule.core.problem import numpy_dtype
from gemmule.core.rung import CpuRung
from gemmule.settings import builtin_enabled


def binder(choice: Choice) -> Callable[[Any, Any], Call | None] | None:
    """Return what binds a product as a builtin function, where the rung has a job for it.

    None also where the user's environment says that no product shall be one.
    """
    rung, problem, turned = choice.rung, choice.problem, choice.call.op == "vecmat"
    if not isinstance(rung, CpuRung) or rung.job is None or problem.batch != 1:
        return None
    if not builtin_enabled():
        return None
    sizes = (problem.m, problem.n) if problem.op == "matvec" else (problem.m, problem.n, problem.k)
    if min(sizes) == 0 or choice.call.swapped != turned:
        return None
    job_of, params = rung.job, choice.params

    def bind(a: Any, b: Any) -> Call | None:
        matrix, other = (b, a) if turned else (a, b)
        if turned:
            matrix = matrix.T
        job = job_of(problem, params, matrix, other)
        if job is None:
            return None
        out = np.empty(choice.call.out_shape, numpy_dtype(problem.out))
        return bound(job, (a, b), out, swapped=turned)

    return bind


def fresh(choice: Choice) -> Callable[[Any, Any], Any] | None:
    """Return what multiplies operands as a caller gives them and makes the result, or None."""
    rung, call = choice.rung, choice.call
    if not isinstance(rung, CpuRung) or choice.problem.batch != 1:
        return None
    for view in (call.a, call.b):
        steps = zip(view.shape, view.strides, strict=True)
        inner = sorted((step, size) for size, step in steps)
        if inner[0][0] != 1 or (len(inner) == 2 and inner[1][0] != inner[0][1]):
            return None
    return rung.fresh(choice.problem)
