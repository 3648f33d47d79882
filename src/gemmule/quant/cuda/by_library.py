"""Quantised products by the vendor's library, which multiplies pieces that were dequantised.

A piece holds some rows of the product's matrix and is no larger than `MOST_BYTES`, so that a large
matrix is never there as floats as a whole. As with kernels, all goes to the caller's stream and
nothing waits; the memory comes from the operands' own allocator.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import starter
from gemmule.backends.cuda.launch_args import addresses_of
from gemmule.backends.cuda.library.cublas import Gemm
from gemmule.backends.cuda.library.run import LibraryRun
from gemmule.core.canonical import Call
from gemmule.core.operand import Operand, View
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Step
from gemmule.quant.cuda import dequantise
from gemmule.quant.cuda.dequantise import Piece

MOST_BYTES = 256 << 20
_WHOLE, _PLACE = 64, 256  # rows of pieces in whole tiles either way; the library's workspace behind
_ADDRESSES = struct.Struct("<5Q")


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a product: where they begin, what is dequantised for them, what is multiplied.

    source: a digest of the kernel's text.
    """

    first: int
    step: Step
    packed: str
    gemm: Gemm
    source: str


def rows_at_a_time(problem: Problem) -> int:
    """Return how many rows of the product's matrix a piece has, all but the last."""
    row_bytes = dequantise.row_step(problem.k, problem.b) * ITEMSIZE[problem.b]
    most = max(MOST_BYTES // max(row_bytes, 1) // _WHOLE, 1) * _WHOLE
    count = -(-problem.m // most)
    return -(-problem.m // max(count, 1) // _WHOLE) * _WHOLE


def workspace(problem: Problem) -> int:
    """Return the bytes of the largest piece."""
    rows = min(rows_at_a_time(problem), -(-problem.m // _WHOLE) * _WHOLE)
    spec = problem.quant
    rows, across = (problem.k, rows) if spec is not None and spec.transposed else (rows, problem.k)
    used = rows * dequantise.row_step(across, problem.b) * ITEMSIZE[problem.b]
    return -(-used // _PLACE) * _PLACE


def products(problem: Problem, call: Call) -> Iterator[tuple[int, Piece, Problem, Call]]:
    """Yield each piece: its first row of the product, the piece, and its product of floats."""
    spec = problem.codes
    every, none = rows_at_a_time(problem), (0,) * len(call.outer)
    for first in range(0, problem.m, every):
        rows = min(every, problem.m - first)
        if spec.transposed:
            piece = Piece(0, problem.k, first, rows, dequantise.row_step(rows, problem.b))
            strides = (1, piece.step)
        else:
            piece = Piece(first, rows, 0, problem.k, dequantise.row_step(problem.k, problem.b))
            strides = (piece.step, 1)
        layout = "col" if spec.transposed else "row"
        dense = replace(problem, m=rows, a=problem.b, layout_a=layout, quant=None)
        seen = View((*call.outer, rows, problem.k), (*none, *strides))
        out = View((*call.out.shape[:-2], rows, problem.n), call.out.strides)
        yield first, piece, dense, replace(call, problem=dense, a=seen, out=out)


@dataclass(frozen=True, slots=True)
class Told:
    """All that is asked of kernel and library, piece by piece."""

    parts: tuple[Part, ...]


def told(problem: Problem, call: Call, gemm: Callable[[Problem, Call], Gemm]) -> Told:
    """Return what a product asks for."""
    found = []
    for first, piece, dense, seen in products(problem, call):
        step, packed = _launch(problem, piece)
        text = dequantise.digest(_source(problem))
        launch = (first, step, packed.hex(), gemm(dense, seen), text)
        found.append(Part(*launch))
    return Told(tuple(found))


def _source(problem: Problem) -> Path:
    return dequantise.source_of(problem.codes)


def _launch(problem: Problem, piece: Piece) -> tuple[Step, bytes]:
    spec = problem.codes
    m, n = (problem.k, problem.m) if spec.transposed else (problem.m, problem.k)
    packed = dequantise.arguments(spec, m, n, piece)
    return dequantise.step(spec, problem.b, piece), packed


class ByLibrary:
    """A prepared product: ``run(Q, x, out, alpha, beta)`` on operands of the prepared forms."""

    def __init__(
        self, problem: Problem, call: Call, gemm: Callable[[Problem, Call], Gemm], rank: int
    ) -> None:
        self.memory, exchanged = workspace(problem), problem.layout_out == "row"
        self.source = _source(problem)
        row = call.out.strides[-2] * ITEMSIZE[problem.out]
        self.parts = []
        for first, piece, dense, seen in products(problem, call):
            run = LibraryRun(gemm(dense, seen), dense, seen, exchanged=exchanged, rank=rank)
            self.parts.append((first * row, *_launch(problem, piece), dense, run))

    def __call__(self, a: Operand, b: Operand, out: Operand, alpha: complex, beta: complex) -> None:
        """Start the product: out = alpha A b + beta out; nothing waits for it."""
        ordinal = int(out.device[5:])
        stream = device_arrays.current_stream(out, ordinal)
        work, owner = device_arrays.workspace(out, self.memory)
        for offset, step, packed, dense, run in self.parts:
            given = _ADDRESSES.pack(*addresses_of(a.array), work) + packed[_ADDRESSES.size :]
            starter.run(self.source, step, given, ordinal, stream)
            shape = (dense.m, dense.n) if len(out.form.shape) == 2 else out.form.shape
            form = out.form._replace(shape=shape)
            rows = out._replace(pointer=out.pointer + offset, form=form)
            run(b._replace(pointer=work), b, rows, alpha, beta)
        del owner  # its allocator reuses the memory in stream order

    @property
    def is_one_call(self) -> bool:
        """Whether one call of the library is each piece's whole product."""
        return all(run.is_one_call for *_, run in self.parts)

    def workspace_bytes(self, ordinal: int) -> int:
        """Return the bytes a start needs: a dequantised piece, and behind it the library's own."""
        return self.memory + max(run.prepared(ordinal).workspace_bytes for *_, run in self.parts)

    def starter(self, ordinal: int) -> starter.Start:
        """Return ``start(stream, matrix, x, result, work)``; matrix: its packed addresses."""
        begin = []
        for offset, step, packed, _, run in self.parts:
            kernel = starter.built(self.source, step, packed, ordinal)
            launch = starter.starter(kernel, "32sQ0s0s")
            multiply = run.prepared(ordinal).starter(1.0, 0.0)
            begin.append((launch, multiply, run.exchanged, offset))
        behind = self.memory

        def start(stream: int, matrix: bytes, x: int, result: int, work: int) -> None:
            for launch, multiply, exchanged, offset in begin:
                launch(stream, matrix, work, b"", b"")
                first, second = (x, work) if exchanged else (work, x)
                multiply(stream, first, second, result + offset, work + behind)

        return start
