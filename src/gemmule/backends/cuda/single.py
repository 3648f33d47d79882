"""Single kernels: those of a rung compiled, one of no rung run, any one started."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemmule.backends.cuda import driver, nvrtc
from gemmule.core.choice import Choice
from gemmule.core.rung import CudaRung, Step


def run(source: Path, step: Step, packed: bytes, ordinal: int, stream: int) -> None:
    """Start the kernel of `source` that a step names, with this struct; nothing waits for it.

    Raises DeviceError and CompileError as a launch does.
    """
    module = nvrtc.compile_file(source, (step.kernel,), driver.device_info(ordinal).arch)
    handle = driver.load(module.cubin, module.symbols[step.kernel], ordinal, step.smem)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    params = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
    with driver.on_device(ordinal):
        starter(handle, step)(ctypes.addressof(params), stream)


def kernels(rung: CudaRung, steps: tuple[Step, ...], arch: str) -> nvrtc.Module:
    """Return the compiled module that holds every kernel of `steps`."""
    defines = tuple(dict.fromkeys(d for step in steps for d in step.defines))
    names = tuple(dict.fromkeys(step.kernel for step in steps))
    return nvrtc.compile_file(rung.source_path, names, arch, defines)


def cuda_rung(choice: Choice) -> CudaRung:
    """Return a choice's rung; TypeError for one of another back end."""
    rung = choice.rung
    if not isinstance(rung, CudaRung):
        raise TypeError(f"rung {rung.folder}/{rung.name} is for {rung.backend}, not for CUDA.")
    return rung


def starter(handle: Any, step: Step) -> Callable[[int, int], None]:
    """Return a function (params address, stream) that launches one kernel."""
    if step.pdl or step.cluster != (1, 1, 1):
        return _extended_starter(handle, step)
    api = driver.bindings()
    launch, function = api.cuLaunchKernel, api.CUfunction(int(handle))
    (gx, gy, gz), (bx, by, bz), smem = step.grid, step.block, step.smem
    name = step.kernel

    def start(params: int, stream: int) -> None:
        (code,) = launch(function, gx, gy, gz, bx, by, bz, smem, stream, params, 0)
        if code:
            raise driver.error_of(code, f"launching {name}")

    return start


def _extended_starter(handle: Any, step: Step) -> Callable[[int, int], None]:
    """Return a launcher with cluster dimensions and programmatic dependent launch."""
    api = driver.bindings()
    function = api.CUfunction(int(handle))
    attributes = []
    if step.cluster != (1, 1, 1):
        cluster = api.CUlaunchAttribute()
        cluster.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = (
            step.cluster
        )
        attributes.append(cluster)
    if step.pdl:
        dependent = api.CUlaunchAttribute()
        dependent.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        dependent.value.programmaticStreamSerializationAllowed = 1
        attributes.append(dependent)

    def start(params: int, stream: int) -> None:
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = step.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = step.block
        config.sharedMemBytes, config.hStream = step.smem, api.CUstream(stream)
        config.numAttrs, config.attrs = len(attributes), attributes
        (code,) = api.cuLaunchKernelEx(config, function, params, 0)
        if code:
            raise driver.error_of(code, f"launching {step.kernel}")

    return start
