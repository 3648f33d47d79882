"""What the short ways of PyTorch's tensors share: launches through ctypes, and memory for them.

A launch's config and struct lie in one buffer for each thread; one packing writes what moves.
Where a launch has several kernels, one struct and one list of tensor maps serve them all; the
workspace is of PyTorch's allocator on the current stream, in whose order its memory is used again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

from gemmule.backends.cuda import driver, tensor_maps
from gemmule.backends.cuda.launch import Launcher
from gemmule.backends.cuda.tensor_maps import MAP_BYTES, MOST_KEPT, Maps
from gemmule.core.operand import Form, c_strides
from gemmule.core.problem import ITEMSIZE
from gemmule.core.rung import Step

Product = Callable[[Any, Any, Any], Any]
# What tells tensors apart: dtype, shape, strides in elements, device.
Signature = tuple[Any, Any, tuple[int, ...], int]
Launch = Callable[[int, tuple[int, ...]], None]  # stream, the operands' addresses

# CUlaunchConfig, directly followed by the kernel's struct and by one CUlaunchAttribute of 72 bytes.
CONFIG = struct.Struct("<7I4xQQI4x")
ATTRIBUTE = struct.Struct("<I4x3I52x")
_ADDRESS = struct.Struct("<Q")
MOVING_AT = 32  # the stream; then where attributes lie, how many, and the struct's addresses
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
EARLY_START = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


def guards(*tensors: Any) -> Callable[..., bool]:
    """Return PyTorch's own test for "like these": types, dtypes, devices, shapes, strides, flags.

    The flags tell a gradient that is asked for, autocast, vmap and the like. It compares three
    tensors in 0.3 us where Python's attributes take 0.9. It is no public interface, so a PyTorch
    without it goes the long way; it keeps no reference to the tensors.
    """
    with contextlib.suppress(Exception):  # whatever another version's private interface raises
        guards = sys.modules["torch"]._C._dynamo.guards.TensorGuards
        same: Callable[..., bool] = guards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
        if same(*tensors) is True:
            return same
    return lambda *others: False


def maker(shape: tuple[int, ...], dtype: Any, ordinal: int) -> Callable[[], Any]:
    """Return what makes an uninitialised C-ordered tensor while device `ordinal` is current.

    What compiled models allocate by takes a microsecond less than `torch.empty` (one H200's host,
    November 2026); it is no public interface either.
    """
    torch = sys.modules["torch"]
    # From PyTorch 2.13 on it takes no subclass of tuple, which torch.Size is.
    wanted = (tuple(shape), c_strides(shape), dtype, torch.device("cuda", ordinal))
    with contextlib.suppress(Exception):  # as above
        quick = torch._C._dynamo.guards._empty_strided_cuda
        made = quick(*wanted[:3])
        if (made.shape, made.stride(), made.dtype, made.device) == wanted:
            return functools.partial(quick, *wanted[:3])
    return functools.partial(torch.empty, shape, dtype=dtype, device=wanted[3])


def slot(template: bytes, step: Step) -> tuple[Any, int, int, int]:
    """Return one thread's memory, and the addresses of config, pointer array and attribute."""
    config = CONFIG.pack(*step.grid, *step.block, step.smem, 0, 0, 0)
    whole = config + template + ATTRIBUTE.pack(CLUSTER_DIMENSION, *step.cluster)
    buffer = ctypes.create_string_buffer(whole, len(whole))
    address = ctypes.addressof(buffer)
    params = (ctypes.c_void_p * 1)(address + len(config))
    buffer.params = params  # type: ignore[attr-defined]  # lives as long as the buffer
    return buffer, address, ctypes.addressof(params), address + len(config) + len(template)


class MappedSlot:
    """One thread's memory of a launch whose kernel takes tensor maps behind its struct.

    `buffer` holds config, struct and attribute, `config` is its address and `params` that of the
    pointer array; `memory` holds the maps from byte `first` on, and `shown` is what lies there.
    """

    __slots__ = ("_pointers", "attribute", "buffer", "config", "first", "memory", "params", "shown")

    def __init__(self, template: bytes, step: Step, count: int) -> None:
        self.buffer, self.config, _, self.attribute = slot(template, step)
        self.memory, first = tensor_maps.aligned_memory(count)
        self.first = first - ctypes.addressof(self.memory)
        places = range(first, first + count * MAP_BYTES, MAP_BYTES)
        self._pointers = (ctypes.c_void_p * (1 + count))(self.config + CONFIG.size, *places)
        self.params = ctypes.addressof(self._pointers)
        self.shown = b""


class StepsSlot:
    """One thread's arguments: `buffer` holds the struct, the configs and their attributes.

    `configs` are addresses; `streams` are places in the buffer where each config has the stream,
    `stream` is the one that stands there. `params` is the address of the pointer array. `maps`
    holds the tensor maps from byte `first` on, and `shown` is what lies there.
    """

    __slots__ = (
        "_pointers", "buffer", "configs", "first", "maps", "params", "shown", "stream", "streams",
    )  # fmt: skip

    def __init__(self, template: bytes, steps: tuple[Step, ...], maps: int) -> None:
        begin = -(-len(template) // 16) * 16
        ends = begin + CONFIG.size * len(steps)
        attributes = [_attributes(step) for step in steps]
        self.buffer = ctypes.create_string_buffer(ends + sum(map(len, attributes)))
        address = ctypes.addressof(self.buffer)
        ctypes.memmove(self.buffer, template, len(template))
        places = [begin + CONFIG.size * i for i in range(len(steps))]
        for step, place, packed in zip(steps, places, attributes, strict=True):
            config = (*step.grid, *step.block, step.smem, 0, address + ends)
            CONFIG.pack_into(self.buffer, place, *config, len(packed) // ATTRIBUTE.size)
            ctypes.memmove(address + ends, packed, len(packed))
            ends += len(packed)
        self.configs = [address + place for place in places]
        self.streams, self.stream = [place + MOVING_AT for place in places], 0
        self.maps, first = tensor_maps.aligned_memory(maps)
        self.first, self.shown = first - ctypes.addressof(self.maps), b""
        shown = range(first, first + maps * MAP_BYTES, MAP_BYTES)
        self._pointers = (ctypes.c_void_p * (1 + maps))(address, *shown)
        self.params = ctypes.addressof(self._pointers)

    def turn(self, stream: int) -> None:
        """Write the stream to every config."""
        for at in self.streams:
            _ADDRESS.pack_into(self.buffer, at, stream)
        self.stream = stream


def _attributes(step: Step) -> bytes:
    """Return the attributes that a step's launch has, one behind the other."""
    clustered, early = step.cluster != (1, 1, 1), ATTRIBUTE.pack(EARLY_START, 1, 0, 0)
    found = ATTRIBUTE.pack(CLUSTER_DIMENSION, *step.cluster) if clustered else b""
    return found + early if step.pdl else found


def steps_starter(launcher: Launcher, ordinal: int, words: int) -> Launch:
    """Return what starts a launcher's kernels on the addresses of its operands, `words` of them."""
    launcher.load(ordinal)
    module, steps, template = launcher.module, launcher.steps, launcher.template
    functions = [
        int(driver.load(module.cubin, module.symbols[step.kernel], ordinal, step.smem))
        for step in steps
    ]
    launch, local, maps = launch_function(), threading.local(), launcher.maps
    place = struct.Struct(f"<{words + 1}Q").pack_into
    show = None if maps is None else shower(maps)
    count, nbytes = len(maps.shapes) if maps else 0, launcher.workspace
    workspace = maker((nbytes,), sys.modules["torch"].uint8, ordinal) if nbytes else None

    def new() -> tuple[StepsSlot, list[tuple[int, int]]]:
        memory = StepsSlot(template, steps, count)
        local.slot = memory, list(zip(memory.configs, functions, strict=True))
        return local.slot  # type: ignore[no-any-return]

    def start(stream: int, addresses: tuple[int, ...]) -> None:
        try:
            memory, launches = local.slot
        except AttributeError:
            memory, launches = new()
        if memory.stream != stream:
            memory.turn(stream)
        if workspace is None:
            work = 0
        else:
            owner = workspace()  # until the launches are given, after which its memory is reused
            work = owner.data_ptr()
        if show is not None:
            show(memory, (*addresses, work))
        place(memory.buffer, 0, *addresses, work)
        params = memory.params
        for config, function in launches:
            code = launch(config, function, params, None)
            if code:
                raise failed(code, steps[functions.index(function)])

    return start


def shower(maps: Maps) -> Callable[[StepsSlot, tuple[int, ...]], None]:
    """Return what writes the maps of operands at some addresses, where others were shown."""
    show = struct.Struct(f"{len(maps.shapes) * MAP_BYTES}s").pack_into  # quicker than memmove
    kept: dict[tuple[int, ...], bytes] = {}

    def shown(memory: StepsSlot, addresses: tuple[int, ...]) -> None:
        encoded = kept.get(addresses)
        if encoded is None:
            if len(kept) >= MOST_KEPT:
                kept.clear()
            encoded = kept[addresses] = b"".join(maps.of(addresses))
        if encoded is not memory.shown:
            show(memory.maps, memory.first, encoded)
            memory.shown = encoded

    return shown


def kernel_of(launcher: Launcher, ordinal: int) -> int:
    """Return the handle of the only step's kernel, loaded."""
    launcher.load(ordinal)
    module, step = launcher.module, launcher.steps[0]
    return int(driver.load(module.cubin, module.symbols[step.kernel], ordinal, step.smem))


def launch_function() -> Callable[..., int]:
    """Return the driver's launch: (config address, kernel, params address, None) -> code."""
    call = ctypes.PyDLL("libcuda.so.1").cuLaunchKernelEx  # a launch is too short to drop the GIL
    call.argtypes, call.restype = (ctypes.c_void_p,) * 4, ctypes.c_int
    return call


def failed(code: int, step: Step) -> Exception:
    """Return the error of a launch that the driver refused."""
    return driver.error_of(driver.bindings().CUresult(code), f"launching {step.kernel}")


def extent(form: Form) -> int:
    """Return the bytes from the first element to behind the last; strides are not negative."""
    reach = sum((s - 1) * t for s, t in zip(form.shape, form.strides, strict=True) if s > 0)
    return (reach + 1) * ITEMSIZE[form.dtype]
