"""Launching one kernel that is no rung: what prepares operands on the device."""

from __future__ import annotations

import ctypes
from pathlib import Path

from gemmule.backends.cuda import driver, launch, nvrtc
from gemmule.core.rung import Step


def run(source: Path, step: Step, packed: bytes, ordinal: int, stream: int) -> None:
    """Start the kernel of `source` that a step names, with this struct; nothing waits for it.

    Raises DeviceError and CompileError as a launch does.
    """
    module = nvrtc.compile_file(source, (step.kernel,), driver.device_info(ordinal).arch)
    handle = driver.load(module.cubin, module.symbols[step.kernel], ordinal, step.smem)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    params = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
    with driver.on_device(ordinal):
        launch.starter(handle, step)(ctypes.addressof(params), stream)
