"""A^T X for many columns of X by weights that are rounded once, as they come out of their codes.

Seen transposed the sum runs down the rows of the stored matrix, and each of them brings its own
scales. `movmatrix` turns a word of codes, so that the operand of columns is in the registers which
wgmma reads; two neighbouring rows are then the halves of a word, as their scales are. Everything
else is `rounded_columns`: stages by bulk copies, x in order by a launch in front, shared sums. But
codes turned have rows in the order of x, so that TMA brings x as it lies where it can, and there is
no launch in front.

A strip has 128 columns. Beside up to 128 columns of x one warpgroup takes every other 64 rows, so
that what turns codes into weights is fetched once for two instructions; beside 256, half of the
strip. By more columns of x codes are taken apart again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from gemmule.core.device_model import Terms
from gemmule.core.packing import TensorMap
from gemmule.core.problem import Problem
from gemmule.core.rung import Constraint, Machine, Params, Step
from gemmule.rungs._cuda import fragments
from gemmule.rungs._cuda.geometry import modelled
from gemmule.rungs.quantized.cuda import rounded_columns as straight

_STRIP = 128
_LEAST_COLUMNS = 8  # from which on codes are read once instead of once a column


def _takes(problem: Problem) -> bool:
    """Tell whether codes lie in fragment order, and columns in their own."""
    ordered = problem.quant is not None and not problem.quant.has_perm
    return ordered and fragments.in_fragments(problem, transposed=True)


def _direct(problem: Problem, params: Params) -> bool:
    """Tell whether TMA brings x as it lies."""
    return straight.direct(problem) and params["parts"] == 1


def _split(problem: Problem, params: Params) -> int:
    """Return into how many pieces a strip is cut so that each lies in one group."""
    group = problem.codes.group_size
    return 1 if group in (None, -1) else _STRIP // math.gcd(group or 1, _STRIP)


_turning = straight.steps("rounded_transposed", _split)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    steps = _turning(problem, params, machine)
    if not _direct(problem, params):
        return steps
    kernel = steps[1].kernel.replace("rounded_transposed<", "rounded_transposed_direct<")
    shown = TensorMap("b", (64, params["columns"]))
    return (replace(steps[1], kernel=kernel, pdl=False, maps=(shown,)),)


def _workspace(problem: Problem, params: Params, machine: Machine) -> int:
    return 0 if _direct(problem, params) else straight.RUNG.workspace(problem, params, machine)


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Compute as the other side does; what lies as it is read has no launch in front."""
    return straight.terms(problem, params, machine, as_it_lies=_direct(problem, params))


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    return [] if problem.n < _LEAST_COLUMNS else RUNG.space(problem)


RUNG = replace(
    straight.RUNG,
    title="Weights rounded once, transposed",
    idea="Codes are turned in registers, and become weights there for 128 columns of X.",
    source="PTX ISA: movmatrix; wgmma with A in registers; mixed operands as in Marlin (Frantar et "
    "al., 2024)",
    after="transposed_columns",
    # 4-bit floats are right under the emulator; a GPU takes them as codes of 8 bits as long as one
    # rung of theirs is not proved.
    signatures=tuple(s for s in straight.RUNG.signatures if s not in fragments.FLOATS),
    adds=False,  # layers have their matrix in front
    params={**straight.RUNG.params, "tall": (1,), "parts": (1, 4, 16)},
    constraints=(
        *straight.RUNG.constraints,
        Constraint(
            "256 columns of x by one panel",
            lambda problem, params: params["panels"] == (1 if params["columns"] == 256 else 2),
        ),
    ),
    accepts_quant=_takes,
    layouts_b=("col", "row", "strided"),  # what proofs meet most is the first
    workspace=_workspace,
    steps=_steps,
    **modelled("quantized/rounded_transposed", _terms, _choices),
)
