"""The back ends: siblings behind one small Protocol. Neither imports the other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gemmule.arrays import Operand
from gemmule.rung import Machine, Rung

if TYPE_CHECKING:
    from gemmule.plan import Choice

# run(a, b, out, alpha, beta): out = alpha * a b + beta * out, on operands of the prepared forms.
Run = Callable[[Operand, Operand, Operand, float, float], None]


@dataclass(frozen=True, slots=True)
class HostRun:
    """A `Run` that needs no more of its operands than their host arrays."""

    on_arrays: Callable[[Any, Any, Any, float, float], None]

    def __call__(self, a: Operand, b: Operand, out: Operand, alpha: float, beta: float) -> None:
        """Set out = alpha * product + beta * out."""
        self.on_arrays(a.array, b.array, out.array, alpha, beta)


class Backend(Protocol):
    """What a back end offers the plan: the machine, which rungs are proved, and a launcher."""

    name: str

    def machine(self, device: str) -> Machine:
        """Describe the device, cheaply and without touching its state."""
        ...

    def proved(self, rung: Rung, machine: Machine) -> bool:
        """Tell whether the rung may be chosen automatically on this machine."""
        ...

    def adapts(self) -> bool:
        """Tell whether operands may be copied to another dtype or layout that a rung takes."""
        ...

    def prepare(self, choice: Choice) -> Run:
        """Compile or bind what `choice` needs and return its launcher."""
        ...


@functools.cache
def get(name: str) -> Backend:
    """Return the back end called ``"cpu"`` or ``"cuda"``, importing it on first use."""
    if name == "cpu":
        from gemmule.backends.cpu import CpuBackend

        return CpuBackend()
    if name == "cuda":
        from gemmule.backends.cuda import CudaBackend

        return CudaBackend()
    raise ValueError(f"backend is {name!r}; it must be 'cpu' or 'cuda'.")
