"""A CUDA driver whose kernels run on the CPU under the emulator, so that public calls do too.

Device memory is host memory (`fake_driver`), a "cubin" names the kernels of a file, and a launch
runs them in the order of threads and blocks that `seed` shuffles. Nothing else of the back end is
replaced: plans, argument structs, workspaces and launch geometry are those of a real device.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from cuda_emulation import encoded, sampled_kernels
from cuemu.build import Module, compile_cu
from fake_cublas import installed
from fake_driver import FakeDriver, _Names
from gemmule import finished
from gemmule.backends.cuda import driver, nvrtc, starter, tensor_maps
from gemmule.backends.cuda import launch as cuda_launch
from gemmule.backends.cuda.convert import CTYPE
from gemmule.core.registry import cuda_rungs
from gemmule.plan import resolve
from gemmule.quant.cuda import fragment_order, on_device

REMEMBERED = (
    driver.bindings, driver.device_info, driver.version, driver._primary_context,
    driver._primary_handle, driver.load, cuda_launch._machine, resolve, finished.resolved,
    finished.pass_on,
)  # fmt: skip

_PAIRS = [
    f"{CTYPE[weight]}, {CTYPE[scale]}"
    for weight, scale in (
        ("float32", "float32"),
        ("float16", "bfloat16"),
        ("bfloat16", "float16"),
        ("float64", "float16"),
    )
]
# Kernels of no rung that tests launch, by their file: built together, for a compiler that starts
# once. Others are built one by one.
OUTSIDE_RUNGS = {
    Path(on_device.__file__).with_suffix(".cu"): [
        name
        for types in _PAIRS
        for name in (
            *(f"fit_groups<{types}, {best}>" for best in ("false", "true")),
            f"whole_limits<{types.partition(',')[0]}>",
            f"whole_errors<{types}>",
            *(f"encode<{types}, {bits}>" for bits in (4, 8)),
        )
    ],
    Path(fragment_order.__file__).with_suffix(".cu"): [
        *(f"{how}_mma16<{bits}>" for how in ("pack", "unpack") for bits in (4, 8)),
        *(f"turn<{word}>" for word in ("unsigned short", "unsigned")),
    ],
}


def parameters(module: Module, kernel: str, params: int) -> list[bytes]:
    """Return the parameters that a launch points to."""
    found = []
    for i, size in enumerate(module.parameter_bytes(kernel)):
        address = ctypes.c_void_p.from_address(params + 8 * i).value
        assert address is not None
        found.append(ctypes.string_at(address, size))
    return found


def stream_on(ordinal: int) -> int:
    """Return the handle of the stream that fakes of PyTorch are at on a device."""
    return 7 + ordinal


class EmulatedDriver(FakeDriver):
    """`FakeDriver` with kernels that run, on the device whose memory they are given."""

    own: ClassVar[frozenset[int]] = frozenset()  # streams that were made, not given

    def __init__(self, seed: int = 0) -> None:
        super().__init__(devices=2, free_bytes=1 << 32)
        self.seed = seed
        self.kernels: list[tuple[Module, str]] = []

    def launch(self, config: int, function: int, params: int, extra: None) -> int:
        """Launch a kernel: on the default stream, or on what is PyTorch's on this device."""
        (stream,) = struct.unpack("<Q", ctypes.string_at(config + 32, 8))
        known = {0, *self.own, *(stream_on(one - 1000) for one in self.contexts[-1:])}
        assert not self.contexts or stream in known, f"stream {stream} is none of {known}"
        return super().launch(config, function, params, extra)

    def cuLibraryGetKernel(self, library: int, symbol: bytes) -> tuple[Any, ...]:
        """Compile the named kernel for the CPU, with those that other tests of its file share."""
        path, names, defines = json.loads(self.libraries[library - 1])
        module = compile_cu(path, names=tuple(names), defines=tuple(defines))
        self.kernels.append((module, symbol.decode()))
        return self._answer("cuLibraryGetKernel", len(self.kernels))

    def launched(
        self,
        function: int,
        params: int,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        cluster: tuple[int, ...],
        smem: int,
    ) -> None:
        """Run a kernel on the argument structs that the launch points to."""
        module, name = self.kernels[function - 1]
        args = parameters(module, name, params)
        words = {w for one in args for (w,) in struct.iter_unpack("<Q", one[: len(one) // 8 * 8])}
        owners = {self.owner.get(one, 0) for one in self.memory if one in words}
        current = {self.contexts[-1] - 1000} if self.contexts else {min(owners, default=0)}
        assert owners <= current, f"{name} was given memory of {owners}"

        def run() -> None:
            module.launch(
                name, grid=grid, block=block, cluster=cluster, smem=smem, args=args, seed=self.seed
            )

        self.start(run)

    def start(self, kernel: Callable[[], None]) -> None:
        """Run a launched kernel, at once."""
        kernel()


class Poisoned(EmulatedDriver):
    """A device on which memory that nobody wrote holds NaN and huge counts."""

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, ...]:
        """Allocate, and fill with ones."""
        result = super().cuMemAlloc(nbytes)
        ctypes.memset(result[1], 0xFF, nbytes)
        return result


class TimedDriver(EmulatedDriver):
    """An emulated device with events, 2 ns from one to the next, and page-locked memory."""

    own = frozenset({1})
    CUstream_flags = CUstreamCaptureMode = _Names()

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.pinned: dict[int, Any] = {}
        self.events: set[int] = set()

    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        self.events.add(len(self.events) + 1)
        return self._answer("cuEventCreate", len(self.events))

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        return self._answer("cuEventRecord")

    def cuEventSynchronize(self, event: int) -> tuple[Any, ...]:
        return self._answer("cuEventSynchronize")

    def cuEventElapsedTime(self, before: int, after: int) -> tuple[Any, ...]:
        assert before != after
        return self._answer("cuEventElapsedTime", 2e-6)

    def cuEventDestroy(self, event: int) -> tuple[Any, ...]:
        return self._answer("cuEventDestroy")

    def __getattr__(self, name: str) -> Any:
        """Answer whatever streams and graphs are asked for: launched kernels have run by then."""
        if name.startswith(("cuStream", "cuGraph")):
            return lambda *_: self._answer(name, 1)
        raise AttributeError(name)

    def cuMemAllocHost(self, nbytes: int) -> tuple[Any, ...]:
        block = (ctypes.c_uint8 * nbytes)()
        self.pinned[ctypes.addressof(block)] = block
        return self._answer("cuMemAllocHost", ctypes.addressof(block))

    def cuMemFreeHost(self, address: int) -> tuple[Any, ...]:
        del self.pinned[address]
        return self._answer("cuMemFreeHost")


def _compile_file(
    path: Path, names: tuple[str, ...], arch: str, defines: tuple[str, ...] = ()
) -> nvrtc.Module:
    """Stand for `nvrtc.compile_file`: a module that names kernels instead of holding them."""
    built = tuple(OUTSIDE_RUNGS.get(path, ()))
    built = built if set(names) <= set(built) else names
    for rung in cuda_rungs():
        if rung.source_path == path:  # build what the rungs' tests build as well
            shared, known = sampled_kernels(rung)
            built = shared if set(names) <= set(shared) and defines == known else names
    text = json.dumps([str(path), built, defines]).encode()
    return nvrtc.Module(text, {name: name for name in names})


@contextlib.contextmanager
def emulated(
    seed: int = 0, kind: type[EmulatedDriver] = EmulatedDriver
) -> Iterator[EmulatedDriver]:
    """Give the CUDA back end two devices, on which kernels are emulated; undone afterwards."""
    nvrtc.cuda_core()  # which takes the real driver's types when it is first imported
    stand_in = kind(seed)
    with contextlib.ExitStack() as undo:
        undo.enter_context(mock.patch.object(sys.modules["cuda.bindings"], "driver", stand_in))
        undo.enter_context(mock.patch.object(nvrtc, "compile_file", _compile_file))
        launch = mock.patch.object(starter, "launch_function", return_value=stand_in.launch)
        undo.enter_context(launch)
        undo.enter_context(mock.patch.object(tensor_maps, "encode", encoded))
        undo.enter_context(installed(None))  # a library would want a device
        for function in REMEMBERED:
            function.cache_clear()
        try:
            yield stand_in
        finally:
            for function in REMEMBERED:
                function.cache_clear()
