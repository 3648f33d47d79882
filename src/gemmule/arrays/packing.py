"""Packing a matrix for many products: which rungs it is packed for, and what they make of it."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import numpy as np

from gemmule import backends
from gemmule.backends.cuda.arrays import form_of
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.backends.cuda.packed import making
from gemmule.choose import choose
from gemmule.core.canonical import Call, Options, canonical
from gemmule.core.operand import Form
from gemmule.core.packing import SIDES, HostPacked, HostPacking
from gemmule.core.registry import all_rungs
from gemmule.core.rung import CpuRung, CudaRung, Machine, Rung

LITERAL = Options(literal=True)
# Of the other operand: a rung that plans choose for none of these packs nothing.
ROWS = tuple(2**power for power in range(4, 15))
Planes = tuple[HostPacked, ...]  # what a rung on the host made of each entry of a batch


def on_host(
    array: np.ndarray[Any, Any], side: str, rung: str | None, more: Container[str] = ()
) -> dict[str, Planes]:
    """Return what rungs make of an array, which nobody else has, by their names.

    rung: only this one. more: names of rungs to pack for, where they take it on this processor.
    """
    array.flags.writeable = False
    machine = backends.get("cpu").machine("cpu")
    steps = tuple(step // array.itemsize for step in array.strides)
    form = Form(array.shape, steps, array.dtype.name, min(array.itemsize, 16))
    made: dict[Any, Planes | None] = {}
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
    return packed


def on_device(
    array: DeviceArray, dtype: str, side: str, rung: str | None, stream: int
) -> tuple[DeviceArray, dict[str, DeviceArray]]:
    """Return a contiguous array, as the rungs that read a copy want it, and what rungs make of it.

    rung: only this one. The kernels may still run on `stream`.
    """
    machine = backends.get("cuda").machine(array.device)
    packed: dict[str, DeviceArray] = {}
    form = form_of(array.pointer, array.shape, array.strides, dtype)
    for packer in _packers(form, side, machine, rung):
        if not isinstance(packer, CudaRung):
            continue
        made = making.packed(packer, machine, array, side, stream)
        packed[packer.name] = made
        if packer.packing is not None and packer.packing.is_copy:
            array = made
    return array, packed


def _host_planes(
    packing: HostPacking, array: np.ndarray[Any, Any], form: Form, side: str
) -> Planes | None:
    """Return what a rung makes of each entry of a batch, None where it makes nothing."""
    problem = _product(form._replace(shape=form.shape[-2:], strides=form.strides[-2:]), side, 1)
    made = []
    for index in np.ndindex(array.shape[:-2]):
        one = packing.pack(problem.problem, "ab"[SIDES.index(side)], array[index])
        if one is None:
            return None
        made.append(one)
    return tuple(made)


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
