"""Batch axes: how operands are broadcast along them, and which of them one stride walks."""

from __future__ import annotations

from typing import NamedTuple

from gemmule.core.operand import Ints


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
    axes = [(size, [steps[i] for steps in strides]) for i, size in enumerate(shape) if size != 1]
    merged: list[tuple[int, list[int]]] = []
    for size, steps in axes:
        if merged and merged[-1][1] == [step * size for step in steps]:
            merged[-1] = (merged[-1][0] * size, steps)
        else:
            merged.append((size, steps))
    columns = tuple(tuple(steps[i] for _, steps in merged) for i in range(3))
    return Batch(tuple(size for size, _ in merged), (columns[0], columns[1], columns[2]))
