"""What follows a product before its result is rounded: the public `Epilogue`, and what is checked.

Everything here works on shapes and dtypes alone; operands are looked at where they are unwrapped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from gemmule.core.problem import FLOATS

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
OPERANDS = ("C", "bias", "gate", "residual")
FUNCTIONS = {
    None: "PLAIN",
    "relu": "PLAIN",
    "gelu": "GELU",
    "gelu_tanh": "GELU_TANH",
    "silu": "SILU",
}
"""What kernels are compiled for, by activation (``epilogue.cuh``)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Epilogue:
    """What `gemmule.matmul` does to a product of floats before it rounds the result, once.

    The result is ``activation(alpha A B + beta C + bias) * gate + residual``, each part only where
    it is given, computed in float32 (of float64 results in float64).

    Parameters
    ----------
    alpha, beta : real numbers. Without C there is no beta; with ``beta=0`` C is never read.
    C, gate, residual : arrays of the result's shape and dtype, any strides.
    bias : array of the result's dtype: one number for each column, shape (n,) or (1, n), or one for
        each row, shape (m, 1).
    activation : ``"relu"``; ``"gelu"``, that is ``v Phi(v)`` by the normal distribution's own
        function (erf); ``"gelu_tanh"``, its form by tanh; ``"silu"``, ``v / (1 + exp(-v))``.

    Operands come from the library and lie on the device of A and B. TypeError for dtypes and kinds,
    ValueError for shapes and for an activation that there is not.

    >>> import numpy as np, gemmule as gm
    >>> A, B = np.eye(2), np.array([[1.0, -2.0], [3.0, -4.0]])
    >>> gm.matmul(A, B, epilogue=gm.Epilogue(bias=np.array([0.5, 1.0]), activation="relu"))
    array([[1.5, 0. ],
           [3.5, 0. ]])
    """

    alpha: Any = 1
    C: Any = None
    beta: Any = 1
    bias: Any = None
    activation: str | None = None
    gate: Any = None
    residual: Any = None

    def __post_init__(self) -> None:
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation is {self.activation!r}; it must be None or one of "
                f"{', '.join(ACTIVATIONS)}."
            )
        if self.C is None and self.beta not in (0, 1):
            raise ValueError(f"beta is {self.beta}, but there is no C that it scales. Pass C=.")

    def operands(self) -> dict[str, Any]:
        """Return the arrays that are read, by their names."""
        given = {name: getattr(self, name) for name in OPERANDS}
        if self.beta == 0:
            del given["C"]
        return {name: one for name, one in given.items() if one is not None}


class Shape(NamedTuple):
    """What of an epilogue decides how it is computed: no addresses, and no scalar but trivial ones.

    names: of the operands, in the order of `OPERANDS`. by_row: the bias has a number for each row.
    scaled: alpha is not 1.
    """

    activation: str | None
    names: tuple[str, ...]
    by_row: bool
    scaled: bool

    def describe(self) -> str:
        """Return the epilogue as a formula.

        >>> Shape("gelu", ("bias", "residual"), False, True).describe()
        'gelu(alpha A B + bias of columns) + residual'
        """
        terms = "alpha A B" if self.scaled else "A B"
        terms += " + beta C" * ("C" in self.names)
        if "bias" in self.names:
            terms += f" + bias of {'rows' if self.by_row else 'columns'}"
        text = terms if self.activation is None else f"{self.activation}({terms})"
        if "gate" in self.names:
            text = f"{text if self.activation or terms == 'A B' else f'({text})'} * gate"
        return text + " + residual" * ("residual" in self.names)


def check_result(shape: tuple[int, ...], dtype: str) -> None:
    """Raise for a result that no epilogue goes with."""
    if dtype not in FLOATS:
        raise TypeError(
            f"an epilogue goes with results of {', '.join(FLOATS)}, and this one is {dtype}. "
            "Multiply without, and do the rest with the library of the arrays."
        )
    if len(shape) < 2:
        raise ValueError(
            f"an epilogue goes with products of matrices, and this result has shape {shape}. Give "
            "a vector as a matrix of one row or column: x[None] or x[:, None]."
        )


def check_operand(
    name: str, shape: tuple[int, ...], dtype: str, result: tuple[int, ...], out: str
) -> None:
    """Raise unless an operand's shape and dtype go with a result's shape and dtype."""
    if dtype != out:
        raise TypeError(
            f"the epilogue's {name} has dtype {dtype}, and the result is {out}; both must be the "
            "same. Convert it, or choose the result's with out_dtype=."
        )
    rows, columns = result[-2:]
    if name == "bias":
        if tuple(shape) not in ((columns,), (1, columns), (rows, 1)):
            raise ValueError(
                f"the epilogue's bias has shape {tuple(shape)}; required is one number for each of "
                f"the {columns} columns, shape ({columns},) or (1, {columns}), or for each of the "
                f"{rows} rows, shape ({rows}, 1)."
            )
    elif tuple(shape) != tuple(result):
        raise ValueError(
            f"the epilogue's {name} has shape {tuple(shape)}; the result has {tuple(result)}, and "
            "both must be the same."
        )


def bias_is_by_row(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Tell whether a bias of a legal shape has a number for each row."""
    return len(shape) == 2 and shape[1] == 1 and (result[-1] != 1 or shape[0] != 1)


def checked_scalar(name: str, value: Any) -> float:
    """Return a scalar of an epilogue as a double; TypeError and ValueError for what is none."""
    item = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    if isinstance(item, bool) or not isinstance(item, int | float):
        raise TypeError(f"the epilogue's {name} is {value!r}; it must be a real number.")
    try:
        number = float(item)
    except OverflowError:
        number = math.inf
    if math.isinf(number) and not (isinstance(item, float) and math.isinf(item)):
        raise ValueError(f"the epilogue's {name} is beyond the largest double.")
    return number
