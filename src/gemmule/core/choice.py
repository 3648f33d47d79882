"""The frozen `Choice`: a rung with its parameters for a problem, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gemmule.core.canonical import Call
from gemmule.core.problem import Problem
from gemmule.core.rung import Machine, Rung


@dataclass(frozen=True, slots=True)
class Choice:
    """A rung with its parameters for a problem, and why.

    `problem` is what the rung is given; where it differs from ``call.problem`` the back end copies
    operands first, and `copies` says so in words.
    """

    call: Call
    problem: Problem
    rung: Rung
    params: Mapping[str, Any]
    machine: Machine
    reason: str
    expected_s: float | None = None
    copies: tuple[str, ...] = ()
    runner_up: str = ""


def duration(seconds: float) -> str:
    """Return a time in the unit that shows it: microseconds, milliseconds or seconds.

    >>> duration(2.04e-6), duration(0.01234), duration(1.5)
    ('2.0 us', '12.3 ms', '1.5 s')
    """
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.95:
            return f"{seconds * scale:.1f} {unit}"
    return f"{seconds:,.1f} s"
