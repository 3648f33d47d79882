"""Caches that new measurements make stale: plans, and calls bound to them.

Whoever stores a new measurement empties all of them together, so that later calls decide anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

T = TypeVar("T")
_empty: list[Callable[[], None]] = []  # of every cache made here


def remembered(maxsize: int) -> Callable[[Callable[..., T]], _lru_cache_wrapper[T]]:
    """Return a decorator: `functools.lru_cache` of so many results, forgotten with all others."""

    def decorate(function: Callable[..., T]) -> _lru_cache_wrapper[T]:
        cached = functools.lru_cache(maxsize)(function)
        _empty.append(cached.cache_clear)
        return cached

    return decorate


def table() -> dict[Hashable, Any]:
    """Return a dict whose entries are forgotten with all others."""
    made: dict[Hashable, Any] = {}
    _empty.append(made.clear)
    return made


def forget_plans() -> None:
    """Drop every plan and bound call, so that the next call sees new measurements."""
    for empty in _empty:
        empty()
