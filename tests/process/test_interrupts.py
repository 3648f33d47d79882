"""Ctrl-C waits for what must not be cut in two, and what was interrupted works when tried again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from children import printed
from gemmule.backends.cpu.jit import kernel
from gemmule.core import fork
from planted import planted

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals need its main thread"
)


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """A shell starts what runs in the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_comes_at_the_end() -> None:
    before, done = signal.getsignal(signal.SIGINT), []

    def interrupted() -> None:
        with fork.uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            with fork.uninterrupted():
                done.append("within")
            done.append("behind")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["within", "behind"]
    assert signal.getsignal(signal.SIGINT) is before
    with fork.uninterrupted():
        done.append("quiet")
    assert signal.getsignal(signal.SIGINT) is before


def test_handlers_of_others_stay() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []
    try:
        signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
        with fork.uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
        with fork.uninterrupted():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # set within: that is what is wanted
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with fork.uninterrupted():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_none_to_wait_for() -> None:
    found: list[Any] = []
    before = signal.getsignal(signal.SIGINT)

    def within() -> None:
        with fork.uninterrupted():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=within)
    thread.start()
    thread.join()
    assert found == [before]


def test_a_compilation_ends_before_the_interrupt() -> None:
    from gemmule.backends.cpu import assembler, jit_cache

    compiled = []

    def interrupted(sound: Any, text: str) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        result = sound(text)
        compiled.append(text)
        return result

    @kernel
    def twice(a: int) -> int:
        return 2 * a

    @kernel
    def four_times(a: int) -> int:
        return twice(twice(a))

    nothing_on_disk = planted(jit_cache, "kernel_folder", lambda sound: None)
    with planted(assembler, "object_code", interrupted), nothing_on_disk:
        for one in (twice, four_times):
            with pytest.raises(KeyboardInterrupt):
                one(3)
            assert compiled
            compiled.clear()
    assert (twice(3), four_times(3)) == (6, 12)


IMPORTED = """
import os, signal, sys
import numpy as np
import gemmule as gm

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "llvmlite.ir" and self in sys.meta_path:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
A, x = np.ones((40, 30), np.float16), np.ones(30, np.float16)
try:
    gm.matvec(A, x, rung="threads")
except KeyboardInterrupt:
    assert (gm.matvec(A, x, rung="threads") == 30).all()
    print("interrupted, then right")
"""


def test_the_compiler_is_loaded_whole_before_the_interrupt(tmp_path: Path) -> None:
    assert printed(IMPORTED, GEMMULE_CACHE=tmp_path) == "interrupted, then right\n"
