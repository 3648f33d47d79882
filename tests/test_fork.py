"""Fork while other threads import, compile and multiply: the child must work, not wait for ever.

``python tests/test_fork.py KIND FORKS [--record]`` forks as often during random work, and counts
the children that hang. KIND is ``import`` or ``compile`` (threads do that), ``kernels`` (threads in
products without BLAS), ``blas`` (with it), or ``numpy``: the control, without gemmule.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from campaign_record import keep

CHILD = """
import os, signal, sys, threading, time
import gemmule as gm
import numpy as np
from gemmule.backends.cpu.jit import intrinsic, kernel

def start(work, limit):
    pid = os.fork()
    if pid == 0:
        signal.alarm(limit)  # without a handler it ends the process
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return pid

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def fork(work, limit):
    return ended(start(work, limit))

def made(number):
    @kernel
    def add(a: int) -> int:
        return a + number
    return add

def use():
    A = np.ones((5, 7), np.float16)
    assert made(3)(4) == 7
    assert (gm.matvec(A, A[0], rung="four_rows") == 7).all()

begun = threading.Event()
"""

COMPILING = """
@intrinsic
def slow(typing, a):
    from numba.core import types
    begun.set()
    time.sleep(1)  # the fork comes now
    return types.int64(types.int64), lambda context, builder, signature, args: args[0]

@kernel
def calls(a: int) -> int:
    return slow(a)

thread = threading.Thread(target=calls, args=(1,))
"""

IMPORTING = """
import logging

class Slow:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "numba.core.dispatcher" and not begun.is_set():
            begun.set()
            time.sleep(1)  # the fork comes now
            logging.getLogger("any").warning("a lock that a fork takes as well")

sys.meta_path.insert(0, Slow)
thread = threading.Thread(target=lambda: made(1)(1))
"""

FORKING = """
thread.start()
assert begun.wait(60)
status = fork(use, 60)
thread.join()
use()
print(status)
"""


def run(code: str, cache: Path, *arguments: str, timeout: float = 240) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "GEMMULE_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("held", [COMPILING, IMPORTING], ids=["compiling", "importing"])
def test_a_child_of_a_busy_parent_compiles_its_own_kernels(held: str, tmp_path: Path) -> None:
    assert run(CHILD + held + FORKING, tmp_path) == "0\n"


def test_an_interrupted_wait_leaves_no_lock_behind(tmp_path: Path) -> None:
    interrupted = """
    import signal
    from gemmule.core import fork as waits

    def stop(*_):
        raise TimeoutError("enough")

    signal.signal(signal.SIGALRM, stop)
    sys.unraisablehook = lambda _: None
    free = threading.Event()

    def hold():
        with waits.WHOLE:
            begun.set()
            free.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert begun.wait(60)
    signal.alarm(1)
    pid = os.fork()  # Python forks although the hook was interrupted
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    free.set()
    thread.join()
    assert waits.WHOLE.acquire(timeout=10)
    waits.WHOLE.release()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert fork(use, 60) == 0
    print("right")
    """
    assert run(CHILD + textwrap.dedent(interrupted), tmp_path) == "right\n"


SOAK = """
kind, forks = sys.argv[1], int(sys.argv[2])
rng = np.random.default_rng(1)
A = rng.integers(-2, 3, (300, 300)).astype(np.float32)
x = A[0].copy()
H, wide = A.astype(np.float16), A.astype(np.float64)
counter = iter(range(10**9))

def work():
    if kind == "numpy":
        assert (np.matmul(A, x) == exact).all() and (np.matmul(A, A) == product).all()
    elif kind in ("compile", "import"):
        assert made(next(counter))(3) >= 3
    else:
        assert (gm.matvec(A, x, rung="threads") == exact).all()
        assert (gm.matvec(H, x) == exact).all()
        assert (gm.matmul(A, A, rung="blas" if kind == "blas" else "packed") == product).all()

exact, product = wide @ x.astype(np.float64), wide @ wide

def loop():
    while True:
        work()

def child():
    if kind != "numpy":
        use()
        assert made(-1 - os.getpid())(1) < 1
    for _ in range(3):
        work()

if kind not in ("import", "numpy"):
    work()
for _ in range(8):
    threading.Thread(target=loop, daemon=True).start()
hangs = wrong = 0
many, limit = (10, 60) if kind in ("numpy", "blas") else (1, 120)  # where they hang, at once
for index in range(0, forks, many):
    pids = []
    for _ in range(min(many, forks - index)):
        time.sleep(float(rng.uniform(0, 0.2)))
        pids.append(start(child, limit))
    found = [ended(pid) for pid in pids]
    hangs += found.count(-signal.SIGALRM)
    wrong += sum(status not in (0, -signal.SIGALRM) for status in found)
print(f"{kind}: {forks} forks, {hangs} hung, {wrong} failed", flush=True)
os._exit(0)
"""


def soak(kind: str, forks: int, cache: Path) -> str:
    """Return what one parent with 8 busy threads counted; ``import`` takes a new parent each."""
    return run(CHILD + SOAK, cache, kind, str(forks), timeout=forks * 130 + 600)


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "parents", "forks"), [("compile", 2, 100), ("import", 20, 2)])
def test_children_of_busy_parents(kind: str, parents: int, forks: int, tmp_path: Path) -> None:
    for index in range(parents):
        out = soak(kind, forks, tmp_path / str(index))
        assert out == f"{kind}: {forks} forks, 0 hung, 0 failed\n"


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        counted = soak(sys.argv[1], int(sys.argv[2]), Path(folder))
    print(counted, end="")
    if "--record" in sys.argv:
        forks, hung, failed = (int(number) for number in re.findall(r"\d+", counted))
        keep(
            f"forks beside 8 busy threads: {sys.argv[1]}",
            forks,
            hung + failed,
            f"python tests/test_fork.py {sys.argv[1]} {forks}",
            f"{hung} children hung, {failed} failed",
        )
