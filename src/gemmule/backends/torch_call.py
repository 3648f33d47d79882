"""The short way of a product of CUDA tensors of PyTorch.

A `TorchCall` compares what a call brings with what was planned, attribute by attribute, and goes
straight to the launch; `eager` finds one for an unplanned call by the operands' shapes, strides
and dtypes alone. What they do not know (another library or device, other strides, less alignment,
a questionable `out`) is left to the general way, which accepts or refuses it with an explanation.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from gemmule.arrays import Form
from gemmule.backends import driver, launch_args
from gemmule.canonical import Call, Options, c_strides
from gemmule.problem import ITEMSIZE

if TYPE_CHECKING:
    from gemmule.backends.cuda import Launcher


class TorchCall:
    """One product of tensors of exactly the planned dtypes, shapes and strides, on one device."""

    __slots__ = (
        "_a", "_b", "_bytes", "_device", "_dtype", "_launcher", "_mask", "_ordinal", "_shape",
        "_starters", "_strides", "_swapped", "_torch",
    )  # fmt: skip

    def __init__(self, launcher: Launcher, call: Call, a: Form, b: Form, ordinal: int) -> None:
        torch = sys.modules["torch"]
        self._torch, self._launcher, self._ordinal = torch, launcher, ordinal
        self._a = (torch.Size(a.shape), a.strides, getattr(torch, a.dtype))
        self._b = (torch.Size(b.shape), b.strides, getattr(torch, b.dtype))
        self._shape, self._strides = torch.Size(call.out_shape), c_strides(call.out_shape)
        self._dtype = getattr(torch, call.problem.out)
        self._device = torch.device("cuda", ordinal)
        self._bytes = (_extent(a), _extent(b), self._shape.numel() * ITEMSIZE[call.problem.out])
        self._mask = call.problem.alignment - 1
        self._swapped = call.swapped
        self._starters = launcher.load(ordinal)

    def __call__(self, a: Any, b: Any, out: Any) -> Any | None:
        """Return the product, in `out` where given, or None: nothing was done, go the other way."""
        tensor = self._torch.Tensor
        if type(a) is not tensor or type(b) is not tensor or not (a.is_cuda and b.is_cuda):
            return None
        if (a.shape, a.stride(), a.dtype) != self._a or a.get_device() != self._ordinal:
            return None
        if (b.shape, b.stride(), b.dtype) != self._b or b.get_device() != self._ordinal:
            return None
        if out is not None and (
            type(out) is not tensor
            or out.shape != self._shape
            or out.stride() != self._strides
            or out.dtype is not self._dtype
            or out.get_device() != self._ordinal
        ):
            return None
        return self.launch(a, b, out)

    def launch(self, a: Any, b: Any, out: Any) -> Any | None:
        """Launch on tensors known to be of the planned forms, or return None."""
        if out is None:
            out = self._torch.empty(self._shape, dtype=self._dtype, device=self._device)
        left, right, result = a.data_ptr(), b.data_ptr(), out.data_ptr()
        if (left | right | result) & self._mask:
            return None
        a_bytes, b_bytes, out_bytes = self._bytes
        if (result < left + a_bytes and left < result + out_bytes) or (
            result < right + b_bytes and right < result + out_bytes
        ):
            return None  # out may overlap an input
        native = self._torch._C
        if native._cuda_getDevice() != self._ordinal:
            return None
        if self._swapped:
            left, right = right, left
        slot = self._launcher.slot()
        launch_args.POINTERS.pack_into(slot.buffer, 0, left, right, result)
        stream = native._cuda_getCurrentRawStream(self._ordinal)
        for start in self._starters:
            start(slot.address, stream)
        return out


def _extent(form: Form) -> int:
    """Return the bytes from the first element to behind the last; strides are not negative."""
    reach = sum((s - 1) * t for s, t in zip(form.shape, form.strides, strict=True) if s > 0)
    return (reach + 1) * ITEMSIZE[form.dtype]


def bind(launcher: Launcher, call: Call, a: Form, b: Form, ordinal: int) -> TorchCall | None:
    """Return the short way of a prepared launcher, or None where there is none."""
    if "torch" not in sys.modules or call.outer or launcher.workspace or launcher.quantized:
        return None
    if any(step < 0 for step in (*a.strides, *b.strides)) or 0 in (*a.shape, *b.shape):
        return None
    if not driver.is_current(ordinal):
        return None
    return TorchCall(launcher, call, a, b, ordinal)


def eager(
    op: str, a: Any, b: Any, out: Any, options: Options, rung: str | None, params: Any
) -> Any | None:
    """Return an unplanned product of CUDA tensors, or None: nothing was done, go the other way."""
    torch = sys.modules.get("torch")
    if torch is None or type(a) is not torch.Tensor or type(b) is not torch.Tensor:
        return None
    if not (a.is_cuda and b.is_cuda):
        return None
    ordinal = a.get_device()
    if b.get_device() != ordinal:
        return None
    form = None
    if out is not None:
        if type(out) is not torch.Tensor or not out.is_cuda or out.get_device() != ordinal:
            return None
        form = (out.shape, out.stride(), out.dtype)
    aligned = not ((a.data_ptr() | b.data_ptr()) & 15)
    call = _bound(
        op, a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype, form, ordinal, aligned,
        options, rung, params,
    )  # fmt: skip
    return None if call is None else call.launch(a, b, out)


@functools.lru_cache(maxsize=4096)
def _bound(
    op: str, a_shape: Any, a_strides: Any, a_dtype: Any, b_shape: Any, b_strides: Any,
    b_dtype: Any, out: Any, ordinal: int, aligned: bool, options: Options, rung: str | None,
    params: Any,
) -> TorchCall | None:  # fmt: skip
    """Return the short way for tensors of these forms; None where only the general way will do."""
    from gemmule.backends import cuda_arrays
    from gemmule.plan import resolve

    if not aligned:
        return None
    names = [str(dtype).removeprefix("torch.") for dtype in (a_dtype, b_dtype)]
    left = cuda_arrays.form_of(0, tuple(a_shape), a_strides, names[0])
    right = cuda_arrays.form_of(0, tuple(b_shape), b_strides, names[1])
    plan = resolve(op, left, right, None, f"cuda:{ordinal}", options, rung, params)
    short = plan.short_way
    if not isinstance(short, TorchCall):
        return None
    if out is not None and out != (short._shape, short._strides, short._dtype):
        return None
    return short
