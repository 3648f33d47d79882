"""What tests of several rungs are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from gemmule.backends.cpu import amx

MISSING = amx.missing_tiles("bf16")


@pytest.fixture(
    params=[
        "in memory",
        pytest.param("AMX", marks=pytest.mark.skipif(MISSING is not None, reason=str(MISSING))),
    ],
    scope="module",
)
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let products on tile registers run: on those of the processor, and on ones in memory."""
    from tile_emulation import emulated_tiles

    with emulated_tiles() if request.param == "in memory" else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _memory_of_others(unwritten: None) -> None:
    """A result that nobody wrote is not zero by chance."""
