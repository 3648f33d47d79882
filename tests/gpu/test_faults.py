"""Fifty injected faults of ten kinds: each ends in the right answer or a typed error, never a hang.

Every case is a child process with a cache folder of its own, watched by a timeout. A child prints
``right`` after a right product and ``typed`` after the error it was to meet.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SEARCHED = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
VARIANTS = 5
LIMIT_S = 90
SPIN_S = 15  # a kernel that hangs, but not for ever, should the watchdog itself fail

PROLOGUE = """
import os, warnings
from fault_child import A, driver, planted, right, typed, variant, x
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.errors import CompileError, DeviceError, GemmuleWarning
"""

HIDDEN = """
typed(right, DeviceError, "CUDA_VISIBLE_DEVICES")
right("cpu")
"""
MEMORY = """
right()
free_bytes, _ = driver.memory_bytes(0)
keep = []
typed(lambda: DeviceArray.empty((2 * free_bytes,), "uint8"), DeviceError, f"{2 * free_bytes:,}")
for _ in range(variant + 1):  # fill what is left, piece by piece, and ask for more
    piece = driver.memory_bytes(0)[0] // (variant + 1)
    try:
        keep.append(DeviceArray.empty((piece,), "uint8"))
    except DeviceError:
        break
typed(lambda: DeviceArray.empty((free_bytes,), "uint8"), DeviceError, "bytes are free")
keep.clear()
right()
"""
ADDRESS = """
right()
SOURCES = ["*(int*)8 = 1;", "*(int*)(p * 1024 + 1ull) = 1;", "__trap();",
           "((int*)0)[threadIdx.x] += 1;", "*(volatile long long*)(p + 4) = 1;"]
planted("__global__ void bad(unsigned long long p) { %s }" % SOURCES[variant], "bad")
typed(lambda: driver.synchronize(0), DeviceError, "context is lost", restart=True)
for _ in range(3):  # and so ends every later call
    typed(right, DeviceError, "Restart", restart=True)
"""
HANG = """
right()
planted('''__global__ void spin(unsigned long long p) {
  const long long end = clock64() + CYCLES;
  while (clock64() < end) {}
}''', "spin")
print("typed", flush=True)
driver.synchronize(0)
""".replace("CYCLES", f"{2 * SPIN_S}000000000ll")
REFUSED = """
right()
asked = [300 << 10, 1 << 20, 228 << 10, 1 << 24, 1 << 30][variant]
source = "__global__ void big(unsigned long long p) { extern __shared__ int s[]; s[0] = p; }"
typed(lambda: planted(source, "big", asked), DeviceError, "shared memory")
right()
"""
FORK = """
right()
child = os.fork()
if child == 0:
    status = 1
    try:
        typed(right, DeviceError, "forked after CUDA had started")
        right("cpu")
        status = 0
    finally:
        os._exit(status)
_, status = os.waitpid(child, 0)
assert status == 0, status
right()
"""
COMPILER = """
right()
SOURCES = ["not C++", "__global__ void f(int* p) { undefined(); }", "#include <nowhere.h>",
           "__global__ void g(int* p) {}", "template <class T> __global__ void f(T* p) { T::x(); }"]
source = SOURCES[variant]
name = "f<int>" if "template" in source else "f"
typed(lambda: planted(source, name), CompileError, "planted.cu")
right()
"""
CACHED = """
right()
"""
BARRED = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    right()
assert any("not cached" in str(w.message) for w in caught), [str(w.message) for w in caught]
print("typed", flush=True)
"""


def run(code: str, variant: int, cache: Path, **environment: str) -> subprocess.Popen[str]:
    """Start a child that runs the code."""
    cache.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + code, str(variant)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": SEARCHED, "GEMMULE_CACHE": str(cache), **environment},
    )


def said(child: subprocess.Popen[str], limit_s: float = LIMIT_S) -> list[str]:
    """Return what a child printed; it must end in time and by itself."""
    try:
        out, err = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        raise
    assert child.returncode == 0, err[-2000:]
    return out.split()


def each_variant(case: Callable[[int, Path], None], folder: Path) -> None:
    with ThreadPoolExecutor(VARIANTS) as pool:
        list(pool.map(lambda v: case(v, folder / str(v)), range(VARIANTS)))


@pytest.mark.parametrize(
    ("code", "expected", "environment"),
    [
        pytest.param(HIDDEN, ["typed", "right"], {"CUDA_VISIBLE_DEVICES": ""}, id="hidden device"),
        pytest.param(
            ADDRESS, ["right", "typed", "typed", "typed", "typed"], {}, id="illegal address"
        ),
        pytest.param(REFUSED, ["right", "typed", "right"], {}, id="refused launch"),
        pytest.param(FORK, ["right", "typed", "right", "right"], {}, id="fork"),
        pytest.param(COMPILER, ["right", "typed", "right"], {}, id="broken source"),
    ],
)
def test_typed_errors(
    code: str, expected: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    def case(variant: int, folder: Path) -> None:
        assert said(run(code, variant, folder, **environment)) == expected

    each_variant(case, tmp_path)


def test_memory_runs_out(tmp_path: Path) -> None:
    for variant in range(VARIANTS):  # one at a time: each fills the whole device
        words = said(run(MEMORY, variant, tmp_path / str(variant)))
        assert words == ["right", "typed", "typed", "right"]


def test_a_hanging_kernel_is_ended_by_its_watchdog(tmp_path: Path) -> None:
    def case(variant: int, folder: Path) -> None:
        child = run(HANG, variant, folder)
        assert child.stdout is not None
        assert [child.stdout.readline().strip() for _ in "ab"] == ["right", "typed"]
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=2)
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=LIMIT_S)
        assert said(run(CACHED, variant, folder)) == ["right"]

    each_variant(case, tmp_path)


def test_broken_cache_entries(tmp_path: Path) -> None:
    spoil: list[Callable[[bytes], bytes]] = [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1] + b"\0",
        lambda data: b"\0" * len(data),
        lambda data: data + data,
    ]

    def case(variant: int, folder: Path) -> None:
        assert said(run(CACHED, variant, folder)) == ["right"]
        entries = list((folder / "cubin").glob("*.cubin"))
        assert entries
        for entry in entries:
            entry.write_bytes(spoil[variant](entry.read_bytes()))
        assert said(run(CACHED, variant, folder)) == ["right"]

    each_variant(case, tmp_path)


def test_cache_folders_that_cannot_be_used(tmp_path: Path) -> None:
    def bar(cubins: Path, variant: int) -> None:
        if variant == 0:
            cubins.write_text("a file in its place")
        elif variant == 1:
            (cubins.parent / "elsewhere").mkdir()
            cubins.symlink_to(cubins.parent / "elsewhere")
        elif variant == 2:
            cubins.mkdir(mode=0o700)
            cubins.chmod(0o777)
        elif variant == 3:
            cubins.symlink_to("/nonexistent/gemmule")
        else:
            cubins.mkdir(mode=0o700)
            cubins.chmod(0o720)

    def case(variant: int, folder: Path) -> None:
        folder.mkdir()
        bar(folder / "cubin", variant)
        assert said(run(BARRED, variant, folder)) == ["right", "typed"]

    each_variant(case, tmp_path)


def test_processes_killed_while_they_compile(tmp_path: Path) -> None:
    """Kill a first run at five moments: what it leaves behind must not harm the next."""

    def case(variant: int, folder: Path) -> None:
        child = run(CACHED, variant, folder)
        time.sleep(0.4 * (variant + 1))
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=LIMIT_S)
        assert said(run(CACHED, variant, folder)) == ["right"]

    each_variant(case, tmp_path)
