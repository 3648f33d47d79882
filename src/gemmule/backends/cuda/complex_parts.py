"""Products of complex matrices by a kernel for real ones, which sees real and imaginary parts.

Where A and C lie by rows, their numbers' parts are already those of real matrices with twice as
many columns. B becomes one with twice as many rows, each row followed by i times itself: then the
real product is the complex one, the same sums of the same products. What lies otherwise is laid out
in rows first; of a C by columns the transposed product is computed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.composed import Composed
from gemmule.backends.cuda.launch import CudaBackend, Launcher
from gemmule.backends.cuda.library import rescale
from gemmule.backends.cuda.starter import Start, built
from gemmule.backends.cuda.starter import starter as starter_of
from gemmule.core.canonical import Call
from gemmule.core.choice import Choice
from gemmule.core.operand import Ints, Operand, View, c_strides
from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Params, Step

SOURCE = Path(__file__).with_suffix(".cu")
ITEM, PLACE = 8, 256  # bytes of a complex64; what places in the workspace are multiples of
_ARGS = struct.Struct("<QQ6q")
_SIDE, _THREADS, _MOST_BLOCKS = 32, 256, 8192


@dataclass(frozen=True, slots=True)
class Side:
    """A factor of a product by rows: its size, its steps, and how many of a batch there are."""

    rows: int
    columns: int
    steps: Ints  # from row to row, from column to column, from product to product
    batch: int

    def nbytes(self, *, turned: bool) -> int:
        """Return the bytes of it in rows, with each row's turned one behind it or not."""
        used = self.batch * self.rows * self.columns * ITEM * (2 if turned else 1)
        return -(-used // PLACE) * PLACE

    def step(self, *, turned: bool) -> Step:
        """Return the launch that lays it out so."""
        tiles = self.batch * -(-self.rows // _SIDE) * -(-self.columns // _SIDE)
        name = f"lay_out<{str(turned).lower()}>"
        return Step(name, (min(tiles, _MOST_BLOCKS), 1, 1), (_THREADS, 1, 1))

    def packed(self) -> bytes:
        """Return the launch's struct, without addresses."""
        batch_step = self.steps[2] if self.batch > 1 else 0
        return _ARGS.pack(0, 0, self.rows, self.columns, self.batch, *self.steps[:2], batch_step)


@dataclass(frozen=True, slots=True)
class Parts:
    """A complex product by its parts. exchanged: it is that of the transposes, B first."""

    left: Side
    right: Side
    copied: bool  # whether the left factor is laid out too
    exchanged: bool
    problem: Problem
    call: Call


def parts(problem: Problem, call: Call) -> Parts:
    """Return how a product of complex64 is one of float32; C lies by rows or by columns."""
    inside = len(call.outer)
    seen = [view.strides[inside:] for view in (call.a, call.b, call.out)]
    steps = [(step[-2], step[-1], step[0] if problem.batch > 1 else 0) for step in seen]
    exchanged = problem.layout_out == "col"
    alone = (1 if problem.shared_a else problem.batch, 1 if problem.shared_b else problem.batch)
    if exchanged:
        turned = [(step[1], step[0], step[2]) for step in steps]
        left = Side(problem.n, problem.k, turned[1], alone[1])
        right = Side(problem.k, problem.m, turned[0], alone[0])
        out = turned[2]
    else:
        left = Side(problem.m, problem.k, steps[0], alone[0])
        right = Side(problem.k, problem.n, steps[1], alone[1])
        out = steps[2]
    copied = left.steps[1] != 1
    real = real_problem(problem)
    of_left = (left.rows * left.columns, left.columns) if copied else (left.steps[2], left.steps[0])
    of_right = c_strides((right.batch, 2 * right.rows, 2 * right.columns))
    by_parts = replace(
        call,
        problem=real,
        a=_view(real, (real.m, real.k), (2 * of_left[0], 2 * of_left[1], 1), left.batch),
        b=_view(real, (real.k, real.n), of_right, right.batch),
        out=_view(real, (real.m, real.n), (2 * out[2], 2 * out[0], 1), problem.batch),
        outer=(),
    )
    return Parts(left, right, copied, exchanged, real, by_parts)


def real_problem(problem: Problem) -> Problem:
    """Return the product of the parts."""
    m, n, shared = problem.m, problem.n, (problem.shared_a, problem.shared_b)
    if problem.layout_out == "col":
        m, n, shared = n, m, shared[::-1]
    of_parts: dict[str, Any] = dict.fromkeys(("a", "b", "out"), "float32")
    of_parts |= dict.fromkeys(("layout_a", "layout_b", "layout_out"), "row")
    of_parts |= {"m": m, "n": 2 * n, "k": 2 * problem.k, "shared_a": shared[0]}
    of_parts |= {"shared_b": shared[1], "alignment": min(problem.alignment, ITEM)}
    return replace(problem, **of_parts)


def _view(problem: Problem, shape: tuple[int, int], steps: Ints, batch: int) -> View:
    if problem.batch == 1:
        return View(shape, steps[1:])
    return View((problem.batch, *shape), (steps[0] if batch > 1 else 0, *steps[1:]))


@dataclass(frozen=True, slots=True)
class Told:
    """What a product asks for: how its factors are laid out, and the product of the parts."""

    steps: tuple[Step, ...]
    packed: tuple[str, ...]
    problem: Problem
    rung: str
    source: str


def told(problem: Problem, call: Call, rung: CudaRung, digest: str) -> Told:
    """Return what a product asks for; digest: of the kernels' text."""
    made = parts(problem, call)
    copies = _copies(made)
    steps = tuple(side.step(turned=turned) for side, turned in copies)
    packed = tuple(side.packed().hex() for side, _ in copies)
    return Told(steps, packed, made.problem, rung.name, digest)


def _copies(made: Parts) -> list[tuple[Side, bool]]:
    """Return the factors that are laid out, and whether with their rows turned."""
    return [(made.right, True), *([(made.left, False)] if made.copied else [])]


class ByParts(Composed):
    """A product of complex numbers; a pass behind it applies alpha and beta."""

    def __init__(self, problem: Problem, call: Call, rung: CudaRung, params: Params) -> None:
        super().__init__(problem, call)
        self.parts, self.rung, self.params = parts(problem, call), rung, params
        self._launchers: dict[int, Launcher] = {}

    def __call__(self, a: Operand, b: Operand, out: Operand, alpha: complex, beta: complex) -> None:
        """Start the product on operands of the prepared forms: out = alpha A b + beta out."""
        ordinal = int(out.device[5:])
        stream = device_arrays.current_stream(out, ordinal)
        own = self.workspace_bytes(ordinal)
        apart = (alpha, beta) != (1, 0)
        kept = rescale.old_bytes(out, beta) if apart else 0
        work, owner = device_arrays.workspace(out, own + kept)
        if kept:
            rescale.keep(out, work + own, stream)
        start = self.starter(ordinal)
        with driver.on_device(ordinal):
            for left, right, result in self.offsets:
                start(stream, a.pointer + left, b.pointer + right, out.pointer + result, work)
        if apart:
            rescale.rescale(out, work + own, (alpha, beta), stream)
        del owner  # its allocator reuses the memory in stream order

    def workspace_bytes(self, ordinal: int) -> int:
        """Return the bytes a start needs: what is laid out, and behind it the kernel's own."""
        laid_out = sum(side.nbytes(turned=turned) for side, turned in _copies(self.parts))
        return laid_out + -(-self._launcher(ordinal).workspace // PLACE) * PLACE

    def _launcher(self, ordinal: int) -> Launcher:
        found = self._launchers.get(ordinal)
        if found is None:
            machine = CudaBackend().machine(f"cuda:{ordinal}")
            made, multiply = self.parts, self.rung
            choice = Choice(made.call, made.problem, multiply, self.params, machine, "its parts")
            found = self._launchers[ordinal] = Launcher(choice)
        return found

    def load(self, ordinal: int) -> Start:
        """Return `starter`'s function, everything loaded on a device."""
        made = self.parts
        lay_out = _laying_out(made.right, ordinal, turned=True)
        copy = _laying_out(made.left, ordinal, turned=False) if made.copied else None
        multiply = self._launcher(ordinal).starter(ordinal)
        behind = made.right.nbytes(turned=True)
        after = behind + (made.left.nbytes(turned=False) if made.copied else 0)
        exchanged = made.exchanged

        def start(stream: int, a: int, b: int, result: int, work: int) -> None:
            left, right = (b, a) if exchanged else (a, b)
            lay_out(stream, right, work)
            if copy is not None:
                copy(stream, left, work + behind)
                left = work + behind
            multiply(stream, left, work, result, work + after)

        return start


def _laying_out(side: Side, ordinal: int, *, turned: bool) -> Callable[[int, int, int], None]:
    """Return ``start(stream, from, to)`` of a factor that is laid out in rows."""
    kernel = built(SOURCE, side.step(turned=turned), side.packed(), ordinal)
    start = starter_of(kernel, "QQ0s0s")
    return lambda stream, source, target: start(stream, source, target, b"", b"")
