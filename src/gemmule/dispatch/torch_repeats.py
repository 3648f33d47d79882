"""Repeated products of tensors: guards that recognise operands, and the calls that served them.

To tell tensors apart by their attributes, and look a call up by what they say, takes the host 2 us
more than a guard, which compares with what was met and says yes or no. A matrix of this package's
own has a kind that is kept with it, so that the guard has the tensor beside it to look at.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from gemmule.arrays.interop import quantized_form
from gemmule.arrays.prepared import PreparedMatrix
from gemmule.backends.cuda.arrays import is_lazy, ordinal_named
from gemmule.backends.cuda.launch_args import addresses, packed_addresses
from gemmule.core.caches import table
from gemmule.core.canonical import Call
from gemmule.core.operand import Form, c_strides
from gemmule.dispatch.tracked import wanted
from gemmule.quant.matrix import QuantizedMatrix

Product = Callable[[Any, Any, Any], Any]
# What tells operands apart: dtype, shape, strides in elements, device; of a matrix its kind.
Signature = tuple[Any, Any, tuple[int, ...], int]

_Tensor, _dual = torch.Tensor, torch.autograd.forward_ad
_is_compiling = torch.compiler.is_compiling
MOST = 4096
MOST_GUARDS = 16  # made for one call; tensors of yet other flags are compared by attributes


# --- matrices of this package's own ---------------------------------------------------------------


class Kind:
    """A form on a device, equal to itself alone: quicker to look up than what it holds."""

    __slots__ = ("form", "ordinal")

    def __init__(self, form: Form, ordinal: int) -> None:
        self.form, self.ordinal = form, ordinal


class Known(NamedTuple):
    """What calls need of a matrix: its kind, None off the devices, and where it lies.

    places: what a launch is given for its address, by the rung that packed it; of codes or of an
    array that is read as it is by None. begin: the address of the array, or of the codes. parts:
    the first and last addresses of what codes have beside them, which no result may overlap.
    """

    kind: Kind | None
    places: Mapping[str | None, Any]
    begin: int
    parts: tuple[tuple[int, int], ...] = ()


_UNKNOWN = Known(None, {}, 0)
_kind = functools.lru_cache(maxsize=4096)(Kind)


def known(matrix: Any) -> Known:
    """Return what calls need of a matrix, found once and kept with it; itself where it is that."""
    given = type(matrix)
    if given is Known:
        return matrix  # type: ignore[no-any-return]
    if given is QuantizedMatrix:
        return matrix.kept(of_codes)  # type: ignore[no-any-return]
    if given is not PreparedMatrix or not matrix.is_cuda:
        return _UNKNOWN
    if matrix.signature is None:
        at, kind = matrix.operand.pointer, _kind(matrix.form, ordinal_named(matrix.device))
        places: dict[str | None, Any] = {rung: (at, matrix.address(rung)) for rung in matrix.rungs}
        matrix.signature = Known(kind, {**places, None: at}, at)
    return matrix.signature  # type: ignore[no-any-return]


def of_codes(matrix: QuantizedMatrix) -> Known:
    """Return what calls need of a quantised matrix; `QuantizedMatrix.kept` keeps it."""
    if matrix.device == "cpu":
        return _UNKNOWN
    kind = _kind(matrix.kept(quantized_form), ordinal_named(matrix.device))
    place = packed_addresses(matrix)
    beside = matrix.scales, matrix.zeros, matrix.perm
    parts = tuple(
        (at, at + part.nbytes)
        for at, part in zip(addresses(place, 4)[1:], beside, strict=True)
        if part is not None
    )
    return Known(kind, {None: place}, int.from_bytes(place[:8], "little"), parts)


def seen(operand: Any) -> Signature | None:
    """Return what tells a CUDA tensor or an own matrix apart; None: for the general path."""
    if type(operand) is not _Tensor:
        kind = known(operand).kind
        return None if kind is None else (kind, (), (), kind.ordinal)
    ordinal = operand.get_device()
    if ordinal < 0 or is_lazy(operand):
        return None  # such a view holds other values than its memory
    return operand.dtype, operand.shape, operand.stride(), ordinal


def form(signature: Signature) -> Form:
    """Return the form of a matrix, or of a 16-byte aligned tensor, with this signature."""
    dtype, shape, strides, _ = signature
    if isinstance(dtype, Kind):
        return dtype.form
    return Form(tuple(shape), strides, str(dtype).removeprefix("torch."), 16)


# --- the repeat guard -----------------------------------------------------------------------------


def guards(*tensors: Any) -> Callable[..., bool]:
    """Return PyTorch's own test for "like these": types, dtypes, devices, shapes, strides, flags.

    The flags tell a gradient that is asked for, autocast, vmap and the like. It compares three
    tensors in 0.3 us where Python's attributes take 0.9. It is no public interface, so a PyTorch
    without it goes the long way; it keeps no reference to the tensors.
    """
    with contextlib.suppress(Exception):  # whatever another version's private interface raises
        guards = torch._C._dynamo.guards.TensorGuards
        same: Callable[..., bool] = guards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
        if same(*tensors) is True:
            return same
    return _never


def _never(*tensors: Any) -> bool:
    return False


class RepeatGuard:
    """Whether operands are those that a product was planned for: a repetition, or at first sight.

    `operands` and `every` say quickly of a call's tensors, without and with an out, that they are
    like those of an earlier call. Where they say no, `admits` compares attribute by attribute.
    `kind` is that of the matrix of this package's own, which the `first` operand is or the other.
    asks: whether PyTorch is asked if it has to know of the product. adds: the third operand is a
    bias, not an out.
    """

    __slots__ = (
        *("_adds", "_asks", "_left", "_made", "_of_out", "_planned"),
        *("every", "first", "kind", "operands"),
    )

    def __init__(
        self, call: Call, forms: tuple[Form, Form], ordinal: int, *, asks: bool, adds: bool
    ) -> None:
        shape, dtype = call.out_shape, getattr(torch, call.problem.out)
        shape = (call.problem.m,) if adds else shape
        self._of_out = dtype, torch.Size(shape), c_strides(shape), ordinal
        own = [form for form in forms if form.quant is not None or form.ready is not None]
        self.kind = _kind(own[0], ordinal) if own else None
        self.first = not own or forms[0] is own[0]
        self._planned = [
            (getattr(torch, form.dtype), torch.Size(form.shape), form.strides, ordinal)
            for form in forms
            if not own or form is not own[0]
        ]
        self._adds, self._asks, self._left = adds, asks, MOST_GUARDS
        self._made: dict[int, list[Callable[..., bool]]] = {}  # by how many tensors they compare
        self.operands: Callable[..., bool] = _never
        self.every: Callable[..., bool] = _never

    def admits(self, tensors: tuple[Any, ...], out: Any) -> bool:
        """Compare with what was planned; operands like these are a repetition from then on."""
        given = tensors if out is None else (*tensors, out)
        if _dual._current_level < 0:
            for same in self._made.get(
                len(given), ()
            ):  # such as within torch.inference_mode, and outside
                if same(*given):
                    self._put(out, same)
                    return True
        for one, planned in zip(tensors, self._planned, strict=True):
            if type(one) is not _Tensor or seen(one) != planned:
                return False
        if out is None:
            if self._adds:
                return False
        elif self._adds:
            if not isinstance(out, _Tensor) or seen(out.detach()) != self._of_out:
                return False
        elif type(out) is not _Tensor or seen(out) != self._of_out or out.requires_grad:
            return False
        if self._asks and wanted(tensors[0], tensors[-1]):
            return False
        # A guard does not see forward differentiation, and one that was made under no_grad would
        # let a gradient be lost later.
        lost = self._asks and any(one.requires_grad for one in tensors)
        if not lost and _dual._current_level < 0 and self._left:
            self._left -= 1
            same = guards(*given)
            self._made.setdefault(len(given), []).append(same)
            self._put(out, same)
        return True

    def _put(self, out: Any, same: Callable[..., bool]) -> None:
        """Let a guard be the first to be asked."""
        if out is None:
            self.operands = same
        else:
            self.every = same


# --- calls by what they take ----------------------------------------------------------------------


class Repeats:
    """Bound calls by the operation, the shape of the matrix or its kind, and whether out was given.

    Beside a matrix of this package's own the tensor's shape takes part too. Each call tells by its
    guard whether operands are its own; those with the same key and another call take its place.
    """

    def __init__(self) -> None:
        self.calls: dict[Any, Product] = table()

    def again(self, op: str, a: Any, b: Any, out: Any) -> Any | None:
        """Return the product of operands like some met before, or None: nothing was done."""
        if _is_compiling():
            return None
        if type(a) is _Tensor is type(b):  # as `_key` has it, without calling that
            key: Any = (op, (a if op == "matvec" else b).shape, out is None)
        else:
            a, b = (one if type(one) is _Tensor else known(one) for one in (a, b))
            key = _key(op, a, b, out)
        call = self.calls.get(key)
        return None if call is None else call(a, b, out)

    def keep(self, op: str, operands: tuple[Any, Any, Any], call: Product) -> None:
        """Remember the bound call of operands that it just multiplied."""
        a, b = (one if type(one) is _Tensor else known(one) for one in operands[:2])
        key = _key(op, a, b, operands[2])
        if key is None:
            return
        if len(self.calls) >= MOST:
            self.calls.clear()
        self.calls[key] = call


def _key(op: str, a: Any, b: Any, out: Any) -> Any | None:
    """Return what calls of tensors, or of one and of what is known of a matrix, are kept by."""
    if type(b) is _Tensor:
        if type(a) is _Tensor:
            return op, (a if op == "matvec" else b).shape, out is None
        return None if a.kind is None else (op, a.kind, b.shape, out is None)
    if type(a) is _Tensor:
        return None if b.kind is None else (op, a.shape, b.kind, out is None)
    return None


REPEATS = Repeats()
