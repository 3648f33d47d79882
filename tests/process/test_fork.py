"""Fork while other threads import, compile and multiply: the child must work, not wait for ever."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from children import printed
from fork_campaign import CHILD, soak

COMPILING = """
@intrinsic
def slow(builder, a):
    begun.set()
    time.sleep(1)  # the fork comes now
    return a

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
        if name == "llvmlite.ir" and not begun.is_set():
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


@pytest.mark.parametrize("held", [COMPILING, IMPORTING], ids=["compiling", "importing"])
def test_a_child_of_a_busy_parent_compiles_its_own_kernels(held: str, tmp_path: Path) -> None:
    assert printed(CHILD + held + FORKING, GEMMULE_CACHE=tmp_path) == "0\n"


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
    assert fork(lambda: None, 60) == 0  # although the hook was interrupted
    free.set()
    thread.join()
    assert waits.WHOLE.acquire(timeout=10)
    waits.WHOLE.release()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert fork(use, 60) == 0
    print("right")
    """
    assert printed(CHILD + textwrap.dedent(interrupted), GEMMULE_CACHE=tmp_path) == "right\n"


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "parents", "forks"), [("compile", 2, 100), ("import", 20, 2)])
def test_children_of_busy_parents(kind: str, parents: int, forks: int, tmp_path: Path) -> None:
    for index in range(parents):
        out = soak(kind, forks, tmp_path / str(index))
        assert out == f"{kind}: {forks} forks, 0 hung, 0 failed\n"
