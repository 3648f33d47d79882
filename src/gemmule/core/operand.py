"""What a product needs to know of an array: `Form` (all but its address), `Operand`, and `View`.

`Factor` is what this package's own operands have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gemmule.core.packing import Ready
from gemmule.core.problem import ITEMSIZE, QuantSpec, layout_of, numpy_dtype

Ints = tuple[int, ...]


class Form(NamedTuple):
    """All of an operand but its address: what a plan is made for. Strides count elements.

    `alignment` in bytes, of the address alone: on a device the largest power of two, at most 16,
    that divides it; on the host the element's own, which is all that host kernels rely on. What
    strides allow depends on how a product walks them, so `gemmule.core.canonical` counts them in.
    `ready`: of a prepared operand.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    alignment: int
    quant: QuantSpec | None = None
    ready: Ready | None = None

    @classmethod
    def packed(cls, shape: Ints, dtype: str) -> Form:
        """Return that of a C-ordered array at an address of any alignment that is asked for."""
        return cls(shape, c_strides(shape), dtype, 16)


class Operand(NamedTuple):
    """One array of a call: an ndarray view on the host, the foreign object on a device."""

    array: Any
    pointer: int
    form: Form
    device: str
    library: str
    original: Any

    @property
    def kind(self) -> str:
        """Library and device, for messages."""
        return f"{self.library} array on {self.device}"


def alignment_of(pointer: int) -> int:
    """Return the largest power of two, at most 16, that divides an address."""
    bits = pointer | 16
    return bits & -bits


def extent(operand: Operand) -> tuple[int, int]:
    """Return the first address that the operand's elements touch and the one behind the last."""
    if 0 in operand.form.shape:
        return operand.pointer, operand.pointer
    itemsize = numpy_dtype(operand.form.dtype).itemsize
    reach = [
        (size - 1) * step
        for size, step in zip(operand.form.shape, operand.form.strides, strict=True)
    ]
    low = operand.pointer + itemsize * sum(r for r in reach if r < 0)
    high = operand.pointer + itemsize * (sum(r for r in reach if r > 0) + 1)
    return low, high


class View(NamedTuple):
    """Shape and strides (in elements) under which a canonical operand sees its array."""

    shape: Ints
    strides: Ints


def c_strides(shape: Ints) -> Ints:
    """Return the strides, in elements, of a C-ordered array."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


class Batch(NamedTuple):
    """Batch axes, and the steps of A, of x or B, and of the result along them."""

    shape: Ints
    strides: tuple[Ints, Ints, Ints]


ALONE = Batch((), ((), (), ()))


def broadcast_strides(shape: Ints, strides: Ints, wanted: Ints) -> Ints:
    """Return the steps of an operand along the result's batch axes: 0 where it is broadcast."""
    lead = len(wanted) - len(shape)
    return (0,) * lead + tuple(
        0 if size == 1 and want != 1 else step
        for size, step, want in zip(shape, strides, wanted[lead:], strict=True)
    )


def collapse(shape: Ints, strides: tuple[Ints, Ints, Ints]) -> Batch:
    """Merge neighbouring batch axes that every operand walks with one stride; drop sizes of 1."""
    sizes, (a, b, out) = merged(shape, strides)
    return Batch(sizes, (a, b, out))


def merged(shape: Ints, strides: Sequence[Ints]) -> tuple[Ints, tuple[Ints, ...]]:
    """Merge neighbouring axes that all operands, however many, walk with one stride each."""
    axes = [(size, [steps[i] for steps in strides]) for i, size in enumerate(shape) if size != 1]
    found: list[tuple[int, list[int]]] = []
    for size, steps in axes:
        if found and found[-1][1] == [step * size for step in steps]:
            found[-1] = (found[-1][0] * size, steps)
        else:
            found.append((size, steps))
    columns = tuple(tuple(steps[i] for _, steps in found) for i in range(len(strides)))
    return tuple(size for size, _ in found), columns


def vector_alignment(form: Form, view: View, batch_steps: Ints) -> int:
    """Return the largest power of two, at most 16, that divides every place vectors start at.

    Those are the address, and the steps from one batch entry and from one row (column, where the
    layout says so) to the next. Only the step along which a kernel reads does not count. A batch
    that lies backwards is aligned to its elements alone: TMA knows no negative steps.
    """
    aligned = form.alignment
    if form.quant is not None:
        return aligned
    steps = list(batch_steps)
    if len(view.shape) == 2:
        leads = {"row": (0,), "col": (1,)}.get(layout_of(view.shape, view.strides), (0, 1))
        steps += [view.strides[axis] for axis in leads if view.shape[axis] > 1]
    for step in steps:
        aligned = min(aligned, power_of_two(step * ITEMSIZE[form.dtype]))
    backwards = any(step < 0 for step in batch_steps)
    return min(aligned, ITEMSIZE[form.dtype]) if backwards else aligned


def power_of_two(value: int) -> int:
    """Return the largest power of two, at most 16, that divides `value`."""
    bits = abs(value) | 16
    return bits & -bits


def deciding(left: Operand, right: Operand) -> Operand:
    """Return the operand whose library, device and stream the result takes.

    A matrix of this package's own (quantised, or kept on a device) goes with arrays of any library,
    so the operand beside it decides.
    """
    return right if left.library == "gemmule" else left


def _by_ufunc(own: Any, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
    """Multiply where `numpy.matmul` is called; refuse every other ufunc, and say what to do."""
    if ufunc is np.matmul and method == "__call__":
        if not options:
            return _product[0](*operands)
        if options.keys() == {"out"}:
            return _product[0](*operands, out=options["out"][0])
    raise TypeError(
        f"np.{ufunc.__name__} of a {type(own).__name__}: multiply by @, np.matmul or gemmule's "
        "functions; np.asarray(...) of it gives the numbers as an array."
    )


class _Universal:
    """``__array_ufunc__``: NumPy asks the class; CuPy asks the object, None leaves ``@`` to it."""

    def __get__(self, one: Any, owner: type) -> Any:
        return _by_ufunc if one is None else None


class Factor:
    """Base of this package's own operands: ``@`` is `gemmule.matmul`, whoever is asked for it."""

    __slots__ = ()

    # NumPy and CuPy leave ``x @ P`` to P, instead of making P an array first.
    __array_ufunc__: ClassVar[Any] = _Universal()
    __array_priority__: ClassVar[int] = 1000

    def __matmul__(self, other: Any) -> Any:
        """Return ``self @ other`` by `gemmule.matmul`, an array of the other operand's library."""
        return _product[0](self, other)

    def __rmatmul__(self, other: Any) -> Any:
        """Return ``other @ self`` by `gemmule.matmul`, an array of the other operand's library."""
        return _product[0](other, self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply where PyTorch meets it in ``@`` or `torch.matmul`; refuse all else."""
        if func.__name__ not in ("matmul", "__matmul__", "__rmatmul__") or len(args) != 2:
            return NotImplemented
        pair = args[::-1] if func.__name__ == "__rmatmul__" else args
        return _product[0](*pair, **(kwargs or {}))


def multiply_by(product: Callable[..., Any]) -> None:
    """Take the function behind ``@``, which stands above this module: `gemmule.matmul` itself."""
    _product[:] = [product]


def multiplied(left: Any, right: Any) -> Any:
    """Return `gemmule.matmul` of two operands, for what lies below it."""
    return _product[0](left, right)


_product: list[Callable[..., Any]] = []
