"""Starting kernels: loaded code, a thread's memory of arguments, the launch.

Launches go through ctypes to the driver's own function. What they are told lies in one buffer for
each thread, so that one packing writes what changes from call to call. Threads share nothing. One
struct and one list of tensor maps serve all kernels of a launch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gemmule.backends.cuda import driver, nvrtc
from gemmule.backends.cuda.tensor_maps import MAP_BYTES, MOST_KEPT, Maps, aligned_memory
from gemmule.core.choice import Choice
from gemmule.core.rung import CudaRung, Machine, Rung, Step
from gemmule.errors import DeviceError
from gemmule.storage.sources import rung_digest

# (stream, the three operands, the workspace, what replaces the struct's end, what maps show
# where that is not what the struct says)
Start = Callable[..., None]

# CUlaunchConfig, and a CUlaunchAttribute of 72 bytes.
CONFIG = struct.Struct("<7I4xQQI4x")
ATTRIBUTE = struct.Struct("<I4x3I52x")
_STREAM = struct.Struct("<Q")
STREAM_AT = 32  # in a config
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
EARLY_START = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class Kernels(NamedTuple):
    """Loaded kernels that follow one another with one struct, and with one list of tensor maps.

    functions: their handles. template: the struct, without addresses.
    """

    steps: tuple[Step, ...]
    functions: tuple[int, ...]
    template: bytes
    maps: Maps | None = None


def loaded(
    module: nvrtc.Module,
    steps: Sequence[Step],
    template: bytes,
    ordinal: int,
    maps: Maps | None = None,
) -> Kernels:
    """Return a compiled module's kernels of these steps, loaded on a device."""
    functions = tuple(
        int(driver.load(module.cubin, module.symbols[step.kernel], ordinal, step.smem))
        for step in steps
    )
    return Kernels(tuple(steps), functions, template, maps)


class Arguments:
    """One thread's argument memory of some kernels, and what launches them with it.

    `buffer` begins with the struct; each kernel's config and their attributes follow. `call`
    launches the first step's kernel and returns the driver's code; `others` are the steps behind
    it, each with its call. `stream` is the one that stands in the configs. `maps` holds the tensor
    maps from byte `maps_at` on, and `shown` is what lies there.
    """

    def __init__(self, kernels: Kernels) -> None:
        steps, functions, template, maps = kernels
        begin = -(-len(template) // 16) * 16
        places = [begin + CONFIG.size * i for i in range(len(steps))]
        attributes = [_attributes(step) for step in steps]
        ends = begin + CONFIG.size * len(steps)
        self.buffer = ctypes.create_string_buffer(ends + sum(map(len, attributes)))
        address = ctypes.addressof(self.buffer)
        ctypes.memmove(self.buffer, template, len(template))
        for step, place, packed in zip(steps, places, attributes, strict=True):
            config = (*step.grid, *step.block, step.smem, 0, address + ends)
            CONFIG.pack_into(self.buffer, place, *config, len(packed) // ATTRIBUTE.size)
            ctypes.memmove(address + ends, packed, len(packed))
            ends += len(packed)
        self._streams, self.stream = [place + STREAM_AT for place in places], 0
        count = len(maps.shapes) if maps else 0
        self.maps, first = aligned_memory(count)
        self.maps_at, self.shown = first - ctypes.addressof(self.maps), b""
        shown = range(first, first + count * MAP_BYTES, MAP_BYTES)
        self._params = (ctypes.c_void_p * (1 + count))(address, *shown)
        launch, params = launch_function(), ctypes.addressof(self._params)
        calls = [
            functools.partial(launch, address + place, function, params, None)
            for place, function in zip(places, functions, strict=True)
        ]
        self.call, self.others = calls[0], list(zip(calls, steps, strict=True))[1:]

    def turn(self, stream: int) -> None:
        """Write the stream to every config."""
        for at in self._streams:
            _STREAM.pack_into(self.buffer, at, stream)
        self.stream = stream


def starter(kernels: Kernels, words: str, end: str = "") -> Start:
    """Return ``start(stream, left, right, result, work)``, which launches the kernels in turn.

    words: what the four are in the struct, which begins with them, as `struct` has it: ``4Q``, or
    ``32s3Q`` where the first are the four addresses of a quantised matrix. end: what its last
    values are; ``start(..., values)`` writes them. The maps of operands at the same addresses are
    encoded once, and copied where others were shown; ``start(..., values, shown)`` says of which
    addresses they are to be. DeviceError where the driver refuses a launch; none follows then.
    """
    local, maps, kept = threading.local(), kernels.maps, dict[tuple[Any, ...], bytes]()
    place, last = struct.Struct(f"<{words}").pack_into, struct.Struct(f"<{end}")
    show = struct.Struct(f"{MAP_BYTES * len(maps.shapes) if maps else 0}s").pack_into
    end_at, several = len(kernels.template) - last.size, len(kernels.steps) > 1
    if maps is None and len(kernels.steps) == 1 and not end:
        return _single_starter(kernels, place)

    def start(
        stream: int,
        left: Any,
        right: Any,
        result: Any,
        work: Any,
        values: tuple[Any, ...] = (),
        shown: tuple[int, ...] | None = None,
    ) -> None:
        try:
            memory = local.memory
        except AttributeError:
            memory = local.memory = Arguments(kernels)
        if memory.stream != stream:
            memory.turn(stream)
        if maps is not None:
            key = shown or (left, right, result, work)
            encoded = kept.get(key)
            if encoded is None:
                if len(kept) >= MOST_KEPT:
                    kept.clear()
                encoded = kept[key] = b"".join(maps.of(key))
            if encoded is not memory.shown:
                show(memory.maps, memory.maps_at, encoded)
                memory.shown = encoded
        buffer, call = memory.buffer, memory.call
        place(buffer, 0, left, right, result, work)
        if values:
            last.pack_into(buffer, end_at, *values)
        code = call()
        if code:
            raise failed(code, kernels.steps[0])
        if several:
            for call, step in memory.others:
                code = call()
                if code:
                    raise failed(code, step)

    return start


def _single_starter(kernels: Kernels, place: Callable[..., None]) -> Start:
    """Return `starter`'s function of one kernel without maps: a tenth of a microsecond less."""
    local, step = threading.local(), kernels.steps[0]

    def start(stream: int, left: Any, right: Any, result: Any, work: Any) -> None:
        try:
            memory, buffer, call = local.memory
        except AttributeError:
            memory = Arguments(kernels)
            buffer, call = memory.buffer, memory.call
            local.memory = memory, buffer, call
        if memory.stream != stream:
            memory.turn(stream)
        place(buffer, 0, left, right, result, work)
        code = call()
        if code:
            raise failed(code, step)

    return start


def whole_starter(kernels: Kernels) -> Callable[[int, bytes], None]:
    """Return ``start(stream, packed)`` of kernels without maps, which is given the whole struct."""
    start = starter(kernels, "0s0s0s0s", f"{len(kernels.template)}s")
    return lambda stream, packed: start(stream, b"", b"", b"", b"", (packed,))


def built(
    source: Path, step: Step, packed: bytes, ordinal: int, maps: Maps | None = None
) -> Kernels:
    """Return the kernel of `source` that a step names, compiled for a device and loaded there."""
    module = nvrtc.compile_file(source, (step.kernel,), driver.device_info(ordinal).arch)
    return loaded(module, (step,), packed, ordinal, maps)


def run(source: Path, step: Step, packed: bytes, ordinal: int, stream: int) -> None:
    """Start the kernel of `source` that a step names, with this struct; nothing waits for it.

    Raises DeviceError and CompileError as a launch does.
    """
    with driver.on_device(ordinal):
        whole_starter(built(source, step, packed, ordinal))(stream, packed)


def kernels(rung: CudaRung, steps: tuple[Step, ...], arch: str) -> nvrtc.Module:
    """Return the compiled module that holds every kernel of `steps`."""
    source, names, _, defines = compiled_by(rung, steps, arch)
    return nvrtc.compile_file(Path(source), names, arch, defines)


def compiled_by(
    rung: CudaRung, steps: tuple[Step, ...], arch: str
) -> tuple[str, tuple[str, ...], str, tuple[str, ...]]:
    """Return the source, the kernels, the architecture and the macros of a module of `steps`."""
    defines = tuple(dict.fromkeys(d for step in steps for d in step.defines))
    names = tuple(dict.fromkeys(step.kernel for step in steps))
    return str(rung.source_path), names, arch, defines


def made_of(rung: Rung) -> str:
    """Return a digest of what decides which code of a rung runs on a device, but for the device."""
    parts = rung_digest(rung), nvrtc.recipe(), str(driver.version())
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def check_shared(module: nvrtc.Module, steps: Sequence[Step], machine: Machine) -> None:
    """Raise DeviceError where a kernel takes more shared memory than a block has on a device."""
    static = nvrtc.static_shared(module)
    for step in steps:
        wanted = step.smem + static[step.kernel]
        if wanted > machine.shared_bytes:
            raise DeviceError(
                f"{step.kernel} takes {wanted:,} bytes of shared memory a block, and "
                f"{machine.name} has {machine.shared_bytes:,}. Name smaller parameters, or no rung."
            )


def cuda_rung(choice: Choice) -> CudaRung:
    """Return a choice's rung; TypeError for one of another back end."""
    rung = choice.rung
    if not isinstance(rung, CudaRung):
        raise TypeError(f"rung {rung.folder}/{rung.name} is for {rung.backend}, not for CUDA.")
    return rung


@functools.cache
def launch_function() -> Callable[..., int]:
    """Return the driver's launch: (config address, function, params address, None) -> code."""
    call = ctypes.PyDLL("libcuda.so.1").cuLaunchKernelEx  # a launch is too short to drop the GIL
    call.argtypes, call.restype = (ctypes.c_void_p,) * 4, ctypes.c_int
    return call


def failed(code: int, step: Step) -> Exception:
    """Return the error of a launch that the driver refused."""
    return driver.error_of(driver.bindings().CUresult(code), f"launching {step.kernel}")


def _attributes(step: Step) -> bytes:
    """Return the attributes that a step's launch has, one behind the other."""
    clustered, early = step.cluster != (1, 1, 1), ATTRIBUTE.pack(EARLY_START, 1, 0, 0)
    found = ATTRIBUTE.pack(CLUSTER_DIMENSION, *step.cluster) if clustered else b""
    return found + early if step.pdl else found
