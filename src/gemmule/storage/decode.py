"""Untrusted JSON into typed records: every field checked against the dataclass that declares it."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Union

MAX_TEXT = 10_000

T = TypeVar("T")


def decode(record: Callable[..., T], value: object, where: str) -> T:
    """Return an instance of dataclass `record` made from parsed JSON.

    Understands str, int, float, bool, None, unions, ``tuple[X, ...]``, ``list[X]``,
    ``Mapping[str, X]`` and nested dataclasses. ValueError, naming the place, for a missing or
    unknown field, a wrong type, a number that is not finite, or a text longer than 10,000
    characters.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_kind(value)}; it must be an object.")
    hints = _hints(record)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise ValueError(f"{where} has an unknown field {unknown[0][:80]!r}.")
    fields = {name: _value(hints[name], given, f"{where}.{name}") for name, given in value.items()}
    missing = [n for n in _required(record) if n not in fields]
    if missing:
        raise ValueError(f"{where} lacks the field {missing[0]!r}.")
    return record(**fields)


@functools.cache
def _hints(record: Any) -> dict[str, Any]:
    return typing.get_type_hints(record)


@functools.cache
def _required(record: Any) -> tuple[str, ...]:
    absent = dataclasses.MISSING
    return tuple(
        f.name
        for f in dataclasses.fields(record)
        if f.default is absent and f.default_factory is absent
    )


def _value(hint: Any, value: object, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return _union(typing.get_args(hint), value, where)
    if origin is tuple or origin is list:
        if not isinstance(value, list):
            raise ValueError(f"{where} is {_kind(value)}; it must be an array.")
        item = typing.get_args(hint)[0]
        return origin(_value(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {_kind(value)}; it must be an object.")
        item = typing.get_args(hint)[1]
        return {_text(k, where): _value(item, v, f"{where}.{k[:80]}") for k, v in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return decode(hint, value, where)
    return _scalar(hint, value, where)


def _union(members: tuple[Any, ...], value: object, where: str) -> Any:
    if value is None and type(None) in members:
        return None
    exact = [m for m in members if m is type(value)]
    others = [m for m in members if m is not type(None)]
    return _value((exact or others)[0], value, where)


def _scalar(hint: Any, value: object, where: str) -> Any:
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"{where} is not a finite number.")
        return number
    if type(value) is not hint:
        raise ValueError(f"{where} is {_kind(value)}; it must be {hint.__name__}.")
    return _text(value, where) if isinstance(value, str) else value


def _text(value: str, where: str) -> str:
    if len(value) > MAX_TEXT:
        raise ValueError(f"{where} has {len(value):,} characters; at most {MAX_TEXT:,} are read.")
    return value


def _kind(value: object) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"
