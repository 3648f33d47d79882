"""Every CUDA rung on a real device: 100 runs give one result, and 2^31 elements are no limit."""

from __future__ import annotations

import pytest

from extremes import extremes
from gemmule.core.rung import Rung

RUNGS = [pytest.param(r, id=f"{r.folder}-{r.name}") for r in extremes.watched()]


@pytest.mark.parametrize("rung", RUNGS)
def test_a_hundred_runs_give_one_result(rung: Rung) -> None:
    found = list(extremes.reruns(rung))
    assert found
    assert not [one for one in found if one.wrong]


@pytest.mark.whole_gpu
@pytest.mark.parametrize("rung", RUNGS)
def test_more_than_2_to_the_31_elements(rung: Rung) -> None:
    found = list(extremes.giants(rung))
    assert len(found) == 1 + rung.batched
    assert not [one for one in found if one.wrong]
