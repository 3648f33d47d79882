"""What benches of the tests have in common: small machines, which cost nothing to measure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gemmule_lab.harness import host
from gemmule_lab.records.rows import Ceiling


@pytest.fixture
def quick_bench(
    folder: Path,
    setting: Callable[..., None],
    limit: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bench on the CPU in an empty folder: few copies, and ceilings that cost nothing."""
    setting(GEMMULE_DEVICE="cpu")
    ceilings = {"read": Ceiling("read", 40.0, "GB/s", "made", 1)}
    limit(host, MOST_SETS=2)
    monkeypatch.setattr(host, "measure_ceilings", lambda **options: ceilings)
