"""Many columns of x by weights that are rounded once, as they come out of their codes.

`arranged_columns` multiplies codes as they are, and scales the sums of each group in float32: the
columns that meet a code are as many as there are registers for two sets of sums, 32. Here a code
becomes its weight in registers, by four instructions for two: the difference to the zero point is
exact, and the scale has two parts, so that the weight is rounded once to the dtype of x, as the
dense weight that it stands for was. Then there is one set of sums: two warpgroups have 128 rows by
256 columns of them, and each code is taken apart once for all 256.

Four warps bring whole stages by turns: codes as they lie, x, which a launch in front has put in the
order that the instruction reads, and what turns the codes of each row into weights, worked out once
for the lanes that share it. What takes a code apart is what limits up to 128 columns; beyond, the
tensor cores. Where there are few blocks of rows the sum is shared: by two blocks of a cluster, or
in parts that a launch behind adds up, always in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from gemmule.core.device_model import Terms
from gemmule.core.packing import TensorMap
from gemmule.core.problem import FLOAT4, HALVES, Problem
from gemmule.core.rung import Arithmetic, Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import fragments
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, modelled
from gemmule.rungs._cuda.rows import Steps
from gemmule.rungs._cuda.terms import rounds, settled
from gemmule.rungs.quantized.cuda import warpgroup_columns as warpgroups

_PANEL, _LINE = 64, 128  # stored columns of a panel; bytes of a column of x in it
_LEAST_STAGES = 3
_NAMES = ("tall", "columns", "cluster", "parts", "panels")
_SHAPES = (
    *((1, columns, cluster, 1, 2) for columns in (32, 64, 128, 256) for cluster in (1, 2)),
    *((1, columns, 1, parts, 2) for columns in (32, 64, 128) for parts in (4, 8, 16)),
    *((1, 256, cluster, 1, 1) for cluster in (1, 2)),
    (2, 64, 1, 1, 2),
)


def _long(params: Params) -> int:
    """Return the stored columns of a stage."""
    return int(_PANEL * params["panels"])


def _split(problem: Problem, params: Params) -> int:
    """Return into how many pieces a stage's columns are cut so that each lies in one group."""
    group, long = problem.codes.group_size, _long(params)
    return 1 if group in (None, -1) else long // math.gcd(group or 1, long)


def _shares(params: Params) -> int:
    """Return how many blocks share a sum."""
    return int(params["cluster"] * params["parts"])


def _all(problem: Problem, params: Params) -> int:
    """Return how many stages the whole sum has, as many for each block that shares it."""
    return ceil_div(problem.k, _long(params) * _shares(params)) * _shares(params)


def _passes(problem: Problem, params: Params) -> int:
    return ceil_div(problem.n, params["columns"])


def _height(params: Params) -> int:
    return int(128 * params["tall"])


def _blocks(problem: Problem, params: Params) -> int:
    down = ceil_div(problem.m, _height(params))
    return int(down * _passes(problem, params) * _shares(params))


def _stage_bytes(problem: Problem, params: Params) -> int:
    row = _long(params) * fragments.bits(problem) // 8 + 8 * _split(problem, params)
    return int(params["panels"] * params["columns"] * _LINE + _height(params) * row)


def _stages(problem: Problem, params: Params) -> int:
    """Return how many stages there is room for, of the numbers that warps share evenly."""
    room = (warpgroups.MOST_SHARED - 1024) // (_stage_bytes(problem, params) + 16)
    return next((count for count in (8, 6, 4, 3) if count <= room), 0)


def direct(problem: Problem) -> bool:
    """Tell whether TMA can bring x as it lies."""
    along = problem.layout_b == "col" and problem.alignment == 16
    return along and 0 < problem.k < 2**31 - 512


def _direct(problem: Problem, params: Params) -> bool:
    """Tell whether TMA brings x as it lies, and codes find its order on their way to registers."""
    spec = problem.codes
    whole = _split(problem, params) <= _long(params) // 16  # an instruction has one group
    ordered = not spec.has_perm and spec.format.startswith("int")
    return ordered and whole and direct(problem)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    steps = _turning(problem, params, machine)
    if not _direct(problem, params):
        return steps
    kernel = steps[1].kernel.replace("rounded_columns<", "rounded_columns_direct<")
    lines = _long(params) * fragments.bits(problem) // 64  # of 128 bytes, in 16 rows
    shown = TensorMap("b", (64, params["columns"])), TensorMap("a", (lines, _height(params) // 16))
    return (replace(steps[1], kernel=kernel, pdl=False, maps=shown), *steps[2:])


def steps(kernel: str, pieces: Callable[[Problem, Params], int] = _split) -> Steps:
    """Return the `steps` of a rung with this kernel: x in order, the product, its parts added.

    pieces: of one group each into which the kernel cuts what a stage has of columns.
    """

    def launch(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
        spec, stages = problem.codes, _stages(problem, params)
        tall, columns, cluster, parts, panels = (params[name] for name in _NAMES)
        parts = parts if problem.k else 1
        out = CTYPE[problem.out]
        types = f"{CTYPE[problem.b]}, {out}, {CTYPE[spec.scale_dtype]}"
        shape = f"{tall}, {columns}, {cluster}, {parts}, {panels}, {stages}"
        split = f"{str(spec.has_zeros).lower()}, {pieces(problem, params)}"
        product = Step(
            kernel=f"{kernel}<{types}, {spec.bits}, {split}, {shape}>",
            grid=(_blocks(problem, params), 1, 1),
            block=(384, 1, 1),
            cluster=(cluster, 1, 1),
            smem=stages * (_stage_bytes(problem, params) + 16),
            pdl=problem.k > 0,
        )
        if problem.k == 0:
            return (product,)
        warps = _passes(problem, params) * (columns // 8) * _all(problem, params) * panels
        whole = panels * cluster * parts  # panels that the blocks share evenly
        turn = Step(
            kernel=f"turn_columns<{CTYPE[problem.b]}, {spec.bits}, {columns}, {whole}>",
            grid=(ceil_div(warps, 8), 1, 1),
            block=(256, 1, 1),
        )
        if parts == 1:
            return (turn, product)
        quads = problem.n * ceil_div(problem.m, _height(params)) * _height(params) // 4
        add = Step(
            kernel=f"add_parts<{out}, {_height(params)}, {columns}, {parts}, {panels}>",
            grid=(ceil_div(quads, 256), 1, 1),
            block=(256, 1, 1),
            pdl=True,
        )
        return (turn, product, add)

    return launch


_turning = steps("rounded_columns")


def _workspace(problem: Problem, params: Params, machine: Machine) -> int:
    if _direct(problem, params) and params["parts"] == 1:
        return 0
    columns = _passes(problem, params) * params["columns"]
    x = columns * _all(problem, params) * params["panels"] * _LINE
    high = ceil_div(problem.m, _height(params)) * _height(params)
    sums = params["parts"] * columns * high * 4 if params["parts"] > 1 else 0
    return int(x + sums)


def _chain(problem: Problem, params: Params) -> int:
    """Count a sum's products, sixteen at a time, and the blocks that share it."""
    return int(ceil_div(problem.k, _shares(params)) + 256 + _shares(params))


def terms(problem: Problem, params: Params, machine: Machine, *, as_it_lies: bool) -> Terms:
    """Compute blocks in rounds; put x in order before, and add parts of sums behind.

    as_it_lies: nothing puts x in order.
    """
    tall, columns, cluster, parts, panels = (params[name] for name in _NAMES)
    taken = ceil_div(_blocks(problem, params), machine.units)
    turns = _all(problem, params) // _shares(params)
    pieces = taken * turns * tall * (_split(problem, params) - 1)
    sums = parts * problem.m * problem.n * 4 if parts > 1 else 0
    turned = problem.k * problem.n * 2 / machine.read_bytes_per_s
    front = {} if as_it_lies else {"turned": turned, "turning_s": 1.0}
    front |= {"added": sums / machine.read_bytes_per_s, "cluster_s": float(cluster > 1)}
    front["scattered"] = front["added"] * fragments.across(problem)
    front |= {"parts_s": float(parts > 1)}
    floats = taken * turns * tall * (fragments.form(problem) in FLOAT4.values())
    more = {"piece_s": pieces, "result_s": taken * columns * tall, "float_s": floats}
    more["across_s"] = more["result_s"] * fragments.across(problem)
    kind = f"{tall} {columns} {panels} {fragments.bits(problem)}"
    shape, limits = (_blocks(problem, params), 1, turns), settled(problem, machine)
    return rounds(problem, machine, shape, kind, front, {}, more, limits)


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    return terms(problem, params, machine, as_it_lies=_direct(problem, params))


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    """Take the shapes that have room; up to 16 columns weights stay exact."""
    few = problem.codes.has_perm or problem.n <= 16
    whole = problem.codes.format == "nvfp4"
    found = () if few else RUNG.space(problem)
    return [params for params in found if not (whole and params["parts"] > 1)]


RUNG = CudaRung(
    title="Weights rounded once",
    idea="Codes become weights in registers, and meet 256 columns of x: one set of sums, not two.",
    source="PTX ISA: wgmma with A in registers; mixed operands as in Marlin (Frantar et al., 2024)",
    op="matmul",
    after="arranged_columns",
    # Of 8 bits beside float16, scales below what halves hold cost more than the bound allows.
    signatures=tuple(
        s
        for s in fragments.SIGNATURES + fragments.FLOATS
        if s[1] in HALVES and s[:2] != ("uint8", "float16")
    ),
    layouts_b=("row", "col", "strided"),
    arithmetic=lambda problem: Arithmetic("float32", chain=_chain, per_add=2.0, inputs=problem.b),
    params={
        name: tuple(dict.fromkeys(shape[i] for shape in _SHAPES)) for i, name in enumerate(_NAMES)
    },
    constraints=(
        fragments.FITS,
        Constraint(
            "three stages fit in shared memory",
            lambda problem, params: _stages(problem, params) >= _LEAST_STAGES,
        ),
        Constraint(
            "one of the declared shapes",
            lambda problem, params: tuple(params[name] for name in _NAMES) in _SHAPES,
        ),
        Constraint(
            "whole sums where rows have factors",
            lambda problem, params: params["parts"] == 1 or problem.codes.format != "nvfp4",
        ),
    ),
    archs=("sm_90a",),
    adds=True,
    quantized=True,
    accepts_quant=warpgroups.RUNG.accepts_quant,
    workspace=_workspace,
    steps=_steps,
    **modelled("quantized/rounded_columns", _terms, _choices),
)
