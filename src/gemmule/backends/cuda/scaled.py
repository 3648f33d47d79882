"""Launching a scaled product: its struct ends with where the scales lie, and their steps."""

from __future__ import annotations

from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver, launch_args
from gemmule.backends.cuda.launch import Launcher
from gemmule.backends.cuda.starter import Start
from gemmule.core.operand import Operand
from gemmule.core.rung import Step, with_scales


class ScaledLauncher(Launcher):
    """A prepared product whose kernels apply scales to its sums."""

    def compiled(self, steps: tuple[Step, ...]) -> tuple[tuple[Step, ...], bytes]:
        """Return the steps as they are compiled, and with what their struct ends."""
        return with_scales(steps), launch_args.SCALES.pack(0, 0, 0, 0)

    def multiply(
        self, a: Operand, b: Operand, scales: tuple[Operand, Operand], out: Operand
    ) -> None:
        """Launch on operands of the prepared forms, on the caller's stream of their device."""
        ordinal = int(out.device[5:])
        stream = device_arrays.current_stream(out, ordinal)
        work, owner = device_arrays.workspace(out, self.workspace)
        of_a, of_b = (one.pointer for one in scales)
        steps = map(self.step_of, scales)
        with driver.on_device(ordinal):
            start = self.scaled_starter(ordinal)
            start(stream, a.pointer, b.pointer, out.pointer, work, (of_a, of_b, *steps))
        del owner  # its allocator reuses the memory in stream order

    @staticmethod
    def step_of(scale: Operand) -> int:
        """Return how far the next row's or column's scale lies; 0 where one serves all."""
        return scale.form.strides[0] if scale.form.shape[0] > 1 else 0

    def scaled_starter(self, ordinal: int) -> Start:
        """Return what starts the kernels on a device; its last argument ends the struct."""
        found = self._starts.get(ordinal)
        if found is None:
            found = self._starts[ordinal] = self.starter(ordinal, launch_args.SCALES.format[1:])
        return found
