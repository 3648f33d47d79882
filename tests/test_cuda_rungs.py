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
    """Return up to three signatures of a rung: its first, a half, an integer."""
    first = rung.signatures[0]
    half = [s for s in rung.signatures if s[0] in ("float16", "bfloat16") and s != first][:1]
    whole = [s for s in rung.signatures if s[2] in ("int32", "int64") and s != first][:1]
    return [first, *half, *whole]


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
    for variant in variants[:: max(1, len(variants) // 2)]:
        _, report = nvrtc.build(rung.source_path, variant.kernels, arch, variant.defines)
        spilled = [r for r in nvrtc.resources(report) if r.spill_bytes]
        assert rung.spills or not spilled, spilled
