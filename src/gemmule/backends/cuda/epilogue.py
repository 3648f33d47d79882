"""What follows a product by a launch of its own, for kernels and libraries that leave it alone.

One pass reads the sums, which lie in memory in the type that they were summed in, and everything
beside them, and writes the result, rounded once. Sums in the result's own type lie where it will.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gemmule.backends.cuda import convert, driver, launch_args, nvrtc, starter
from gemmule.core.epilogue import FUNCTIONS, OPERANDS
from gemmule.core.operand import Form, Ints, merged
from gemmule.core.problem import COMPLEX, HALVES, ITEMSIZE
from gemmule.core.rung import Step

SOURCE = Path(__file__).with_suffix(".cu")
_PASS = struct.Struct("<2Q9q4d")  # addresses; sizes; steps of sums and result; both scalars' parts
ACROSS = 4  # columns that a thread takes


class Place(NamedTuple):
    """Where an operand lies: its address, and its steps along the axes of the result."""

    address: int
    steps: Ints


def sums_dtype(dtype: str) -> str:
    """Return the dtype that what follows a product is computed in, by that of its result."""
    return "float32" if dtype in HALVES else dtype


def floor_of(activation: str | None) -> float:
    """Return what a kernel lifts results to."""
    return 0.0 if activation == "relu" else float("-inf")


def batch_step(shape: Ints, place: Place) -> int | None:
    """Return an operand's step from one product of a batch to the next, None where it has several.

    shape: of the result, which has all products of the batch one behind the other.
    """
    axes, (steps,) = merged(shape[:-2], [place.steps[:-2]])
    return None if len(axes) > 1 else sum(steps)


def fields_of(
    shape: Ints, operands: Mapping[str, Place], activation: str | None
) -> tuple[float, ...]:
    """Return the fields of the struct of kernels that apply an epilogue, of one step a batch."""
    places = {
        name: (one.address, (batch_step(shape, one) or 0, *one.steps[-2:]))
        for name, one in operands.items()
    }
    return launch_args.epilogue(places, floor_of(activation))


def steps_of(shape: Ints, form: Form) -> Ints:
    """Return an operand's steps along the axes of a result: 0 where it is the same along one."""
    lead = len(shape) - len(form.shape)
    pairs = zip(form.shape, form.strides, shape[lead:], strict=True)
    return (0,) * lead + tuple(0 if size == 1 != whole else step for size, step, whole in pairs)


class Pass:
    """A pass over results of one dtype with one activation, on one device."""

    def __init__(self, dtype: str, activation: str | None, ordinal: int) -> None:
        self.dtype, self.activation, self.ordinal = dtype, activation, ordinal
        types = convert.CTYPE[sums_dtype(dtype)], convert.CTYPE[dtype]
        names = [
            f"finish_product<{', '.join(types)}, {FUNCTIONS[activation]}, {vectors}>"
            for vectors in ("false", "true")
        ]
        self._names = names if dtype not in (*COMPLEX, "float64") else names[:1]
        arch = driver.device_info(ordinal).arch
        self._module = nvrtc.compile_file(SOURCE, tuple(self._names), arch)

    def __call__(
        self,
        shape: Ints,
        places: Sequence[Place],
        scalars: tuple[complex, complex],
        operands: Mapping[str, Place],
        stream: int,
    ) -> None:
        """Start the pass over sums and a result of this shape, which lie at two places."""
        named = {name: operands[name] for name in OPERANDS if name in operands}
        every = [*places, *named.values()]
        count = max(2 - len(shape), 0)
        sizes = (1,) * count + shape
        steps = [(0,) * count + one.steps for one in every]
        lead, walked = merged(sizes[:-2], [one[:-2] for one in steps])
        items = [ITEMSIZE[sums_dtype(self.dtype)], *[ITEMSIZE[self.dtype]] * (len(every) - 1)]
        batch = lead[-1] if lead else 1
        inner = [
            (one[-1] if one else 0, own[-2], own[-1])
            for one, own in zip(walked, steps, strict=True)
        ]
        for index in itertools.product(*map(range, lead[:-1])):
            addresses = [
                one.address + item * sum(i * step for i, step in zip(index, way, strict=False))
                for one, item, way in zip(every, items, walked, strict=True)
            ]
            self._start((sizes[-2], sizes[-1], batch), addresses, inner, scalars, [*named], stream)

    def _start(
        self,
        sizes: tuple[int, int, int],
        addresses: list[int],
        steps: list[tuple[int, int, int]],
        scalars: tuple[complex, complex],
        names: list[str],
        stream: int,
    ) -> None:
        m, n, batch = sizes
        if 0 in sizes:
            return
        parts = [part for value in scalars for part in (value.real, value.imag)]
        packed = _PASS.pack(
            *addresses[:2], m, n, batch, *_kernel_order(steps[0]), *_kernel_order(steps[1]), *parts
        )
        told = dict(zip(names, zip(addresses[2:], steps[2:], strict=True), strict=True))
        fields = launch_args.epilogue(told, floor_of(self.activation))
        packed += launch_args.EPILOGUE.pack(*fields)
        item = ITEMSIZE[self.dtype]
        vectors = (
            len(self._names) > 1
            and n % ACROSS == 0
            and all(one[2] == 1 for one in steps[:2])
            and not any(one % ACROSS for way in steps[:2] for one in way[:2])
            and addresses[0] % 16 == 0 == addresses[1] % (ACROSS * item)
        )
        kernel = self._names[int(vectors)]
        pieces = -(-n // ACROSS) * m * batch
        step = Step(kernel, convert.grid(pieces), (convert.THREADS, 1, 1))
        with driver.on_device(self.ordinal):
            ready = starter.loaded(self._module, (step,), packed, self.ordinal)
            starter.whole_starter(ready)(stream, packed)


def _kernel_order(steps: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return row, column and batch of batch, row and column."""
    return steps[1], steps[2], steps[0]
