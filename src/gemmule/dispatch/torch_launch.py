"""What the short ways of PyTorch's tensors share: launches through ctypes, and memory for them.

A launch's config and struct lie in one buffer for each thread; one packing writes what moves.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import sys
from collections.abc import Callable
from typing import Any

from gemmule.backends.cuda import driver, tensor_maps
from gemmule.backends.cuda.launch import Launcher
from gemmule.backends.cuda.tensor_maps import MAP_BYTES
from gemmule.core.operand import Form, c_strides
from gemmule.core.problem import ITEMSIZE
from gemmule.core.rung import Step

Product = Callable[[Any, Any, Any], Any]
# What tells tensors apart: dtype, shape, strides in elements, device.
Signature = tuple[Any, Any, tuple[int, ...], int]

# CUlaunchConfig, directly followed by the kernel's struct and by one CUlaunchAttribute of 72 bytes.
CONFIG = struct.Struct("<7I4xQQI4x")
ATTRIBUTE = struct.Struct("<I4x3I52x")
MOVING_AT = 32  # the stream; then where attributes lie, how many, and the struct's addresses
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


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
    wanted = (torch.Size(shape), c_strides(shape), dtype, torch.device("cuda", ordinal))
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
