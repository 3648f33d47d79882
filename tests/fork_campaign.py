"""Fork while other threads work at random times, and count the children that hang.

``python tests/fork_campaign.py KIND FORKS [--record]``. KIND is ``import`` or ``compile`` (threads
do that), ``kernels`` (threads in products without BLAS), ``blas`` (with it), or ``numpy``: the
control, without gemmule.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from campaign_record import keep
from children import printed

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
    limit = forks * 130 + 600
    return printed(CHILD + SOAK, kind, forks, timeout=limit, GEMMULE_CACHE=cache)


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
            f"python tests/fork_campaign.py {sys.argv[1]} {forks}",
            f"{hung} children hung, {failed} failed",
        )
