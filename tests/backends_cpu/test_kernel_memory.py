"""Kernels keep the memory whose addresses they work on: freed pages are gone at once here.

With the allocator's usual settings memory that was freed mostly stays readable, and nothing is
seen.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from children import printed
from gemmule.core.registry import all_rungs

# Blocks of a page and more are unmapped when they are freed; smaller ones are overwritten.
STRICT = {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_PERTURB_": "165"}
CHILD = """
import sys
from gemmule_lab.verify.random_products import Choice
from gemmule_lab.verify.workers import run_trials
ladder, *names = sys.argv[1:]
for name in names:
    tally = run_trials(Choice(ladder, name), 12, 7, 1)
    assert tally.ok, (name, tally.bad[:1], tally.refused)
    print(name, tally.done)
"""
NAMED_ONCE = """
import numpy as np
from gemmule.backends.cpu.intrinsics import load, store
from gemmule.backends.cpu.jit import kernel
put, get = store("int64", "int64"), load("int64", "int64")

@kernel
def working(count: int) -> int:
    memory = np.empty(count, np.int64)
    address = memory.ctypes.data
    for i in range(count):
        put(address, i, i)
    total = 0
    for i in range(count):
        total += get(address, count - 1 - i)
    return total

assert working(100_000) == sum(range(100_000))
pages = lambda: int(open("/proc/self/statm").read().split()[1])
before = pages()
for _ in range(300):
    working(100_000)
assert pages() - before < 10_000, "its memory is given back"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="settings of the GNU allocator")
@pytest.mark.parametrize("folder", ["matvec", "vecmat", "matmul", "quantized"])
def test_no_kernel_uses_memory_that_is_freed(folder: str) -> None:
    names = [r.name for r in all_rungs("cpu") if r.folder == folder and r.available() is None]
    assert len(printed(CHILD, folder, *names, timeout=500, **STRICT).split()) == 2 * len(names)


@pytest.mark.skipif(sys.platform != "linux", reason="settings of the GNU allocator")
def test_memory_lasts_as_long_as_the_call(tmp_path: Path) -> None:
    path = tmp_path / "working.py"
    path.write_text(NAMED_ONCE, "utf-8")
    own = {"GEMMULE_CACHE": str(tmp_path)}  # a kernel of no package is known by its name alone
    printed(f"import runpy; runpy.run_path({str(path)!r})", timeout=500, **STRICT, **own)
