"""Launching a grouped product: its struct has the ends of the groups in a workspace's place."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace

from gemmule.backends.base import GroupedRun
from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver, launch_args
from gemmule.backends.cuda.launch import Launcher
from gemmule.core.choice import Choice
from gemmule.core.operand import Operand


class GroupedLauncher(Launcher):
    """A prepared grouped product."""

    def early(self) -> GroupedLauncher:
        """Return the launcher whose kernel is started before the one in front of it has ended."""
        other = copy.copy(self)
        other.steps, other._starts = tuple(replace(step, pdl=True) for step in self.steps), {}
        return other

    def multiply(self, a: Operand, w: Operand, ends: Operand, out: Operand) -> None:
        """Launch on operands of the prepared forms, on the caller's stream of their device."""
        ordinal = int(out.device[5:])
        stream = device_arrays.current_stream(out, ordinal)
        start = self._starts.get(ordinal)
        if start is None:
            start = self._starts[ordinal] = self.starter(ordinal)
        current = driver.is_current(ordinal)
        with contextlib.nullcontext() if current else driver.on_device(ordinal):
            if self.quantized:  # whose struct begins with the matrix
                codes = launch_args.packed_addresses(w.array.matrix)
                start(stream, codes, a.pointer, out.pointer, ends.pointer)
            else:
                start(stream, a.pointer, w.pointer, out.pointer, ends.pointer)


def prepare(choice: Choice) -> GroupedRun:
    """Compile the chosen rung's kernels and return what launches them; nothing without elements."""
    if choice.problem.outputs == 0 or choice.problem.batch == 0:
        return lambda a, w, ends, out: None
    return GroupedLauncher(choice).multiply
