"""The CUDA back end: compile the chosen rung's kernels for the device, pack a struct, launch.

A launch goes to the operands' device (not the current one) and the caller's current stream, and
nothing waits for it. Each thread packs its arguments into memory of its own, so threads share
no state; temporaries come from the operands' own allocator on that stream.
"""

from __future__ import annotations

import contextlib
import functools

from gemmule.backends.base import Run
from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver, launch_args, tensor_maps
from gemmule.backends.cuda.library import rescale
from gemmule.backends.cuda.packed import launch as packed
from gemmule.backends.cuda.starter import (
    Kernels,
    Start,
    check_shared,
    cuda_rung,
    kernels,
    loaded,
    made_of,
    starter,
)
from gemmule.core.choice import Choice
from gemmule.core.operand import Operand
from gemmule.core.problem import Problem
from gemmule.core.rung import LibraryRung, Machine, Rung, Step, with_bias
from gemmule.core.scalars import passes
from gemmule.storage import ceilings as stored_ceilings
from gemmule.storage import evidence, first_use, models

# Share of the datasheet's memory rate that a plain read reaches: 4.5 of 4.9 TB/s on one H200
# (driver 580, November 2026). A measured ceiling replaces the product: stored, or of the device's
# shipped model.
READ_SHARE = 0.92
# Time of the smallest kernel in a chain of graph launches on that H200.
CALL_S = 1.8e-6


class CudaBackend:
    """Device operands and kernels compiled at run time."""

    name = "cuda"

    def machine(self, device: str) -> Machine:
        """Describe a device; DeviceError when it is absent or too old."""
        return _machine(device_arrays.ordinal_named(device))

    def proved(self, rung: Rung, problem: Problem, machine: Machine, end: str = "", /) -> bool:
        """A rung is proved for dtypes of which a real GPU's record stands in the evidence.

        Not where it was wrong on this device.
        """
        if not evidence.is_proved(rung, problem, machine.arch, end=end):
            return False
        name = (rung.folder, rung.name, evidence.variant_of(problem))
        parts = functools.partial(made_of, rung)
        covers = evidence.covers(rung, problem, machine.arch)
        return covers or not first_use.failed(machine, name, parts)

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
    known = measured or models.read_ceiling(info.name)
    return Machine(
        backend="cuda",
        name=info.name,
        arch=info.arch,
        units=info.multiprocessors,
        read_bytes_per_s=known or READ_SHARE * info.datasheet_bytes_per_s,
        cache_bytes=info.l2_bytes,
        shared_bytes=info.shared_bytes,
        call_s=CALL_S,
        clock_hz=info.clock_hz,
    )


class Launcher:
    """A prepared choice: packed arguments, loaded kernels, and how to start them.

    adds: the kernels add a bias, whose address is the last of the struct (`with_bias`); then only
    the fast path of tensors starts them.
    """

    def __init__(self, choice: Choice, *, adds: bool = False) -> None:
        call, problem = choice.call, choice.problem
        self.choice, self.adds = choice, adds
        self.quantized, self.result = problem.quant is not None, problem.out
        self.template = launch_args.pack(problem, call)
        rung = cuda_rung(choice)
        self.steps = rung.steps(problem, choice.params, choice.machine)
        if adds:
            self.steps = with_bias(self.steps)
            self.template += launch_args.BIAS.pack(0)
        self.steps, more = self.compiled(self.steps)
        self.template += more
        shapes = tensor_maps.declared(self.steps, problem, self.template)
        self.maps = tensor_maps.Maps(shapes) if shapes else None
        self.module = kernels(rung, self.steps, choice.machine.arch)
        check_shared(self.module, self.steps, choice.machine)
        self.workspace = rung.workspace(problem, choice.params, choice.machine)
        views, dtypes = (call.a, call.b, call.out), (problem.a, problem.b, problem.out)
        self.offsets = launch_args.offsets(call.outer, views, dtypes)
        self.words = "32s3Q" if self.quantized else "4Q"  # that the struct begins with
        self._starts: dict[int, Start] = {}

    def compiled(self, steps: tuple[Step, ...]) -> tuple[tuple[Step, ...], bytes]:
        """Return the steps as they are compiled, and with what their struct ends."""
        return steps, b""

    def __call__(self, a: Operand, b: Operand, out: Operand, alpha: complex, beta: complex) -> None:
        """Launch on operands of the prepared forms.

        Structs hold real scalars: by others a pass behind the kernels multiplies.
        """
        ordinal = int(out.device[5:])
        stream = device_arrays.current_stream(out, ordinal)
        scale = (alpha, beta) if alpha.imag or beta.imag else None
        kept = rescale.old_bytes(out, beta) if scale else 0
        start = self._starts.get(ordinal)
        if start is None:
            start = self._starts[ordinal] = self.starter(ordinal, launch_args.SCALARS.format[1:])
        own = -(-self.workspace // 256) * 256 if kept else self.workspace
        work, owner = device_arrays.workspace(out, own + kept)
        if scale:
            alpha, beta = 1.0, 0.0
        if kept:
            rescale.keep(out, work + own, stream)
        matrix = launch_args.packed_addresses(a.array) if self.quantized else None
        current = driver.is_current(ordinal)
        with contextlib.nullcontext() if current else driver.on_device(ordinal):
            for scalars in passes(alpha, beta, self.result):
                for left, right, result in self.offsets:
                    first = a.pointer + left if matrix is None else matrix
                    start(stream, first, b.pointer + right, out.pointer + result, work, scalars)
        if scale:
            rescale.rescale(out, work + own, scale, stream)
        del owner  # its allocator reuses the memory in stream order

    def starter(self, ordinal: int, end: str = "") -> Start:
        """Return what starts the kernels, loaded on a device, as `starter` has it.

        Of kernels that add a bias, it takes a tuple of the bias's address behind the workspace's.
        """
        return starter(self.load(ordinal), self.words, "Q" if self.adds else end)

    def load(self, ordinal: int) -> Kernels:
        """Return the kernels on a device, each loaded once."""
        return loaded(self.module, self.steps, self.template, ordinal, self.maps)

    @property
    def is_one_call(self) -> bool:
        """Whether one struct serves the whole product."""
        return len(self.offsets) == 1

    def with_bias(self) -> Launcher | None:
        """Return the launcher of the same product and a bias, or None: no proved kernel adds it."""
        choice, problem = self.choice, self.choice.problem
        rung, arch = cuda_rung(choice), choice.machine.arch
        if not rung.adds or not self.is_one_call or self.steps[0].pdl or problem.outputs == 0:
            return None
        proved = evidence.is_proved(rung, problem, arch, bias=True)
        return Launcher(choice, adds=True) if proved else None
