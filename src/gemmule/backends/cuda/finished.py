"""Launching a product whose kernels apply an epilogue: its struct ends with its operands."""

from __future__ import annotations

from collections.abc import Mapping

from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver, launch_args
from gemmule.backends.cuda.epilogue import Place, batch_step, fields_of
from gemmule.backends.cuda.launch import Launcher
from gemmule.core.choice import Choice
from gemmule.core.epilogue import FUNCTIONS
from gemmule.core.operand import Operand
from gemmule.core.rung import Step, with_epilogue


class FinishedLauncher(Launcher):
    """A prepared product, or a batch, whose kernels apply an epilogue to its sums."""

    def __init__(self, choice: Choice, activation: str | None) -> None:
        self.activation = activation
        super().__init__(choice)

    def compiled(self, steps: tuple[Step, ...]) -> tuple[tuple[Step, ...], bytes]:
        """Return the steps as they are compiled, and with what their struct ends."""
        nothing = launch_args.EPILOGUE.pack(*launch_args.epilogue({}, 0.0))
        return with_epilogue(steps, FUNCTIONS[self.activation]), nothing

    def takes(self, operands: Mapping[str, Place]) -> bool:
        """Whether it takes operands as they lie: any but those of a batch of several steps."""
        shape = self.choice.call.out_shape
        return all(batch_step(shape, one) is not None for one in operands.values())

    def multiply(
        self,
        a: Operand,
        b: Operand,
        out: Operand,
        scalars: tuple[float, float],
        operands: Mapping[str, Place],
    ) -> None:
        """Launch on operands of the prepared forms, on the caller's stream of their device."""
        ordinal = int(out.device[5:])
        stream = device_arrays.current_stream(out, ordinal)
        work, owner = device_arrays.workspace(out, self.workspace)
        fields = fields_of(out.form.shape, operands, self.activation)
        start = self._starts.get(ordinal)
        if start is None:
            end = launch_args.SCALARS.format + launch_args.EPILOGUE.format[1:]
            start = self._starts[ordinal] = self.starter(ordinal, end[1:])
        with driver.on_device(ordinal):
            start(stream, a.pointer, b.pointer, out.pointer, work, (*scalars, *fields))
        del owner  # its allocator reuses the memory in stream order
