"""Kernels of wide vectors and of tiles where there are neither, in a process of their own."""

from __future__ import annotations

import pytest

from checkout import TESTS
from children import ended
from gemmule.backends.cpu.target import has_wide_vectors, missing_vectors

pytestmark = [
    pytest.mark.skipif(has_wide_vectors(), reason="they run here as they are"),
    pytest.mark.skipif(missing_vectors() is not None, reason=str(missing_vectors())),
]


def test_products_of_rounded_weights() -> None:
    """Both ways by 4 bits; by 8, and every kind of groups, where the processor has wide vectors."""
    file = TESTS / "rungs" / "test_rounded_tiles.py"
    given = ("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-p", "wide_emulation")
    done = ended(*given, file, "-k", "stretches and memory-4")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "2 passed" in done.stdout, done.stdout
