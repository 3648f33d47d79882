"""The pool of threads: every share once, by whoever comes, and nobody waits for the absent."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from children import printed
from gemmule.backends.cpu import blas_threads, openmp, shares
from gemmule.backends.cpu import steps as cpu_steps
from gemmule.backends.cpu import threads as cpu_threads
from gemmule.backends.cpu.jit import unavailable
from gemmule.backends.cpu.shares import SLOT
from gemmule.settings import borrows_threads

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="needs Numba")

PRODUCT = """
import json, threading, time
import numpy as np
from forks import start_fork, status_of
from gemmule.backends.cpu import pool as cpu_pool
from gemmule.backends.cpu.atomics import add, read
from gemmule.backends.cpu.jit import kernel

@kernel
def share(number: int, counts: int) -> None:
    add(counts + 8 * number, 1)

counted = cpu_pool.in_pool(share, 1)

def each_once(count):
    counts = np.zeros(count, np.int64)
    counted(count, counts.ctypes.data)
    return bool((counts == 1).all())

def fork(work):
    return status_of(start_fork(work))
"""
MANY = """
rng = np.random.default_rng(1)
right = []
def work(sizes):
    right.extend(each_once(int(count)) for count in sizes)
threads = [threading.Thread(target=work, args=(rng.integers(1, 200, 400),)) for _ in range(12)]
[t.start() for t in threads]; [t.join() for t in threads]
# So many claims that some thread is interrupted in the middle of one.
right.extend(each_once(1_000_000) for _ in range(4))
status = fork(lambda: each_once(90) and each_once(2))
print(json.dumps([len(right), all(right), status]))
"""
# Two shares that end when both have begun, or after long: how many saw the other.
MEETING = """
from gemmule.backends.cpu.atomics import now_ns

@kernel
def meet(number: int, begun: int, met: int) -> None:
    add(begun, 1)
    until = now_ns() + 30_000_000_000
    while read(begun) < 2 and now_ns() < until:
        pass
    if read(begun) >= 2:
        add(met, 1)

meeting = cpu_pool.in_pool(meet, 2)

def helped():
    begun, met = np.zeros(1, np.int64), np.zeros(1, np.int64)
    meeting(2, begun.ctypes.data, met.ctypes.data)
    return int(met[0]) == 2
"""
# A share that ends when it is told to.
STUCK = """
@kernel
def stuck(number: int, begun: int, end: int) -> None:
    add(begun, 1)
    while read(end) == 0:
        pass

waiting = cpu_pool.in_pool(stuck, 2)
"""
FORKED = """
before, statuses = helped(), []
for _ in range(3):
    begun, end = np.zeros(1, np.int64), np.zeros(1, np.int64)
    other = threading.Thread(target=waiting, args=(8, begun.ctypes.data, end.ctypes.data))
    other.start()
    while begun[0] < cpu_pool.thread_count():
        time.sleep(1e-3)
    threading.Timer(0.3, lambda: end.fill(1)).start()  # in the middle of the fork, unless it waits
    statuses.append(fork(helped))
    other.join()
print(json.dumps([before, statuses, int(begun[0]), helped(), fork(lambda: fork(helped) == 0)]))
"""
# The first handler that is registered runs last, when the pool has ended.
LATE = """
import atexit
atexit.register(lambda: print(json.dumps([late(90), late(3)])))
"""
LATE_PRODUCT = """
late = each_once
each_once(40)
"""
# Every helper is in a share that ends only when the second product has been computed.
ABSENT = """
begun, end = np.zeros(1, np.int64), np.zeros(1, np.int64)
other = threading.Thread(target=waiting, args=(8, begun.ctypes.data, end.ctypes.data))
each_once(8), cpu_pool.in_pool(stuck, 2).address
other.start()
while begun[0] < cpu_pool.thread_count():
    time.sleep(1e-3)
right = [each_once(40) for _ in range(20)]
stuck_still = other.is_alive()
end[0] = 1
other.join()
print(json.dumps([all(right), stuck_still, int(begun[0]), each_once(40)]))
"""


def child(code: str, pool: str, **more: str) -> list[object]:
    own = {"GEMMULE_POOL": pool, "OPENBLAS_NUM_THREADS": 3, "PYTHONWARNINGS": "ignore"}
    result: list[object] = json.loads(printed(code, **own, **more).splitlines()[-1])
    return result


@pytest.mark.parametrize("pool", ["blas", "own"])
def test_every_share_is_done_once_whoever_calls(pool: str) -> None:
    assert child(PRODUCT + MANY, pool) == [12 * 400 + 4, True, 0]


@pytest.mark.skipif(cpu_threads.usable_processors() < 2, reason="needs two processors")
@pytest.mark.parametrize("pool", ["blas", "own"])
def test_a_product_does_not_wait_for_helpers_that_are_busy(pool: str) -> None:
    assert child(PRODUCT + STUCK + ABSENT, pool) == [True, True, 8, True]


@pytest.mark.skipif(cpu_threads.usable_processors() < 2, reason="needs two processors")
@pytest.mark.parametrize("pool", ["blas", "own"])
def test_a_fork_waits_for_helpers_and_they_come_again(pool: str) -> None:
    assert child(PRODUCT + MEETING + STUCK + FORKED, pool) == [True, [0, 0, 0], 8, True, 0]


@pytest.mark.parametrize("pool", ["blas", "own"])
@pytest.mark.parametrize("started", [True, False])
def test_products_at_the_end_of_the_interpreter(pool: str, started: bool) -> None:
    code = LATE_PRODUCT if started else LATE_PRODUCT.replace("each_once(40)", "")
    assert child("import json" + LATE + PRODUCT + code, pool) == [True, True]


class Twin:
    """The pool's kernels as Python functions, on words of its own, and a caller that comes between.

    Wherever a helper reads a word the caller may end the product, once its shares are done, and
    begin the next one, of other shares: at the `at`th read it does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], at: int) -> None:
        self.words: dict[int, int] = {SLOT + shares.RANGES: 2 * SLOT, SLOT + shares.SERIAL: 1}
        self.counts, self.at, self.reads, self.steps = counts, at, 0, 0
        self.begun, self.done, self.nested = 0, [], True
        own: dict[str, Any] = {
            "read": self.read, "write": self.words.__setitem__, "add": self.add,
            "swap_if": self.swap_if, "call_c": self.call_c, "now_ns": lambda: 0,
            "pause": lambda: 0, "wake": lambda *_: 0, "claim": shares.claim.function,
        }  # fmt: skip
        for name, function in own.items():
            monkeypatch.setattr(shares, name, function)
        monkeypatch.setattr(shares, "work_on", shares.work_on.function)
        monkeypatch.setattr(shares, "_GRACE_NS", 0)
        self.begin()
        self.nested = False

    def read(self, place: int) -> int:
        self.steps += 1
        assert self.steps < 10_000, "the kernels wait for ever"
        if not self.nested:
            self.reads += 1
            if self.reads == self.at:
                self.nested = True
                self.end()
                self.begin()
                self.nested = False
        return self.words.get(place, 0)

    def add(self, place: int, value: int) -> None:
        self.words[place] = self.words.get(place, 0) + value

    def swap_if(self, place: int, expected: int, wanted: int) -> int:
        if self.words.get(place, 0) != expected:
            return 0
        self.words[place] = wanted
        return 1

    def call_c(self, task: int, words: tuple[int, int]) -> None:
        self.done.append((task, *words))

    def begin(self) -> None:
        """Open the next product, where the one before is closed, as `run_shares` does."""
        serial = self.words[SLOT + shares.SERIAL] + 1
        if serial % 2 or self.begun == len(self.counts):
            return
        count = self.counts[self.begun]
        self.begun += 1
        self.add(SLOT + shares._DUE, count)
        told = {shares._TASK: self.begun, shares._WORDS: 100 * self.begun, shares._COUNT: count}
        for place, value in {**told, shares._LIMIT: self.begun, shares.SERIAL: serial}.items():
            self.words[SLOT + place] = value

    def end(self) -> None:
        """Do what is left of the product, and close it unless a helper is in one of its shares."""
        serial, count = self.words[SLOT + shares.SERIAL], self.counts[self.begun - 1]
        people = min(self.begun + 1, count)
        shares.work_on(0, SLOT, serial, 0, people, count, self.begun, 100 * self.begun)
        if self.words[SLOT + shares._DONE] == self.words[SLOT + shares._DUE]:
            self.words[SLOT + shares.SERIAL] = serial + 1


@pytest.mark.parametrize("counts", [(4, 9), (9, 4), (2, 2, 2), (1, 30)])
@pytest.mark.parametrize("me", [0, 1])
def test_a_helper_meets_one_product_whole_wherever_another_begins(
    counts: tuple[int, ...], me: int
) -> None:
    for at in range(1, 60):
        with pytest.MonkeyPatch.context() as patched:
            twin = Twin(patched, counts, at)
            for _ in counts:
                shares.help_others.function(0, SLOT, me)
            twin.nested = True
            while twin.begun < len(counts) or not twin.words[SLOT + shares.SERIAL] % 2:
                twin.end()
                twin.begin()
            wanted = [
                (p + 1, 100 * p + 100, i) for p in range(len(counts)) for i in range(counts[p])
            ]
            assert sorted(twin.done) == wanted, at


def test_one_thread_asks_nobody() -> None:
    code = PRODUCT + "print(json.dumps([each_once(50), cpu_pool._state.address]))"
    assert child(code, "own", NUMBA_NUM_THREADS="1") == [True, 0]


def test_numpys_openblas_is_found_where_numpy_has_one() -> None:
    import numpy as np

    blas = np.show_config("dicts")["Build Dependencies"]["blas"]  # type: ignore[index,call-overload]
    if "scipy-openblas" not in blas["name"] or sys.platform != "linux":
        pytest.skip("this NumPy brings no OpenBLAS")
    found = blas_threads.examined()
    if isinstance(found, str):  # as OpenBLAS 0.3.34 in NumPy 2.5
        assert "does not export its queue" in found


def test_large_products_of_vectors_are_openblas_s_to_share_where_it_has_threads() -> None:
    if blas_threads.routine("openblas_get_num_threads") is None:
        pytest.skip("this NumPy brings no OpenBLAS")
    code = "from gemmule.backends.cpu.blas_threads import shares_vectors as f; print(f(4096, 4096)"
    for threads in (1, 2):
        told = printed(f"{code}, f(90, 90))", OPENBLAS_NUM_THREADS=threads)
        assert told.split() == [str(threads > 1), "False"]


def _maps(*paths: str) -> list[str]:
    return [
        f"7f0000000000-7f0000001000 r-xp 00000000 00:00 {index} {path}".rstrip()
        for index, path in enumerate(("", "[heap]", *paths, *paths))
    ]


NUMPYS = "/v/site-packages/numpy.libs/libscipy_openblas64_-1.so"
SCIPYS = "/v/site-packages/scipy.libs/libscipy_openblas-2.so"
SYSTEMS = "/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.26.so"


@pytest.mark.parametrize(
    ("loaded", "numpys"),
    [
        ([NUMPYS, SCIPYS], [NUMPYS]),
        ([SYSTEMS], [SYSTEMS]),
        ([SYSTEMS, SCIPYS], [SYSTEMS]),
        ([SCIPYS], []),
        (["/v/lib/libmkl_rt.so.2"], []),
        ([SYSTEMS, "/opt/openblas/libopenblas.so.0"], ["/opt/openblas/libopenblas.so.0", SYSTEMS]),
    ],
)
def test_which_openblas_is_numpys(loaded: list[str], numpys: list[str]) -> None:
    assert blas_threads.loaded_with_numpy(_maps(*loaded)) == numpys


@pytest.mark.parametrize(
    ("config", "parallel", "reason"),
    [
        ("OpenBLAS 0.3.31.dev USE64BITINT DYNAMIC_ARCH", 2, "OpenMP"),
        ("OpenBLAS 0.3.31.dev USE64BITINT DYNAMIC_ARCH", 0, "no threads"),
        ("OpenBLAS 0.3.31 NO_AFFINITY Haswell", 1, "does not export"),
        ("OpenBLAS 0.3.35 NO_AFFINITY Haswell", 1, "0.3.35 is not known"),
        ("OpenBLAS 0.3.7 NO_AFFINITY Haswell", 1, "0.3.7 is not known"),
        ("OpenBLAS 0.4.0 NO_AFFINITY Haswell", 1, "0.4.0 is not known"),
        ("", 1, "OpenBLAS is not known"),
    ],
)
def test_why_threads_are_not_borrowed(config: str, parallel: int, reason: str) -> None:
    import ctypes

    found = blas_threads.team_in(ctypes.CDLL(None), config, parallel)
    assert isinstance(found, str)
    assert reason in found


@pytest.mark.skipif(cpu_threads.usable_processors() < 2, reason="needs two processors")
@pytest.mark.parametrize(("pool", "words"), [("own", "gemmule's own"), ("blas", "")])
def test_whose_threads_help_is_said(pool: str, words: str) -> None:
    code = PRODUCT + "print(json.dumps([cpu_pool.helpers()]))"
    (said,) = child(code, pool, NUMBA_NUM_THREADS="2")
    assert isinstance(said, str)
    assert words in said
    assert said.startswith("threads of ")


def test_a_pool_of_another_name_is_refused(setting: Callable[..., None]) -> None:
    setting(GEMMULE_POOL="mine")
    with pytest.raises(ValueError, match="'mine'; it must be 'blas' or 'own'"):
        borrows_threads()


@pytest.mark.parametrize(
    ("text", "processors"), [("max 100000", None), ("150000 100000", 1.5), ("-1", None), ("", None)]
)
def test_quotas_of_control_groups(tmp_path: Path, text: str, processors: float | None) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(text)
    assert cpu_threads.quota_of(path, None) == processors


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("outer", "inner", "processors"), [(150, 400, 2), (400, 150, 2), (100, 400, 1), (None, 20, 1)]
)
def test_the_smallest_quota_of_nested_groups_counts(
    tmp_path: Path,
    fault: Callable[..., Any],
    limit: Callable[..., None],
    version: int,
    outer: int | None,
    inner: int,
    processors: int,
) -> None:
    (tmp_path / "groups").write_text("0::/a/b\n" if version == 2 else "4:cpu,cpuacct:/a/b\n")
    top = tmp_path if version == 2 else tmp_path / "cpu,cpuacct"
    for folder, percent in ((top / "a", outer), (top / "a" / "b", inner)):
        folder.mkdir(parents=True)
        if version == 2:
            told = "max" if percent is None else str(1000 * percent)
            (folder / "cpu.max").write_text(f"{told} 100000\n")
        else:
            (folder / "cpu.cfs_quota_us").write_text(f"{-1 if percent is None else 1000 * percent}")
            (folder / "cpu.cfs_period_us").write_text("100000")
    limit(cpu_threads, _OWN_GROUPS=tmp_path / "groups", _GROUPS=tmp_path)
    fault(os, "sched_getaffinity", lambda sound, _: set(range(64)))
    assert cpu_threads.usable_processors() == processors


def test_steps_are_made_anew_for_other_threads_and_another_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def build(shares: int) -> Any:
        made.append(shares)
        return SimpleNamespace(alone=shares == 1)

    now = cpu_steps.per_team(build)
    for team in ((4, 64), (2, 64), (2, 128)):  # fewer threads, then a forked child's pool
        monkeypatch.setattr(cpu_steps, "team", lambda team=team: team)
        assert now(1) is now(1)
        assert now(8) is now(8)
    assert made == [1, 8, 8, 8]


def test_quotas_of_the_first_version(tmp_path: Path) -> None:
    quota, period = tmp_path / "cpu.cfs_quota_us", tmp_path / "cpu.cfs_period_us"
    quota.write_text("-1\n")
    period.write_text("100000\n")
    assert cpu_threads.quota_of(quota, period) is None
    quota.write_text("250000\n")
    assert cpu_threads.quota_of(quota, period) == 2.5


@pytest.mark.parametrize("asked", [1, 10**6])
def test_numbas_threads_lower_the_processes_own_and_never_raise_them(
    asked: int, modules: Callable[..., None]
) -> None:
    """Numba counts a machine's processors, of which a quota or an affinity may leave fewer."""
    started = SimpleNamespace(_is_initialized=True, get_num_threads=lambda: asked)
    modules({"numba.np.ufunc.parallel": started})
    assert cpu_threads.LENT.count == 0
    assert cpu_threads.thread_count() == min(asked, cpu_threads.processors())


@pytest.mark.parametrize("asked", [1, 10**6])
def test_products_of_tensors_take_no_more_threads_than_pytorch(asked: int) -> None:
    """Nor more than the process may use, and once they are done what they took before."""
    pytest.importorskip("torch")
    team = SimpleNamespace(get_num_threads=lambda: asked)
    before = cpu_threads.LENT.count
    found = openmp.by_pytorch(team, lambda: cpu_threads.LENT.count)
    assert found == (min(asked, cpu_threads.processors()) if openmp.functions() else before)
    assert cpu_threads.LENT.count == before
