"""Mistakes of published kernels, planted again in ours that start from them: how each is tried.

A mutant is one of our kernels with a line changed (the old text must be there, so that no mutant
can rot), a wrong kernel from tests/mutants, or a wrong launch. The shipped kernel passes at the
same problem; the mutant must be caught by the emulator or the oracle, by the name of the check.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import cuda_emulation
from checkout import TESTS
from cuda_emulation import Emulator
from cuemu.build import EmulationError, compile_cu
from gemmule.core.rung import HEADERS_FOLDER, RUNGS_FOLDER, Params, Rung, Signature, Step
from gemmule.oracle import judge as oracle
from gemmule.oracle.inputs import Inputs

MUTANTS_FOLDER = TESTS / "mutants"
MAP_NORESERVE = 0x4000  # Linux's; the mmap module of Python 3.11 does not name it
SCHEDULES = (0, 1, 2, 3)  # orders of threads and blocks that each kernel runs in
INCLUDED = ("rows.cuh", "blocks.cuh", "codes.cuh")  # by each other
BEYOND = (1 << 31) + 64  # elements: what does not fit an int

Edit = tuple[str, str, str]  # file below rungs, or of tests/mutants; old text; new text
Steps = tuple[Step, ...]


@dataclass(frozen=True)
class Mutant:
    """One mistake: where it is planted, the problem that shows it, and the check that names it.

    inf_at: one Inf at this element of A, else small integers. replaced_by: a file of tests/mutants
    in place of the kernel.
    """

    name: str
    rung: str
    caught: str
    sizes: tuple[int, ...]
    params: dict[str, Any]
    edits: tuple[Edit, ...] = ()
    replaced_by: str | None = None
    relaunched: Callable[[Steps], Steps] = lambda steps: steps
    alignment: int = 16
    signature: Signature = ("float32", "float32", "float32")
    inf_at: tuple[int, int] | None = None


def source_of(mutant: Mutant, rung: Rung, folder: Path) -> Path:
    """Write the mutated sources into `folder`, where they come before the shipped ones."""
    kernel = MUTANTS_FOLDER / mutant.replaced_by if mutant.replaced_by else rung.source_path
    texts = {kernel.name: kernel.read_text()}
    texts |= {name: (HEADERS_FOLDER / name).read_text() for name in INCLUDED}
    for name, old, new in mutant.edits:
        home = HEADERS_FOLDER if name.endswith(".cuh") else RUNGS_FOLDER
        text = texts.get(Path(name).name) or (home / name).read_text()
        assert old in text, f"{mutant.name}: {old!r} is not in {name}"
        texts[Path(name).name] = text.replace(old, new)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder / kernel.name


def verdict_of(rung: Rung, inputs: Inputs, params: Params, schedule: int = 0) -> str:
    """Run once and return the name of the check that complains, or ``""``."""
    inputs.poison()
    try:
        out = Emulator(schedule).run(rung, inputs, params)
    except EmulationError as error:
        return error.kind
    verdict = oracle.check(inputs, rung.arithmetic(inputs.case.problem), params, out)
    return "" if verdict.ok else verdict.kind


def verdicts(rung: Rung, inputs: Inputs, params: Params) -> set[str]:
    """Return what is said of a kernel in all orders of its threads."""
    return {verdict_of(rung, inputs, params, schedule) for schedule in SCHEDULES}


def swap_module(fault: Callable[..., Any], source: Path, steps: Steps) -> None:
    """Let the emulator run the kernels of a source in place of the shipped ones."""
    module = compile_cu(source, names=list(dict.fromkeys(step.kernel for step in steps)))
    fault(cuda_emulation, "emulated", lambda *args, **options: module)


def check_caught(
    mutant: Mutant, rung: Rung, inputs: Inputs, folder: Path, fault: Callable[..., Any]
) -> None:
    """Assert that the shipped kernel is right, and that the mutant is caught as it says."""
    params = mutant.params
    assert verdicts(rung, inputs, params) == {""}, "shipped kernel"
    launches = mutant.relaunched(rung.steps(inputs.case.problem, params, Emulator().machine))
    swap_module(fault, source_of(mutant, rung, folder), launches)
    wrong = replace(rung, steps=lambda *args: launches)
    assert mutant.caught in verdicts(wrong, inputs, params)


def grid_errors(steps: Steps) -> list[str]:
    """Return the steps whose grid no device takes: x to 2^31 - 1, y and z to 65,535."""
    return [s.kernel for s in steps if max(s.grid[1:]) > 65_535 or s.grid[0] >= 1 << 31]


def far_array(shape: tuple[int, int], dtype: Any, strides: tuple[int, int]) -> Any:
    """Return a matrix with far steps, in elements, in the middle of reserved memory.

    An offset that wraps to a negative number then meets zeros, not a fault.
    """
    step, size = max(strides), dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, 2 * (step + 4096) * size, flags=flags)
    return np.ndarray(shape, dtype, memory, step * size, tuple(s * size for s in strides))


def launched(steps: Steps, packed: bytes, kernels: Callable[[str], Any]) -> None:
    """Launch the steps of a product, each kernel from the module that holds it."""
    for step in steps:
        kernels(step.kernel).launch(
            step.kernel, grid=step.grid, block=step.block, args=[packed], smem=step.smem
        )
