"""Many columns of x by weights that are rounded once, as they come out of their codes.

`arranged_columns` multiplies codes as they are, and scales the sums of each group in float32: the
columns that meet a code are as many as there are registers for two sets of sums, 32. Here a code
becomes its weight in registers, by four instructions for two: the difference to the zero point is
exact, and the scale has two parts, so that the weight is rounded once to the dtype of x, as the
dense weight that it stands for was. Then there is one set of sums, two warpgroups have 256 rows by
128 columns of them, and groups of any size cost the same. One warp asks for copies: codes as they
lie, and x, which a launch in front has put in the order that the instruction reads.

What is left is the tensor cores' time, and what the L2 has to bring: 16 kB of x and 8 of codes for
64 columns of the matrix.
"""

from __future__ import annotations

from gemmule.core.problem import HALVES, Problem
from gemmule.core.rung import Arithmetic, Constraint, CudaRung, Machine, Params, Step, Suggestion
from gemmule.rungs._cuda import fragments
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div
from gemmule.rungs.quantized.cuda import warpgroup_columns as warpgroups

_LONG, _PANELS = 128, 2  # stored columns of a stage, in panels of 64 columns of x
_LINE = 128  # bytes of a column of x in a panel
_NAMES = ("tall", "columns", "cluster")
_SHAPES = (
    *((1, columns, cluster) for columns in (128, 64, 32) for cluster in (1, 2, 8)),
    *((2, columns, cluster) for columns in (128, 64) for cluster in (1, 2)),
)
# What a block takes for 64 columns of the matrix, and beside them, by its shape; more for codes of
# 8 bits, and for groups that are no whole stages. One H200 (November 2026), 32 products: within
# 12 % of the quickest where one of these is.
_PANEL_S = {
    (1, 32): (0.31e-6, 5.0e-6),
    (1, 64): (0.334e-6, 7.0e-6),
    (1, 128): (0.405e-6, 9.0e-6),
    (2, 64): (0.6e-6, 10.5e-6),
    (2, 128): (0.77e-6, 14.0e-6),
}
_WIDE_CODES, _SMALL_GROUPS_S, _CLUSTER_S = 1.07, {4: 0.14e-6, 8: 0.28e-6}, 1.2e-6


def _whole(problem: Problem) -> bool:
    """Tell whether groups are whole stages."""
    group = fragments.quant(problem).group_size
    return group in (None, -1) or (group or 0) % _LONG == 0


def _all(problem: Problem) -> int:
    """Return how many stages the whole sum has."""
    return ceil_div(problem.k, _LONG)


def _passes(problem: Problem, params: Params) -> int:
    return ceil_div(problem.n, params["columns"])


def _height(params: Params) -> int:
    return int(128 * params["tall"])


def _blocks(problem: Problem, params: Params) -> int:
    down = ceil_div(problem.m, _height(params))
    return int(down * _passes(problem, params) * params["cluster"])


def _stage_bytes(problem: Problem, params: Params) -> int:
    return int(
        _PANELS * params["columns"] * _LINE + _height(params) * _LONG * fragments.bits(problem) // 8
    )


def _stages(problem: Problem, params: Params) -> int:
    return int(min((warpgroups.MOST_SHARED - 1024) // (_stage_bytes(problem, params) + 16), 8))


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    spec, stages = fragments.quant(problem), _stages(problem, params)
    types = f"{CTYPE[problem.b]}, {CTYPE[problem.out]}, {CTYPE[spec.scale_dtype]}"
    shape = ", ".join(str(params[name]) for name in _NAMES)
    flags = ", ".join(str(flag).lower() for flag in (spec.has_zeros, _whole(problem)))
    product = Step(
        kernel=f"rounded_columns<{types}, {spec.bits}, {flags}, {shape}, {stages}>",
        grid=(_blocks(problem, params), 1, 1),
        block=(384, 1, 1),
        cluster=(params["cluster"], 1, 1),
        smem=stages * (_stage_bytes(problem, params) + 16),
        pdl=problem.k > 0,
    )
    if problem.k == 0:
        return (product,)
    columns = params["columns"]
    warps = _passes(problem, params) * (columns // 8) * _all(problem) * _PANELS
    turn = Step(
        kernel=f"turn_columns<{CTYPE[problem.b]}, {spec.bits}, {columns}, {_PANELS}>",
        grid=(ceil_div(warps, 8), 1, 1),
        block=(256, 1, 1),
    )
    return (turn, product)


def _workspace(problem: Problem, params: Params, machine: Machine) -> int:
    of_stage = _PANELS * params["columns"] * _LINE
    return int(_passes(problem, params) * _all(problem) * of_stage)


def _chain(problem: Problem, params: Params) -> int:
    """Count a sum's products, sixteen at a time, and the blocks of a cluster."""
    return int(ceil_div(problem.k, params["cluster"]) + 256 + params["cluster"])


def _seconds(problem: Problem, params: Params, machine: Machine) -> float:
    """Return how long a product takes: its blocks, in rounds, and x turned before them."""
    bits = fragments.bits(problem)
    panel, start = _PANEL_S[params["tall"], params["columns"]]
    panel *= _WIDE_CODES if bits == 8 else 1.0
    panel += 0.0 if _whole(problem) else _SMALL_GROUPS_S[bits]
    own = ceil_div(_all(problem), params["cluster"]) * _PANELS * panel
    own += _CLUSTER_S if params["cluster"] > 1 else 0.0
    rounds = ceil_div(_blocks(problem, params), machine.units)
    turned = 4 * problem.k * problem.n * 2 / machine.read_bytes_per_s
    reading = problem.compulsory_bytes / machine.read_bytes_per_s
    return float(2 * machine.call_s + turned + max(rounds * (start + own), reading))


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Take the shape that is quickest by `_seconds`; up to 16 columns weights stay exact."""
    if fragments.quant(problem).has_perm or problem.n <= 16:
        return None
    found = []
    for shape in _SHAPES:
        params = dict(zip(_NAMES, shape, strict=True))
        found.append(Suggestion(params, _seconds(problem, params, machine)))
    return min(found, key=lambda one: one.expected_s)


RUNG = CudaRung(
    title="Weights rounded once",
    idea="Codes become weights in registers, and meet 128 columns of x: one set of sums, not two.",
    source="PTX ISA: wgmma with A in registers; mixed operands as in Marlin (Frantar et al., 2024)",
    op="matmul",
    after="arranged_columns",
    # Of 8 bits beside float16, scales below what halves hold cost more than the bound allows.
    signatures=tuple(
        s for s in fragments.SIGNATURES if s[1] in HALVES and s[:2] != ("uint8", "float16")
    ),
    layouts_b=("row", "col", "strided"),
    arithmetic=lambda problem: Arithmetic("float32", chain=_chain, per_add=2.0, inputs=problem.b),
    params={"tall": (1, 2), "columns": (128, 64, 32), "cluster": (1, 2, 8)},
    constraints=(
        fragments.FITS,
        Constraint(
            "one of the shapes that won somewhere",
            lambda problem, params: tuple(params[name] for name in _NAMES) in _SHAPES,
        ),
    ),
    archs=("sm_90a",),
    quantized=True,
    accepts_quant=warpgroups.RUNG.accepts_quant,
    workspace=_workspace,
    suggest=_suggest,
    steps=_steps,
)
