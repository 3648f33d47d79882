"""The CUDA back end: compile the chosen rung's kernels for the device, pack a struct, launch.

A launch goes to the operands' device (not the current one) and the caller's current stream, and
nothing waits for it. Each thread packs its arguments into memory of its own, so threads share
no state; temporaries come from the operands' own allocator on that stream.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from gemmule.backends.base import Run
from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver, launch_args, tensor_maps
from gemmule.backends.cuda.packed import launch as packed
from gemmule.backends.cuda.single import cuda_rung, kernels, starter
from gemmule.core.choice import Choice
from gemmule.core.operand import Operand, View
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import LibraryRung, Machine, Rung, with_bias
from gemmule.core.scalars import passes
from gemmule.storage import ceilings as stored_ceilings
from gemmule.storage.evidence import is_proved

# Share of the datasheet's memory rate that a plain read reaches: 4.5 of 4.9 TB/s on one H200
# (driver 580, November 2026). A measured ceiling, where stored, replaces the product.
READ_SHARE = 0.92
# Time of the smallest kernel in a chain of graph launches on that H200.
CALL_S = 1.8e-6


class CudaBackend:
    """Device operands and kernels compiled at run time."""

    name = "cuda"

    def machine(self, device: str) -> Machine:
        """Describe a device; DeviceError when it is absent or too old."""
        return _machine(device_arrays.ordinal_named(device))

    def proved(self, rung: Rung, problem: Problem, machine: Machine) -> bool:
        """A rung is proved for dtypes of which a real GPU's record stands in the evidence."""
        return is_proved(rung, problem, machine.arch)

    def adapts(self) -> bool:
        """Device operands are never copied to another dtype or layout."""
        return False

    def prepare(self, choice: Choice) -> Run:
        """Compile the rung's kernels for the device and return their launcher."""
        problem = choice.call.problem
        if problem.batch == 0 or problem.outputs == 0 or 0 in choice.call.outer:
            return lambda a, b, out, alpha, beta: None
        if isinstance(choice.rung, LibraryRung):
            return choice.rung.bind(choice.problem, choice.call, choice.params)
        ready = packed.ready_sides(choice)
        return packed.PackedLauncher(choice, ready) if any(ready) else Launcher(choice)


@functools.cache
def _machine(ordinal: int) -> Machine:
    info = driver.device_info(ordinal)
    measured = stored_ceilings.read("cuda", info.name, info.arch, info.multiprocessors)
    return Machine(
        backend="cuda",
        name=info.name,
        arch=info.arch,
        units=info.multiprocessors,
        read_bytes_per_s=measured or READ_SHARE * info.datasheet_bytes_per_s,
        cache_bytes=info.l2_bytes,
        shared_bytes=info.shared_bytes,
        call_s=CALL_S,
    )


class Launcher:
    """A prepared choice: packed arguments, loaded kernels, and how to start them.

    adds: the kernels add a bias, whose address is the last of the struct; then only a short way
    starts them (`gemmule.dispatch.torch_codes`).
    """

    def __init__(self, choice: Choice, *, adds: bool = False) -> None:
        call, problem = choice.call, choice.problem
        self.outer = call.outer
        self.quantized, self.result = problem.quant is not None, problem.out
        self.template = (
            launch_args.pack_quantized(problem, call)
            if self.quantized
            else launch_args.pack(problem, call)
        )
        self.scalars_at = len(self.template) - launch_args.SCALARS.size
        rung = cuda_rung(choice)
        self.steps = rung.steps(problem, choice.params, choice.machine)
        if adds:
            self.steps = with_bias(self.steps)
            self.template += launch_args.BIAS.pack(0)
        shapes = tensor_maps.declared(self.steps, problem, self.template)
        self.maps = tensor_maps.Maps(shapes) if shapes else None
        self.module = kernels(rung, self.steps, choice.machine.arch)
        self.workspace = rung.workspace(problem, choice.params, choice.machine)
        self.offsets = _offsets(call.outer, (call.a, call.b, call.out), problem)
        self.local = threading.local()
        self.starters: dict[int, tuple[Callable[[int, int], None], ...]] = {}

    def __call__(self, a: Operand, b: Operand, out: Operand, alpha: complex, beta: complex) -> None:
        """Launch on operands of the prepared forms."""
        ordinal = int(out.device[5:])
        stream = device_arrays.current_stream(out, ordinal)
        if driver.is_current(ordinal):
            self._launch((a, b, out), (alpha, beta), ordinal, stream)
            return
        with driver.on_device(ordinal):
            self._launch((a, b, out), (alpha, beta), ordinal, stream)

    def _launch(
        self,
        operands: tuple[Operand, Operand, Operand],
        scale: tuple[complex, complex],
        ordinal: int,
        stream: int,
    ) -> None:
        starters = self.load(ordinal)
        slot = self.slot()
        work, owner = 0, None
        if self.workspace:
            work, owner = device_arrays.workspace(operands[2], self.workspace)
        for scalars in passes(*scale, self.result):
            launch_args.SCALARS.pack_into(slot.buffer, self.scalars_at, *scalars)
            for addresses in self._addresses(*operands):
                slot.place((*addresses, work))
                for start in starters:
                    start(slot.address, stream)
        del owner  # its allocator reuses the memory in stream order

    def _addresses(self, a: Operand, b: Operand, out: Operand) -> Iterator[tuple[int, ...]]:
        """Yield the addresses that the struct of each outer batch entry begins with."""
        matrix = parts(a.array) if self.quantized else ()
        for left, right, result in self.offsets:
            yield (*(matrix or (a.pointer + left,)), b.pointer + right, out.pointer + result)

    def slot(self) -> tensor_maps.Slot:
        """Return this thread's argument memory."""
        try:
            slot: tensor_maps.Slot = self.local.slot
        except AttributeError:
            slot = self.local.slot = tensor_maps.Slot(self.template, self.maps)
        return slot

    def load(self, ordinal: int) -> tuple[Callable[[int, int], None], ...]:
        """Return the functions that launch each step on a device, loading the kernels once."""
        found = self.starters.get(ordinal)
        if found is not None:
            return found
        loaded = []
        for step in self.steps:
            symbol = self.module.symbols[step.kernel]
            handle = driver.load(self.module.cubin, symbol, ordinal, step.smem)
            loaded.append(starter(handle, step))
        self.starters[ordinal] = tuple(loaded)
        return self.starters[ordinal]


def parts(q: Any) -> tuple[int, int, int, int]:
    """Return the addresses of a quantised matrix's codes, scales, zero points and permutation."""
    zeros = 0 if q.zeros is None else q.zeros.pointer
    perm = 0 if q.perm is None else q.perm.pointer
    return q.codes.pointer, q.scales.pointer, zeros, perm


def _offsets(
    outer: tuple[int, ...], views: tuple[View, View, View], problem: Any
) -> tuple[tuple[int, int, int], ...]:
    """Return the byte offsets of every outer batch entry."""
    itemsizes = [ITEMSIZE.get(t, 1) for t in (problem.a, problem.b, problem.out)]
    found = []
    for index in itertools.product(*(range(size) for size in outer)):
        found.append(
            tuple(
                itemsize * sum(i * s for i, s in zip(index, view.strides, strict=False))
                for itemsize, view in zip(itemsizes, views, strict=True)
            )
        )
    return tuple((x[0], x[1], x[2]) for x in found)
