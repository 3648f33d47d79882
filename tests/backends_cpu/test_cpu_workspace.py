"""Memory that shares of products claim: each has its own, and a forked child finds all of it."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gemmule as gm
from forks import start_fork, status_of
from gemmule.backends.cpu.atomics import read
from gemmule.backends.cpu.intrinsics import load, store
from gemmule.backends.cpu.jit import kernel
from gemmule.backends.cpu.threads import processors
from gemmule.rungs._cpu_workspace import claimed, release, workspace

_get, _put = load("int64", "int64"), store("int64", "int64")
BYTES = 1 << 17


@kernel
def _claimed(at: int) -> int:
    return claimed(at)


@kernel
def _released(at: int, part: int) -> None:
    release(at, part)


@kernel
def _used(at: int, mine: int, times: int) -> int:
    """Return how often what was written to a part was not there any more."""
    lost = 0
    for _ in range(times):
        part = claimed(at)
        for i in range(64):
            _put(part, i, mine)
        for i in range(64):
            if read(part + 8 * i) != mine:
                lost += 1
        release(at, part)
    return lost


def test_parts_are_somebodys_own_until_released() -> None:
    at = workspace(BYTES)
    assert at == workspace(BYTES - 1) == workspace(BYTES // 2 + 1) != workspace(BYTES + 1)
    parts = [_claimed(at) for _ in range(2 * processors())]
    assert min(np.diff(sorted(parts)), default=BYTES) >= BYTES
    assert all(part % 64 == 0 for part in parts)
    _released(at, parts[-1])
    assert _claimed(at) == parts[-1]
    for part in parts:
        _released(at, part)
    with ThreadPoolExecutor(2 * processors() + 2) as pool:  # more than there are parts
        lost = pool.map(lambda mine: _used(at, mine, 20_000), range(2 * processors() + 2))
        assert list(lost) == [0] * (2 * processors() + 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_claims_what_its_parent_is_using() -> None:
    at = workspace(BYTES)
    parts = [_claimed(at) for _ in range(2 * processors())]

    def claims_anew() -> bool:
        signal.alarm(20)  # who finds no part free waits
        return _claimed(at) == parts[0]

    child = start_fork(claims_anew)
    for part in parts:
        _released(at, part)
    assert status_of(child) == 0


def test_products_of_many_callers_do_not_disturb_each_other() -> None:
    rng = np.random.default_rng(3)
    A = rng.integers(-3, 4, (70, 300)).astype(np.float32)
    B = [rng.integers(-3, 4, (300, 90)).astype(np.float32) for _ in range(6)]
    plan = gm.plan("matmul", A, B[0], rung="packed_threads")

    def is_right(one: np.ndarray) -> bool:
        return all(np.array_equal(plan(A, one), A @ one) for _ in range(40))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(is_right, B))
