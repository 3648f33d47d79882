"""What the tests of the tuner have in common: rungs of their own, and nothing tuned before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gemmule.core.rung import Rung
from gemmule.storage import tuned as tuned_store
from made_rungs import Plant


@pytest.fixture(autouse=True)
def _nothing_tuned(own_cache: Path, tmp_path: Path, limit: Callable[..., None]) -> None:
    limit(tuned_store, SHIPPED=tmp_path / "shipped")


@pytest.fixture
def plant(tmp_path: Path, only_rungs: Callable[..., None]) -> Plant:
    """What makes some rungs the only ones there are, and returns them."""

    def make_only(*rungs: Rung) -> tuple[Rung, ...]:
        only_rungs(tmp_path / "rungs", *rungs)
        return rungs

    return make_only
