"""Packing one operand on its device: a copy, and what the packing passes of rungs write."""

from __future__ import annotations

from collections.abc import Sequence

from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import convert, driver, launch_args
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.backends.cuda.starter import kernels, loaded, starter
from gemmule.core.canonical import Options, canonical
from gemmule.core.operand import Form, Operand, c_strides
from gemmule.core.problem import ITEMSIZE, layout_of
from gemmule.core.rung import CudaRung, Machine

LITERAL = Options(literal=True)


def copied(operand: Operand, stream: int) -> DeviceArray:
    """Return a contiguous copy; one whose matrices lie by columns keeps that order."""
    form, ordinal = operand.form, device_arrays.ordinal_of(operand)
    (rows, cols), (row_step, col_step) = form.shape[-2:], form.strides[-2:]
    turned = layout_of((rows, cols), (row_step, col_step)) == "col"
    if turned:
        shape = (*form.shape[:-2], cols, rows)
        strides = (*form.strides[:-2], col_step, row_step)
        operand = operand._replace(form=form._replace(shape=shape, strides=strides))
    result = DeviceArray.empty(operand.form.shape, form.dtype, ordinal)
    convert.write(operand, result.pointer, form.dtype, stream)
    return result.mT if turned else result


def packed(
    rung: CudaRung, machine: Machine, array: DeviceArray, side: str, stream: int
) -> DeviceArray:
    """Return what the passes of a rung make of a contiguous array alone.

    Of a rung that packs by copying it is the array, with lines at multiples of 16 bytes; of others
    the bytes that the product reads.
    """
    packing = rung.packing
    if packing is None:
        raise TypeError(f"rung {rung.folder}/{rung.name} packs no operands.")
    form = device_arrays.form_of(array.pointer, array.shape, array.strides, array.dtype)
    rows, cols = array.shape[-2:]
    if side == "left":
        pair = form, Form.packed((cols, 0), array.dtype)
    else:
        pair = Form.packed((0, rows), array.dtype), form
    call = canonical("matmul", *pair, None, LITERAL)
    params = rung.defaults()
    steps = rung.steps(call.problem, params, machine)[: packing.passes]
    result = DeviceArray.empty(
        (rung.workspace(call.problem, params, machine),), "uint8", array.ordinal
    )
    module = kernels(rung, steps, machine.arch)
    template = launch_args.pack(call.problem, call)
    with driver.on_device(array.ordinal):
        start = starter(loaded(module, steps, template, array.ordinal), "4Q")
        start(stream, array.pointer, array.pointer, 0, result.pointer)
    return _lined_up(array, result) if packing.is_copy else result


def _lined_up(array: DeviceArray, memory: DeviceArray) -> DeviceArray:
    """Return the array as it lies in `memory`: in the same order, lines at multiples of 16 bytes.

    >>> from gemmule.backends.cuda.device_array import DeviceArray
    >>> _lined_up(DeviceArray(0, (2, 3, 5), (15, 5, 1), "float16", 0, None),
    ...     DeviceArray(64, (999,), (1,), "uint8", 0, None)).strides
    (24, 8, 1)
    """
    unit = 16 // ITEMSIZE[array.dtype]
    by_rows = layout_of(_last_two(array.shape), _last_two(array.strides)) == "row"
    inner, outer = array.shape[-1 if by_rows else -2], array.shape[-2 if by_rows else -1]
    lead = -(-inner // unit) * unit
    core = (lead, 1) if by_rows else (1, lead)
    batch = tuple(step * lead * outer for step in c_strides(array.shape[:-2]))
    strides = (*batch, *core)
    return DeviceArray(memory.pointer, array.shape, strides, array.dtype, array.ordinal, memory)


def _last_two(values: Sequence[int]) -> tuple[int, int]:
    return values[-2], values[-1]
