"""What a device's time models count with: the coefficients of each rung's formula, as data.

A rung says by a formula how long it takes; the numbers in it were fitted to products measured on
one device and are a tree of positive numbers, a branch for each rung.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

Numbers: TypeAlias = Mapping[Any, Any]  # names, or sizes, to numbers or to more of these
Path: TypeAlias = tuple[Any, ...]

# What any coefficient may be, by the end of its name: seconds, rates, and numbers without a unit.
PLAUSIBLE = {"_s": (1e-15, 1.0), "_per_s": (1e3, 1e18), "": (1e-6, 1e12)}


@dataclass(frozen=True, eq=False)
class DeviceModel:
    """Coefficients on a device, and what they are worth there.

    numbers: of each rung, ``folder/name``, a tree of positive numbers. errors: of a rung, how far
    its formula is from times that it was not fitted to, a share of them. origin: where the numbers
    come from, in words. measured: the day of the fit, or ``""`` as shipped.
    """

    device: str
    arch: str
    units: int
    read_bytes_per_s: float
    numbers: Mapping[str, Numbers]
    clock_hz: float = 0.0
    errors: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    origin: str = ""
    measured: str = ""


def leaves(tree: Numbers, at: Path = ()) -> Iterator[tuple[Path, float]]:
    """Yield the place and the value of every number of a tree.

    >>> list(leaves({"turn_s": {2: 5e-7}, "rate": 0.9}))
    [(('turn_s', 2), 5e-07), (('rate',), 0.9)]
    """
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*at, name))
        else:
            yield (*at, name), value


def changed(tree: Numbers, change: Callable[[Path, float], float], at: Path = ()) -> Numbers:
    """Return the tree with each number replaced by what `change` says of its place and value."""
    return {
        name: changed(value, change, (*at, name))
        if isinstance(value, Mapping)
        else change((*at, name), value)
        for name, value in tree.items()
    }


def unit(path: Path) -> str:
    """Return which unit the number at a place has: ``_per_s``, ``_s``, or none."""
    names = [name for name in path if isinstance(name, str)]
    for ending in ("_per_s", "_s"):
        if any(name.endswith(ending) for name in names):
            return ending
    return ""


def plausible(path: Path, value: object) -> bool:
    """Tell whether a number at this place may be true of any device."""
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        return False
    low, high = PLAUSIBLE[unit(path)]
    return low <= value <= high  # type: ignore[operator]
