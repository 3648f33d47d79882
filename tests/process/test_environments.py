"""A sample of the campaign of environments: the same bits whatever befalls the process."""

from __future__ import annotations

from pathlib import Path

import pytest

import environments_campaign as environments
from gemmule.backends.cpu.jit import unavailable
from gemmule.settings import cache_folder

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="needs Numba")
SEED, PRODUCTS = 4, 8


def test_the_bits_stay_whatever_befalls_the_process(tmp_path: Path) -> None:
    plain = environments.told_by(environments.Environment(), SEED, PRODUCTS, cache_folder())
    found = environments.told_by(environments.TOGETHER, SEED, PRODUCTS, tmp_path / "cache")
    assert len(plain) == PRODUCTS
    assert environments.compared(plain, found) == []


def test_what_differs_is_told() -> None:
    plain = {"0 matvec": "float32 (3,) 12", "1 matmul": "float32 (3, 4) 34"}
    assert environments.compared(plain, dict(plain)) == []
    assert environments.compared(plain, plain | {"0 matvec": "MemoryError: "}) == [
        "0 matvec: MemoryError: , plain float32 (3,) 12"
    ]
    assert len(environments.compared(plain, {"process": "hung for 600 s"})) == 3
