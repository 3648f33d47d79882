"""Runs a CUDA rung on the oracle's inputs under the emulator; shared by the rungs' tests."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cuemu.build import compile_cu, tensor_record
from fences import fenced
from gemmule.backends.cuda import launch_args, tensor_maps
from gemmule.core.epilogue import FUNCTIONS
from gemmule.core.problem import Problem
from gemmule.core.rung import Rung, Signature, with_bias, with_epilogue, with_scales
from gemmule.oracle import biased
from gemmule.oracle.inputs import Inputs
from proofs import device as verify_device
from proofs import proofs, raw_launch

MOST_LATE_BYTES = 1 << 26  # sparse operands span more, and are there from the start


class Emulator:
    """A runner like proofs.device_runner.DeviceRunner, on the CPU.

    Threads and blocks run in an order that `seed` shuffles (0: in order); under an odd one copies
    to shared memory land at once, under an even one as late as may be. A step that is launched
    early meets the memory that was there before what it waits for. Operands lie at the end of a
    page, or one seed in four at its beginning, aligned as the case asked for: who reads on faults.
    """

    def __init__(self, seed: int = 0, *, bank_conflicts: bool = False) -> None:
        self.seed = seed
        self.bank_conflicts = bank_conflicts
        self.machine = proofs.proof_machine()
        self.reports: list[Any] = []

    def run(
        self,
        rung: Rung,
        inputs: Inputs,
        params: Mapping[str, Any],
        alpha: float = 1.0,
        beta: float = 0.0,
        bias: np.ndarray[Any, Any] | None = None,
        scales: tuple[np.ndarray[Any, Any], ...] | None = None,
        epilogue: Any = None,
    ) -> np.ndarray[Any, Any]:
        problem = inputs.case.problem
        if inputs.out.size == 0:
            return inputs.out
        steps = rung.steps(problem, params, self.machine)
        steps = steps if bias is None else with_bias(steps)
        steps = steps if scales is None else with_scales(steps)
        if epilogue is not None:
            steps = with_epilogue(steps, FUNCTIONS[epilogue.activation])
            alpha, beta = epilogue.alpha, epilogue.beta
        room = np.full(rung.workspace(problem, params, self.machine) + 256, 0xFF, np.uint8)
        work = fenced(room[-room.ctypes.data % 256 :][: room.size - 256], True, 256)
        base = int(work.__array_interface__["data"][0])
        given = raw_launch.parts(inputs)
        parts = [one if one is None or one is inputs.out else self.placed(one) for one in given]
        addresses = [
            0 if part is None else int(part.__array_interface__["data"][0]) for part in parts
        ]
        added = None if bias is None else int(bias.ctypes.data)
        tail = None if scales is None else [int(one.ctypes.data) for one in scales]
        packed = raw_launch.arguments(inputs, addresses, base, alpha, beta, added)
        if tail is not None:
            packed += raw_launch.tail_of(scales, tail, problem.m)
        if epilogue is not None:
            beside = [one.ctypes.data for one in epilogue.operands.values()]
            packed += raw_launch.epilogue_of(epilogue, beside)
        shapes = tensor_maps.declared(steps, problem, packed)
        where = launch_args.operands(packed, coded=problem.quant is not None) if shapes else ()
        maps = [encoded(where[shape.word] + shape.offset, shape) for shape in shapes]
        kernels = [step.kernel for step in steps]
        if epilogue is not None:
            module = _module(
                rung.source_path, tuple(dict.fromkeys(kernels)), steps[0].defines, False
            )
        elif scales is not None:
            module = _module(rung.source_path, tuple(dict.fromkeys(kernels)), ("SCALES",), False)
        elif bias is None:
            module = emulated(rung, kernels, problem, bank_conflicts=self.bank_conflicts)
        else:
            module = with_a_bias(rung, kernels)
        before = work
        for index, step in enumerate(steps):
            late: list[np.ndarray[Any, Any]] = []
            if step.pdl and index:  # it may begin before the step in front of it has written
                late = [work]
            elif step.pdl:  # or before whoever writes the operands has
                late = [bytes_of(part) for part in parts[:2] if part is not None and part.size]
                late = [part for part in late if part.nbytes < MOST_LATE_BYTES]
            written = [part.copy() for part in late]
            for part in late:
                part[...] = before if part is work else 0xFF
            before = work.copy() if index + 1 < len(steps) and steps[index + 1].pdl else work
            report = module.launch(
                step.kernel,
                grid=step.grid,
                block=step.block,
                args=[packed, *(maps if step.maps else ())],
                smem=step.smem,
                cluster=step.cluster,
                seed=self.seed,
                eager=self.seed % 2 == 1,
                late=[
                    (part.ctypes.data, copy.ctypes.data, copy.nbytes)
                    for part, copy in zip(late, written, strict=True)
                ],
            )
            if not index:  # operands that no thread waited for are given back
                for part, copy in zip(late, written, strict=True):
                    part[...] = copy
            self.reports.append(report)
        for part, copy in zip(given, parts, strict=True):
            if copy is not part:  # the oracle looks for what was written to its operands
                bytes_of(part)[...] = bytes_of(copy)
        return inputs.out

    def placed(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return a copy of an operand beside a page that nobody may read; itself if too wide."""
        low, high = np.lib.array_utils.byte_bounds(array)
        return fenced(array, self.seed % 4 != 3, 16) if high - low < MOST_LATE_BYTES else array


def encoded(address: int, shape: tensor_maps.Shape) -> bytes:
    """Stand for `tensor_maps.encode`, with what the driver refuses refused."""
    if address % 16 or any(stride % 16 or not 0 < stride < 1 << 40 for stride in shape.strides):
        raise ValueError(f"TMA wants multiples of 16 bytes; given 0x{address:x} and {shape}")
    if any(not 1 <= b <= 256 for b in shape.box) or shape.box[0] * shape.itemsize > 128:
        raise ValueError(f"a box of 1 to 256 elements a side, 128 bytes wide at most: {shape}")
    if any(not 1 <= size < 1 << 32 for size in shape.sizes):
        raise ValueError(f"sizes of 1 to 2^32 elements: {shape}")
    numbers = [*shape.sizes, *shape.box]
    return tensor_record(address, shape.itemsize, 3, "128B", numbers, shape.strides)


def bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the memory from the first to the last element of an array, as bytes."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))


def sampled(rung: Rung) -> list[Signature]:
    """Return two signatures of a rung: its first, and a half or an integer, by turns."""
    first = rung.signatures[0]
    kinds = (("int32", "int64"), ("float16", "bfloat16"))
    wanted = kinds[len(rung.name) % 2]
    others = [s for s in rung.signatures if s[2] in wanted] or list(rung.signatures[1:])
    return [first, *[s for s in others if s != first][:1]]


def emulated(
    rung: Rung, kernels: Sequence[str], problem: Any, *, bank_conflicts: bool = False
) -> Any:
    """Compile, once for all sampled signatures, what their trials launch, or else `kernels`."""
    signature = (problem.a, problem.b, problem.out)
    shared = tuple(sampled(rung))
    names, defines = _kernels(rung, shared if signature in shared else (signature,))
    if not set(kernels) <= set(names):  # some that the trials do not reach
        alone = tuple(dict.fromkeys(kernels))
        sets = [one for one in _TOGETHER.get(rung.source_path, ()) if set(alone) <= set(one)]
        names = next(iter(sets), alone)
    return _module(rung.source_path, names, defines, bank_conflicts)


def with_a_bias(rung: Rung, kernels: Sequence[str]) -> Any:
    """Compile, once for all sampled signatures, what their trials with a bias launch."""
    names, defines = _biased_kernels(rung)
    names = names if set(kernels) <= set(names) else tuple(kernels)
    return _module(rung.source_path, names, (*defines, "BIAS"), False)


_TOGETHER: dict[Path, list[tuple[str, ...]]] = {}


def together(
    rung: Rung, products: Iterable[tuple[Problem, Mapping[str, Any]]], run: Emulator
) -> None:
    """Let the kernels of these products be one build, which costs a fraction of one for each."""
    steps = [step for given in products for step in rung.steps(*given, run.machine)]
    names = tuple(dict.fromkeys(step.kernel for step in steps))
    _TOGETHER.setdefault(rung.source_path, []).append(names)


def sampled_kernels(rung: Rung) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the kernels and defines of one build that serves the rung's sampled signatures."""
    return _kernels(rung, tuple(sampled(rung)))


@functools.cache
def _module(path: Path, names: tuple[str, ...], defines: tuple[str, ...], conflicts: bool) -> Any:
    """Compile the kernels of a shipped file, which no test changes."""
    return compile_cu(path, names=names, defines=defines, bank_conflicts=conflicts)


@functools.cache
def _kernels(
    rung: Rung, signatures: tuple[Signature, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    found = (verify_device.trials(rung, one, few=True) for one in signatures)
    return _launched(rung, itertools.chain.from_iterable(found))


@functools.cache
def _biased_kernels(rung: Rung) -> tuple[tuple[str, ...], tuple[str, ...]]:
    found = (verify_device.trials(rung, one, few=True) for one in sampled(rung))
    return _launched(rung, itertools.chain.from_iterable(biased.some(rung, one) for one in found))


def _launched(
    rung: Rung, trials: Iterable[verify_device.Trial]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the kernels that trials launch, and their defines."""
    machine = proofs.proof_machine()
    steps = [step for trial in trials for step in rung.steps(trial.problem, trial.params, machine)]
    defines = {step.defines for step in steps}
    assert len(defines) == 1, f"{rung.name}: its signatures want different defines: {defines}"
    return tuple(dict.fromkeys(step.kernel for step in steps)), defines.pop()
