"""`prepare`: what products would do to the same operand each time, done once."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import numpy as np

from gemmule import backends
from gemmule.arrays.interop import unwrap
from gemmule.arrays.prepared import PreparedMatrix, prepared_by
from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.backends.cuda.packed import making
from gemmule.choose import choose
from gemmule.core import memory
from gemmule.core.canonical import Call, Options, canonical
from gemmule.core.operand import Form, Operand
from gemmule.core.packing import SIDES, HostPacked, HostPacking
from gemmule.core.problem import FLOATS, layout_of
from gemmule.core.registry import all_rungs
from gemmule.core.rung import CpuRung, CudaRung, Machine, Rung
from gemmule.quant.matrix import QuantizedMatrix

LITERAL = Options(literal=True)
# Of the other operand: a rung that plans choose for none of these packs nothing.
ROWS = tuple(2**power for power in range(4, 15))


def prepare(B: Any, /, *, side: str = "right", rung: str | None = None) -> Any:
    """Return B in the form that matrix products read, made once for many products.

    Parameters
    ----------
    B : array (..., k, n) of floats with any strides, or QuantizedMatrix.
    side : ``"right"`` for the second operand of `gemmule.matmul`, ``"left"`` for the first.
    rung : pack for this rung, whatever plans would choose (default: for those that they choose
        for 16 to 16,384 rows of the other operand).

    Returns
    -------
    PreparedMatrix, on B's device: a copy of B, contiguous and aligned, and beside it what rungs
    otherwise make of B in each call. It stands wherever B does, in `matmul`, ``@``, `gemm`, `plan`,
    and `vecmat` (a left one: `matvec`), with all their options. Of a QuantizedMatrix: the matrix in
    the layout that plans prefer on its device.

    Raises
    ------
    TypeError for other dtypes and for what is no array; ValueError for fewer than two axes, for an
    unknown side, and for a rung that packs nothing or does not take B; DeviceError where the device
    has no room; CompileError.

    Promised: a product has the bits that it has with a contiguous copy of B, in B's own order, in
    its place. What becomes of B afterwards has no effect. On the host a pickle of the result packs
    anew where it is read, for the rungs of that processor. On a GPU the work is done when `prepare`
    returns, so the result may be used on any stream, but no graph may be being captured. Not
    promised: gradients. It has none, and an operand beside it that asks for one is refused.

    >>> import numpy as np, gemmule as gm
    >>> B = np.array([[1.0, 2.0], [3.0, 4.0]])
    >>> P = gm.prepare(B)
    >>> B[:] = 0
    >>> np.eye(2) @ P
    array([[1., 2.],
           [3., 4.]])
    >>> P.shape, P.side, P.T.side
    ((2, 2), 'right', 'left')
    """
    if side not in SIDES:
        raise ValueError(f"side is {side!r}; it must be 'left' or 'right'.")
    if isinstance(B, QuantizedMatrix):
        return _quantized(B, rung)
    if isinstance(B, PreparedMatrix):
        raise TypeError("the matrix is prepared already; give the array that it was made from.")
    operand = unwrap(B, "B")
    form = operand.form
    if form.dtype not in FLOATS:
        raise TypeError(
            f"B has dtype {form.dtype}; prepared are {', '.join(FLOATS)}. Give products the array "
            "itself: they would do nothing with it more than once."
        )
    if len(form.shape) < 2:
        raise ValueError(
            f"B has shape {form.shape}; needed are two axes or more. A vector is read only once, "
            "so there is nothing to prepare."
        )
    made = _on_host if operand.device == "cpu" else _on_device
    return made(operand, side, rung)


def _quantized(Q: QuantizedMatrix, rung: str | None) -> QuantizedMatrix:
    if rung is not None:
        raise ValueError(
            f"rung={rung!r} was given with a quantised matrix, which has one layout for all rungs. "
            "Choose it with Q.to(layout=...), or leave rung away."
        )
    return Q if Q.device == "cpu" else Q.to(layout="mma16")


def _on_host(operand: Operand, side: str, rung: str | None) -> PreparedMatrix:
    array, form = operand.array, operand.form
    by_columns = layout_of(form.shape[-2:], form.strides[-2:]) == "col"
    memory.require(array.nbytes, "the copy of B")
    turned = array.swapaxes(-1, -2) if by_columns else array
    copy = np.array(turned, order="C", copy=True)
    copy = copy.swapaxes(-1, -2) if by_columns else copy
    return _host_matrix(copy, side, rung)


def _host_matrix(
    array: np.ndarray[Any, Any], side: str, rung: str | None, more: Container[str] = ()
) -> PreparedMatrix:
    """Return an array, which nobody else has, beside what rungs make of it.

    more: names of rungs to pack for, where they take it on this processor.
    """
    array.flags.writeable = False
    dtype, machine = array.dtype.name, backends.get("cpu").machine("cpu")
    steps = tuple(step // array.itemsize for step in array.strides)
    form = Form(array.shape, steps, dtype, min(array.itemsize, 16))
    made: dict[Any, tuple[HostPacked, ...] | None] = {}
    packed = {}
    for packer in _packers(form, side, machine, rung, more):
        packing = packer.packing if isinstance(packer, CpuRung) else None
        if packing is None:
            continue
        if packing.pack not in made:
            made[packing.pack] = _host_planes(packing, array, form, side)
        planes = made[packing.pack]
        if planes is not None:
            packed[packer.name] = planes
    reason = "" if packed else "no rung that plans choose for it reads a packed form"
    return PreparedMatrix(array, dtype, side, packed, reason)


def _host_planes(
    packing: HostPacking, array: np.ndarray[Any, Any], form: Form, side: str
) -> tuple[HostPacked, ...] | None:
    """Return what a rung makes of each entry of a batch, None where it makes nothing."""
    problem = _product(form._replace(shape=form.shape[-2:], strides=form.strides[-2:]), side, 1)
    made = []
    for index in np.ndindex(array.shape[:-2]):
        one = packing.pack(problem.problem, "ab"[SIDES.index(side)], array[index])
        if one is None:
            return None
        made.append(one)
    return tuple(made)


def _again(array: np.ndarray[Any, Any], side: str, rungs: tuple[str, ...]) -> PreparedMatrix:
    """Return a matrix that came as a pickle, packed for what this processor has."""
    return _host_matrix(array, side, None, rungs)


prepared_by(_again)


def _packers(
    form: Form, side: str, machine: Machine, named: str | None, more: Container[str] = ()
) -> Iterator[CudaRung | CpuRung]:
    """Yield the rungs to pack for: the named one, or those that plans choose for some product."""
    found = [rung for rung in all_rungs(machine.backend) if _packs(rung, machine)]
    able, largest = [rung.name for rung in found], _product(form, side, ROWS[-1])
    if named is not None:
        found = [rung for rung in found if rung.name == named]
        if not found:
            raise ValueError(
                f"rung {named!r} packs none of its operands on {machine.arch}; those that do: "
                f"{', '.join(able) or 'none'}."
            )
        refusal = found[0].refusal(largest.problem)
        if refusal is not None:
            raise ValueError(f"rung {named} does not take this matrix: {refusal}.")
    elif 0 in form.shape:
        return
    else:
        chosen = {choose(_product(form, side, rows), machine).rung for rows in ROWS}
        free = {one.packing.pack for one in chosen if isinstance(one, CpuRung) and one.packing}
        found = [
            rung
            for rung in found
            if rung in chosen
            or (
                (rung.name in more or _costs_nothing(rung, free))
                and rung.refusal(largest.problem) is None
            )
        ]
    yield from (rung for rung in found if isinstance(rung, CudaRung | CpuRung))


def _packs(rung: Rung, machine: Machine) -> bool:
    if isinstance(rung, CudaRung):
        return rung.packing is not None and machine.arch in rung.archs
    return isinstance(rung, CpuRung) and rung.packing is not None


def _costs_nothing(rung: Rung, made: Container[Any]) -> bool:
    """Whether what a rung reads is the copy itself, or made for another rung anyway."""
    if isinstance(rung, CpuRung):
        return rung.packing is not None and rung.packing.pack in made
    return isinstance(rung, CudaRung) and rung.packing is not None and rung.packing.is_copy


def _product(form: Form, side: str, rows: int) -> Call:
    """Return the product of a matrix with another one of so many rows (a left one: columns)."""
    batch, (k, n) = form.shape[:-2], form.shape[-2:]
    if side == "left":
        return canonical("matmul", form, Form.packed((*batch, n, rows), form.dtype), None, LITERAL)
    return canonical("matmul", Form.packed((*batch, rows, k), form.dtype), form, None, LITERAL)


def _on_device(operand: Operand, side: str, rung: str | None) -> PreparedMatrix:
    ordinal = device_arrays.ordinal_of(operand)
    stream = device_arrays.current_stream(operand, ordinal)
    machine = backends.get("cuda").machine(operand.device)
    array = making.copied(operand, stream)
    dtype = operand.form.dtype
    packed: dict[str, DeviceArray] = {}
    form = device_arrays.form_of(array.pointer, array.shape, array.strides, dtype)
    for packer in _packers(form, side, machine, rung):
        if not isinstance(packer, CudaRung):
            continue
        made = making.packed(packer, machine, array, side, stream)
        packed[packer.name] = made
        if packer.packing is not None and packer.packing.is_copy:
            array = made
    driver.wait(stream, ordinal)
    reason = "" if packed else "no rung that plans choose for it reads a packed form"
    return PreparedMatrix(array, dtype, side, packed, reason)
