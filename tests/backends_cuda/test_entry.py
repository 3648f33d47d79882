"""C functions called by a block of their arguments: in the right order, and without our code."""

from __future__ import annotations

import ctypes
import platform
import struct
from pathlib import Path
from typing import Any

import pytest

from gemmule.backends.cuda.library import entry

PLACES = (6, 7, 8, 1, 9, 2, 10, 11, 3, 12, 4, 13, 14, 5, 15, 0)
needs_code = pytest.mark.skipif(platform.machine() != "x86_64", reason="code for x86-64")


def function_of(count: int, met: list[Any]) -> Any:
    """Return a C function of so many numbers, which keeps what it was given and returns -7."""

    def body(*given: int) -> int:
        met.append(given)
        return -7

    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * count)(body)


@pytest.mark.parametrize("count", [1, 5, 6, 7, 8, 15, 16])
@pytest.mark.parametrize("runs", [pytest.param(True, marks=needs_code), False])
def test_arguments_come_in_order(runs: bool, count: int) -> None:
    met: list[Any] = []
    function = function_of(count, met)
    block = ctypes.create_string_buffer(17 * 8)
    given = function if runs else function.__call__  # what is no C function is called as it is
    call = entry.caller(given, block, PLACES[:count], 16)
    for first in (100, 2**63):
        struct.pack_into("<16Q", block, 0, *range(first, first + 16))
        assert call() == -7
        assert met.pop() == tuple(first + place for place in PLACES[:count])
    assert not met


@needs_code
def test_code_is_never_writable_while_it_runs() -> None:
    met: list[Any] = []
    block = ctypes.create_string_buffer(8)
    entry.caller(function_of(1, met), block, (0,), 0)
    made = entry.entry((0,), 0)
    if made is None:
        pytest.skip("memory may not be run here")
    place = ctypes.cast(made, ctypes.c_void_p).value or 0
    for line in Path("/proc/self/maps").read_text("ascii").splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= place < last:
            assert line.split()[1] == "r-xp"
            return
    raise AssertionError("the code lies in no mapping")
