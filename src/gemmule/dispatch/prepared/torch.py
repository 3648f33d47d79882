"""The short way of a product of a prepared matrix and a CUDA tensor of PyTorch.

As `gemmule.dispatch.torch`: compared with what was planned, and started through ctypes. A packed
product has three parts, passes, what is brought together, and the product itself, each with a
struct of its own; where the plan reads the array, it is started as if that were a tensor.
"""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

from gemmule.arrays.prepared import PreparedMatrix
from gemmule.backends.cuda.packed.launch import RANGES, PackedLauncher, Ranges
from gemmule.backends.cuda.tensor_maps import MAP_BYTES
from gemmule.core.canonical import Call
from gemmule.core.operand import Form
from gemmule.core.problem import ITEMSIZE
from gemmule.core.rung import Step
from gemmule.dispatch.torch_codes import MatrixCall
from gemmule.dispatch.torch_launch import (
    Product,
    StepsSlot,
    extent,
    failed,
    launch_function,
    maker,
)

# (stream, addresses of A, B and the result, the prepared matrix)
Start = Callable[[int, tuple[int, int, int], PreparedMatrix], None]
_ADDRESSES = struct.Struct("<4Q").pack_into


def prepared_call(start: Start, call: Call, a: Form, b: Form, ordinal: int) -> MatrixCall:
    """Return the short way beside a prepared matrix."""
    first = a.ready is not None
    planned = (a, b) if first else (b, a)
    trusted = _trusted(start, call, planned, first, ordinal)
    return MatrixCall(trusted, call, planned, first, ordinal)


def _trusted(
    start: Start, call: Call, planned: tuple[Form, Form], first: bool, ordinal: int
) -> Product:
    torch = sys.modules["torch"]
    native = torch._C
    device_of, stream_of = native._cuda_getDevice, native._cuda_getCurrentRawStream
    written = native._increment_version  # a gradient that needs what was there has to fail
    shape, dtype = call.out_shape, getattr(torch, call.problem.out)
    fresh, (own_bytes, other_bytes) = maker(shape, dtype, ordinal), map(extent, planned)
    out_bytes = torch.Size(shape).numel() * ITEMSIZE[call.problem.out]
    mask, leads = call.problem.alignment - 1, first != call.swapped  # the matrix is canonical A

    def trusted(a: Any, b: Any, out: Any) -> Any:
        if device_of() != ordinal:
            return None
        matrix, x = (a, b) if first else (b, a)
        at, here = x.data_ptr(), matrix.array.pointer
        if out is None:
            out = fresh()
            result = out.data_ptr()
        else:
            result = out.data_ptr()
            end = result + out_bytes
            if result < at + other_bytes and at < end:
                return None  # out may overlap x
            if result < here + own_bytes and here < end:
                return None  # or the prepared array, through a view of it
            written([out])
        if (at | result) & mask or not (at and result):
            return None
        addresses = (here, at, result) if leads else (at, here, result)
        start(stream_of(ordinal), addresses, matrix)
        return out

    return trusted


def as_array(start: Callable[[int, int, int, int], None]) -> Start:
    """Return what starts a product that reads the matrix as an array."""
    return lambda stream, addresses, matrix: start(stream, *addresses)


class _Part:
    """Kernels that follow one another with one struct."""

    def __init__(
        self, steps: tuple[Step, ...], functions: tuple[int, ...], template: bytes, maps: int = 0
    ) -> None:
        self.steps, self.functions = steps, functions
        self.slot = StepsSlot(template, steps, maps)
        self._launch = launch_function()

    def start(self, stream: int) -> None:
        """Launch the kernels with what stands in the slot."""
        slot = self.slot
        if slot.stream != stream:
            slot.turn(stream)
        for config, function, step in zip(slot.configs, self.functions, self.steps, strict=True):
            code = self._launch(config, function, slot.params, None)
            if code:
                raise failed(code, step)


class _Parts:
    """One thread's arguments of a packed product."""

    def __init__(self, launcher: PackedLauncher, ordinal: int) -> None:
        of_passes, of_gather, of_main = launcher.functions(ordinal)
        self.passes = _Part(launcher.passes, of_passes, launcher.pass_template)
        self.gather = _Part((launcher.gather,), (of_gather,), bytes(8 * 3 * RANGES))
        count = len(launcher.maps.shapes)
        self.main = _Part(launcher.main, of_main, launcher.template, count)


def packed(launcher: PackedLauncher, ordinal: int) -> Start:
    """Return what starts a product of which the matrix comes packed, and the tensor does not."""
    local, maps, moves = threading.local(), launcher.maps, launcher.moves
    which, main_at = launcher.ready.index(True), launcher.main_at
    workspace = maker((launcher.workspace,), sys.modules["torch"].uint8, ordinal)
    show = struct.Struct(f"{len(maps.shapes) * MAP_BYTES}s").pack_into
    launcher.functions(ordinal)  # loaded before a graph is captured

    def start(stream: int, addresses: tuple[int, int, int], matrix: PreparedMatrix) -> None:
        try:
            parts = local.parts
        except AttributeError:
            parts = local.parts = _Parts(launcher, ordinal)
        owner = workspace()
        work = owner.data_ptr()
        main_work = (work + main_at) % (1 << 64)
        both = [work, work]
        both[which] = matrix.address(launcher.rung)
        _ADDRESSES(parts.passes.slot.buffer, 0, *addresses, work)
        parts.passes.start(stream)
        if moves:
            Ranges.pack(parts.gather.slot.buffer, moves, both, main_work)
            parts.gather.start(stream)
        slot = parts.main.slot
        encoded = b"".join(maps.of((*addresses, main_work, *both)))
        if encoded != slot.shown:
            show(slot.maps, slot.first, encoded)
            slot.shown = encoded
        _ADDRESSES(slot.buffer, 0, *addresses, main_work)
        parts.main.start(stream)

    return start
