"""What a back end is to the layers above: a `Backend` that prepares a choice as a `Run`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from gemmule.core.choice import Choice
from gemmule.core.operand import Operand
from gemmule.core.problem import Problem
from gemmule.core.rung import Machine, Rung

# run(a, b, out, alpha, beta): out = alpha * a b + beta * out, on operands of the prepared forms.
Run = Callable[[Operand, Operand, Operand, complex, complex], None]
# run(a, w, ends, out): the rows of out, each by its expert's matrix of w, up to the last end.
GroupedRun = Callable[[Operand, Operand, Operand, Operand], None]


@dataclass(frozen=True, slots=True)
class HostRun:
    """A `Run` that needs no more of its operands than their host arrays.

    packed: names of rungs, of A and of B: what those packed of a prepared operand stands for the
    array (`gemmule.arrays.prepared.PreparedMatrix.packed`). bound: what makes of the product a
    faster function for operands like two given ones: (a, b) -> the product, or None: nothing was
    done. fresh: (a, b) -> the product, where that is quicker than to fill a result.
    """

    product: Callable[[Any, Any, Any], None]  # (a, b, out): out = a b
    scaled: Callable[[Any, Any, Any, complex, complex], None]  # out = alpha a b + beta out
    packed: tuple[str | None, str | None] = (None, None)
    bound: Callable[[Any, Any], Callable[[Any, Any], Any | None] | None] | None = None
    fresh: Callable[[Any, Any], Any] | None = None

    def __call__(self, a: Operand, b: Operand, out: Operand, alpha: complex, beta: complex) -> None:
        """Set out = alpha * product + beta * out."""
        left, right = (
            one.array if rung is None else one.original.packed(rung)
            for one, rung in zip((a, b), self.packed, strict=True)
        )
        if alpha == 1 and beta == 0:
            self.product(left, right, out.array)
        else:
            self.scaled(left, right, out.array, alpha, beta)


class Backend(Protocol):
    """What a back end offers the plan: the machine, which rungs are proved, and a launcher."""

    name: str

    def machine(self, device: str) -> Machine:
        """Describe the device, cheaply and without touching its state."""
        ...

    def proved(self, rung: Rung, problem: Problem, machine: Machine, end: str = "", /) -> bool:
        """Tell whether the rung may be chosen automatically for these dtypes on this machine.

        end: of the name of its variant that does more than the product.
        """
        ...

    def adapts(self) -> bool:
        """Tell whether operands may be copied to another dtype or layout that a rung takes."""
        ...

    def prepare(self, choice: Choice) -> Run:
        """Compile or bind what `choice` needs and return its launcher."""
        ...
