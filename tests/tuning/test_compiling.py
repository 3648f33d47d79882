"""Compilers beside: what they compile is in the cache, and nothing is waited for in vain."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from gemmule.backends.cuda import nvrtc, starter
from gemmule.core.problem import Problem
from gemmule.core.registry import rung_in
from gemmule.core.rung import CudaRung, Machine
from gemmule.tuning.compiling import Compilers, Kernels

MACHINE = Machine("cuda", "made up", "sm_90a", 132, 4e12, 50 << 20, 227 << 10)
SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")


def kernels_of(m: int) -> Kernels:
    rung, problem = rung_in("matvec", "cuda", "thread_per_row"), Problem("matvec", m, 64)
    assert isinstance(rung, CudaRung)
    steps = rung.steps(problem, rung.check_params(problem, None), MACHINE)
    return starter.compiled_by(rung, steps, "sm_90a")


def cached(kernels: Kernels, cache: Path) -> bool:
    source, names, arch, defines = kernels
    key = nvrtc.cubin_key(Path(source), names, arch, defines)
    return (cache / "cubin" / f"{key}.cubin").exists()


def test_what_was_asked_for_is_in_the_cache(own_cache: Path) -> None:
    kernels = kernels_of(64)
    nonsense: Kernels = (kernels[0], ("no_such_kernel",), *kernels[2:])
    with Compilers(1) as compilers:
        for one in (nonsense, kernels):  # what does not compile ends no process
            compilers.ask(one).result(60)
        assert compilers.ask(kernels) is compilers.ask(kernels)
    assert cached(kernels, own_cache)
    assert not cached(nonsense, own_cache)


def test_a_process_that_dies_is_waited_for_no_longer() -> None:
    with Compilers(1, (sys.executable, "-c", "")) as compilers:
        compilers.ask(kernels_of(64)).result(60)


def test_the_end_of_the_block_ends_a_process_that_is_at_work() -> None:
    begun = time.monotonic()
    with Compilers(1, SLEEPER) as compilers:
        first = compilers.ask(kernels_of(64))
        second = compilers.ask(("another", *kernels_of(64)[1:]))
        while not compilers.running():
            time.sleep(0.01)
    assert first.done()
    assert second.cancelled()
    assert time.monotonic() - begun < 60
    assert not compilers.running()
