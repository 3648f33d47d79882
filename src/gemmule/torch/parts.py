"""A quantised matrix as PyTorch's tensors: the order they lie in, and the matrix they stand for.

A layer holds its codes once, in the order that products read where they lie: canonical (``row``) on
the host, fragments (``mma16``) on a GPU, where scales and zero points lie group by group. What is
saved or leaves the GPU is canonical, bit for bit. Memory is PyTorch's throughout.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.problem import FLOAT4, FLOAT8_CODES
from gemmule.dispatch.torch_repeats import Known, known
from gemmule.quant import checks, rounding
from gemmule.quant.cuda.fragment_order import LAYOUT
from gemmule.quant.files import NOT_NUMPYS
from gemmule.quant.layouts import get_layout
from gemmule.quant.library import closed
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.torch.on_host import HostCalls
from gemmule.torch.spread import refuse_spread

PARTS = ("codes", "scales", "zeros", "perm")
Parts = tuple[Any, ...]  # tensors in the order of PARTS, None where a matrix has none
Move = Callable[[torch.Tensor], torch.Tensor]


class Shape(NamedTuple):
    """What a matrix is beside its parts: stored rows and columns, bits of a code, group size."""

    rows: int
    columns: int
    bits: int
    group_size: int | None

    def order_of(self, codes: torch.Tensor) -> str:
        """Return the layout of codes. Their shape tells it: no matrix has two of one shape."""
        there = get_layout(LAYOUT).storage_shape(self.rows, self.columns, self.bits)
        return LAYOUT if tuple(codes.shape) == there and 0 not in there else "row"

    def order_at(self, codes: torch.Tensor) -> str:
        """Return the layout that products read where codes lie."""
        return order_at(codes)


class StackShape(Shape):
    """The same of a stack's matrix, whose products read rows of codes wherever they lie."""

    __slots__ = ()

    def order_at(self, codes: torch.Tensor) -> str:
        """Return ``row``."""
        return "row"


def order_at(codes: torch.Tensor) -> str:
    """Return the layout that products read where codes lie."""
    return LAYOUT if codes.is_cuda else "row"


# --- the matrix that tensors stand for ------------------------------------------------------------


_ELSEWHERE = Known(None, {}, 0)


class Held:
    """The matrix that tensors stand for, as long as their `state` is this one.

    addresses, others, known: of tensors whose memory the matrix reads as it is, where the codes lie
    and the others that belong to them, and what calls need on a GPU; calls: those on the host.
    Writing to tensors on a GPU needs nothing to be made anew, but for a permutation, whose
    `version` that is; on the host it is that of all.
    """

    __slots__ = ("addresses", "calls", "codes", "known", "matrix", "others", "state", "version")

    def __init__(self, parts: Parts, state: Any, matrix: QuantizedMatrix) -> None:
        key = id(parts[0])
        self.codes: Any = weakref.ref(parts[0], lambda _: HELD.pop(key, None))
        self.state, self.matrix = state, matrix
        self.known, self.calls = _ELSEWHERE, None
        tensors = [part for part in parts if part is not None]
        own = (matrix.codes, matrix.scales, matrix.zeros, matrix.perm)
        addresses = [part.data_ptr() for part in tensors]
        there = [_address(part) for part in own if part is not None]
        if addresses != there:
            return
        self.addresses, self.others = addresses, parts[1:]
        if matrix.device == "cpu":
            self.calls = matrix.kept(HostCalls)
            self.version = [*map(version, tensors)]
        else:
            self.known = known(matrix)
            self.version = [version(part) for part in parts[3:] if part is not None]

    def stands_for(self, codes: Any, scales: Any, zeros: Any, perm: Any) -> bool:
        """Tell whether tensors lie where they lay when the matrix was made, as they were."""
        if (self.known is _ELSEWHERE and self.calls is None) or self.codes() is not codes:
            return False
        others, at = self.others, self.addresses
        if scales is not others[0] or zeros is not others[1] or perm is not others[2]:
            return False
        if codes.data_ptr() != at[0] or scales.data_ptr() != at[1]:
            return False
        if zeros is not None and zeros.data_ptr() != at[2]:
            return False
        if perm is not None and perm.data_ptr() != at[-1]:
            return False
        if self.calls is None:
            return perm is None or version(perm) == self.version[0]
        written = [version(part) for part in (codes, scales, zeros, perm) if part is not None]
        return written == self.version

    def wants_gradients(self) -> bool:
        """Tell whether a derivative by scales or zero points is asked for, which there is none."""
        scales, zeros, _ = self.others
        return bool(scales.requires_grad or (zeros is not None and zeros.requires_grad))


def _address(part: Any) -> int:
    return part.pointer if isinstance(part, DeviceArray) else int(part.ctypes.data)


HELD: dict[int, Held] = {}  # by the id of the codes


def matrix_of(parts: Parts, shape: Shape) -> QuantizedMatrix:
    """Return the matrix that tensors stand for, checked once for as long as they do not change.

    What kernels keep of a matrix stays with it. Of codes on a GPU that do not lie as kernels read
    them it holds a copy.
    """
    codes = parts[0]
    held = HELD.get(id(codes))
    if held is not None and held.state[-1] == shape and held.stands_for(*parts):
        return held.matrix
    state = (*map(_state, parts), shape)
    if held is not None and held.codes() is codes and held.state == state:
        return held.matrix
    refuse_spread(*parts)
    if codes.is_meta:
        raise TypeError(
            "the layer's codes lie on the device meta, which holds no data. Fill it first: "
            'load_state_dict(..., assign=True), or .to_empty(device="cpu") and load_state_dict.'
        )
    matrix = _matrix(parts, shape).to(layout=shape.order_at(codes))
    _check_perm(parts[3], shape)
    HELD[id(codes)] = Held(parts, state, matrix)
    return matrix


def _state(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, version(tensor)


def version(tensor: torch.Tensor) -> int:
    """Return a number that grows as PyTorch writes to a tensor's memory."""
    return 0 if tensor.is_inference() else tensor._version


def _matrix(parts: Parts, shape: Shape) -> QuantizedMatrix:
    """Return the matrix of tensors in the order that they are in, its shapes and dtypes checked."""
    layout = shape.order_of(parts[0])
    # Detached: what the matrix holds must not keep the tensors themselves alive.
    own: list[Any] = [
        None if part is None else closed(_lying(part.detach(), name, layout))
        for name, part in zip(PARTS, parts, strict=True)
    ]
    form: dict[str, Any] = {"bits": shape.bits, "group_size": shape.group_size, "layout": layout}
    codes, scales, zeros, perm = own
    if isinstance(codes, np.ndarray):
        given = {"shape": shape[:2], "perm": perm}
        return QuantizedMatrix.from_parts(codes, scales, zeros, **given, **form)
    check_on_device(parts, shape, layout)
    given = {"stored_shape": shape[:2], "device": codes.device}
    return QuantizedMatrix(codes, scales, zeros, perm, **given, **form)


def _lying(part: torch.Tensor, name: str, layout: str) -> torch.Tensor:
    """Return a part as it lies beside codes of a layout, itself where it does."""
    if name in ("scales", "zeros") and part.ndim == 2 and get_layout(layout).scale_order == "F":
        return part if part.T.is_contiguous() else part.T.contiguous().T
    return part.contiguous()


def check_on_device(parts: Parts, shape: Shape, layout: str) -> None:
    """Raise ValueError or TypeError for parts on a GPU of another shape, place or dtype."""
    m, n, bits, group_size = shape
    count = (1, 1) if group_size is None else (m, rounding.group_count(n, group_size))
    beside = (m, 1) if rounding.dtype_name(parts[1]) in FLOAT4 else count
    wanted = (get_layout(layout).storage_shape(m, n, bits), count, beside, (n,))
    dtypes = (("uint8", FLOAT8_CODES), (*checks.SCALE_DTYPES, *FLOAT4), ("float32",), ("int32",))
    for name, part, size, taken in zip(PARTS, parts, wanted, dtypes, strict=True):
        if part is not None and (tuple(part.shape) != size or part.device != parts[0].device):
            raise ValueError(f"{name} has shape {tuple(part.shape)} on {part.device}, not {size}")
        if part is not None and rounding.dtype_name(part) not in taken:
            raise TypeError(f"{name} has dtype {part.dtype}, but must be {' or '.join(taken)}")


def _check_perm(perm: torch.Tensor | None, shape: Shape) -> None:
    if perm is not None and not torch.equal(perm.sort().values, torch.arange(len(perm)).to(perm)):
        raise ValueError(f"perm is no permutation of 0..{shape.columns - 1}")


# --- their order ----------------------------------------------------------------------------------


def placed(parts: Parts, shape: Shape) -> Parts:
    """Return tensors in the order that products read where they lie: themselves if they do."""
    return ordered(parts, shape, shape.order_at(parts[0]))


def ordered(parts: Parts, shape: Shape, layout: str) -> Parts:
    """Return tensors in an order, themselves where they are in it or hold no data.

    Layers that share them are given the same ones, as long as these live and nobody writes to them.
    """
    if _is_in_order(parts, shape, layout):
        return parts
    return _shared(parts, layout, lambda: reordered(parts, shape, layout))


def _is_in_order(parts: Parts, shape: Shape, layout: str) -> bool:
    if parts[0].is_meta or isinstance(parts[0], torch._subclasses.FakeTensor):
        return True
    turned = get_layout(layout).scale_order == "F"
    return shape.order_of(parts[0]) == layout and all(
        part is None or part.ndim != 2 or (part.T if turned else part).is_contiguous()
        for part in parts[1:3]
    )


def reordered(parts: Parts, shape: Shape, layout: str) -> Parts:
    """Return copies of tensors in an order; themselves where they have it."""
    if _is_in_order(parts, shape, layout):
        return parts
    matrix = _matrix(parts, shape).to(layout=layout)
    return (*map(tensor_of, (matrix.codes, matrix.scales, matrix.zeros)), parts[3])


def tensor_of(part: Any) -> torch.Tensor | None:
    """Return a part of a matrix as a tensor: of NumPy's a copy, of a device's the same memory."""
    if part is None:
        return None
    if not isinstance(part, np.ndarray):
        if not isinstance(part.owner, torch.Tensor):
            return torch.from_dlpack(part)
        made = torch.empty(0, dtype=getattr(torch, part.dtype), device=part.owner.device)
        storage = part.owner.untyped_storage()
        offset = (part.pointer - storage.data_ptr()) // made.itemsize
        return made.set_(storage, offset, part.shape, part.strides)
    if part.dtype.name in NOT_NUMPYS:
        bits = torch.from_numpy(part.view(f"int{8 * part.itemsize}").copy())
        return bits.view(getattr(torch, part.dtype.name))
    return torch.from_numpy(part.copy())


def moved(parts: Parts, move: Move, shape: Shape) -> Parts:
    """Return tensors where `move` takes them, their numbers as they are, in the order read there.

    They are shown to it as integers, so that they follow to a device but not to another dtype. All
    layers that have them are given the same ones: they stay tied.
    """
    codes = parts[0]

    def make() -> Parts:
        there = shape.order_at(move(codes.new_empty(0, dtype=torch.int8)))
        given = reordered(parts, shape, "row") if there != shape.order_at(codes) else parts
        found = tuple(None if part is None else _taken(part, move) for part in given)
        return reordered(found, shape, shape.order_at(found[0]))

    return _shared(parts, move, make)


def _taken(part: torch.Tensor, move: Move) -> torch.Tensor:
    shown = part.view(getattr(torch, f"int{8 * part.itemsize}"))
    found = move(shown)
    if found.dtype != shown.dtype:  # `.type()` converts everything
        found = shown.to(found.device)
    stays = found.untyped_storage()._cdata == shown.untyped_storage()._cdata
    return part if stays else found.view(part.dtype)


# --- layers that share them -----------------------------------------------------------------------

_latest: Any = WeakTensorKeyDictionary()  # what was made of codes and their others last, and how


def _shared(parts: Parts, how: Any, make: Callable[[], Parts]) -> Parts:
    """Return ``make()``, or what it gave for the same tensors before, so that they stay shared.

    That holds as long as those live and nobody writes to either. how: the same object where it
    makes the same of them; where it is another, bits are compared.
    """
    by, references, then = _latest.get(parts[0], (None, [None] * 2 * len(PARTS), None))
    both = [None if one is None else one() for one in references]
    given, there = both[: len(PARTS)], tuple(both[len(PARTS) :])
    as_then = all(map(operator.is_, given, parts)) and _versions(both) == then
    if as_then and by() is how:
        return there
    made = make()
    if all(map(operator.is_, made, parts)):
        return parts
    if as_then and all(map(_alike, made, there)):
        return there
    method = (lambda: how) if isinstance(how, str) else weakref.ref(how)
    both = [*parts, *made]
    references = [None if one is None else weakref.ref(one) for one in both]
    _latest[parts[0]] = method, references, _versions(both)
    return made


def _versions(tensors: list[Any]) -> list[int | None]:
    """Return what tells that none is gone and nobody wrote to any."""
    return [None if tensor is None else version(tensor) for tensor in tensors]


def _alike(one: Any, other: Any) -> bool:
    """Tell whether two parts are of the same bits in the same place."""
    if one is None or other is None:
        return one is other
    if (one.device, one.shape, one.dtype) != (other.device, other.shape, other.dtype):
        return False
    bits = getattr(torch, f"int{8 * one.itemsize}")
    return bool(one.is_meta or torch.equal(one.view(bits), other.view(bits)))
