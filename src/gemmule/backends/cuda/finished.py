"""Launching a product whose kernels finish its sums: by scales, by an epilogue, or by both.

Its struct ends with where the scales lie, their steps, and the operands of the epilogue.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver, launch_args
from gemmule.backends.cuda.epilogue import Place, fields_of, seen
from gemmule.backends.cuda.launch import Launcher
from gemmule.backends.cuda.starter import Start, cuda_rung
from gemmule.core.choice import Choice
from gemmule.core.epilogue import FUNCTIONS
from gemmule.core.operand import Form, Ints, Operand
from gemmule.core.rung import Step, with_epilogue, with_scales


class FinishedLauncher(Launcher):
    """A prepared product whose kernels finish its sums.

    scaled: by scales of A and of B. epilogue: by one with this activation; then a batch is served
    as well, and alpha and beta are written anew in each call.
    """

    def __init__(
        self,
        choice: Choice,
        activation: str | None = None,
        *,
        scaled: bool = False,
        epilogue: bool = True,
    ) -> None:
        self.activation, self.scaled, self.epilogue = activation, scaled, epilogue
        super().__init__(choice)

    def compiled(self, steps: tuple[Step, ...]) -> tuple[tuple[Step, ...], bytes]:
        """Return the steps as they are compiled, and with what their struct ends."""
        nbytes = 0
        if self.scaled:
            steps, nbytes = with_scales(steps), self._scales.size
        if self.epilogue:
            steps = with_epilogue(steps, FUNCTIONS[self.activation])
            nbytes += launch_args.EPILOGUE.size
        return steps, bytes(nbytes)

    def takes(self, operands: Mapping[str, Place]) -> bool:
        """Whether it takes operands as they lie: any but those of several steps a batch."""
        return all(seen(self.choice.call, one) is not None for one in operands.values())

    def multiply(
        self,
        a: Operand,
        b: Operand,
        out: Operand,
        scalars: tuple[float, ...] = (),
        operands: Mapping[str, Place] | None = None,
        scales: tuple[Operand, ...] = (),
    ) -> None:
        """Launch on operands of the prepared forms, on the caller's stream of their device.

        scalars: alpha and beta, and operands: what else is read, of a product with an epilogue.
        """
        ordinal = int(out.device[5:])
        stream = device_arrays.current_stream(out, ordinal)
        work, owner = device_arrays.workspace(out, self.workspace)
        values = [*scalars, *(one.pointer for one in scales), *self.steps_of(scales)]
        if operands is not None:
            values += fields_of(self.choice.call, operands, self.activation)
        with driver.on_device(ordinal):
            start = self.finishing_starter(ordinal)
            start(stream, a.pointer, b.pointer, out.pointer, work, values)
        del owner  # its allocator reuses the memory in stream order

    def steps_of(self, scales: tuple[Operand, ...]) -> tuple[int, ...]:
        """Return how far the next row's or column's scale lies, 0 where one serves all; and more.

        Of scales by blocks see `launch_args.block_steps`.
        """
        if not scales:
            return ()
        of_a, of_b = (_as_matrix(one.form, axis) for axis, one in enumerate(scales))
        steps = launch_args.block_steps(of_a, of_b, self.choice.problem.m)
        return steps if cuda_rung(self.choice).by_blocks else steps[:2]

    def finishing_starter(self, ordinal: int) -> Start:
        """Return what starts the kernels on a device; its last argument ends the struct."""
        found = self._starts.get(ordinal)
        if found is None:
            ends = [self._scales] if self.scaled else []
            if self.epilogue:
                ends = [launch_args.SCALARS, *ends, launch_args.EPILOGUE]
            end = "".join(one.format[1:] for one in ends)
            found = self._starts[ordinal] = self.starter(ordinal, end)
        return found

    @property
    def _scales(self) -> struct.Struct:
        return launch_args.scales_of(cuda_rung(self.choice).by_blocks)


def _as_matrix(form: Form, axis: int) -> tuple[Ints, Ints]:
    """Return shape and strides of a scale of A (axis 0) or of B as those of a matrix."""
    if len(form.shape) == 2:
        return form.shape, form.strides
    size, step = (*form.shape, 1)[0], (*form.strides, 0)[0]
    return ((size, 1), (step, 0)) if axis == 0 else ((1, size), (0, step))
