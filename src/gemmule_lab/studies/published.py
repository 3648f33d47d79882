"""The figures that the documents printed, one file a document."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "published"
BITS = {"torch": 16, "fp16": 16, "int8": 8, "int4": 4}


@functools.cache
def published(number: str) -> Any:
    """Return a document's printed figures."""
    return json.loads((FOLDER / f"{number}.json").read_text(encoding="utf-8"))


def formula_bytes(n: int, bits: int) -> float:
    """Return the bytes that document 003's bandwidth counts: matrix, float16 vector and result.

    >>> formula_bytes(512, 16)
    526336.0
    """
    return n * n * bits / 8 + 2 * 2 * n


def formula_gbs(n: int, bits: int, ns: float) -> float:
    """Return document 003's bandwidth: those bytes over nanoseconds, in GB/s."""
    return formula_bytes(n, bits) / ns
