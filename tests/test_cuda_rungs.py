"""Every CUDA rung, without a GPU: judged by the oracle under the emulator, compiled for every arch.

A sample of signatures runs on each rung; the whole matrix runs on a device
(`gemmule verify --device cuda`), whose records test_evidence compares with the current code.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from cuda_emulation import Emulator, sampled
from cuemu.toolchain import missing_tools
from gemmule.backends.cuda import nvrtc
from gemmule.core.registry import all_rungs
from gemmule.core.rung import CUDA_ARCHS, Rung
from gemmule.lab.verify import device as verify_device
from gemmule.lab.verify import proofs
from gemmule.oracle.problems import make_problem

RUNGS = [pytest.param(r, id=f"{r.folder}-{r.name}") for r in all_rungs("cuda")]
needs_emulator = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


@needs_emulator
@pytest.mark.parametrize("rung", RUNGS)
def test_right_under_the_emulator(rung: Rung) -> None:
    for which, signature in enumerate(sampled(rung)):
        emulator = Emulator(seed=which)
        for trial in verify_device.trials(rung, signature, few=True):
            verdict = verify_device.judge_trial(rung, trial, emulator.run)
            assert verdict.ok, f"{trial}: {verdict.text}"


@pytest.mark.parametrize(("n", "adds"), [(32, 8), (512, 8), (513, 16)])
def test_the_chain_counts_whole_turns(n: int, adds: int) -> None:
    """A thread adds 8 neighbouring rows a turn however few rows there are, then 2 + 15 sums."""
    (rung,) = (r for r in all_rungs("cuda") if r.name == "block_columns")
    problem = make_problem("matvec", 64, n, 1, ("float32",) * 3, layout_a="col")
    chain = rung.arithmetic(problem).chain(problem, {"lanes": 8, "threads": 512})
    assert chain >= adds + 2 + 15


@functools.cache
def variants(rung: Rung) -> tuple[proofs.Variant, ...]:
    """Return a rung's variants without their launches, which fill memory."""
    return tuple(replace(variant, launches=()) for variant in proofs.variants(rung))


def heaviest(rung: Rung, arch: str) -> proofs.Variant:
    """Return a variant of a rung, another one for each architecture, with three of its kernels.

    Few instances need as many registers as the last ones do, since parameters are declared in
    rising order. The whole matrix: gemmule verify --stale.
    """
    of_rung = variants(rung)
    variant = of_rung[(len(rung.name) + CUDA_ARCHS.index(arch)) % len(of_rung)]
    kernels = (variant.kernels[0], *variant.kernels[-2:])
    return replace(variant, kernels=tuple(dict.fromkeys(kernels)))


@pytest.mark.parametrize("arch", CUDA_ARCHS)
@pytest.mark.parametrize("rung", RUNGS)
def test_compiles_without_spills(rung: Rung, arch: str) -> None:
    if arch not in rung.archs:
        pytest.skip(f"{rung.name} is not declared for {arch}")
    variant = heaviest(rung, arch)
    _, report = nvrtc.build(rung.source_path, variant.kernels, arch, variant.defines)
    found = list(nvrtc.resources(report))
    assert len(found) >= len(variant.kernels), "ptxas reports every kernel"
    spilled = [r for r in found if r.spill_bytes]
    assert rung.spills or not spilled, spilled


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
