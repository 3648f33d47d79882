"""From the keywords of a public function, which `gemmule.typing` names, to `Options`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from gemmule.core.canonical import DEFAULT, Frozen, Options
from gemmule.typing import Choices

Function = TypeVar("Function", bound=Callable[..., Any])
_DEFAULTS = {field.name: field.default for field in fields(Options)}


def shows(keywords: Any) -> Callable[[Function], Function]:
    """Return a decorator: help, completion and `inspect.signature` show the keywords one by one.

    keywords: the TypedDict that a function's ``**keywords`` unpack.
    """

    def decorate(function: Function) -> Function:
        own = inspect.signature(function)
        given = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
        for name, kind in keywords.__annotations__.items():
            text, default = getattr(kind, "__forward_arg__", kind), _DEFAULTS.get(name)
            parameter = inspect.Parameter
            given.append(parameter(name, parameter.KEYWORD_ONLY, default=default, annotation=text))
        function.__signature__ = own.replace(parameters=given)  # type: ignore[attr-defined]
        return function

    return decorate


def split(function: str, keywords: Any) -> tuple[Any, Options, str | None]:
    """Return what the keywords of a product mean: its `out`, its options, and its device."""
    out, device = keywords.pop("out", None), keywords.pop("device", None)
    return out, options_of(function, keywords) if keywords else DEFAULT, device


def split_epilogue(keywords: Any) -> tuple[Any, Any, Options]:
    """Return what the keywords of a product with an epilogue mean: that, `out`, the options."""
    epilogue = keywords.pop("epilogue")
    if keywords.get("device") is not None:
        raise ValueError(
            f"an epilogue was given with device={keywords['device']!r}; such products are computed "
            "where their operands lie. Move them first: gemmule.asarray(A, device=...)."
        )
    out, options, _ = split("matmul", keywords)
    return epilogue, out, options


_OF_SCALED = ("out", "out_dtype", "rung", "params")


def split_scaled(keywords: Any) -> tuple[tuple[Any, Any], Any, Options, Any]:
    """Return what a scaled product's keywords mean: scales, `out`, its options, its epilogue."""
    scales = keywords.pop("scale_a", None), keywords.pop("scale_b", None)
    epilogue = keywords.pop("epilogue", None)
    unknown = keywords.keys() - {*_OF_SCALED}
    if unknown:
        raise TypeError(
            f"matmul() with scales got the keyword argument {min(unknown)!r}; those of a scaled "
            f"product are scale_a, scale_b, epilogue, {', '.join(_OF_SCALED)}."
        )
    out, options, _ = split("matmul", keywords)
    return scales, out, options, epilogue


def options_of(function: str, choices: Any) -> Options:
    """Return the options that these keywords mean; ValueError for a word that means nothing."""
    unknown = choices.keys() - Choices.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"{function}() got an unexpected keyword argument {min(unknown)!r}; its options are "
            f"{', '.join(Choices.__annotations__)}."
        )
    if choices.get("params") is not None:
        choices = choices | {"params": _frozen(choices["params"])}
    try:
        return _made(**choices)
    except TypeError:
        _check_kinds(choices)  # what cannot be hashed or compared names no argument by itself
        raise


@functools.lru_cache(maxsize=256, typed=True)
def _made(**choices: Any) -> Options:
    _check_kinds(choices)
    options = Options(**choices)
    if options.activations not in ("float", "int8"):
        raise ValueError(f"activations is {options.activations!r}; it must be 'float' or 'int8'.")
    name = None if options.out_dtype is None else _dtype_name(options.out_dtype)
    named = {"literal": options.rung is not None, "exact": choices.get("precision") == "float32"}
    made = Options(**choices | {"out_dtype": name} | named)
    return DEFAULT if made == DEFAULT else made


def _check_kinds(choices: Mapping[str, Any]) -> None:
    """Raise TypeError for a keyword's value of a kind that it never has."""
    for name in ("precision", "activations", "rung", "accumulate"):
        word = choices.get(name, _DEFAULTS[name])
        if not isinstance(word, str) and (word is not None or _DEFAULTS[name] is not None):
            raise TypeError(f"{name} is {word!r}; it must be a string.")
    alone = choices.get("batch_invariant", False)
    if not isinstance(alone, bool | np.bool):
        raise TypeError(f"batch_invariant is {alone!r}; it must be True or False.")
    if choices.get("out_dtype") is not None:
        _dtype_name(choices["out_dtype"])


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


def _frozen(params: Any) -> Frozen:
    """Return a rung's parameters as sorted pairs; TypeError and ValueError for what is none."""
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise TypeError(f"params is {params!r}; it must be a mapping of parameter names to values.")
    for name, value in params.items():
        if not isinstance(value, bool | int | float | str):
            raise ValueError(f"params: {name}={value!r} is no number, string or bool.")
    return tuple(sorted(params.items()))
