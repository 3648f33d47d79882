"""From the keywords of a public function to `Options`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from gemmule.core.canonical import DEFAULT, Frozen, Options

_PLAIN = (None, None, "float32", None, False, "float", None)


def options_of(*given: Any) -> Options:
    """Return the options that these keywords mean; ValueError for a word that means nothing.

    given: rung, out_dtype, precision, accumulate, batch_invariant, activations, params.
    """
    try:
        # NumPy's float64 compares equal to None.
        return DEFAULT if given[1] is None and given == _PLAIN else _made(*given)
    except (TypeError, ValueError):
        _check_kinds(*given)  # what cannot be hashed or compared names no argument by itself
        raise


@functools.lru_cache(maxsize=256, typed=True)
def _made(
    rung: str | None,
    out_dtype: str | None,
    precision: str,
    accumulate: str | None,
    batch_invariant: bool,
    activations: str,
    params: Frozen | None,
) -> Options:
    _check_kinds(rung, out_dtype, precision, accumulate, batch_invariant, activations, params)
    if activations not in ("float", "int8"):
        raise ValueError(f"activations is {activations!r}; it must be 'float' or 'int8'.")
    name = None if out_dtype is None else _dtype_name(out_dtype)
    literal = rung is not None
    return Options(name, precision, accumulate, batch_invariant, activations, literal, rung, params)


def _check_kinds(
    rung: Any,
    out_dtype: Any,
    precision: Any,
    accumulate: Any,
    batch_invariant: Any,
    activations: Any,
    params: Any,
) -> None:
    """Raise TypeError for a keyword's value of a kind that it never has."""
    words = {"precision": precision, "activations": activations}
    maybe = {"rung": rung, "accumulate": accumulate}
    for name, word in (words | {k: v for k, v in maybe.items() if v is not None}).items():
        if not isinstance(word, str):
            raise TypeError(f"{name} is {word!r}; it must be a string.")
    if not isinstance(batch_invariant, bool | np.bool):
        raise TypeError(f"batch_invariant is {batch_invariant!r}; it must be True or False.")
    if out_dtype is not None:
        _dtype_name(out_dtype)


def _dtype_name(dtype: Any) -> str:
    """Return the name of a NumPy, ml_dtypes or torch dtype, or of its string."""
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    if isinstance(dtype, str):
        return text
    try:
        name: str = np.dtype(dtype).name
    except (TypeError, ValueError) as error:
        raise TypeError(f"out_dtype is {text}; it must be a dtype or the name of one.") from error
    return name


def frozen(params: Mapping[str, Any] | None) -> Frozen | None:
    """Return a rung's parameters as sorted pairs; TypeError and ValueError for what is none."""
    if params is None:
        return None
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise TypeError(f"params is {params!r}; it must be a mapping of parameter names to values.")
    for name, value in params.items():
        if not isinstance(value, bool | int | float | str):
            raise ValueError(f"params: {name}={value!r} is no number, string or bool.")
    return tuple(sorted(params.items()))
