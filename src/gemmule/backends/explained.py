"""A choice and what a back end made of it, in words: the lines of `Plan.explain`."""

from __future__ import annotations

import math

from gemmule.backends.base import HostRun, Run
from gemmule.backends.cuda import convert, nvrtc
from gemmule.backends.cuda.launch import Launcher
from gemmule.backends.cuda.packed.launch import PackedLauncher
from gemmule.core.canonical import NAMES
from gemmule.core.choice import Choice, duration
from gemmule.core.problem import Problem
from gemmule.core.rung import (
    MOST_PER_ADD,
    Arithmetic,
    CudaRung,
    LibraryRung,
    Step,
)
from gemmule.storage import first_use, models

TELLING_SHARE = 0.1  # of the read ceiling; below, arithmetic limits a product of matrices


def explained(op: str, choice: Choice, run: Run) -> list[str]:
    """Return what runs, why, what it should cost, what is copied, and the runner-up."""
    run = run.run if isinstance(run, convert.Converting) else run
    problem = choice.call.problem
    params = ", ".join(f"{k}={v}" for k, v in choice.params.items()) or "none"
    lines = [
        f"problem    {problem.describe()}",
        f"device     {choice.machine.name} ({choice.machine.arch})",
        f"rung       {choice.rung.folder}/{choice.rung.name}: {choice.rung.title}",
        f"parameters {params}",
        f"reason     {choice.reason}",
    ]
    code = run.module.digest() if isinstance(run, Launcher | PackedLauncher) else None
    proof = first_use.in_words(choice, code)
    lines += [f"proof      {proof}"] if proof else []
    if choice.expected_s:  # nothing is expected of a product without elements
        lines.append(f"expected   {_expected(problem, choice.expected_s, choice)}")
    lines += [f"runner-up  {choice.runner_up}"] if choice.runner_up else []
    if isinstance(choice.rung, CudaRung):
        given = (choice.problem, choice.params, choice.machine)
        packed = run.workspace if isinstance(run, PackedLauncher) else None
        memory = choice.rung.workspace(*given) if packed is None else packed
        shared = _shared(choice.rung.steps(*given), run)
        lines.append(f"memory     workspace {memory:,} bytes, {shared} a block")
    elif isinstance(choice.rung, LibraryRung):
        memory = choice.rung.workspace(choice.problem, choice.params)
        if memory or problem.quant is not None:
            lines.append(f"memory     workspace {memory:,} bytes beside the library's own")
    arithmetic = choice.rung.arithmetic(choice.problem)
    rounded = f", of operands rounded to {arithmetic.inputs}" if arithmetic.inputs else ""
    if arithmetic.per_add > MOST_PER_ADD:
        bits = 25 - round(math.log2(arithmetic.per_add))
        rounded += f", of parts that tensor cores keep {bits} bits of; precision='ieee' forbids it"
    if choice.rung.precision:
        rounded += ", or integers within the bound of such sums; precision='ieee' forbids them"
    rounded += _unused(problem, arithmetic)
    lines.append(f"sums in    {arithmetic.accumulator}{rounded}")
    lines.append(f"copies     {'; '.join(choice.copies) or 'none'}")
    return lines + _prepared(op, choice, run)


def _expected(problem: Problem, seconds: float, choice: Choice) -> str:
    """Return a time and what limits it: reading, or for products of matrices arithmetic as well.

    Where the rung's estimates were judged on this device, by how much they are mostly off.
    """
    words, matrices, machine = duration(seconds), problem.op == "matmul", choice.machine
    error = models.error(machine, f"{choice.rung.folder}/{choice.rung.name}")
    if error is not None and not choice.reason.startswith("tuned"):
        words += f", within {max(error, 0.01):.0%}"
    if machine.backend == "cuda" and (other := models.borrowed(machine)):
        words += f", by the times of {other}"
    share = problem.compulsory_bytes / seconds / machine.read_bytes_per_s
    if not matrices or share >= TELLING_SHARE:
        ceiling = f"{machine.read_bytes_per_s / 1e9:,.0f} GB/s"
        words += f", {share:.0%} of the read ceiling ({ceiling})"
    return f"{words}, {problem.flops / seconds / 1e9:,.0f} GFLOP/s" if matrices else words


def _unused(problem: Problem, arithmetic: Arithmetic) -> str:
    """Return what the caller allowed that the chosen rung makes no use of."""
    allowed = []
    if problem.precision == "tf32" and arithmetic.inputs != "tf32":
        allowed.append('precision="tf32"')
    if problem.accumulate == "float16" and arithmetic.accumulator != "float16":
        allowed.append('accumulate="float16"')
    return f"; this rung makes no use of {' and '.join(allowed)}" if allowed else ""


def _shared(steps: tuple[Step, ...], run: Run) -> str:
    """Return the shared memory of the kernel that has most: of its launch and of its code."""
    if not isinstance(run, Launcher | PackedLauncher):
        return "shared memory 0 bytes"
    static = nvrtc.static_shared(run.module)
    if run.module.is_ptx:
        return f"shared memory {max(s.smem for s in steps):,} bytes and what the driver adds,"
    sizes = [(step.smem + static[step.kernel], step.smem) for step in steps]
    total, dynamic = max(sizes, default=(0, 0))
    return f"shared memory {total:,} bytes (static {total - dynamic:,}, dynamic {dynamic:,})"


def _prepared(op: str, choice: Choice, run: Run) -> list[str]:
    """Return a line for each prepared operand: what it holds, and what the product reads."""
    lines, rung = [], choice.rung.name
    used = run.ready if isinstance(run, PackedLauncher) else (False, False)
    if isinstance(run, HostRun):
        used = run.packed[0] is not None, run.packed[1] is not None
    call = choice.call
    names = NAMES.get(op, ("A", "W"))  # of a grouped product
    names = names[::-1] if call.swapped else names
    for name, one, is_used in zip(names, call.ready, used, strict=True):
        if one is None:
            continue
        if is_used:
            read = f"read packed by {rung}"
        else:
            packed = f"packed for {', '.join(one.rungs)}" if one.rungs else "no rung packs it"
            if rung in one.rungs:
                packed = "packed batches are not walked as this product walks them"
            read = f"read by {rung} as an array ({packed})"
        lines.append(
            f"prepared   {name} on the {one.side}: {read}; it holds {one.own:,} bytes as an "
            f"array and {one.packed:,} beside it"
        )
    return lines
