"""Products of several launches: how they are called, and that each is loaded once a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver, launch_args
from gemmule.backends.cuda.starter import Start
from gemmule.core.canonical import Call
from gemmule.core.operand import Operand
from gemmule.core.problem import Problem


class Composed(ABC):
    """A prepared product: ``run(A, B, out, alpha, beta)`` on operands of the prepared forms."""

    def __init__(self, problem: Problem, call: Call) -> None:
        views, dtypes = (call.a, call.b, call.out), (problem.a, problem.b, problem.out)
        self.offsets = launch_args.offsets(call.outer, views, dtypes)
        self._on: dict[int, Start] = {}

    def __call__(self, a: Operand, b: Operand, out: Operand, alpha: complex, beta: complex) -> None:
        """Start the product on operands of the prepared forms: out = alpha A b + beta out."""
        ordinal = int(out.device[5:])
        stream = device_arrays.current_stream(out, ordinal)
        work, owner = device_arrays.workspace(out, self.workspace_bytes(ordinal))
        scale, start = self.scale(alpha, beta), self.starter(ordinal)
        with driver.on_device(ordinal):
            for left, right, result in self.offsets:
                to = out.pointer + result
                start(stream, a.pointer + left, b.pointer + right, to, work, *scale)
        del owner  # its allocator reuses the memory in stream order

    @property
    def is_one_call(self) -> bool:
        """Whether one start is the whole product."""
        return len(self.offsets) == 1

    def starter(self, ordinal: int) -> Start:
        """Return ``start(stream, a, b, result, work, *scale)``, of alpha 1 and beta 0 without."""
        found = self._on.get(ordinal)
        if found is None:
            found = self._on[ordinal] = self.load(ordinal)
        return found

    def scale(self, alpha: complex, beta: complex) -> tuple[Any, ...]:
        """Return what a start is told of alpha and beta."""
        return ()

    @abstractmethod
    def load(self, ordinal: int) -> Start:
        """Return `starter`'s function, everything loaded on a device."""

    @abstractmethod
    def workspace_bytes(self, ordinal: int) -> int:
        """Return the bytes a start needs."""
