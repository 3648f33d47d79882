"""Few columns: the matrix is read once, as if there were one column.

A product with few columns (2 to 16) is a matvec with company: the matrix decides the time again,
and a tile of C for 128 columns computes mostly padding. Here the rows are streamed and every vector
of A meets all columns: 16 at most, more stream the matrix again. Eight lanes walk a row and four
rows lie side by side in a warp, so that a vector of a column serves `rows` rows of a lane. Both
operands come through rings in shared memory that `cp.async` fills three turns ahead: registers are
for sums. Warps that share columns wait for each other, and for no others: with a barrier of the
whole block 16 columns take 7 % longer.
Columns that lie along the sum are copied as they are. For others a small kernel before packs them
in the order in which lanes read them, zero past the end, whatever their strides; the large one
starts early and has its first turns of A under way by then. Of X W^T with few rows, W is what is
streamed.
"""

from __future__ import annotations

from gemmule.core.architectures import SINCE_AMPERE
from gemmule.core.device_model import Terms
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import (
    Constraint,
    CudaRung,
    Machine,
    Params,
    Step,
    floats,
    integers,
)
from gemmule.rungs._cuda import few
from gemmule.rungs._cuda.geometry import (
    CTYPE,
    ceil_div,
    instance,
    modelled,
    starts_early,
)
from gemmule.rungs._cuda.rows import sums
from gemmule.rungs._cuda.tiles import ANY_ORDER

LANES = 8
MOST_STAGES = (4, 6)  # of doubles more: a stage holds half as many


def _width(problem: Problem) -> int:
    # Sixteen sums for every row and halves converted to float32 are more than registers hold.
    return few.width_of(problem, 8 if ITEMSIZE[few.seen(problem).matrix] == 2 else few.MOST)


def _held(problem: Problem, params: Params) -> int:
    """Return the registers of a lane's sums."""
    words = 2 if problem.a == "float64" else 1
    return int(params["rows"]) * _width(problem) * words


def _warps(problem: Problem, params: Params) -> int:
    """Return how many warps the registers leave room for."""
    doubles = problem.a == "float64" and _width(problem) > 8
    return 8 if params["rows"] == 8 or _held(problem, params) > 64 or doubles else 16


def _rows(params: Params) -> int:
    return int(params["across"] * params["rows"] * 32 // LANES)


def _stage_bytes(problem: Problem, params: Params) -> int:
    view, warps = few.seen(problem), _warps(problem, params)
    columns = _width(problem) * LANES * view.lanes * ITEMSIZE[view.packed]
    return int(warps * 32 * params["rows"] * 16 + warps // params["across"] * columns)


def _direct(problem: Problem) -> bool:
    """Tell whether columns are copied from where they lie: along the sum, whole, as wide as A."""
    view = few.seen(problem)
    whole = view.k % (LANES * view.lanes) == 0 and problem.alignment == 16
    return whole and view.columns_along_k and ITEMSIZE[view.matrix] == ITEMSIZE[view.columns]


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    view, width, warps = few.seen(problem), _width(problem), _warps(problem, params)
    stage = _stage_bytes(problem, params)
    stages = max(2, min(MOST_STAGES[problem.a == "float64"], machine.shared_bytes // stage))
    types = (CTYPE[t] for t in (view.matrix, view.columns, problem.out))
    shape = warps, params["across"], params["rows"], width, stages
    direct = _direct(problem)
    product = Step(
        kernel=instance("few_columns", *types, *shape, view.turned, direct),
        grid=(few.slabs(problem, _rows(params), width), 1, 1),
        block=(32 * warps, 1, 1),
        smem=stages * stage,
        pdl=not direct and starts_early(machine),
    )
    return (product,) if direct else few.after_packing(problem, width, LANES, product)


def _workspace(problem: Problem, params: Params, machine: Machine) -> int:
    return 0 if _direct(problem) else few.packed_bytes(problem, _width(problem), LANES)


def _chain(problem: Problem, params: Params) -> int:
    view = few.seen(problem)
    split = _warps(problem, params) // params["across"]
    vectors = ceil_div(ceil_div(view.k, LANES * view.lanes), split)
    return int((vectors + 1) * view.lanes + 5 + split)


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    view, width, rows = few.seen(problem), _width(problem), _rows(params)
    split = _warps(problem, params) // params["across"]
    turns = ceil_div(view.k * ITEMSIZE[view.matrix], 16 * LANES * split)
    shape, tile = (few.slabs(problem, rows, width), 1, turns), (rows, width, LANES * view.lanes)
    return few.streaming(problem, machine, shape, tile, _workspace(problem, params, machine))


RUNG = CudaRung(
    title="Few columns",
    idea="A vector of A in registers meets all columns: A is read once, C's padding not computed.",
    archs=SINCE_AMPERE,
    source="skinny GEMM kernels, as in vLLM; Little's law",
    signatures=(
        *floats("float32", "float64", "float16", "bfloat16"),
        *(s for s in integers() if s[2] == "int32"),
    ),
    arithmetic=sums(_chain),
    after="vector_tile",
    branch="few columns",
    params={"across": (2, 4, 1), "rows": (4, 8, 2)},
    constraints=(
        few.STREAMED,
        few.FITS,
        Constraint(
            "at most 64 rows a block (across x rows x 4), so that the columns' ring fits",
            lambda problem, params: params["across"] * params["rows"] <= 16,
        ),
        Constraint(
            "where halves are converted: 2 rows a lane for 8 columns, else up to 4",
            lambda problem, params: (
                ITEMSIZE[few.seen(problem).matrix] != 2
                or params["rows"] * max(4, _width(problem)) <= 16
            ),
        ),
        Constraint(
            "sums of at most 128 registers a lane",
            lambda problem, params: _held(problem, params) <= 128,
        ),
        Constraint(
            "two stages of at most 49,152 bytes",
            lambda problem, params: _stage_bytes(problem, params) <= 49_152,
        ),
    ),
    workspace=_workspace,
    steps=_steps,
    **ANY_ORDER,
    **modelled("matmul/few_columns", _terms),
)
