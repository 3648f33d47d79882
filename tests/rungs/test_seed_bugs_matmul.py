"""The mistakes of the published matmul kernels, planted again: each is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_emulation import Emulator
from cuemu.build import compile_cu
from cuemu.toolchain import missing_tools
from gemmule.backends.cuda import launch_args, nvrtc
from gemmule.core.problem import ITEMSIZE, Problem, numpy_dtype
from gemmule.core.registry import cuda_rungs
from gemmule.core.rung import HEADERS_FOLDER, RUNGS_FOLDER, Rung, Signature, Step
from gemmule.oracle import judge as oracle
from gemmule.oracle.inputs import make_inputs
from gemmule.oracle.problems import make_problem
from gemmule.oracle.values import placements
from seed_bugs import (
    BEYOND,
    Edit,
    Mutant,
    check_caught,
    far_array,
    grid_errors,
    launched,
    source_of,
    swap_module,
    verdict_of,
)

F32: Signature = ("float32", "float32", "float32")
HERE = (
    "naive",
    "shared_tile",
    "rectangular_tile",
    "register_tile",
    "vector_tile",
    "tensor_core",
    "tensor_core_int8",
)
LADDER = [r for r in cuda_rungs() if r.op == "matmul" and r.name in HERE]
EACH = pytest.mark.parametrize("rung", LADDER, ids=lambda r: r.name)
CUDA = "matmul/cuda/"

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))

TILE = {"tile": 8, "fma": True}
GUARD = "return i < rows && j < cols ? a["
STORE = "if (i < p.m && j < p.n) finish("
FIRST = "    __syncthreads();  // both tiles are there\n"
SECOND = "    __syncthreads();  // nobody reads them any more\n"
MUTANTS = (
    # ---- document 001
    Mutant(
        "linear index in place of row and column", "shared_tile", "nonfinite", (9, 10, 11), TILE,
        (("tiles.cuh", GUARD, "return i * cols + j < rows * cols ? a["),), inf_at=(1, 0),
    ),
    Mutant(
        "B A in place of A B", "naive", "equality", (12, 12, 12), {"width": 16},
        (
            (CUDA + "naive.cu", "entry<TA>(p.a, ", "entry<TA>(p.b, "),
            (CUDA + "naive.cu", "entry<TB>(p.b, ", "entry<TB>(p.a, "),
        ),
    ),
    Mutant(
        "C not zeroed before sums in C", "naive", "equality", (5, 6, 7),
        {"width": 16, "accumulate": "global"},
        ((CUDA + "naive.cu", "    *running = 0;\n", ""),),
    ),
    # ---- document 002
    Mutant(
        "return before the barrier", "shared_tile", "equality", (9, 10, 11), TILE,
        ((CUDA + "shared_tile.cu", "  Acc sum = 0;", "  if (i >= p.m || j >= p.n) return;\n"
          "  Acc sum = 0;"),),
    ),
    Mutant(
        "barrier inside the guard", "shared_tile", "divergent_barrier", (9, 10, 11), TILE,
        ((CUDA + "shared_tile.cu", "  __syncthreads();  // both",
          "  if (i < p.m && j < p.n) __syncthreads();  // both"),),
    ),
    Mutant(
        "no first barrier", "shared_tile", "equality", (9, 10, 11), TILE,
        ((CUDA + "shared_tile.cu", FIRST, ""),),
    ),
    Mutant(
        "no second barrier", "shared_tile", "equality", (9, 10, 20), TILE,
        ((CUDA + "shared_tile.cu", SECOND, ""),),
    ),
    Mutant(
        "unguarded store", "shared_tile", "side effect", (8, 10, 11), TILE,
        (("tiles.cuh", STORE, "finish("),),
    ),
    Mutant(
        "square blocks taken for granted", "shared_tile", "equality", (9, 10, 11), TILE,
        relaunched=lambda steps: tuple(replace(s, block=(8, 4, 1)) for s in steps),
    ),
    Mutant(
        "slots of the two tiles of B collide", "rectangular_tile", "equality", (9, 20, 11),
        {"tile": 8},
        (
            (CUDA + "rectangular_tile.cu", "ty * ROW", "ty * TILE"),
            (CUDA + "rectangular_tile.cu", "l * ROW", "l * TILE"),
        ),
    ),
    Mutant(
        "room for two tiles of three", "rectangular_tile", "shared_overrun", (9, 20, 11),
        {"tile": 32},
        relaunched=lambda steps: tuple(replace(s, smem=2 * 32 * 32 * 4) for s in steps),
    ),
    # ---- the same kinds of mistake in the kernels that came after
    Mutant(
        "no barrier between buffers", "vector_tile", "equality", (20, 20, 70), {"micro": 4},
        ((CUDA + "vector_tile.cu", "    }\n    __syncthreads();\n", "    }\n"),),
    ),
    Mutant(
        "the copy is not waited for", "tensor_core", "equality", (20, 24, 72), {"tile": 64},
        ((CUDA + "tensor_core.cu", "cp_async_wait<STAGES - 2>", "cp_async_wait<STAGES - 1>"),),
        signature=("float16", "float16", "float32"),
    ),
    Mutant(
        "edge of the reduction not zeroed", "tensor_core", "equality", (20, 24, 72), {"tile": 64},
        ((CUDA + "tensor_core.cu", "o < outer ? inner - q : 0", "o < outer ? V : 0"),),
        signature=("float16", "float16", "float32"),
    ),
    Mutant(
        "signs of the operands exchanged", "tensor_core_int8", "equality", (20, 24, 80),
        {"tile": 64}, ((CUDA + "tensor_core_int8.cu", "SWAP = TA(-1) < TA(0)", "SWAP = false"),
                       (CUDA + "tensor_core_int8.cu", "signed char, signed char) {\n  ptx::mma_s8",
                        "signed char, unsigned char) {\n  ptx::mma_s8")),
        signature=("int8", "uint8", "int32"),
    ),
)  # fmt: skip


def find_rung(name: str) -> Rung:
    return next(rung for rung in LADDER if rung.name == name)


def inputs_of(mutant: Mutant, problem: Problem) -> Any:
    if mutant.inf_at is None:
        return make_inputs(problem, "integers", 7)
    wanted = ("a", *mutant.inf_at, np.inf)
    return make_inputs(problem, "nonfinite", placements(problem).index(wanted))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_caught(mutant: Mutant, tmp_path: Path, fault: Callable[..., Any]) -> None:
    rung = find_rung(mutant.rung)
    problem = make_problem("matmul", *mutant.sizes, mutant.signature)
    given = replace(mutant, params=rung.check_params(problem, mutant.params))
    check_caught(given, rung, inputs_of(mutant, problem), tmp_path, fault)


def test_linear_index_is_harmless_for_finite_data(
    tmp_path: Path, fault: Callable[..., Any]
) -> None:
    """Why the mistake survived its authors' tests, and why ours place infinities."""
    mutant = MUTANTS[0]
    rung = find_rung(mutant.rung)
    problem = make_problem("matmul", *mutant.sizes, mutant.signature)
    steps = rung.steps(problem, mutant.params, Emulator().machine)
    swap_module(fault, source_of(mutant, rung, tmp_path), steps)
    assert verdict_of(rung, make_inputs(problem, "integers", 7), mutant.params) == ""


def within_epsilon(found: Any, truth: Any) -> bool:
    """The document's test: no element is further off than FLT_EPSILON."""
    with np.errstate(invalid="ignore"):
        return not bool((np.abs(found - truth) > np.finfo(np.float32).eps).any())


def test_absolute_epsilon_lets_nan_pass_and_refuses_what_is_right() -> None:
    rung = find_rung("naive")
    problem = make_problem("matmul", 20, 20, 300, F32)
    inputs = make_inputs(problem, "normal", 3)
    truth = inputs.a.astype(np.float64) @ inputs.b.astype(np.float64)
    right, arithmetic = (inputs.a @ inputs.b), rung.arithmetic(problem)
    inputs.out[...] = right
    assert not within_epsilon(right, truth)
    assert oracle.check(inputs, arithmetic, {}, inputs.out).ok
    inputs.out[...] = np.nan
    assert within_epsilon(inputs.out, truth)
    assert oracle.check(inputs, arithmetic, {}, inputs.out).kind == "nonfinite"


def test_transposing_argument_gives_b_a() -> None:
    """Row-major data read as column-major and multiplied in the same order is B A, stored again."""
    problem = make_problem("matmul", 12, 12, 12, F32)
    inputs = make_inputs(problem, "integers", 3)
    as_columns = inputs.a.T @ inputs.b.T  # what a column-major library sees and computes
    inputs.out[...] = as_columns.T  # its memory, read by rows
    np.testing.assert_array_equal(inputs.out, inputs.b @ inputs.a)
    assert oracle.check(inputs, find_rung("naive").arithmetic(problem), {}, inputs.out).kind == (
        "equality"
    )


def test_fma_false_rounds_the_product() -> None:
    """(1 + 2^-12)^2 - (1 + 2^-11) is 2^-24 fused and 0 rounded apart."""
    rung, problem = find_rung("naive"), make_problem("matmul", 1, 1, 2, F32)
    inputs = make_inputs(problem, "integers", 0)
    inputs.a[...] = [[-1 - 2.0**-11, 1 + 2.0**-12]]
    inputs.b[...] = [[1.0], [1 + 2.0**-12]]
    Emulator().run(rung, inputs, rung.check_params(problem, {"fma": False}))
    assert inputs.out[0, 0] == 0.0


def ptx_of(path: Path, name: str) -> str:
    """Return the PTX of one kernel. cuda.core asks for a driver here, so NVRTC is called itself."""
    api = pytest.importorskip("cuda.bindings.nvrtc")
    text = path.read_text().encode()
    created, program = api.nvrtcCreateProgram(text, path.name.encode(), 0, [], [])
    folders = [HEADERS_FOLDER, *nvrtc.include_folders()]
    options = ["--gpu-architecture=compute_90a", "-std=c++17", *(f"-I{f}" for f in folders)]
    encoded = [option.encode() for option in options]
    codes = [created]
    codes += api.nvrtcAddNameExpression(program, name.encode())
    codes += api.nvrtcCompileProgram(program, len(encoded), encoded)
    failed, size = api.nvrtcGetPTXSize(program)
    ptx = b" " * size
    codes += [failed, *api.nvrtcGetPTX(program, ptx), *api.nvrtcDestroyProgram(program)]
    assert [int(code) for code in codes] == [0] * len(codes)
    return str(ptx, "ascii")


@pytest.mark.parametrize("in_c", ["false", "true"])
@pytest.mark.parametrize(("ctype", "bits"), [("float", "f32"), ("double", "f64")])
def test_fma_false_leaves_one_fused_instruction(ctype: str, bits: str, in_c: str) -> None:
    """The one left applies beta. Multiplications and additions with .rn are never fused later."""
    names = [f"naive<{ctype}, {ctype}, {ctype}, {in_c}, {fma}>" for fma in ("true", "false")]
    fused, apart = (ptx_of(RUNGS_FOLDER / CUDA / "naive.cu", name) for name in names)
    fma, mul, add = (f"{op}.rn.{bits}" for op in ("fma", "mul", "add"))
    assert apart.count(fma) == 1
    assert fused.count(fma) > 1
    assert mul in apart
    assert add in apart


@EACH
def test_grids_of_large_results(rung: Rung) -> None:
    for m, n in ((70_000, 70_000), (3_000_000, 17), (17, 3_000_000)):
        problem = make_problem("matmul", m, n, 64, rung.signatures[0])
        for params in rung.space(problem):
            steps = rung.steps(problem, params, Emulator().machine)
            assert grid_errors(steps) == []
    on_y = Step("n x n blocks, as printed", (70_000, 70_000, 1), (1, 1, 1))
    assert grid_errors((on_y,)) == [on_y.kernel]


def test_block_per_element_is_refused_where_the_grid_ends() -> None:
    rung = find_rung("naive")
    problem = make_problem("matmul", 46_341, 46_341, 8, F32)
    with pytest.raises(ValueError, match="at most 2,147,483,647 blocks"):
        rung.check_params(problem, {"width": 1})


@EACH
def test_result_of_any_strides_with_alpha_and_beta(rung: Rung) -> None:
    problem = make_problem("matmul", 19, 21, 40, rung.signatures[0])
    inputs = make_inputs(problem, "integers", 3)
    grid = np.arange(3 * 19 * 2 * 21) % 31
    whole = grid.astype(inputs.out.dtype).reshape(2 * 21, 3 * 19)
    before, c = whole.copy(), whole[::-2, ::3].T
    exact = 2.0 * (inputs.a.astype(np.float64) @ inputs.b.astype(np.float64)) - 3.0 * c
    Emulator(seed=2).run(
        rung, replace(inputs, out=c), rung.check_params(problem, None), alpha=2.0, beta=-3.0
    )
    np.testing.assert_array_equal(c, exact.astype(c.dtype))
    before[::-2, ::3] = c.T
    np.testing.assert_array_equal(whole, before)


def test_sums_in_c_keep_alpha_and_beta() -> None:
    rung, problem = find_rung("naive"), make_problem("matmul", 5, 6, 7, F32)
    inputs = make_inputs(problem, "integers", 3)
    inputs.out[...] = np.arange(30).reshape(5, 6)
    exact = 2.0 * (inputs.a @ inputs.b) - 3.0 * inputs.out
    params = rung.check_params(problem, {"accumulate": "global"})
    Emulator().run(rung, inputs, params, alpha=2.0, beta=-3.0)
    np.testing.assert_array_equal(inputs.out, exact)


def far_product(rung: Rung, operand: int, kernels: Callable[[str], Any]) -> bool:
    """Multiply with the second row of A, B or C 2^31 elements on; tell if the result is right."""
    signature = min(rung.signatures, key=lambda s: ITEMSIZE[s[0]])
    m, n, k = 2, 3, 2 if operand == 1 else 5
    problem = make_problem("matmul", m, n, k, signature)
    inputs = make_inputs(problem, "integers", 5)
    arrays = [inputs.a, inputs.b, inputs.out]
    steps = [array.shape[1] for array in arrays]
    near = arrays[operand]
    steps[operand] = BEYOND
    arrays[operand] = far_array(near.shape, near.dtype, (BEYOND, 1))
    arrays[operand][...] = near if operand < 2 else 0
    params = rung.check_params(problem, None)
    pointers = [array.__array_interface__["data"][0] for array in arrays]
    rows = (value for step in steps for value in (step, 1, 0))
    packed = launch_args.GEMM.pack(*pointers, 0, m, n, k, 1, *rows, 1.0, 0.0)
    launched(rung.steps(problem, params, Emulator().machine), packed, kernels)
    right = inputs.a.astype(np.int64) @ inputs.b.astype(np.int64)
    return bool((arrays[2] == right.astype(numpy_dtype(problem.out))).all())


@pytest.mark.parametrize("operand", [0, 1, 2], ids="ABC")
@EACH
def test_rows_beyond_2_31_elements(rung: Rung, operand: int) -> None:
    assert far_product(rung, operand, lambda name: compile_cu(rung.source_path, names=[name]))


@pytest.mark.parametrize(
    ("name", "edit", "operand"),
    [
        ("naive", (CUDA + "naive.cu", "+ i * p.a_row", "+ (int)i * (int)p.a_row"), 0),
        ("shared_tile", ("tiles.cuh", "i * row_step +", "(int)i * (int)row_step +"), 1),
        ("vector_tile", (CUDA + "vector_tile.cu", "+ o * lead", "+ (int)o * (int)lead"), 0),
        ("tensor_core", ("tiles.cuh", "+ i * p.c_row", "+ (int)i * (int)p.c_row"), 2),
    ],
)
def test_offsets_in_int_are_caught(name: str, edit: Edit, operand: int, tmp_path: Path) -> None:
    rung = find_rung(name)
    source = source_of(Mutant("offsets in int", name, "", (), {}, (edit,)), rung, tmp_path)
    assert not far_product(rung, operand, lambda kernel: compile_cu(source, names=[kernel]))
