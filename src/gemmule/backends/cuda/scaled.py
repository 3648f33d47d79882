"""Launching a scaled product: its struct ends with where the scales lie, and their steps."""

from __future__ import annotations

from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver, launch_args
from gemmule.backends.cuda.launch import Launcher
from gemmule.backends.cuda.starter import Start, cuda_rung
from gemmule.core.operand import Form, Ints, Operand
from gemmule.core.rung import Step, with_scales


class ScaledLauncher(Launcher):
    """A prepared product whose kernels apply scales to its sums."""

    def compiled(self, steps: tuple[Step, ...]) -> tuple[tuple[Step, ...], bytes]:
        """Return the steps as they are compiled, and with what their struct ends."""
        tail = launch_args.scales_of(cuda_rung(self.choice).by_blocks)
        return with_scales(steps), bytes(tail.size)

    def multiply(self, a: Operand, b: Operand, scales: tuple[Operand, ...], out: Operand) -> None:
        """Launch on operands of the prepared forms, on the caller's stream of their device."""
        ordinal = int(out.device[5:])
        stream = device_arrays.current_stream(out, ordinal)
        work, owner = device_arrays.workspace(out, self.workspace)
        of_a, of_b = (one.pointer for one in scales)
        with driver.on_device(ordinal):
            start = self.scaled_starter(ordinal)
            start(
                stream,
                a.pointer,
                b.pointer,
                out.pointer,
                work,
                (of_a, of_b, *self.steps_of(scales)),
            )
        del owner  # its allocator reuses the memory in stream order

    def steps_of(self, scales: tuple[Operand, ...]) -> tuple[int, ...]:
        """Return how far the next row's or column's scale lies, 0 where one serves all; and more.

        Of scales by blocks see `launch_args.block_steps`.
        """
        of_a, of_b = (_as_matrix(one.form, axis) for axis, one in enumerate(scales))
        steps = launch_args.block_steps(of_a, of_b, self.choice.problem.m)
        return steps if cuda_rung(self.choice).by_blocks else steps[:2]

    def scaled_starter(self, ordinal: int) -> Start:
        """Return what starts the kernels on a device; its last argument ends the struct."""
        found = self._starts.get(ordinal)
        if found is None:
            tail = launch_args.scales_of(cuda_rung(self.choice).by_blocks)
            found = self._starts[ordinal] = self.starter(ordinal, tail.format[1:])
        return found


def _as_matrix(form: Form, axis: int) -> tuple[Ints, Ints]:
    """Return shape and strides of a scale of A (axis 0) or of B as those of a matrix."""
    if len(form.shape) == 2:
        return form.shape, form.strides
    size, step = (*form.shape, 1)[0], (*form.strides, 0)[0]
    return ((size, 1), (step, 0)) if axis == 0 else ((1, size), (0, step))
