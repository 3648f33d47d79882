"""The clock of graph replays: which device, which stream, and whose memory it times calls on."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import gemmule as gm
from emulated_driver import TimedDriver, emulated
from gemmule.backends.cuda import arrays
from gemmule.backends.cuda.graph_clock import GraphClock
from gemmule.timing.clock import Entry


@pytest.mark.parametrize("ordinal", [0, 1])
def test_calls_run_on_the_clocks_device_and_stream_in_every_library(ordinal: int) -> None:
    with emulated(kind=TimedDriver) as driver:
        timed(driver, ordinal)
        gc.collect()  # memory is given back to the driver that it came from


def timed(driver: Any, ordinal: int) -> None:
    current: list[Any] = []

    @contextmanager
    def entered(stream: Any) -> Any:
        current.append(stream)
        yield
        current.pop()

    on_torch = SimpleNamespace(ExternalStream=lambda *at, device: (*at, device), stream=entered)
    on_cupy = SimpleNamespace(ExternalStream=lambda handle, device: entered((handle, device)))
    libraries = {"torch": SimpleNamespace(cuda=on_torch), "cupy": SimpleNamespace(cuda=on_cupy)}
    like = arrays.from_own(gm.asarray(np.ones(1), device=f"cuda:{ordinal}"))
    clock, met = GraphClock(ordinal), []
    here = [(clock.stream, f"cuda:{ordinal}"), (clock.stream, ordinal)]

    def call(index: int) -> None:
        assert driver.contexts[-1] == 1000 + ordinal
        assert current == here
        assert arrays.current_stream(like, ordinal) == clock.stream
        met.append((index, arrays.workspace(like, 64)[0]))

    with mock.patch.dict(sys.modules, libraries):
        run = clock.prepare(Entry("a product", call, sets=3))
    counted = run(0, 10)
    assert {index for index, _ in met} == {0, 1, 2}
    assert len({place for _, place in met}) == 1, "launches of a graph share a workspace"
    assert counted.calls >= 10
    assert counted.calls % 3 == 0
    assert current == []
    assert arrays.current_stream(like, ordinal) == arrays.LEGACY_STREAM
    two = [arrays.workspace(like, 64) for _ in range(2)]
    assert two[0][0] != two[1][0], "and others have their own again"


@pytest.mark.parametrize(("each_ms", "calls"), [(2e-6, 64), (0.05, 64), (0.25, 16), (1, 4), (9, 1)])
def test_a_graph_lasts_four_milliseconds_or_has_64_calls(each_ms: float, calls: int) -> None:
    class Slow(TimedDriver):
        def cuEventElapsedTime(self, before: int, after: int) -> tuple[Any, ...]:
            return self._answer("cuEventElapsedTime", each_ms)

    with emulated(kind=Slow):
        run = GraphClock(0).prepare(Entry("a product", lambda index: None, sets=1))
        found = run(0, 1)
        assert found.calls == calls
        assert found.seconds == pytest.approx(each_ms * 1e-3)
        assert run(0, 65).calls == -(-65 // calls) * calls
        del run
        gc.collect()
