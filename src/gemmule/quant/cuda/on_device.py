"""Quantisation on a CUDA device, by kernels of this package: whatever library holds the matrix.

`quantised` gives the codes that `gemmule.quantize` gives on the host, one by one. What it returns
lies in memory of the matrix's own library (of this package, where that cannot be asked for any), in
layout ``mma16``. Kernels run on the caller's current stream, and the last copy waits for them.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import convert, driver, starter
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.operand import Form, Operand
from gemmule.core.problem import ITEMSIZE, numpy_dtype
from gemmule.core.rung import Step
from gemmule.quant import checks, rounding
from gemmule.quant.cuda import fragment_order
from gemmule.quant.layouts import get_layout, row_blocks
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.search import SHRINKS, Wanted, best_of, error_ratio

METHODS = ("rtn", "mse")

_SOURCE = Path(__file__).with_suffix(".cu")
_ARGS = struct.Struct("<7Q10q2d")
_THREADS = 256
_MOST_BLOCKS = 4096  # of a kernel that leaves a few numbers a block to the host


def operand_of(W: Any) -> Operand | None:
    """Return a matrix on a CUDA device as an operand; None for what lies elsewhere or is empty."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(W, torch.Tensor):
        if not W.is_cuda or W.layout is not torch.strided:
            return None
        name = checks.float_kind(rounding.dtype_name(W), tuple(W.shape))
        return device_arrays.from_torch(W.detach(), name) if W.numel() else None
    if isinstance(W, DeviceArray):
        operand = device_arrays.from_own(W)
    elif hasattr(W, "__cuda_array_interface__") and not hasattr(W, "__dlpack_device__"):
        operand = device_arrays.from_interface(W, "W")
    elif not hasattr(W, "__dlpack_device__") or int(W.__dlpack_device__()[0]) != 2:
        return None
    else:
        cupy = sys.modules.get("cupy")
        ours = cupy is not None and isinstance(W, cupy.ndarray)
        operand = (
            device_arrays.from_interface(W, "W") if ours else device_arrays.from_dlpack(W, "", "W")
        )
    checks.float_kind(operand.form.dtype, operand.form.shape)
    return None if 0 in operand.form.shape else operand


def quantised(W: Operand, wanted: Wanted) -> QuantizedMatrix:
    """Return the quantised matrix of a float matrix on a device, by a method of `METHODS`.

    Raises ValueError as `gemmule.quantize` does, for a number that is not finite or a scale that
    does not fit; DeviceError and CompileError as a launch does.
    """
    return _Launches(W, wanted).matrix()


class _Launches:
    """The kernels that quantise one matrix, and the memory that they share."""

    def __init__(self, W: Operand, wanted: Wanted) -> None:
        self.W, self.wanted = W, wanted
        self.m, self.n = W.form.shape
        self.ordinal = device_arrays.ordinal_of(W)
        self.stream = device_arrays.current_stream(W, self.ordinal)
        self.whole, self.blank = wanted.group_size is None, False
        given = wanted.group_size or -1
        self.group = self.n if given == -1 else min(given, self.n)
        self.groups = -(-self.n // self.group)
        counts = (1, 1) if self.whole else (self.groups, self.m)
        storage = get_layout(fragment_order.LAYOUT).storage_shape(self.m, self.n, wanted.bits)
        self.codes = self._empty(storage, "uint8")
        self.scales = self._empty(counts, wanted.scale_dtype)
        self.zeros = None if wanted.symmetric else self._empty(counts, "float32")
        compute = "float64" if W.form.dtype == "float64" else "float32"
        self.perm, self.importance = self._there(wanted.perm), None
        if wanted.importance is not None:
            self.importance = self._there(wanted.importance.astype(compute))

    def matrix(self) -> QuantizedMatrix:
        """Launch, wait, and look at what was found."""
        types = f"{convert.CTYPE[self.W.form.dtype]}, {convert.CTYPE[self.wanted.scale_dtype]}"
        if self.whole:
            self._fit_whole(types)
        else:
            self._fit_groups(types)
        blocks = min(-(-self.codes.nbytes // (16 * _THREADS)), _MOST_BLOCKS)
        sums = self._sums(f"encode<{types}, {self.wanted.bits}>", blocks, 2).sum(0)
        if not np.isfinite(sums).all():
            self._refuse()
        if not self.whole:
            count = min(-(-self.m * self.groups // _THREADS), _MOST_BLOCKS)
            self._launch(f"flatten_zeros<{types}>", count, 0)
        elif self.blank:
            self._fill(self.scales, np.zeros((1, 1), numpy_dtype(self.wanted.scale_dtype)))
        made = QuantizedMatrix(
            self.codes,
            self.scales.T,
            None if self.zeros is None else self.zeros.T,
            self.perm,
            (self.m, self.n),
            self.wanted.bits,
            self.wanted.group_size,
            layout=fragment_order.LAYOUT,
            device=f"cuda:{self.ordinal}",
        )
        return replace(made, error=error_ratio(*sums.tolist()))

    def _fit_groups(self, types: str) -> None:
        best = str(self.wanted.method == "mse").lower()
        team = self._team()
        count = -(-self.m * self.groups // (_THREADS // team))
        self._launch(f"fit_groups<{types}, {best}>", count, 0, team=team)

    def _fit_whole(self, types: str) -> None:
        wanted = self.wanted
        blocks = min(-(-self.m * self.n // (16 * _THREADS)), _MOST_BLOCKS)
        source = types.partition(",")[0]
        found = self._sums(f"whole_limits<{source}>", blocks, 2)
        low, high = found[:, 0].min().reshape(1, 1), found[:, 1].max().reshape(1, 1)
        if not np.isfinite([low, high]).all():
            self._refuse()
        exact = rounding.exact_scales(low, high, wanted.bits, wanted.symmetric)
        self.blank = bool(exact == 0)
        exact = rounding.divisors(exact)
        scale = rounding.round_up(exact, wanted.scale_dtype)
        zero = np.float32(2 ** (wanted.bits - 1)).reshape(1, 1)
        if self.zeros is not None:
            zero = rounding.zero_points(low, scale)
            self._fill(self.zeros, zero)
        checks.scales_fit(scale, None)
        if wanted.method == "mse":
            kernel, numbers = f"whole_errors<{types}>", (exact.item(), zero.item())
            errors = self._sums(kernel, blocks, len(SHRINKS), numbers).sum(0)
            tried = [rounding.round_up(exact * shrink, wanted.scale_dtype) for shrink in SHRINKS]
            scale = best_of(tried, [np.reshape(error, (1, 1)) for error in errors])
        self._fill(self.scales, scale)

    def _down(self) -> bool:
        """Tell whether neighbouring rows lie closer to each other than neighbouring columns."""
        row_step, col_step = self.W.form.strides
        return self.m > 1 and abs(row_step) < abs(col_step)

    def _team(self) -> int:
        """Return how many threads share a group."""
        if self._down():
            return 8
        return next((team for team in (8, 32) if self.group <= 128 * team), _THREADS)

    def _sums(
        self, kernel: str, blocks: int, each: int, numbers: tuple[float, float] = (0, 0)
    ) -> Any:
        """Launch, wait, and return what the blocks found, float64 ``(blocks, each)``."""
        found = self._empty((blocks, each), "float64")
        self._launch(kernel, blocks, found.pointer, numbers=numbers)
        return self._fetched(found)

    def _launch(
        self,
        kernel: str,
        blocks: int,
        sums: int,
        team: int = 1,
        numbers: tuple[float, float] = (0, 0),
    ) -> None:
        parts = (self.perm, self.importance, self.scales, self.zeros, self.codes)
        packed = _ARGS.pack(
            self.W.pointer,
            *(0 if part is None else part.pointer for part in parts),
            sums,
            self.m,
            self.n,
            *self.W.form.strides,
            self.group,
            self.groups,
            0 if self.whole else self.m,
            self.wanted.bits,
            team,
            self._down(),
            *numbers,
        )
        step = Step(kernel, (blocks, 1, 1), (_THREADS, 1, 1))
        starter.run(_SOURCE, step, packed, self.ordinal, self.stream)

    def _empty(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Return uninitialised memory of the matrix's own allocator, where it has one."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * ITEMSIZE[dtype]
        like = self.W if self.W.library in ("torch", "cupy") else self.W._replace(library="gemmule")
        memory = device_arrays.empty((nbytes,), "uint8", like)
        return DeviceArray(
            memory.pointer, shape, (shape[-1], 1)[-len(shape) :], dtype, self.ordinal, memory.array
        )

    def _there(self, host: np.ndarray[Any, Any] | None) -> DeviceArray | None:
        if host is None:
            return None
        part = self._empty(host.shape, host.dtype.name)
        self._fill(part, host)
        return part

    def _fill(self, part: DeviceArray, host: np.ndarray[Any, Any]) -> None:
        driver.copy(part.pointer, host.ctypes.data, host.nbytes, self.ordinal, self.stream)

    def _refuse(self) -> None:
        """Raise ValueError where a weight is not finite or a scale does not fit, naming it.

        Returns where neither is so: then the squares of the errors are too large to be known.
        """
        for rows in row_blocks(self.m, self.n, 1 << 24):
            values = self._rows(rows)
            if not np.isfinite(values).all():
                row, column = (int(i) for i in np.argwhere(~np.isfinite(values))[0])
                order = self.wanted.perm
                place = rows.start + row, column if order is None else int(order[column])
                raise rounding.non_finite(place, float(values[row, column]))
        if not self.whole:
            checks.scales_fit(self._fetched(self.scales).T, self.wanted.group_size)

    def _fetched(self, part: Any) -> np.ndarray[Any, Any]:
        """Return an array in C order as it is on the device once the stream has come so far."""
        host = np.empty(part.shape, numpy_dtype(part.dtype))
        driver.copy(host.ctypes.data, part.pointer, host.nbytes, self.ordinal, self.stream)
        return host

    def _rows(self, rows: slice) -> np.ndarray[Any, Any]:
        """Return some rows of the matrix on the host, as float64, columns in stored order."""
        row_step, col_step = self.W.form.strides
        pointer = self.W.pointer + rows.start * row_step * ITEMSIZE[self.W.form.dtype]
        form = Form((rows.stop - rows.start, self.n), (row_step, col_step), *self.W.form[2:])
        packed = convert.widened(self.W._replace(pointer=pointer, form=form), "float64")
        block = DeviceArray(packed.pointer, form.shape, (), "float64", self.ordinal, packed)
        host = self._fetched(block)
        return host if self.wanted.perm is None else host[:, self.wanted.perm]
