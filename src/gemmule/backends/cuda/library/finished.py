"""A library's product with an epilogue that the library computes itself, told once for each bias.

cublasLt adds a C of its own place and a bias along its columns, and applies relu or gelu by tanh.
Where operands lie otherwise, a product is left to a pass (`takes`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.epilogue import Place, batch_step
from gemmule.backends.cuda.library import cublas
from gemmule.backends.cuda.library.run import LibraryRun
from gemmule.core.choice import Choice
from gemmule.core.epilogue import Shape
from gemmule.core.operand import Operand
from gemmule.core.problem import HALVES, ITEMSIZE

FUNCTIONS = {None: 1, "relu": 2, "gelu_tanh": 32}  # cublasLtEpilogue_t; a bias is 4 more
MOST = 256  # products prepared, each for where a bias lies


def knows(what: Shape, choice: Choice) -> bool:
    """Whether the library computes an epilogue itself, as exactly as a pass would.

    It may multiply operands or partial sums by an alpha, so of others than 1 it is told nothing.
    """
    problem = choice.problem
    if what.activation not in FUNCTIONS or {"gate", "residual"} & {*what.names}:
        return False
    if what.scaled or problem.a not in (*HALVES, "float32"):
        return False
    return "bias" not in what.names or what.by_row == (problem.layout_out == "col")


class FinishedLibrary:
    """A prepared choice of the library's product, and an epilogue that it `knows`."""

    def __init__(self, choice: Choice, run: LibraryRun, what: Shape) -> None:
        self.choice, self.what = choice, what
        self._run, self._lock = run, threading.Lock()
        self._prepared: dict[tuple[int, int, int, int], cublas.Prepared] = {}

    def takes(self, operands: Mapping[str, Place]) -> bool:
        """Whether operands lie as the library reads them: a bias packed, C as the result does."""
        gemm = self._run.gemm
        axes = (-2, -1) if self._run.exchanged else (-1, -2)  # across the library's lines, along
        if "bias" in operands and operands["bias"].steps[axes[1]] != 1:
            return gemm.result.rows == 1
        if "C" not in operands:
            return True
        place, item = operands["C"], ITEMSIZE[gemm.result.dtype]
        step, unit = (place.steps[axis] for axis in axes)
        line, apart = gemm.result.rows, batch_step(self.choice.call.out_shape, place)
        return (
            (unit == 1 or line == 1)
            and (step >= line or gemm.result.columns == 1)
            and (apart is not None and apart >= 0)
            and (place.address | (max(step, 0) | apart) * item) % gemm.alignment == 0
        )

    def multiply(
        self,
        a: Operand,
        b: Operand,
        out: Operand,
        scalars: tuple[float, float],
        operands: Mapping[str, Place],
    ) -> None:
        """Start the product on operands of the prepared forms, on the caller's stream."""
        ordinal = int(out.device[5:])
        stream = device_arrays.current_stream(out, ordinal)
        c, alpha, beta = operands.get("C"), *scalars
        prepared = self._told(ordinal, operands)
        work, owner = device_arrays.workspace(out, prepared.workspace_bytes)
        first, second = (b, a) if self._run.exchanged else (a, b)
        old = out.pointer if c is None else c.address
        start = prepared.starter(alpha, 0.0 if c is None else beta, old)
        with driver.on_device(ordinal):
            start(stream, first.pointer, second.pointer, out.pointer, work)
        del owner  # its allocator reuses the memory in stream order

    def _told(self, ordinal: int, operands: Mapping[str, Place]) -> cublas.Prepared:
        """Return the product as prepared for where the bias lies, and for the steps of C."""
        gemm, bias, c = self._run.gemm, operands.get("bias"), operands.get("C")
        axis = -2 if self._run.exchanged else -1
        step, apart = gemm.result.step, gemm.result.batch_step
        if c is not None:
            step = max(c.steps[axis], gemm.result.rows)
            apart = batch_step(self.choice.call.out_shape, c) or 0
        key = ordinal, 0 if bias is None else bias.address, step, apart
        with self._lock:
            found = self._prepared.get(key)
            if found is None:
                if len(self._prepared) >= MOST:
                    self._prepared.clear()
                function = FUNCTIONS[self.what.activation]
                told = (function & ~1 | 4 if bias else function), *key[1:]
                found = self._prepared[key] = cublas.Prepared(gemm, ordinal, self._run.rank, told)
        return found


def library_run(run: object) -> LibraryRun | None:
    """Return a run that is one call of the library, or None."""
    return run if isinstance(run, LibraryRun) and run.is_one_call else None
