"""Every CUDA rung, without a GPU: judged by the oracle under the emulator, compiled for every arch.

A sample of signatures runs on each rung; the whole matrix runs on a device
(`gemmule verify --device cuda`), whose records test_evidence compares with the current code.
"""

from __future__ import annotations

import pytest

from cuda_emulation import Emulator
from cuemu.build import missing_tools
from gemmule.backends import nvrtc
from gemmule.lab import proofs, verify_cuda
from gemmule.rung import Rung, all_rungs

RUNGS = [pytest.param(r, id=f"{r.folder}-{r.name}") for r in all_rungs("cuda")]
needs_emulator = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


def sampled(rung: Rung) -> list[tuple[str, str, str]]:
    """Return two signatures of a rung: its first, and a half or an integer, by turns."""
    first = rung.signatures[0]
    kinds = (("int32", "int64"), ("float16", "bfloat16"))
    wanted = kinds[len(rung.name) % 2]
    others = [s for s in rung.signatures if s[2] in wanted] or list(rung.signatures[1:])
    return [first, *(s for s in others[:1] if s != first)]


@needs_emulator
@pytest.mark.parametrize("rung", RUNGS)
def test_right_under_the_emulator(rung: Rung) -> None:
    for which, signature in enumerate(sampled(rung)):
        emulator = Emulator(seed=which)
        for trial in verify_cuda.trials(rung, signature, few=True):
            verdict = verify_cuda.judge_trial(rung, trial, emulator.run)
            assert verdict.ok, f"{trial}: {verdict.text}"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
@pytest.mark.parametrize("rung", RUNGS)
def test_compiles_without_spills(rung: Rung, arch: str) -> None:
    if arch not in rung.archs:
        pytest.skip(f"{rung.name} is not declared for {arch}")
    variants = list(proofs.variants(rung))
    variant = variants[len(rung.name) % len(variants)]  # the whole matrix: gemmule verify --stale
    _, report = nvrtc.build(rung.source_path, variant.kernels, arch, variant.defines)
    spilled = [r for r in nvrtc.resources(report) if r.spill_bytes]
    assert rung.spills or not spilled, spilled
