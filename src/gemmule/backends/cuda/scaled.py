"""Launching a scaled product: its struct ends with where the scales lie, and their steps.

One that applies an epilogue too has that's operands behind them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver, launch_args
from gemmule.backends.cuda.epilogue import Place, fields_of
from gemmule.backends.cuda.launch import Launcher
from gemmule.backends.cuda.starter import Start, cuda_rung
from gemmule.core.choice import Choice
from gemmule.core.epilogue import FUNCTIONS
from gemmule.core.operand import Form, Ints, Operand
from gemmule.core.rung import Step, with_epilogue, with_scales

Scales = tuple[Operand, ...]


class ScaledLauncher(Launcher):
    """A prepared product whose kernels apply scales to its sums."""

    def compiled(self, steps: tuple[Step, ...]) -> tuple[tuple[Step, ...], bytes]:
        """Return the steps as they are compiled, and with what their struct ends."""
        return with_scales(steps), bytes(self._tail().size)

    def multiply(self, a: Operand, b: Operand, scales: Scales, out: Operand) -> None:
        """Launch on operands of the prepared forms, on the caller's stream of their device."""
        self._launch(a, b, out, self.ends(scales))

    def ends(self, scales: Scales) -> tuple[float, ...]:
        """Return what the struct ends with: where scales lie, and their steps."""
        return (*(one.pointer for one in scales), *self.steps_of(scales))

    def _tail(self) -> struct.Struct:
        return launch_args.scales_of(cuda_rung(self.choice).by_blocks)

    def _launch(self, a: Operand, b: Operand, out: Operand, values: tuple[float, ...]) -> None:
        ordinal = int(out.device[5:])
        stream = device_arrays.current_stream(out, ordinal)
        work, owner = device_arrays.workspace(out, self.workspace)
        with driver.on_device(ordinal):
            start = self.scaled_starter(ordinal)
            start(stream, a.pointer, b.pointer, out.pointer, work, values)
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
            found = self._starts[ordinal] = self.starter(ordinal, self._tail().format[1:])
        return found


class FinishedScaledLauncher(ScaledLauncher):
    """One whose kernels apply an epilogue to the scaled sums as well."""

    def __init__(self, choice: Choice, activation: str | None) -> None:
        self.activation = activation
        super().__init__(choice)

    def compiled(self, steps: tuple[Step, ...]) -> tuple[tuple[Step, ...], bytes]:
        """Return the steps as they are compiled, and with what their struct ends."""
        more = launch_args.SCALES.size + launch_args.EPILOGUE.size
        return with_epilogue(with_scales(steps), FUNCTIONS[self.activation]), bytes(more)

    def _tail(self) -> struct.Struct:
        ends = launch_args.SCALARS, launch_args.SCALES, launch_args.EPILOGUE
        return struct.Struct("<" + "".join(one.format[1:] for one in ends))

    def finish(
        self,
        product: tuple[Operand, Operand, Operand],
        scales: Scales,
        scalars: tuple[float, float],
        places: Mapping[str, Place],
    ) -> None:
        """Launch on A, B and the result; scalars: alpha and beta; places: of what else is read."""
        a, b, out = product
        ends = *scalars, *self.ends(scales), *fields_of(out.form.shape, places, self.activation)
        self._launch(a, b, out, ends)


def _as_matrix(form: Form, axis: int) -> tuple[Ints, Ints]:
    """Return shape and strides of a scale of A (axis 0) or of B as those of a matrix."""
    if len(form.shape) == 2:
        return form.shape, form.strides
    size, step = (*form.shape, 1)[0], (*form.strides, 0)[0]
    return ((size, 1), (step, 0)) if axis == 0 else ((1, size), (0, step))
