"""Products of which one operand or both were packed before, by passes of the same rung.

The kernels are those of the unprepared product, and so are the bits of the result; only what was
done before is left out. Of an operand that was not prepared the passes run over it alone. What the
product reads of both in its workspace (`gemmule.core.packing.Move`) is brought together by one
small launch; packed operands themselves are shown by tensor maps, wherever they lie.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver, launch_args, nvrtc, tensor_maps
from gemmule.backends.cuda.starter import (
    Start,
    check_shared,
    cuda_rung,
    kernels,
    loaded,
    starter,
    whole_starter,
)
from gemmule.core.choice import Choice
from gemmule.core.operand import Operand
from gemmule.core.packing import Move, Ready
from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Step
from gemmule.core.scalars import passes

GATHER = Path(__file__).with_name("gather.cu")
MOST_MOVES, THREADS, MOST_BLOCKS = 4, 256, 64
RANGES = struct.Struct(
    f"<{3 * MOST_MOVES}Q"
)  # the struct of gather.cu: from where, to where, words
_ADDRESSES = 1 << 64
SideMove = tuple[int, Move]  # of A (0) or B (1)


def ready_sides(choice: Choice) -> tuple[bool, bool]:
    """Tell of A and of B whether what they were prepared for serves this choice."""
    call, problem, rung = choice.call, choice.problem, choice.rung
    if not isinstance(rung, CudaRung) or rung.packing is None or call.outer:
        return False, False
    alone = problem.batch == 1
    planes = (
        (1 if alone or problem.shared_a else problem.batch),
        (1 if alone or problem.shared_b else problem.batch),
    )
    a, b = (_serves(one, rung, count) for one, count in zip(call.ready, planes, strict=True))
    return a, b


def _serves(one: Ready | None, rung: CudaRung, planes: int) -> bool:
    return one is not None and rung.name in one.rungs and one.planes == planes


def alone(problem: Problem, operand: str) -> Problem:
    """Return the problem in which the other operand has no rows (B: no columns)."""
    return replace(problem, n=0) if operand == "a" else replace(problem, m=0)


def pass_steps(choice: Choice, operand: str) -> tuple[Step, ...]:
    """Return the launches that pack A or B alone."""
    rung = cuda_rung(choice)
    if rung.packing is None:
        raise TypeError(f"rung {rung.folder}/{rung.name} packs no operands.")
    steps = rung.steps(alone(choice.problem, operand), choice.params, choice.machine)
    return steps[: rung.packing.passes]


def pass_bytes(choice: Choice, operand: str) -> int:
    """Return the bytes of workspace that packing A or B alone takes, rounded up to 256."""
    rung = cuda_rung(choice)
    nbytes = rung.workspace(alone(choice.problem, operand), choice.params, choice.machine)
    return -(-nbytes // 256) * 256


class PackedLauncher:
    """A prepared choice of which `ready` operands come packed; called as `Launcher` is."""

    def __init__(self, choice: Choice, ready: tuple[bool, bool]) -> None:
        rung, problem = cuda_rung(choice), choice.problem
        packing = rung.packing
        if packing is None or not any(ready):
            raise TypeError(f"no operand comes packed for rung {rung.folder}/{rung.name}.")
        self.rung, self.ready, self.result = rung.name, ready, problem.out
        steps = rung.steps(problem, choice.params, choice.machine)
        self.module = kernels(rung, steps, choice.machine.arch)
        check_shared(self.module, steps, choice.machine)
        self.template = launch_args.pack(problem, choice.call)
        rest = [name for name, has in zip("ab", ready, strict=True) if not has]
        self.passes: tuple[Step, ...] = ()
        self.pass_template, packed_bytes = self.template, 0
        for name in rest:
            self.passes, packed_bytes = pass_steps(choice, name), pass_bytes(choice, name)
            self.pass_template = launch_args.without_rows(
                self.template, "b" if name == "a" else "a"
            )
        begins = packing.begins(problem)
        self.main = steps[packing.passes :]
        self.main_at = packed_bytes - begins  # where the product's workspace would begin
        whole = rung.workspace(problem, choice.params, choice.machine)
        self.workspace = packed_bytes + whole - begins
        self.moves = [
            (which, move)
            for which, name in enumerate("ab")
            for move in packing.moves(problem, name)
        ]
        self.gather = _gathering(self.moves)
        arch = choice.machine.arch
        self.gather_module = nvrtc.compile_file(GATHER, (self.gather.kernel,), arch)
        self.maps = tensor_maps.Maps(_shown(self.main, problem, self.template))
        self._starts: dict[int, Start] = {}

    def __call__(self, a: Operand, b: Operand, out: Operand, alpha: complex, beta: complex) -> None:
        """Launch on operands of the prepared forms: out = alpha a b + beta out."""
        ordinal = int(out.device[5:])
        stream = device_arrays.current_stream(out, ordinal)
        start = self._starts.get(ordinal)
        if start is None:
            start = self._starts[ordinal] = self.starter(ordinal)
        work, owner = device_arrays.workspace(out, self.workspace)
        left, right = (
            (one.pointer, one.original.address(self.rung)) if has else one.pointer
            for one, has in zip((a, b), self.ready, strict=True)
        )
        with driver.on_device(ordinal):
            for scalars in passes(alpha, beta, self.result):
                start(stream, left, right, out.pointer, work, scalars)
        del owner  # its allocator reuses the memory in stream order

    def starter(self, ordinal: int) -> Start:
        """Return what starts the product on a device, as `starter` has it, its kernels loaded.

        An operand that comes packed is given by two addresses, the array's and what was packed.
        """
        of_passes = loaded(self.module, self.passes, self.pass_template, ordinal)
        of_main = loaded(self.module, self.main, self.template, ordinal, self.maps)
        pack, multiply = starter(of_passes, "4Q"), starter(of_main, "4Q", "2d")
        none = bytes(RANGES.size)
        gather = whole_starter(loaded(self.gather_module, (self.gather,), none, ordinal))
        moves, main_at, has_passes = self.moves, self.main_at, bool(self.passes)

        def start(
            stream: int,
            left: Any,
            right: Any,
            result: int,
            work: int,
            scalars: tuple[float, float] = (1.0, 0.0),
        ) -> None:
            packed_a = packed_b = work
            if isinstance(left, tuple):
                left, packed_a = left
            if isinstance(right, tuple):
                right, packed_b = right
            if has_passes:
                pack(stream, left, right, result, work)
            main_work = (work + main_at) % _ADDRESSES
            if moves:
                gather(stream, ranges(moves, (packed_a, packed_b), main_work))
            shown = (left, right, result, main_work, packed_a, packed_b)
            multiply(stream, left, right, result, main_work, scalars, shown)

        return start


def ranges(moves: Sequence[SideMove], packed: Sequence[int], work: int) -> bytes:
    """Return the struct of `gather.cu`: from the packed operands, to a product's workspace."""
    unused = [0] * (MOST_MOVES - len(moves))
    sources = [packed[which] + move.at for which, move in moves]
    targets = [(work + move.to) % _ADDRESSES for _, move in moves]
    words = [move.nbytes // 4 for _, move in moves]
    return RANGES.pack(*sources, *unused, *targets, *unused, *words, *unused)


def _gathering(moves: Sequence[SideMove]) -> Step:
    """Return the launch that brings these ranges together."""
    longest = max((move.nbytes // 4 for _, move in moves), default=0)
    blocks = max(1, min(-(-longest // THREADS), MOST_BLOCKS))
    return Step("gather", (blocks, 1, 1), (THREADS, 1, 1))


def _shown(
    steps: Sequence[Step], problem: Problem, template: bytes
) -> tuple[tensor_maps.Shape, ...]:
    """Return the product's maps, those of packed operands by addresses 4 (A) and 5 (B)."""
    shapes = tensor_maps.declared(steps, problem, template)
    maps = next((step.maps for step in steps if step.maps), ())
    return tuple(
        shape
        if one.packed_at is None
        else shape._replace(word=4 + "ab".index(one.operand), offset=0)
        for shape, one in zip(shapes, maps, strict=True)
    )
