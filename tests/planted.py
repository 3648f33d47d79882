"""Faults planted in the sources or in the system, to see that what watches notices them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def planted(owner: Any, name: str, fault: Callable[..., Any]) -> Iterator[list[tuple[Any, ...]]]:
    """Call `fault` in the place of a function: the sound function first, then what that is given.

    Gives a list that grows with what each call is given. AssertionError where nothing calls it
    within the block: a check that never meets the fault says nothing about it.
    """
    sound, own, calls, met = getattr(owner, name), name in vars(owner), [], False

    def faulty(*given: Any, **named: Any) -> Any:
        nonlocal met
        met = True
        calls.append(given)
        return fault(sound, *given, **named)

    setattr(owner, name, faulty)
    try:
        yield calls
    finally:
        if own:
            setattr(owner, name, sound)
        else:
            delattr(owner, name)
    assert met, f"nothing called {name} of {owner} while it was faulty"
