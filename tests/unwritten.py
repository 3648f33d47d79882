"""What `np.empty` gives, full of ones: memory that nobody wrote shows as NaN and huge numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np


def _full(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*given: Any, **named: Any) -> Any:
        array = make(*given, **named)
        if not array.dtype.hasobject:
            array.ravel("K").view(np.uint8).fill(0xFF)
        return array

    return made


@contextmanager
def shown() -> Iterator[None]:
    """Fill what NumPy leaves as it was, for the block."""
    made = {name: _full(getattr(np, name)) for name in ("empty", "empty_like")}
    with mock.patch.multiple(np, **made):
        yield
