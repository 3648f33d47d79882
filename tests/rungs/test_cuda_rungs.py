"""Every CUDA rung, without a GPU: judged by the oracle under the emulator, compiled for every arch.

A sample of signatures runs on each rung; the whole matrix runs on a device
(`python -m proofs`), whose records test_built compares with the current code.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compiled
from cuda_emulation import Emulator, sampled, sampled_kernels
from cuemu.toolchain import missing_tools
from fences import fenced
from gemmule.backends.cuda import nvrtc
from gemmule.core.architectures import LISTED
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.registry import cuda_rungs
from gemmule.core.rung import CudaRung, Rung
from gemmule.oracle.inputs import make_inputs
from gemmule.oracle.judge import check
from gemmule.oracle.problems import make_problem
from planted import planted
from proofs import device as verify_device
from proofs import proofs

RUNGS = [pytest.param(r, id=f"{r.folder}-{r.name}") for r in cuda_rungs()]
MOST_THREADS, FEW_ROWS = 2**20, 3
# A grouped rung has blocks for each multiprocessor, which take turns; of 132 most would have none.
FEW_UNITS = 20
needs_emulator = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


@needs_emulator
@pytest.mark.parametrize("rung", RUNGS)
def test_right_under_the_emulator(rung: Rung) -> None:
    for which, signature in enumerate(sampled(rung)):
        emulator = Emulator()
        if rung.op == "grouped":
            emulator.machine = replace(emulator.machine, units=FEW_UNITS)
        for index, proof in enumerate(verify_device.trials(rung, signature, few=True)):
            trial = emulated(rung, proof)
            turn = which + index
            # Two orders, early and late copies in both. Where there are several turns of a loop
            # warps run ahead: what a barrier lacks shows only then.
            emulator.seed = 2 + turn % 2 if has_turns(trial.problem) else turn % 4
            verdict = verify_device.judge_trial(rung, trial, emulator.run)
            assert verdict.ok, f"{trial}: {verdict.text}"


def emulated(rung: Rung, trial: verify_device.Trial) -> verify_device.Trial:
    """Return a trial as the emulator runs it: with few rows where it launches a million threads."""
    steps = rung.steps(trial.problem, trial.params, proofs.proof_machine())
    if sum(math.prod(step.grid) * math.prod(step.block) for step in steps) <= MOST_THREADS:
        return trial
    return replace(trial, problem=replace(trial.problem, m=FEW_ROWS))


def has_turns(problem: Problem) -> bool:
    return problem.m * problem.n * problem.k >= 2**14


@needs_emulator
@pytest.mark.parametrize("rung", [p for p in RUNGS if p.values[0].quantized])
def test_every_grouping_of_codes(rung: Rung) -> None:
    """Each quantisation that it takes, by kernels that the other tests have compiled already."""
    emulator, found = Emulator(seed=3), 0
    compiled = set(sampled_kernels(rung)[0])
    for signature in sampled(rung):
        for index, quant in enumerate(verify_device.taken_quants(rung, signature)):
            problems = [
                make_problem(rung.op, m, *((7, n) if rung.op == "matmul" else (n, 1)), signature,
                             layout_b=(*rung.layouts_b, "row")[0], quant=quant)
                for m, n in ((35, 131), (37, 264), (260, 48))
                if rung.op != "grouped"
            ]  # fmt: skip
            if rung.op == "grouped":
                problems = [make_problem("grouped", 35, 40, 288, signature, batch=4, quant=quant)]
            for problem in [p for p in problems if rung.refusal(p) is None][:1]:
                params = rung.check_params(problem, None)
                steps = rung.steps(problem, params, emulator.machine)
                if {step.kernel for step in steps} <= compiled:
                    trial = verify_device.Trial(problem, params, "integers", "contiguous", index)
                    verdict = verify_device.judge_trial(rung, trial, emulator.run)
                    assert verdict.ok, f"{trial}: {verdict.text}"
                    found += 1
    assert found


FAR = 2**31 + 64  # elements: no 32-bit offset reaches the second row


def far_apart(array: np.ndarray[Any, Any], aligned: bool) -> np.ndarray[Any, Any]:
    """Return a copy whose rows (or columns, elements, batch entries) lie beyond 2^31 elements.

    The memory between them is never touched, so that it costs addresses only. It begins at a
    multiple of 16 bytes, and of `aligned` ones each row does.
    """
    item, steps, step = array.itemsize, [0] * array.ndim, FAR + (not aligned)
    for axis in np.argsort(np.abs(array.strides), kind="stable"):
        unit = array.ndim > 1 and array.strides[axis] == item
        steps[axis] = item if unit else step * item
        step = step if unit else step * array.shape[axis]
    size = sum((n - 1) * s for n, s in zip(array.shape, steps, strict=True)) + 4096
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    held = np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)
    copy: np.ndarray[Any, Any] = np.ndarray(array.shape, array.dtype, held, 1024, steps)
    copy[...] = array
    return copy


def strided_problems(rung: Rung, sizes: tuple[int, int, int] | None = None) -> Iterator[Problem]:
    """Yield small problems in every layout, one aligned product and two that are not."""
    plain = {"matvec": (5, 48, 1), "matmul": (5, 7, 64), "grouped": (5, 8, 64)}
    m, n, k = sizes or plain[rung.op]
    layouts_b = rung.layouts_b if rung.op != "matvec" else ("row",)
    signature = rung.signatures[0]
    single = ITEMSIZE[signature[0]]  # no row but the first is aligned to more than an element
    pairs = ((1, 16), (2, single))
    for a, b, (batch, aligned) in itertools.product(rung.layouts, layouts_b, pairs):
        options: dict[str, Any] = {"layout_a": a, "layout_b": b, "batch": batch}
        problem = make_problem(rung.op, m, n, k, signature, **options)
        problem = replace(problem, alignment=aligned)
        if "strided" not in (a, b) and rung.refusal(problem) is None:
            yield problem


def ready(rung: Rung, problem: Problem) -> list[dict[str, Any]]:
    """Return the parameters whose kernels the other tests have compiled already."""
    compiled, machine = set(sampled_kernels(rung)[0]), proofs.proof_machine()
    return [
        params
        for params in rung.space(problem)
        if {step.kernel for step in rung.steps(problem, params, machine)} <= compiled
    ]


@needs_emulator
@pytest.mark.parametrize("rung", [p for p in RUNGS if not p.values[0].quantized])
def test_offsets_beyond_32_bits(rung: Rung) -> None:
    """By kernels that the other tests have compiled already: another build would cost seconds."""
    emulator, found = Emulator(seed=2), 0
    for problem in strided_problems(rung):
        for params in ready(rung, problem)[:1]:
            near = make_inputs(problem, "integers", 7)
            aligned = problem.alignment == 16
            b = far_apart(near.b, aligned) if rung.op != "matvec" else np.repeat(near.b, 2, -1)
            b = b if rung.op != "matvec" else b[..., ::2]  # a vector of every second element
            out = far_apart(near.out, aligned)
            far = replace(near, a=far_apart(near.a, aligned), b=b, out=out)
            result = emulator.run(rung, far, params)
            verdict = check(far, rung.arithmetic(problem), params, result)
            assert verdict.ok, f"{problem}: {verdict.text}"
            found += 1
    assert found


def named(*names: str) -> list[Any]:
    return [p for p in RUNGS if p.values[0].name in names]


@needs_emulator
@pytest.mark.parametrize("rung", named("streamed_rows", "early_rows"))
def test_blocks_that_walk_a_batch(rung: Rung) -> None:
    """A grid has 65,535 products of a batch at most; here two of five, so that a block takes on."""

    def steps(*given: Any) -> tuple[Any, ...]:
        return tuple(replace(one, grid=(one.grid[0], 2, 1)) for one in rung.steps(*given))

    few, emulator, found = replace(rung, steps=steps), Emulator(), set()
    for problem in strided_problems(rung, (5, 2333, 1)):
        walked = replace(problem, batch=5)
        for params in ready(rung, walked):
            for emulator.seed in (0, 2):
                inputs = make_inputs(walked, "integers", 7)
                out = emulator.run(few, inputs, params)
                verdict = check(inputs, rung.arithmetic(walked), params, out)
                assert verdict.ok, f"{walked} {params}: {verdict.text}"
            found.add(params["lanes"])
    assert max(found) > 32, "warps that meet in shared memory"


@needs_emulator
@pytest.mark.parametrize("rung", named("warpgroup_columns", "arranged_columns"))
def test_rings_that_go_round(rung: Rung) -> None:
    """A sum so long that what waits for stages meets each of them in both phases."""
    (quant, *_), columns = verify_device.taken_quants(rung, sampled(rung)[0]), 5120
    problem = make_problem("matmul", 66, 7, columns, sampled(rung)[0], quant=quant)
    problem = replace(problem, layout_b=(*rung.layouts_b, "row")[0])
    params = rung.check_params(problem, None)
    assert columns > params["cluster"] * params["tiles"] * params["stages"] * 64
    trial = verify_device.Trial(problem, params, "integers", "contiguous", 0)
    verdict = verify_device.judge_trial(rung, trial, Emulator(seed=2).run)
    assert verdict.ok, verdict.text


@needs_emulator
@pytest.mark.parametrize("rung", named("even_rows"))
def test_blocks_with_more_rows_than_they_hold_sums_of(rung: Rung) -> None:
    """A block has 18 rows here, and a warp of the second kernel three."""
    emulator = Emulator()
    for problem in strided_problems(rung, (2300, 7, 1)):
        for emulator.seed in (0, 2):
            params = ready(rung, problem)[0]
            inputs = make_inputs(problem, "integers", 7)
            out = emulator.run(rung, inputs, params)
            verdict = check(inputs, rung.arithmetic(problem), params, out)
            assert verdict.ok, f"{problem} {params}: {verdict.text}"


@needs_emulator
@pytest.mark.parametrize(
    "rung", named("register_tile", "vector_tile", "tensor_core", "tensor_core_int8", "wgmma_tile")
)
def test_tiles_that_are_walked_in_groups(rung: Rung) -> None:
    """Eight tiles of 128 rows are walked down before the next column; here are eight and one."""
    emulator, problem = Emulator(seed=2), next(strided_problems(rung, (1100, 130, 16)))
    params, inputs = ready(rung, problem)[0], make_inputs(problem, "integers", 7)
    out = emulator.run(rung, inputs, params)
    verdict = check(inputs, rung.arithmetic(problem), params, out)
    assert verdict.ok, f"{problem} {params}: {verdict.text}"


@needs_emulator
@pytest.mark.parametrize("rung", named("tensor_core"))
def test_aligned_operands_alone_are_copied_ahead(rung: Rung) -> None:
    emulator, seen = Emulator(seed=2), set()
    for problem in strided_problems(rung):
        emulator.run(rung, make_inputs(problem, "integers", 7), ready(rung, problem)[0])
        aligned = problem.alignment == 16
        assert (emulator.reports[-1].async_copies > 0) == aligned, problem
        seen.add(aligned)
    assert seen == {False, True}


def edge_launches(rung: Rung, deep: bool) -> Iterator[tuple[Problem, Any]]:
    """Yield small problems with parameters whose kernels the other tests have compiled already.

    Of the uneven ones aligned rows end within a vector; the sums of deep ones take more turns of a
    loop than a ring has stages.
    """
    uneven = {"matvec": (5, 53, 1), "matmul": (5, 7, 69), "grouped": (5, 40, 72)}[rung.op]
    problems = [*strided_problems(rung), *strided_problems(rung, uneven)]
    if deep and rung.op == "matvec":
        problems += list(strided_problems(rung, (5, 2333, 1)))[:1]
    elif deep:
        aligned = [p for p in strided_problems(rung, (5, 7, 331)) if p.alignment == 16]
        along_k = [p for p in aligned if (p.layout_a, p.layout_b) == ("row", "col")]
        problems += [*aligned, *(replace(p, k=1103) for p in along_k)]
    for index, problem in enumerate(problems):
        sets = ready(rung, problem)
        yield from ((problem, params) for params in sets[index % max(1, len(sets)) :][:1])


@needs_emulator
@pytest.mark.parametrize("rung", [p for p in RUNGS if not p.values[0].quantized])
def test_nothing_beyond_the_operands_is_touched(rung: Rung) -> None:
    """What is read has fences in any emulated launch; here the result has, too."""
    found = 0
    for seed, at_end in ((3, False), (2, True)):
        for problem, params in edge_launches(rung, deep=at_end):
            inputs = make_inputs(problem, "integers", 7)
            unit = 16 if problem.alignment == 16 else 1
            held = replace(inputs, out=fenced(inputs.out, at_end, unit))
            out = Emulator(seed).run(rung, held, params)
            verdict = check(held, rung.arithmetic(problem), params, out)
            assert verdict.ok, f"{problem}: {verdict.text}"
            found += 1
    assert found


@pytest.mark.parametrize(("n", "adds"), [(32, 8), (512, 8), (513, 16)])
def test_the_chain_counts_whole_turns(n: int, adds: int) -> None:
    """A thread adds 8 neighbouring rows a turn however few rows there are, then 2 + 15 sums."""
    (rung,) = (r for r in cuda_rungs() if r.name == "block_columns")
    problem = make_problem("matvec", 64, n, 1, ("float32",) * 3, layout_a="col")
    chain = rung.arithmetic(problem).chain(problem, {"lanes": 8, "threads": 512})
    assert chain >= adds + 2 + 15


@pytest.mark.parametrize("arch", LISTED)
@pytest.mark.parametrize("rung", RUNGS)
def test_compiles_without_spills(rung: CudaRung, arch: str) -> None:
    """Built of each rung for one architecture, and for all by a compiler that is on no record."""
    if arch not in rung.archs:
        pytest.skip(f"{rung.name} is not declared for {arch}")
    known = compiled.on_record(rung, arch)
    assert known or not proofs.is_pinned(), "run python tools/rebuild.py"
    if known is None or arch == rung.archs[len(rung.name) % len(rung.archs)]:
        made = compiled.build(rung, arch)
        assert known in (made, None), "false: delete the line and run python tools/rebuild.py"
        known = made
    assert known.shared_bytes == known.told_shared_bytes
    assert rung.spills or not known.spill_bytes, known


@pytest.mark.parametrize("name", ["wgmma_codes", "wgmma_experts"])
def test_no_product_of_tensor_cores_waits_for_the_one_before(name: str) -> None:
    """The compiler makes them wait where registers are short, and tells it in a remark alone."""
    (rung,) = (r for r in cuda_rungs() if r.name == name)
    kernels = next(proofs.variants(rung)).kernels[-2:]
    _, report = nvrtc.build(rung.source_path, kernels, "sm_90a")
    assert "Used" in report
    assert "serialized" not in report, report


def test_what_is_on_record_is_of_these_inputs(tmp_path: Path) -> None:
    (rung,) = (r for r in cuda_rungs() if r.name == "p_threads")
    assert list(compiled.update([rung.name], tmp_path)) == [compiled.path_of(rung, tmp_path)]
    assert list(compiled.update([rung.name], tmp_path)) == []
    lines = [compiled.on_record(rung, arch, tmp_path) for arch in rung.archs]
    assert [line and line.arch for line in lines] == list(rung.archs)
    assert len({line and line.inputs for line in lines}) == len(rung.archs)
    with planted(nvrtc, "compiler_version", lambda sound: "1.2"):
        assert not any(compiled.on_record(rung, arch, tmp_path) for arch in rung.archs)
    path = compiled.path_of(rung, tmp_path)
    path.write_text(path.read_text().replace('"spill_bytes": 0', '"spill_bytes": "0"'))
    assert compiled.on_record(rung, rung.archs[0], tmp_path) is None


def test_a_spill_is_seen(tmp_path: Path) -> None:
    """A kernel that keeps more numbers than its launch bounds leave it registers."""
    source = tmp_path / "spilling.cu"
    source.write_text(
        "__global__ void __launch_bounds__(1024, 2) f(float* p) {\n"
        "  float v[96];\n#pragma unroll\n  for (int i = 0; i < 96; ++i) v[i] = p[i * 32];\n"
        "  __syncthreads();\n#pragma unroll\n"
        "  for (int i = 0; i < 96; ++i) p[i * 64 + threadIdx.x] = v[i] * v[95 - i];\n}\n"
    )
    _, report = nvrtc.build(source, ("f",), "sm_90a")
    (found,) = nvrtc.resources(report)
    assert found.spill_bytes > 0


@needs_emulator
@pytest.mark.parametrize("layout", ["row", "col"])
def test_vector_tile_right_under_the_emulator_where_half_of_the_threads_move_nothing(
    layout: str,
) -> None:
    """Small tiles of halves beside floats, which no sampled signature has."""
    (rung,) = (p.values[0] for p in RUNGS if p.id == "matmul-vector_tile")
    problem = make_problem(
        "matmul", 70, 66, 40, ("float16", "float32", "float32"), layout_a=layout, layout_b=layout
    )
    trial = verify_device.Trial(problem, {"micro": 4}, "integers", "contiguous", 0)
    verdict = verify_device.judge_trial(rung, trial, Emulator(seed=1).run)
    assert verdict.ok, verdict.text


@needs_emulator
@pytest.mark.parametrize(("rows", "unroll"), [(2, 2), (4, 1)])
def test_streamed_rows_right_under_the_emulator_where_rows_of_a_warp_are_past_the_end(
    rows: int, unroll: int
) -> None:
    """Unaligned rows: what is loaded in their stead begins at the same place of a vector."""
    (rung,) = (p.values[0] for p in RUNGS if p.id == "matvec-streamed_rows")
    params = {"lanes": 32, "rows": rows, "unroll": unroll}
    for m in (11, 27):
        problem = make_problem("matvec", m, 301, 1, ("float16",) * 3)
        trial = verify_device.Trial(problem, params, "integers", "contiguous", 0)
        verdict = verify_device.judge_trial(rung, trial, Emulator(seed=1).run)
        assert verdict.ok, verdict.text
