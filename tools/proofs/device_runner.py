"""Runs a CUDA rung on the oracle's inputs on a real device, bytes around them included.

Each input buffer goes to the device with the same address modulo 256, so alignment there is what
the case asked for; the whole buffer comes back, so the guard bytes around the output are judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gemmule.arrays import interop
from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver, launch_args, starter, tensor_maps
from gemmule.backends.cuda import launch as cuda_launch
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.epilogue import FUNCTIONS
from gemmule.core.problem import Problem
from gemmule.core.rung import (
    CudaRung,
    DeviceRung,
    LibraryRung,
    Machine,
    Step,
    with_bias,
    with_epilogue,
    with_scales,
)
from gemmule.oracle.inputs import Inputs
from gemmule.quant import places
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.tuning.operands import call_over
from proofs import raw_launch

_PLACE = 256


class DeviceRunner:
    """One device and an arena of its memory; not for use from several threads."""

    def __init__(self, ordinal: int = 0, arena_bytes: int = 256 * 2**20) -> None:
        self.ordinal = ordinal
        self.machine: Machine = cuda_launch.CudaBackend().machine(f"cuda:{ordinal}")
        self._base = driver.allocate(arena_bytes, ordinal)
        self._size, self._used = arena_bytes, 0

    def close(self) -> None:
        """Give the arena back."""
        driver.free(self._base, self.ordinal)

    def run(
        self,
        rung: DeviceRung,
        inputs: Inputs,
        params: Mapping[str, Any],
        alpha: float = 1.0,
        beta: float = 0.0,
        bias: np.ndarray[Any, Any] | None = None,
        scales: tuple[np.ndarray[Any, Any], ...] | None = None,
        epilogue: Any = None,
    ) -> np.ndarray[Any, Any]:
        """Run the rung once and return `inputs.out`, filled with what the device wrote.

        bias: a number for each row, which kernels compiled for that add; scales: of rows and of
        columns, which others apply; epilogue: what `gemmule.oracle.finished` made, with its own
        alpha and beta.
        """
        problem = inputs.case.problem
        if inputs.out.size == 0:
            return inputs.out  # the back end launches nothing either
        self._used = 0
        if isinstance(rung, LibraryRung):
            return self._multiply(rung, inputs, params, (alpha, beta))
        steps = rung.steps(problem, params, self.machine)
        steps = steps if bias is None else with_bias(steps)
        steps = steps if scales is None else with_scales(steps)
        if epilogue is not None:
            steps = with_epilogue(steps, FUNCTIONS[epilogue.activation])
            alpha, beta = epilogue.alpha, epilogue.beta
        workspace = rung.workspace(problem, params, self.machine)
        work = self._take(workspace, 0)
        if workspace:
            self._upload(work, np.full(workspace, 0xFF, np.uint8))
        parts = raw_launch.parts(inputs)
        addresses = [self._place(part, inputs) for part in parts]
        added = None if bias is None else self._place(bias, inputs)
        packed = raw_launch.arguments(inputs, addresses, work, alpha, beta, added)
        if scales is not None:
            places = [self._place(one, inputs) for one in scales]
            packed += raw_launch.tail_of(scales, places, problem.m)
        if epilogue is not None:
            beside = [self._place(one, inputs) for one in epilogue.operands.values()]
            packed += raw_launch.epilogue_of(epilogue, beside)
        self._launch(rung, steps, problem, packed)
        at = next(at for at, part in zip(addresses, parts, strict=True) if part is inputs.out)
        self._download(inputs, at)
        return inputs.out

    def _multiply(
        self,
        rung: LibraryRung,
        inputs: Inputs,
        params: Mapping[str, Any],
        scalars: tuple[float, float],
    ) -> np.ndarray[Any, Any]:
        """Have a library multiply; its own requirements decide what memory it is given."""
        problem = inputs.case.problem
        arrays = (inputs.a, inputs.b, inputs.out)
        codes, operands = isinstance(inputs.a, QuantizedMatrix), []
        if codes:
            there = places.on(inputs.a, f"cuda:{self.ordinal}")  # `to` would widen 4-bit floats
            operands.append(interop.unwrap(there, "A"))
        addresses = [self._place(part, inputs) for part in arrays[codes:]]
        for address, part in zip(addresses, arrays[codes:], strict=True):
            strides = tuple(step // part.itemsize for step in part.strides)
            there = DeviceArray(address, part.shape, strides, part.dtype.name, self.ordinal, self)
            operands.append(device_arrays.from_own(there))
        call = call_over(problem, *arrays)
        rung.bind(problem, call, params)(*operands, *scalars)
        driver.synchronize(self.ordinal)
        self._download(inputs, addresses[-1])
        return inputs.out

    def _launch(
        self, rung: CudaRung, steps: tuple[Step, ...], problem: Problem, packed: bytes
    ) -> None:
        module = starter.kernels(rung, steps, self.machine.arch)
        shapes = tensor_maps.declared(steps, problem, packed)
        maps = tensor_maps.Maps(shapes) if shapes else None
        with driver.on_device(self.ordinal):  # a map is encoded in the context of its address
            ready = starter.loaded(module, steps, packed, self.ordinal, maps)
            coded = problem.quant is not None
            first, *others = launch_args.operands(packed, coded=coded)
            words, left = ("32s3Q", packed[:32]) if coded else ("4Q", first)
            starter.starter(ready, words)(0, left, *others)
        driver.synchronize(self.ordinal)

    def _take(self, nbytes: int, remainder: int) -> int:
        start = self._used + (remainder - (self._base + self._used)) % _PLACE
        if start + nbytes > self._size:
            raise MemoryError(
                f"the case needs {start + nbytes:,} bytes; the arena holds {self._size:,}."
            )
        self._used = start + nbytes
        return self._base + start

    def _place(self, part: Any, inputs: Inputs) -> int:
        """Copy the buffer around an array to the device; return the array's address there."""
        if part is None:
            return 0
        whole = _surrounding(part, inputs)
        host = int(whole.__array_interface__["data"][0])
        target = self._take(whole.nbytes, host % _PLACE)
        self._upload(target, whole)
        return target + int(part.__array_interface__["data"][0]) - host

    def _upload(self, target: int, source: np.ndarray[Any, Any]) -> None:
        address = int(source.__array_interface__["data"][0])
        driver.copy(target, address, source.nbytes, self.ordinal, 0)

    def _download(self, inputs: Inputs, address: int) -> None:
        whole = _surrounding(inputs.out, inputs)
        host = int(whole.__array_interface__["data"][0])
        source = address - int(inputs.out.__array_interface__["data"][0]) + host
        driver.copy(host, source, whole.nbytes, self.ordinal, 0)


def _surrounding(part: Any, inputs: Inputs) -> np.ndarray[Any, Any]:
    """Return the byte buffer of the frame that an input array was cut from, or the array itself."""
    for frame in inputs.frames:
        if frame.array is part:
            return frame.buffer
    return np.ascontiguousarray(part.T if part.flags.f_contiguous else part)
