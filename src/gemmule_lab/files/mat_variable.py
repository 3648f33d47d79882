"""A variable of a MATLAB file, and the matrix that is made of what the file stores of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule_lab.files.sources import Source

Matrix = NDArray[Any]

MAX_NAME_BYTES = 4096
DTYPES = {"double": "f8", "single": "f4"} | {
    f"{sign}int{8 * size}": f"{sign or 'i'}{size}" for sign in ("", "u") for size in (1, 2, 4, 8)
}


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable of a file: its MATLAB class, and what reads its parts once it is chosen.

    parts: returns the real part and, where `complex_`, the imaginary part, as flat arrays.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    complex_: bool
    stored_bytes: int
    parts: Callable[[], list[NDArray[Any]]]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of MATLAB's class, which is not always what the file stores."""
        return np.dtype(DTYPES[self.kind])


def matrix(source: Source, variable: Variable) -> Matrix:
    """Return the numbers of a variable as an array, column-major.

    ValueError where the file is damaged, or stores what the variable's class does not hold.
    """
    try:
        parts = [_exactly(part, variable.dtype) for part in variable.parts()]
        flat = parts[0]
        if variable.complex_:
            single = variable.kind == "single" or variable.dtype.itemsize <= 2
            real, imaginary = (_exactly(part, np.dtype("f4" if single else "f8")) for part in parts)
            flat = np.empty(real.size, "c8" if single else "c16")
            flat.real, flat.imag = real, imaginary
    except ValueError as error:
        raise ValueError(f"{source} is not readable: {error}.") from None
    return flat.reshape(variable.shape, order="F")


def _exactly(stored: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return `stored` as `dtype`, native; ValueError where a number would change.

    Writers store a variable in the fewest bytes that hold it, so nothing changes in a sound file.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        converted = stored.astype(dtype, copy=False)
        if not np.can_cast(stored.dtype, dtype, "safe") and not np.array_equal(converted, stored):
            raise ValueError(f"it stores {stored.dtype} numbers that no {dtype} holds")
    return converted
