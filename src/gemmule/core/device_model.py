"""What a device's time models count with: the coefficients of each rung's terms, as data.

A rung says of a product by which terms its time grows: `Terms`. Each is multiplied with a number of
that name, which was fitted to products measured on one device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

Numbers: TypeAlias = Mapping[str, float]
Terms: TypeAlias = tuple[Mapping[str, float], ...]
"""What is waited for by itself, then what takes place at the same time: amounts by their names."""

TOGETHER = 4  # the power by which what takes place at the same time adds up

# What any coefficient may be: where its name ends with _s seconds, else a number without a unit.
PLAUSIBLE = {True: (1e-16, 1.0), False: (1e-6, 1e6)}


@dataclass(frozen=True, eq=False)
class DeviceModel:
    """Coefficients on a device, and what they are worth there.

    numbers: of each rung, ``folder/name``, positive numbers by name. errors: of a rung, how far its
    expected times are from those that it was not fitted to, a share of them. origin: where the
    numbers come from, in words. measured: the day of the fit, or ``""`` as shipped.
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


def seconds(own: Numbers, terms: Terms) -> float:
    """Return the time of terms: a sum, and the longest of what overlaps, or some more.

    Where two that overlap are alike, neither is free.

    >>> seconds({"start_s": 2.0, "read": 1.0}, ({"start_s": 1.0}, {"read": 3.0}))
    5.0
    """
    alone, *together = (sum(own[name] * amount for name, amount in some.items()) for some in terms)
    return float(alone + sum(one**TOGETHER for one in together) ** (1 / TOGETHER))


def is_time(name: str) -> bool:
    """Tell whether a coefficient is in seconds, by the first word of its name.

    >>> is_time("turn_s aligned"), is_time("read aligned")
    (True, False)
    """
    return name.partition(" ")[0].endswith("_s")


def plausible(name: str, value: object) -> bool:
    """Tell whether the number of this name may be true of any device."""
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        return False
    low, high = PLAUSIBLE[is_time(name)]
    return low <= value <= high  # type: ignore[operator]
