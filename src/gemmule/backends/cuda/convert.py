"""Device operands in a wider dtype, for products whose operands differ in theirs."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gemmule.backends.base import Run
from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import starter
from gemmule.core.operand import Form, Ints, Operand
from gemmule.core.problem import COMPLEX, ITEMSIZE
from gemmule.core.rung import Step

CTYPE = {"float64": "double", "float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
CTYPE |= {name: name for name in COMPLEX}
SOURCE = Path(__file__).with_suffix(".cu")
MOST_AXES, THREADS, MOST_BLOCKS = 8, 256, 8192
_ARGS = struct.Struct(f"<QQqq{MOST_AXES}q{MOST_AXES}q")


class Converting:
    """A run on operands of which some are converted first; `dtypes` in the canonical order."""

    def __init__(self, run: Run, dtypes: tuple[str, str]) -> None:
        self.run, self.dtypes = run, dtypes

    def __call__(self, a: Operand, b: Operand, out: Operand, alpha: complex, beta: complex) -> None:
        """Convert what is of another dtype, then run; both in the order of the stream."""
        a, b = (
            one if one.form.dtype == dtype else widened(one, dtype, out)
            for one, dtype in zip((a, b), self.dtypes, strict=True)
        )
        self.run(a, b, out, alpha, beta)


def widened(operand: Operand, dtype: str, like: Operand | None = None) -> Operand:
    """Return the operand's values in a float dtype that holds them all, packed in C order.

    A new array of the library of `like` (default: of the operand), written on its current stream;
    nothing waits for it. Raises DeviceError where it does not fit, and CompileError.
    """
    like = operand if like is None else like
    fresh = device_arrays.empty(operand.form.shape, dtype, like)
    ordinal = device_arrays.ordinal_of(operand)
    write(operand, fresh.pointer, dtype, device_arrays.current_stream(like, ordinal))
    return fresh


def write(operand: Operand, target: int, dtype: str, stream: int) -> None:
    """Write the operand's values to an address, in `dtype` and packed in C order."""
    form = operand.form
    if 0 in form.shape:
        return
    ordinal = device_arrays.ordinal_of(operand)
    kernel = f"convert<{CTYPE[form.dtype]}, {CTYPE[dtype]}>"
    for first, offset, count, axes in pieces(form):
        source = operand.pointer + offset * ITEMSIZE[form.dtype]
        packed = pack(source, target + first * ITEMSIZE[dtype], count, axes)
        starter.run(SOURCE, Step(kernel, grid(count), (THREADS, 1, 1)), packed, ordinal, stream)


def pieces(form: Form) -> Iterator[tuple[int, int, int, list[tuple[int, int]]]]:
    """Yield an array as launches walk it: at most MOST_AXES axes each.

    Of each piece: elements in front of it in C order, elements from the array's first to its own,
    how many it has, and its axes' sizes and steps.
    """
    axes = merged_axes(form.shape, form.strides)
    outer, inner = axes[:-MOST_AXES], axes[-MOST_AXES:]
    count = math.prod(size for size, _ in inner)
    for number, index in enumerate(np.ndindex(*(size for size, _ in outer))):
        offset = sum(i * step for i, (_, step) in zip(index, outer, strict=True))
        yield number * count, offset, count, inner


def grid(count: int) -> tuple[int, int, int]:
    """Return the blocks for so many elements."""
    return min(-(-count // THREADS), MOST_BLOCKS), 1, 1


def pack(source: int, target: int, count: int, axes: Sequence[tuple[int, int]]) -> bytes:
    """Return the struct of one launch: addresses, and of each axis its size and its step."""
    unused = [1] * (MOST_AXES - len(axes))
    sizes, steps = [size for size, _ in axes], [step for _, step in axes]
    return _ARGS.pack(source, target, count, len(axes), *sizes, *unused, *steps, *unused)


def merged_axes(shape: Ints, strides: Ints) -> list[tuple[int, int]]:
    """Return sizes and steps of the axes, neighbours that one step walks as one axis."""
    axes: list[tuple[int, int]] = []
    for size, step in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * step:
            axes[-1] = (axes[-1][0] * size, step)
        else:
            axes.append((size, step))
    return axes
