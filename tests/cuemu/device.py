"""Runs the cases of `cuemu.cases` on a CUDA device: `python -m cuemu.device` (from tests/).

Prints one line per case and exits with 1 where an output differs from what NumPy expects, which is
what the emulator gives too: then a CPU twin, or the primitive, is wrong.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import numpy as np

from cuemu.build import RUNGS
from cuemu.cases import CASES, SOURCE, Case, Map, pack_args
from cuemu.layouts import Array
from cuemu.toolchain import cuda_include_dirs

_LEVELS = {"sm_80": 80, "sm_89": 89, "sm_90": 90}


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _check(answer: tuple[Any, ...]) -> Any:
    """Return the value of a driver call, or raise with the driver's name for the error."""
    if int(answer[0]):
        raise RuntimeError(f"the CUDA driver answered {answer[0].name}")
    return answer[1] if len(answer) > 1 else None


@functools.cache
def capability() -> int:
    """Make the first device's primary context current; return 90 for compute capability 9.0."""
    driver = _driver()
    _check(driver.cuInit(0))
    device = _check(driver.cuDeviceGet(0))
    _check(driver.cuCtxSetCurrent(_check(driver.cuDevicePrimaryCtxRetain(device))))
    names = driver.CUdevice_attribute
    major = names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    minor = names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    return int(
        10 * _check(driver.cuDeviceGetAttribute(major, device))
        + _check(driver.cuDeviceGetAttribute(minor, device))
    )


def supported(case: Case, level: int) -> bool:
    """Whether a device of compute capability `level` has the case's primitive."""
    return level == 90 if case.arch == "sm_90a" else level >= _LEVELS[case.arch]


def compile_cases(level: int) -> tuple[bytes, dict[str, bytes]]:
    """Return the cubin of all supported kernels and the mangled name of each."""
    from cuda.core import Program, ProgramOptions

    folders = [str(RUNGS), *(str(d) for d in cuda_include_dirs())]
    arch = f"sm_{level}a" if level >= 90 else f"sm_{level}"
    names = tuple(dict.fromkeys(c.kernel for c in CASES if supported(c, level)))
    options = ProgramOptions(arch=arch, std="c++17", include_path=folders)
    made = Program(SOURCE.read_text(), "c++", options).compile("cubin", name_expressions=names)
    return bytes(made.code), {name: made.symbol_mapping[name] for name in names}


@functools.cache
def _functions() -> dict[str, Any]:
    driver = _driver()
    cubin, symbols = compile_cases(capability())
    module = _check(driver.cuModuleLoadData(cubin))
    return {n: _check(driver.cuModuleGetFunction(module, s)) for n, s in symbols.items()}


def _upload(array: Array) -> int:
    driver = _driver()
    data = np.ascontiguousarray(array)
    pointer = _check(driver.cuMemAlloc(max(1, data.nbytes)))
    _check(driver.cuMemcpyHtoD(pointer, data.ctypes.data, data.nbytes))
    return int(pointer)


def _encode(wanted: Map, array: Array, pointer: int) -> bytes:
    """Return the CUtensorMap of a contiguous array."""
    driver = _driver()
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    types = driver.CUtensorMapDataType
    kind = {
        "bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "float32": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        "uint8": types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[array.dtype.name]
    swizzle = getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{wanted.swizzle.upper()}")
    made = _check(
        driver.cuTensorMapEncodeTiled(
            kind,
            array.ndim,
            pointer,
            [wide(s) for s in reversed(array.shape)],
            [wide(s) for s in reversed(array.strides[:-1])],
            [narrow(b) for b in reversed(wanted.box)],
            [narrow(1)] * array.ndim,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(int(made.getPtr()), 128)


def _launch(case: Case, args: bytes) -> None:
    driver = _driver()
    function = _functions()[case.kernel]
    if case.smem > 48 << 10:
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(function, most, case.smem))
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = case.grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = case.block, 1, 1
    config.sharedMemBytes = case.smem
    if case.cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        value = attribute.value
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = case.cluster, 1, 1
        attribute.value = value
        config.attrs, config.numAttrs = [attribute], 1
    held = ctypes.create_string_buffer(args, len(args))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(held))
    _check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))
    _check(driver.cuCtxSynchronize())


def run_on_device(case: Case) -> list[Array]:
    """Run a case on the device and return its outputs."""
    driver = _driver()
    capability()
    outputs = [np.zeros_like(a) for a in case.expected]
    inputs_at, outputs_at = [_upload(a) for a in case.inputs], [_upload(a) for a in outputs]
    sides = {"in": (case.inputs, inputs_at), "out": (outputs, outputs_at)}
    maps = [_encode(m, sides[m.side][0][m.index], sides[m.side][1][m.index]) for m in case.maps]
    try:
        _launch(case, pack_args(maps, inputs_at, outputs_at, case.n))
        for array, pointer in zip(outputs, outputs_at, strict=True):
            _check(driver.cuMemcpyDtoH(array.ctypes.data, pointer, array.nbytes))
    finally:
        for pointer in (*inputs_at, *outputs_at):
            driver.cuMemFree(pointer)
    return outputs


def main() -> int:
    """Run every supported case; return the number that differ."""
    wrong = 0
    for case in CASES:
        if not supported(case, capability()):
            sys.stdout.write(f"skipped    {case.name}: needs {case.arch}\n")
            continue
        try:
            pairs = zip(run_on_device(case), case.expected, strict=True)
            different = [int((o != e).sum()) for o, e in pairs if o.tobytes() != e.tobytes()]
            note = f"{different} elements" if different else ""
        except RuntimeError as error:
            different, note = [0], str(error)
        wrong += bool(different)
        sys.stdout.write(f"{'DIFFERENT' if different else 'equal':10s} {case.name} {note}\n")
    sys.stdout.write(f"{len(CASES)} cases, {wrong} different\n")
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
