"""The short way of a product of a quantised matrix and a CUDA tensor of PyTorch.

As `gemmule.dispatch.torch`, beside a matrix whose addresses and form were found once and are kept
with it. A bias costs no launch of its own: the kernel adds a number for each row to its sums before
they are rounded, where the chosen rung has such a kernel and it is proved.
"""

from __future__ import annotations

import functools
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from gemmule.arrays.interop import quantized_form
from gemmule.arrays.prepared import PreparedMatrix
from gemmule.backends.base import Run
from gemmule.backends.cuda import launch_args
from gemmule.backends.cuda.arrays import ordinal_named
from gemmule.backends.cuda.launch import Launcher, parts
from gemmule.core.canonical import Call
from gemmule.core.choice import Choice
from gemmule.core.operand import Form, c_strides
from gemmule.core.problem import ITEMSIZE
from gemmule.core.rung import CudaRung
from gemmule.dispatch.torch_launch import (
    CONFIG,
    MOVING_AT,
    Launch,
    Product,
    Signature,
    extent,
    failed,
    guards,
    kernel_of,
    launch_function,
    maker,
    slot,
    steps_starter,
)
from gemmule.dispatch.tracked import wanted
from gemmule.quant.cuda.by_library import ByLibrary
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.storage.evidence import is_proved

# One packing writes the stream, where attributes lie and how many, and the first six addresses.
MOVING = struct.Struct("<QQI4x6Q")
Added = Callable[[Any, Any, Any], Any]  # matrix, x, bias -> the result, or None


class Kind:
    """A form, equal to itself alone: quicker to look up than what it holds."""

    __slots__ = ("form",)

    def __init__(self, form: Form) -> None:
        self.form = form


class Known(NamedTuple):
    """What a call needs of a matrix: its signature, None on the host, and four addresses."""

    signature: Signature | None
    addresses: tuple[int, int, int, int]


_kind = functools.lru_cache(maxsize=4096)(Kind)


def known(matrix: QuantizedMatrix) -> Known:
    """Return what a call needs of a matrix; `QuantizedMatrix.kept` computes it once."""
    if matrix.device == "cpu":
        return Known(None, (0, 0, 0, 0))
    signature = (_kind(matrix.kept(quantized_form)), (), (), ordinal_named(matrix.device))
    return Known(signature, parts(matrix))


def own_signature(matrix: Any) -> Signature | None:
    """Return what tells a matrix of this package's own on a device apart, None for all else."""
    if type(matrix) is QuantizedMatrix:
        return matrix.kept(known).signature
    if type(matrix) is not PreparedMatrix or not matrix.is_cuda:
        return None
    if matrix.signature is None:
        matrix.signature = (_kind(matrix.form), (), (), ordinal_named(matrix.device))
    return matrix.signature  # type: ignore[no-any-return]


class MatrixCall:
    """One product of a matrix of exactly the planned form and a tensor, on one device.

    The attributes are those of `gemmule.dispatch.torch.TorchCall`. planned: the form of the matrix,
    that of the tensor; first: the matrix is the first operand.
    """

    __slots__ = ("checked", "out_seen", "trusted")

    def __init__(
        self, trusted: Product, call: Call, planned: tuple[Form, Form], first: bool, ordinal: int
    ) -> None:
        torch = sys.modules["torch"]
        dtype, shape = getattr(torch, call.problem.out), torch.Size(call.out_shape)
        self.out_seen = (dtype, shape, c_strides(call.out_shape), ordinal)
        self.trusted = trusted
        self.checked = checked_pair(trusted, self.out_seen, planned, first)


def codes_call(
    launcher: Launcher | ByLibrary, call: Call, a: Form, b: Form, ordinal: int
) -> MatrixCall:
    """Return the short way beside a quantised matrix."""
    first = a.quant is not None
    matrix, vector = (a, b) if first else (b, a)
    trusted = _trusted(launcher, call, vector, first, ordinal)
    return MatrixCall(trusted, call, (matrix, vector), first, ordinal)


def checked_pair(
    trusted: Product, out_seen: Signature, planned: tuple[Form, Form], first: bool
) -> Product:
    """Return what compares a matrix of this package's own and a tensor with the planned forms.

    planned: that of the matrix, that of the tensor; first: the matrix is the first operand.
    """
    torch = sys.modules["torch"]
    tensor, ordinal, dual = torch.Tensor, out_seen[3], torch.autograd.forward_ad
    kind, form = _kind(planned[0]), planned[1]
    seen_x = (getattr(torch, form.dtype), torch.Size(form.shape), form.strides, ordinal)
    known_x: Callable[..., bool] | None = None
    known_pair: Callable[..., bool] | None = None

    def same(one: Any, seen: Signature) -> bool:
        return bool(
            type(one) is tensor
            and (one.dtype, one.shape, one.stride(), one.get_device()) == seen
            and not one.is_neg()
        )

    def checked(a: Any, b: Any, out: Any) -> Any:
        nonlocal known_x, known_pair
        matrix, x = (a, b) if first else (b, a)
        signature = own_signature(matrix)
        if signature is None or signature[0] is not kind or signature[3] != ordinal:
            return None
        if dual._current_level >= 0:
            pass  # a guard does not see what forward differentiation knows
        elif out is None:
            if known_x is not None and known_x(x):
                return trusted(a, b, out)
        elif known_pair is not None and known_pair(x, out):
            return trusted(a, b, out)
        if out is not None and (not same(out, out_seen) or out.requires_grad):
            return None
        if not same(x, seen_x) or wanted(a, b):
            return None
        if x.requires_grad:
            pass  # a guard that was made under no_grad would let a gradient be lost later
        elif out is None and known_x is None:
            known_x = guards(x)
        elif out is not None and known_pair is None:
            known_pair = guards(x, out)
        return trusted(a, b, out)

    return checked


def _trusted(
    launcher: Launcher | ByLibrary, call: Call, vector: Form, first: bool, ordinal: int
) -> Product:
    torch = sys.modules["torch"]
    native = torch._C
    device_of, stream_of = native._cuda_getDevice, native._cuda_getCurrentRawStream
    written = native._increment_version  # a gradient that needs what was there has to fail
    shape, dtype = call.out_shape, getattr(torch, call.problem.out)
    fresh = maker(shape, dtype, ordinal)
    x_bytes = extent(vector)
    out_bytes = torch.Size(shape).numel() * ITEMSIZE[call.problem.out]
    mask = call.problem.alignment - 1
    start = _start(launcher, ordinal)

    def trusted(a: Any, b: Any, out: Any) -> Any:
        if device_of() != ordinal:
            return None
        matrix, x = (a, b) if first else (b, a)
        at = x.data_ptr()
        if out is None:
            out = fresh()
            result = out.data_ptr()
        else:
            result = out.data_ptr()
            if result < at + x_bytes and at < result + out_bytes:
                return None  # out may overlap x
            written([out])
        if (at | result) & mask or not (at and result):
            return None
        start(stream_of(ordinal), (*matrix.kept(known).addresses, at, result))
        return out

    return trusted


def _start(launcher: Launcher | ByLibrary, ordinal: int) -> Launch:
    """Return what starts a launcher's kernels: the only one, or all of them."""
    if isinstance(launcher, ByLibrary):
        return launcher.starter(ordinal, maker)
    if len(launcher.steps) > 1 or launcher.workspace or launcher.steps[0].pdl:
        return steps_starter(launcher, ordinal, 6)
    launch, local, pack_into = launch_function(), threading.local(), MOVING.pack_into
    template, step, function = launcher.template, launcher.steps[0], kernel_of(launcher, ordinal)
    attributes = int(step.cluster != (1, 1, 1))

    def start(stream: int, addresses: tuple[int, ...]) -> None:
        try:
            buffer, address, params, attribute = local.slot
        except AttributeError:
            buffer, address, params, attribute = local.slot = slot(template, step)
        pack_into(buffer, MOVING_AT, stream, attribute, attributes, *addresses)
        code = launch(address, function, params, None)
        if code:
            raise failed(code, step)

    return start


def call_with_bias(run: Run, choice: Choice, ordinal: int) -> Added | None:
    """Return what computes a planned product and adds a bias in one launch, or None."""
    rung, problem = choice.rung, choice.problem
    if type(run) is not Launcher or not isinstance(rung, CudaRung) or not rung.adds:
        return None
    if len(run.offsets) != 1 or len(run.steps) != 1 or run.workspace or run.steps[0].pdl:
        return None
    if problem.outputs == 0 or not is_proved(rung, problem, choice.machine.arch, bias=True):
        return None
    return _adding(Launcher(choice, adds=True), choice.call, ordinal)


def _adding(launcher: Launcher, call: Call, ordinal: int) -> Added:
    torch = sys.modules["torch"]
    native = torch._C
    device_of, stream_of = native._cuda_getDevice, native._cuda_getCurrentRawStream
    dtype = getattr(torch, call.problem.out)
    fresh = maker(call.out_shape, dtype, ordinal)
    mask = call.problem.alignment - 1
    start = _start_with_bias(launcher, ordinal)

    def added(matrix: Any, x: Any, bias: Any) -> Any:
        at = x.data_ptr()
        if device_of() != ordinal or at & mask or not at:
            return None
        out = fresh()
        addresses = (*matrix.kept(known).addresses, at, out.data_ptr())
        start(stream_of(ordinal), addresses, bias.data_ptr())
        return out

    return added


def _start_with_bias(
    launcher: Launcher, ordinal: int
) -> Callable[[int, tuple[int, ...], int], None]:
    """Return what starts the only kernel, as `_start` does, and takes a bias as well."""
    launch, local, pack_into = launch_function(), threading.local(), MOVING.pack_into
    template, step, function = launcher.template, launcher.steps[0], kernel_of(launcher, ordinal)
    attributes = int(step.cluster != (1, 1, 1))
    place_bias = launch_args.BIAS.pack_into
    bias_at = CONFIG.size + len(template) - launch_args.BIAS.size

    def start(stream: int, addresses: tuple[int, ...], bias: int) -> None:
        try:
            buffer, address, params, attribute = local.slot
        except AttributeError:
            buffer, address, params, attribute = local.slot = slot(template, step)
        pack_into(buffer, MOVING_AT, stream, attribute, attributes, *addresses)
        place_bias(buffer, bias_at, bias)
        code = launch(address, function, params, None)
        if code:
            raise failed(code, step)

    return start
