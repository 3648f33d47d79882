"""What holds for the process: imports, threads, fork, and a cache folder that cannot be used.

Each case runs in a child with a cache of its own, on borrowed threads and on the package's own
where that matters.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import gemmule
from children import printed
from gemmule.settings import cache_folder
from gemmule.tuning import isolated

POOLS = ["blas", "own"]

PRODUCTS = """
import os, sys, threading, traceback
import numpy as np
import gemmule as gm

rng = np.random.default_rng(1)
M = 700  # large enough that the threaded rungs are worth while
A = rng.integers(-2, 3, (M, M)).astype(np.float32)
x = rng.integers(-2, 3, M).astype(np.float32)
H, I = A.astype(np.float16), A.astype(np.int8)
Q = gm.quantize(np.abs(A), bits=8, group_size=-1)
W = Q.dequantize("float64")
wide, xw = A.astype(np.float64), x.astype(np.float64)

def right():
    assert (gm.matvec(A, x, rung="threads") == wide @ xw).all()
    assert (gm.matvec(A, x) == wide @ xw).all()
    assert (gm.vecmat(x, A, rung="panel_threads") == xw @ wide).all()
    assert (gm.matvec(H, x) == wide @ xw).all()
    assert (gm.matvec(I, x.astype(np.int8)) == wide @ xw).all()
    assert (gm.matmul(A[:200], A, rung="packed_threads") == wide[:200] @ wide).all()
    assert (gm.matmul(I[:60], I) == wide[:60] @ wide).all()
    bound = np.abs(W) @ np.abs(xw) * M * 2.0**-24
    assert (np.abs(gm.matvec(Q, x) - W @ xw) <= bound).all()
"""

THREADS = (
    PRODUCTS
    + """
failures = []

def work():
    try:
        for _ in range(2):
            right()
    except BaseException:
        failures.append(traceback.format_exc())

threads = [threading.Thread(target=work) for _ in range(4)]
for t in threads: t.start()
for t in threads: t.join()
assert not failures, failures
print("right")
"""
)

FORK = (
    PRODUCTS
    + """
from forks import start_fork, status_of

right()  # the parent's threads are running now

def child():
    right()
    assert status_of(start_fork(right)) == 0  # the grandchild

assert status_of(start_fork(child)) == 0
right()
print("right")
"""
)


@pytest.fixture(scope="module")
def warm_cache() -> Path:
    """The cache of all tests, with what the products need: the other children compile nothing."""
    cache = cache_folder()
    printed(PRODUCTS + "right()", GEMMULE_CACHE=cache)
    return cache


@pytest.mark.parametrize("pool", POOLS)
def test_four_python_threads(pool: str, warm_cache: Path) -> None:
    out = printed(THREADS, GEMMULE_CACHE=warm_cache, GEMMULE_POOL=pool, NUMBA_NUM_THREADS=2)
    assert out == "right\n"


@pytest.mark.parametrize("pool", POOLS)
def test_fork(pool: str, warm_cache: Path) -> None:
    out = printed(FORK, GEMMULE_CACHE=warm_cache, GEMMULE_POOL=pool, NUMBA_NUM_THREADS=2)
    assert out == "right\n"


SMALL = """
import numpy as np, gemmule as gm
A = np.ones((5, 7), np.float16)
assert (gm.matvec(A, A[0]) == 7).all()
I = np.ones((3, 3), np.int32)
assert (gm.matmul(I, I, rung="triple_loop") == 3).all()  # the quickest to compile
print("right")
"""


@pytest.mark.parametrize("kind", ["file", "link", "others_may_write", "garbage", "read_only"])
def test_an_unusable_cache_never_breaks_a_call(kind: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    if kind == "file":
        cache.write_text("not a folder")
    elif kind == "link":
        cache.mkdir()
        (tmp_path / "elsewhere").mkdir()
        (cache / "kernels").symlink_to(tmp_path / "elsewhere")
        (cache / "tuned").symlink_to(tmp_path / "nowhere")
    elif kind == "others_may_write":
        (cache / "kernels").mkdir(parents=True)
        (cache / "kernels").chmod(0o777)
    elif kind == "read_only":
        cache = Path("/proc/gemmule")  # not even root may create a folder there
    else:
        printed(SMALL, GEMMULE_CACHE=cache)
        for path in cache.rglob("*"):
            if path.is_file():
                path.write_bytes(b"garbage" * 100)
    assert printed(SMALL, GEMMULE_CACHE=cache) == "right\n"
    if kind == "link":
        assert not list((tmp_path / "elsewhere").iterdir())


def test_import_brings_in_numpy_alone() -> None:
    code = """
import sys
before = set(sys.modules)
import numpy
with_numpy = set(sys.modules)
import gemmule
new = {name.partition(".")[0] for name in set(sys.modules) - with_numpy}
print(sorted(new - set(sys.stdlib_module_names) - {"numpy"}))
"""
    assert printed(code) == "['gemmule']\n"


def test_a_python_without_its_lock_is_told_what_was_not_tried() -> None:
    code = """
import sys, warnings
sys.abiflags = {flags!r}
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import gemmule as gm
import numpy as np
A = np.arange(6, dtype=np.float16).reshape(2, 3)
planned = gm.plan("matvec", A, A[0])
print(len(told), *planned(A, A[0]), any("free-threaded" in str(one.message) for one in told))
"""
    assert printed(code.format(flags="t")).split() == ["1", "5.0", "14.0", "True"]
    assert printed(code.format(flags="")).split() == ["0", "5.0", "14.0", "False"]


def test_import_needs_no_gpu_no_home_and_no_numba() -> None:
    code = """
import sys
for name in ("numba", "cuda", "torch", "ml_dtypes", "safetensors", "rich", "click"):
    sys.modules[name] = None
import numpy as np, gemmule as gm
A = np.arange(6.0).reshape(2, 3)
print(gm.matvec(A, A[0]).tolist(), gm.matmul(A, A.T).tolist(), gm.vecmat(A[:, 0], A).tolist())
"""
    out = printed(code, HOME="/nonexistent", XDG_CACHE_HOME="", CUDA_VISIBLE_DEVICES="")
    assert out == "[5.0, 14.0] [[5.0, 14.0], [14.0, 50.0]] [9.0, 12.0, 15.0]\n"


PACKED = """
import sys
import numpy as np, ml_dtypes, gemmule as gm
for dtype in sys.argv[1:]:
    A = np.ones((40, 30), dtype)
    C = gm.matmul(A, A.T.copy(), rung="packed")
    assert (C.astype(float) == 30).all(), dtype
print("right")
"""


def test_kernels_compiled_by_different_processes_do_not_mix(tmp_path: Path) -> None:
    """Kernels of one source for several dtypes had one symbol, and the first loaded served all."""
    dtypes = ("bfloat16", "int8", "float16", "uint8")
    for dtype in dtypes:
        printed(PACKED, dtype, GEMMULE_CACHE=tmp_path)
    assert printed(PACKED, *dtypes, GEMMULE_CACHE=tmp_path) == "right\n"
    assert printed(PACKED, *reversed(dtypes), GEMMULE_CACHE=tmp_path) == "right\n"


def test_kernels_of_one_source_differ_in_key_in_every_process() -> None:
    code = """
from gemmule.backends.cpu.jit import kernel

def make(number):
    @kernel
    def add(a: int) -> int:
        return a + number
    return add

print(*(make(n).key.replace(" ", "_") for n in {order}))
"""
    first = printed(code.format(order=(1, 2))).split()
    second = printed(code.format(order=(2, 1))).split()
    assert first == second[::-1]
    assert len(set(first)) == 2


def test_no_child_takes_code_from_the_folder_where_the_user_is(tmp_path: Path) -> None:
    """Every ``python -m`` of the package leaves that folder out; the tuner's child in earnest."""
    package = Path(gemmule.__file__).parents[1]
    for path in [*package.glob("gemmule/**/*.py"), *package.glob("gemmule_lab/**/*.py")]:
        for found in re.findall(r"sys\.executable,([^\]]*)", path.read_text("utf-8")):
            assert "-P" in found or "-I" in found, f"{path.name}: sys.executable,{found}"
    (tmp_path / "json.py").write_text("import pathlib; pathlib.Path('taken').touch()")
    (tmp_path / "numpy.py").write_text("import pathlib; pathlib.Path('taken').touch()")
    subprocess.run(isolated.COMMAND, cwd=tmp_path, input=b"{}", capture_output=True, check=False)
    assert not (tmp_path / "taken").exists()
