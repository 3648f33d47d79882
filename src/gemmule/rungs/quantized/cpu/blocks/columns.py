"""Many columns packed for register tiles, and results stored, whichever way they lie."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from gemmule.backends.cpu import simd
from gemmule.backends.cpu.intrinsics import load, narrow, store, widen
from gemmule.backends.cpu.jit import Intrinsic, Kernel, kernel, operation
from gemmule.backends.cpu.simd import LANES, Value
from gemmule.core.problem import ITEMSIZE
from gemmule.rungs._cpu_vectors import transposed
from gemmule.rungs.quantized.cpu.vector.activations import place_kernel

LINE_BYTES = 64  # of a cache


@functools.cache
def _put_lines(stored: str, places: tuple[int, ...], turned: bool) -> Intrinsic:
    """Return ``f(x, step, out, row_bytes)``: sixteen columns as float32, of some terms each.

    x: sixteen lines, `step` bytes apart, of a column each; where `turned`, sixteen vectors of a
    term each. Term i of all columns goes to row ``places[i]`` of out, whose rows lie row_bytes
    apart. Lines are read whole: those of columns are often a power of two apart.
    """
    squares, item = len(places) // LANES, ITEMSIZE[stored]

    def emit(builder: Any, x: Value, step: Value, out: Value, row_bytes: Value) -> None:
        rows: list[list[Value]] = [[] for _ in range(squares)]
        for i in range(LANES):
            line = builder.add(x, builder.mul(step, step.type(i)))
            for square in range(squares):
                raw = simd.load_vector(builder, line, stored, LANES * item * square)
                rows[square].append(widen(builder, raw, stored, "float32"))
        for square, some in enumerate(rows):
            for i, row in enumerate(some if turned else transposed(builder, some)):
                place = places[LANES * square + i]
                at = builder.add(out, builder.mul(row_bytes, row_bytes.type(place)))
                simd.store_vector(builder, row, at, 0)

    return operation(f"put_lines {stored} {places} {turned}", emit)


@functools.cache
def pack_kernel(stored: str, bits: int, words: bool, unit: str) -> Kernel:
    """Return ``f(x, column_step, term_step, columns, terms, out, width)``: a sliver of x.

    Steps in bytes; unit: the axis of unit stride, ``"depth"`` (terms), ``"width"`` (columns) or
    ``"none"``. out: rows of `width` float32, one a term, in the order of `place_kernel` within
    blocks of codes; what is not there, up to the end of a block, is 0.
    """
    place_of, block = place_kernel(bits, words), simd.block_columns(bits)
    read, write, zero = load(stored, "float32"), store("float32", "float32"), np.float32(0)
    in_vectors = unit != "none"
    # Terms from `low` on lie like the first ones, place_of(low) rows further.
    line = LANES if unit == "width" else LINE_BYTES // ITEMSIZE[stored]
    places = tuple(place_of.function(i) for i in range(line))
    put_lines = _put_lines(stored, places, unit == "width")

    @kernel
    def pack(
        x: int, column_step: int, term_step: int, columns: int, terms: int, out: int, width: int
    ) -> None:
        whole, step = terms // block, column_step
        if unit == "width":
            step = term_step
        for number in range((terms + block - 1) // block):
            here, to = x + number * block * term_step, out + number * block * width * 4
            done = 0
            if in_vectors and number < whole:
                done = columns // LANES * LANES
                for first in range(0, done, LANES):
                    for low in range(0, block, line):
                        at = here + first * column_step + low * term_step
                        row = to + 4 * (first + width * place_of(low))
                        put_lines(at, step, row, 4 * width)
            some = min(block, terms - number * block)
            for term in range(block):
                row = to + 4 * width * place_of(term)
                for column in range(done, width):
                    value = zero
                    if term < some and column < columns:
                        value = read(here + term * term_step + column * column_step, 0)
                    write(row, column, value)

    return pack


@functools.cache
def _store_lines(stored: str) -> Intrinsic:
    """Return ``f(sums, row_bytes, out, step)``: rows of sixteen sums, a line's, turned.

    Results of a column lie behind each other, `step` bytes from one column to the next. Lines are
    stored whole: a product's columns are often a power of two apart, and meet in few cache sets.
    """
    squares, item = LINE_BYTES // ITEMSIZE[stored] // LANES, ITEMSIZE[stored]

    def emit(builder: Any, sums: Value, row_bytes: Value, out: Value, step: Value) -> None:
        turned = []
        for square in range(squares):
            rows = []
            for i in range(LANES * square, LANES * (square + 1)):
                at = builder.add(sums, builder.mul(row_bytes, step.type(i)))
                rows.append(simd.load_vector(builder, at, "float32"))
            turned.append(transposed(builder, rows))
        for i in range(LANES):
            at = builder.add(out, builder.mul(step, step.type(i)))
            for square in range(squares):
                made = narrow(builder, turned[square][i], stored, "float32")
                simd.store_vector(builder, made, at, LANES * square * item)

    return operation(f"store_lines {stored}", emit)


@functools.cache
def turn_kernel(stored: str) -> Kernel:
    """Return ``f(sums, pitch, C, C_column, height, breadth)``: sums of rows, stored by columns.

    pitch: numbers between rows of sums; C_column: bytes between columns of C, whose rows lie side
    by side.
    """
    read, write, put = load("float32", "float32"), store(stored, "float32"), _store_lines(stored)
    item, rows = ITEMSIZE[stored], LINE_BYTES // ITEMSIZE[stored]

    @kernel
    def turn(sums: int, pitch: int, C: int, C_column: int, height: int, breadth: int) -> None:
        high, wide = height // rows * rows, breadth // LANES * LANES
        for j in range(0, wide, LANES):
            for i in range(0, high, rows):
                put(sums + 4 * (i * pitch + j), 4 * pitch, C + i * item + j * C_column, C_column)
        for j in range(breadth):
            for i in range(high if j < wide else 0, height):
                write(C + j * C_column, i, read(sums + 4 * i * pitch, j))

    return turn
