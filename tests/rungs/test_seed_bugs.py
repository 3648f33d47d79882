"""The mistakes of the published matvec kernels, planted again: each is caught."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_emulation import Emulator
from cuemu.build import compile_cu
from cuemu.toolchain import BuildError, missing_tools
from gemmule.backends.cuda import launch_args
from gemmule.core.problem import ITEMSIZE, Problem, QuantSpec, numpy_dtype
from gemmule.core.registry import all_rungs
from gemmule.core.rung import RUNGS_FOLDER, Rung
from gemmule.oracle import judge as oracle
from gemmule.oracle.inputs import make_inputs
from gemmule.oracle.problems import make_problem
from seed_bugs import (
    BEYOND,
    MUTANTS_FOLDER,
    Edit,
    Mutant,
    Steps,
    check_caught,
    far_array,
    grid_errors,
    launched,
    source_of,
    swap_module,
    verdict_of,
    verdicts,
)

SEEDED = [r for r in all_rungs("cuda") if r.op == "matvec" and r.source.startswith("document 00")]
EACH_SEEDED = pytest.mark.parametrize("rung", SEEDED, ids=lambda r: f"{r.folder}-{r.name}")

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


def _aligned_anyway(steps: Steps) -> Steps:
    return tuple(replace(s, kernel=s.kernel.replace(", 1, 8>", ", 16, 8>")) for s in steps)


ROW = {"p": 32, "rows": 4, "values": 8}
TWO = {"p": 64, "rows": 2, "values": 8}
BLOCKS = {"height": 64, "width": 8}
CODES = {"p": 32, "rows": 1, "values": 8}
MUTANTS = (
    # ---- document 000
    Mutant(
        "store without a bounds check", "shared_x", "side effect", (20, 40), {"block": 32},
        (("matvec/cuda/shared_x.cu", "if (row < p.m) finish(", "finish("),),
    ),
    # ---- document 003
    Mutant(
        "size / p drops the rest", "p_threads_vector", "equality", (5, 1000), ROW,
        (
            ("rows.cuh", "(last - first) % W;\n  Acc sum", "(last - first) % stride;\n  Acc sum"),
            ("rows.cuh", "  for (j = whole + thread; j < last;", "  for (j = last; j < last;"),
        ),
    ),
    Mutant(
        "16-byte loads of odd rows", "p_threads_vector", "misaligned", (5, 333), ROW,
        relaunched=_aligned_anyway, alignment=2,
    ),
    Mutant(
        "8 values loaded, 16 stepped over", "int4_codes", "equality", (5, 512),
        {**CODES, "values": 16},
        (("codes.cuh", "k < W; ++k) part", "k < W / 2; ++k) part"),),
    ),
    Mutant(
        "the sum is in one lane only", "two_step", "equality", (5, 512), TWO,
        (("rows.cuh", "__shfl_xor_sync(mask, v, d)", "__shfl_up_sync(mask, v, d)"),),
    ),
    Mutant(
        "full mask behind a row guard", "p_threads", "divergent_warp", (5, 40),
        {"p": 8, "rows": 16}, replaced_by="full_mask.cu",
    ),
    Mutant(
        "one slot for the warps of several rows", "two_step", "equality", (5, 512), TWO,
        (("matvec/cuda/two_step.cu", "slots[threadIdx.y * warps + t / 32] =", "slots[t / 32] ="),),
    ),
    Mutant(
        "no barrier before the second step", "two_step", "equality", (5, 512), TWO,
        (("matvec/cuda/two_step.cu", "  __syncthreads();\n", ""),),
    ),
    Mutant(
        "table indexed with negative codes", "product_table_int8", "equality", (5, 512), CODES,
        (
            (
                "codes.cuh",
                "  if constexpr (BITS == 8) return piece[k];",
                "  if constexpr (BITS == 8) return (signed char)piece[k];",
            ),
        ),
    ),
    Mutant(
        "code - zero wraps in 8 bits", "int8_codes", "equality", (5, 512), CODES,
        (
            (
                "codes.cuh",
                "(float(code_of<BITS>(piece, k)) - zero)",
                "float((signed char)(code_of<BITS>(piece, k) - int(zero)))",
            ),
        ),
    ),
    # ---- document 004
    Mutant(
        "edge test inverted", "block_multiply", "equality", (9, 12), BLOCKS,
        (("blocks.cuh", "first < width ? int(p.n - first)", "first >= width ? int(p.n % width)"),),
    ),
    Mutant(
        "edge taken from the height", "block_multiply", "equality", (9, 12), BLOCKS,
        (("blocks.cuh", "? int(p.n - first)", "? int(p.m % width)"),),
    ),
    Mutant(
        "no barrier after the shared indices", "block_multiply", "out_of_bounds", (9, 12), BLOCKS,
        (("shared_indices.cu", "  __syncthreads();  // the indices are written\n", ""),),
        replaced_by="shared_indices.cu",
    ),
    Mutant(
        "no barrier after x is staged", "block_multiply", "equality", (9, 12), BLOCKS,
        (("blocks.cuh", "  __syncthreads();\n", ""),),
    ),
    Mutant(
        "the wrong slice of x", "block_multiply_transposed", "equality", (9, 12), BLOCKS,
        (
            (
                "blocks.cuh",
                "slice[k] = x[(at.first + k)",
                "slice[k] = x[(at.row - threadIdx.x + k)",
            ),
        ),
    ),
    Mutant(
        "sums not zeroed", "block_multiply", "equality", (9, 12), BLOCKS,
        relaunched=lambda steps: steps[1:],
    ),
)  # fmt: skip


def problem_of(rung: Rung, m: int, n: int, alignment: int = 16) -> Problem:
    """Return a problem in the rung's first signature and layout."""
    signature = rung.signatures[0]
    quant = None
    if rung.quantized:
        bits = 4 if signature[0] == "uint4" else 8
        quant = QuantSpec(bits, None, True, "row", "float32", False)
    problem = make_problem("matvec", m, n, 1, signature, layout_a=rung.layouts[0], quant=quant)
    return replace(problem, alignment=alignment)


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    """Return a folder of the test's own that stays, since compiled kernels are kept by path."""
    slug = re.sub(r"\W+", "-", request.node.name)
    made = Path(request.config.cache.mkdir("seed_mutants")) / slug
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    return made


def find_rung(name: str) -> Rung:
    return next(rung for rung in SEEDED if rung.name == name)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_caught(mutant: Mutant, folder: Path, fault: Callable[..., Any]) -> None:
    rung = find_rung(mutant.rung)
    problem = problem_of(rung, *mutant.sizes, mutant.alignment)
    check_caught(mutant, rung, make_inputs(problem, "integers", 7), folder, fault)


def test_shared_indices_are_right_with_their_barriers(
    folder: Path, fault: Callable[..., Any]
) -> None:
    mutant = Mutant("", "block_multiply", "", (9, 12), BLOCKS, replaced_by="shared_indices.cu")
    rung = find_rung("block_multiply")
    problem = problem_of(rung, 9, 12)
    steps = rung.steps(problem, BLOCKS, Emulator().machine)
    swap_module(fault, source_of(mutant, rung, folder), steps)
    assert verdicts(rung, make_inputs(problem, "integers", 7), BLOCKS) == {""}


def test_group_of_lanes_that_is_no_power_of_two() -> None:
    rung = find_rung("p_threads")
    problem = problem_of(rung, 5, 40)
    with pytest.raises(ValueError, match="p=24 is outside its declared values"):
        rung.check_params(problem, {"p": 24})
    inputs = make_inputs(problem, "integers", 7)
    assert verdict_of(rung, inputs, {"p": 24, "rows": 4}) == "deadlock"  # no lane 24 to 31


def test_structs_of_halves_do_not_force_vector_loads() -> None:
    source = MUTANTS_FOLDER / "packed_structs.cu"
    assert compile_cu(source, names=["copy"])
    with pytest.raises(BuildError, match="vector loads are not forced"):
        compile_cu(source, names=["copy"], defines=["PACKED"])


def test_result_of_the_size_of_x() -> None:
    """A result "of the size of the input vector" is right for square matrices only."""
    rung = find_rung("shared_x")
    problem = problem_of(rung, 3, 5)
    inputs = make_inputs(problem, "integers", 1)
    verdict = oracle.check(inputs, rung.arithmetic(problem), {"block": 32}, np.zeros_like(inputs.b))
    assert (verdict.ok, verdict.kind) == (False, "form")


def unaligned_shared(text: str) -> list[str]:
    """Return the declarations of dynamic shared memory that promise fewer than 16 bytes."""
    found = re.findall(r"extern\s+__shared__[^;]*;", text)
    return [d for d in found if int((re.findall(r"__align__\((\d+)\)", d) or ["0"])[0]) < 16]


def test_dynamic_shared_memory_declares_its_alignment() -> None:
    shipped = list(RUNGS_FOLDER.rglob("*.cu*"))
    assert [found for path in shipped for found in unaligned_shared(path.read_text())] == []
    text = (RUNGS_FOLDER / "matvec/cuda/shared_x.cu").read_text()
    assert len(unaligned_shared(text.replace("__align__(16) ", ""))) == 1


@EACH_SEEDED
def test_grids_of_tall_matrices(rung: Rung) -> None:
    problem = problem_of(rung, 100_000_000, 64)
    for params in rung.space(problem):
        steps = rung.steps(problem, params, Emulator().machine)
        assert grid_errors(steps) == []
        on_y = tuple(replace(s, grid=(1, s.grid[0], 1)) for s in steps)  # (1, n / m), as printed
        assert grid_errors(on_y) != []


@EACH_SEEDED
def test_vectors_of_any_step_with_alpha_and_beta(rung: Rung) -> None:
    problem = problem_of(rung, 37, 72)
    params = rung.check_params(problem, None)
    inputs = make_inputs(problem, "integers", 3)
    x = np.zeros(2 * problem.n, inputs.b.dtype)[::-2]
    x[...] = inputs.b
    whole = np.arange(3 * problem.m).astype(inputs.out.dtype)
    before, y = whole.copy(), whole[::3]
    moved = replace(inputs, b=x, out=y)
    a = inputs.a.dequantize() if problem.quant else inputs.a
    exact = 2.0 * (a.astype(np.float64) @ inputs.b.astype(np.float64)) - 3.0 * y.astype(np.float64)
    Emulator(seed=2).run(rung, moved, params, alpha=2.0, beta=-3.0)
    np.testing.assert_array_equal(y, exact.astype(y.dtype))
    before[::3] = y
    np.testing.assert_array_equal(whole, before)


def far_product(rung: Rung, kernels: Callable[[str], Any]) -> bool:
    """Multiply a matrix whose second row (or column) lies 2^31 elements on; tell if it is right."""
    by_rows = rung.layouts[0] == "row"
    signature = min(rung.signatures, key=lambda s: ITEMSIZE[s[0]])
    m, n = (2, 48) if by_rows else (48, 2)
    problem = make_problem("matvec", m, n, 1, signature, layout_a=rung.layouts[0])
    problem = replace(problem, alignment=16)
    strides = (BEYOND, 1) if by_rows else (1, BEYOND)
    inputs = make_inputs(problem, "integers", 5)
    a = far_array((m, n), numpy_dtype(problem.a), strides)
    a[...] = inputs.a
    params = rung.check_params(problem, None)
    right = inputs.a.astype(np.float64) @ inputs.b.astype(np.float64)
    machine = Emulator().machine
    work = np.full(rung.workspace(problem, params, machine) + 256, 0xFF, np.uint8)
    base = -(-work.ctypes.data // 256) * 256
    pointers = [array.ctypes.data for array in (a, inputs.b, inputs.out)]
    numbers = (base, m, n, 1, *strides, 0, 1, 0, 1, 0, 1.0, 0.0)
    packed = launch_args.GEMV.pack(*pointers, *numbers)
    launched(rung.steps(problem, params, machine), packed, kernels)
    return bool((inputs.out.astype(np.float64) == right).all())


@pytest.mark.parametrize(
    "rung", [r for r in SEEDED if not r.quantized], ids=lambda r: f"{r.folder}-{r.name}"
)
def test_rows_and_columns_beyond_2_31_elements(rung: Rung) -> None:
    assert far_product(rung, lambda kernel: compile_cu(rung.source_path, names=[kernel]))


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("shared_x", ("matvec/cuda/shared_x.cu", "+ row * p.a_row;", "+ (int)row * (int)p.a_row;")),
        ("block_multiply", ("blocks.cuh", "wide<Acc>(a[k * step])", "wide<Acc>(a[k * (int)step])")),
    ],
)
def test_offsets_in_int_are_caught(name: str, edit: Edit, folder: Path) -> None:
    rung = find_rung(name)
    source = source_of(Mutant("offsets in int", name, "", (), {}, (edit,)), rung, folder)
    assert not far_product(rung, lambda kernel: compile_cu(source, names=[kernel]))
