"""Kernels from every side: the disk cache, fork, threads, and the intrinsics' arithmetic."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import gemmule as gm
from checkout import SOURCE
from children import printed
from gemmule.backends.cpu.intrinsics import enter, load, multiply_add, store
from gemmule.backends.cpu.jit import Kernel, kernel, unavailable
from gemmule.backends.cpu.target import missing_vectors
from gemmule.backends.cpu.threads import thread_count
from gemmule.core.caches import forget_plans
from gemmule.errors import GemmuleWarning
from gemmule.settings import cache_folder, default_device, tuning_enabled

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="needs llvmlite")

MULTIPLY = """
import json, sys, numpy as np
from gemmule.core.registry import rung_in
from gemmule.core.problem import Problem
def multiply(rung="threads", m=40, n=33):
    problem = Problem(op="matvec", m=m, n=n)
    r = rung_in("matvec", "cpu", rung)
    run = r.bind(problem, r.defaults())
    A = (np.arange(m * n, dtype=np.float32) % 7).reshape(m, n)
    x = (np.arange(n, dtype=np.float32) % 5)
    y = np.empty(m, np.float32)
    run(A, x, y)
    return bool(np.array_equal(y, A @ x))
"""


def report(code: str, cache: Path, **environment: object) -> Any:
    """Return what code says at last in a new process that has its own cache folder."""
    return json.loads(printed(code, GEMMULE_CACHE=cache, **environment).splitlines()[-1])


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the kernels of `MULTIPLY`."""
    cache = tmp_path_factory.mktemp("cache")
    assert report(MULTIPLY + "print(json.dumps(multiply()))", cache)
    return cache


STATISTICS = """
print(json.dumps([right, "llvmlite" in sys.modules]))
"""


def test_importing_rungs_imports_no_compiler(tmp_path: Path) -> None:
    code = (
        "import sys, json; from gemmule.core.registry import all_rungs; all_rungs('cpu');"
        "print(json.dumps('llvmlite' in sys.modules))"
    )
    assert report(code, tmp_path) is False


def test_a_second_process_loads_what_the_first_compiled(warm: Path) -> None:
    assert report(MULTIPLY + "right = multiply()" + STATISTICS, warm) == [True, False]
    for folder in (warm / "kernels", *(warm / "kernels").iterdir()):
        assert folder.stat().st_mode & 0o077 == 0


@kernel
def _sum(left: int, right: int) -> int:
    return left + right


class _Place(NamedTuple):
    at: int
    index: int


_put = store("int64", "int64")


def _writer(number: int) -> Kernel:
    @kernel
    def write(place: _Place, value: int) -> None:
        _put(place.at, place.index, value + number)

    return write


@kernel
def _enters(entry: int, at: int, value: int) -> None:
    for index in range(2):
        enter(entry, (_Place(at, index), value))


def test_one_compiled_caller_enters_many_kernels() -> None:
    numbers = np.zeros(2, np.int64)
    for number in (10, 20):
        writer = _writer(number)
        _enters(writer.entry(_Place, int), numbers.ctypes.data, 3)
        assert numbers.tolist() == [number + 3] * 2


def test_kernels_of_one_key_are_one_function() -> None:
    # As threads get that ask a cached factory at once; one of them is forgotten.
    first, second = kernel(_sum.function), kernel(_sum.function)
    assert first.address(2) == second.address(2)


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], tuple[int, bool]]:
    """Return what computes 2 + 3 by a kernel made anew with a cache, and whether it compiled."""
    from gemmule.backends.cpu import jit, jit_cache

    def run(folder: Path) -> tuple[int, bool]:
        compiled, compile_ = [], jit_cache.compiled
        with monkeypatch.context() as patch:
            patch.setattr(jit, "_LOADED", {})
            patch.setattr(jit_cache, "kernel_folder", lambda: folder)
            patch.setattr(
                jit_cache, "compiled", lambda *given: (compiled.append(1), compile_(*given))[1]
            )
            return kernel(_sum.function)(2, 3), bool(compiled)

    return run


def give_away(path: Path) -> None:
    """Let a path belong to another user, which the administrator may."""
    if os.geteuid() != 0:
        pytest.skip("only the administrator gives files away")
    os.chown(path, 12_345, -1)


@pytest.mark.parametrize(
    "damage", ["cut", "flip", "empty", "link", "open", "group", "other's", "foreign"]
)
def test_a_damaged_entry_is_compiled_again(
    tmp_path: Path, damage: str, summed: Callable[[Path], tuple[int, bool]]
) -> None:
    assert summed(tmp_path) == (5, True)
    (entry,) = tmp_path.glob("*.o")
    content = bytearray(entry.read_bytes())
    if damage == "cut":
        entry.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[-100] ^= 1
        entry.write_bytes(content)
    elif damage == "empty":
        entry.write_bytes(b"")
    elif damage == "link":
        entry.rename(entry.with_suffix(".moved"))
        entry.symlink_to(entry.with_suffix(".moved"))
    elif damage in ("open", "group"):
        entry.chmod(0o666 if damage == "open" else 0o660)
    elif damage == "other's":
        give_away(entry)
    else:
        payload = b"no object file at all"  # under a right digest
        entry.write_bytes(hashlib.sha256(payload).digest() + payload)
    assert summed(tmp_path) == (5, True)
    assert summed(tmp_path) == (5, False)


WARNED = """
import json, warnings
from gemmule.backends.cpu.jit import kernel
def one(a):
    return a + 1
def two(a):
    return a + 2
from gemmule.errors import GemmuleWarning
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    right = kernel(one)(1) == 2 and kernel(two)(1) == 3
print(json.dumps([right, sum(issubclass(w.category, GemmuleWarning) for w in seen)]))
"""


@pytest.mark.parametrize("fault", ["file", "writable", "group", "other's", "link"])
def test_a_folder_that_cannot_be_trusted_costs_one_warning(tmp_path: Path, fault: str) -> None:
    cache = tmp_path / "cache"
    if fault == "file":
        cache.write_text("not a folder")
    elif fault in ("writable", "group", "other's"):
        (cache / "kernels").mkdir(0o700, parents=True)
        if fault == "other's":
            give_away(cache / "kernels")
        else:
            (cache / "kernels").chmod(0o777 if fault == "writable" else 0o770)
    else:
        cache.mkdir()
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        (cache / "kernels").symlink_to(tmp_path / "elsewhere")
    assert report(WARNED, cache) == [True, 1]
    assert not list(tmp_path.glob("**/*.o"))


def test_a_disk_that_fills_up_costs_one_warning(tmp_path: Path) -> None:
    full = (
        "import gemmule.backends.cpu.jit_cache as c\n"
        "def full(path, content): raise OSError(28, 'No space left on device')\n"
        "c._write_atomically = full\n"
    )
    assert report(full + WARNED, tmp_path) == [True, 1]


def test_an_edited_helper_is_noticed(warm: Path, tmp_path: Path) -> None:
    shutil.copytree(SOURCE / "gemmule", tmp_path / "gemmule")
    helper = tmp_path / "gemmule/rungs/matvec/cpu/four_rows.py"
    text = helper.read_text()
    assert text.count("total = zero") == 1
    edited = text.replace("total = zero", "total = zero + zero + 1")
    assert edited != text
    helper.write_text(edited)
    cache = tmp_path / "cache"
    shutil.copytree(warm, cache)
    code = MULTIPLY.replace("m=40", "m=1").replace("n=33", "n=1")
    done = report(code + "print(json.dumps(multiply()))", cache, PYTHONPATH=tmp_path)
    assert done is False  # the edit shows: 0 * 0 + 1
    assert len(list((cache / "kernels").iterdir())) == 2


def test_a_kernel_outside_of_what_names_the_folder_is_named_by_its_text(tmp_path: Path) -> None:
    """Such as the loops that measure a memory: another release may change them alone."""
    keys = []
    for name, number in (("a.py", 1), ("b.py", 1), ("c.py", 2)):
        (tmp_path / name).write_text(f"def one() -> int:\n    return {number}\n")
        found: dict[str, Any] = {"__name__": "elsewhere"}
        exec(compile((tmp_path / name).read_text(), str(tmp_path / name), "exec"), found)
        keys.append(kernel(found["one"]).key)
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("pool", ["blas", "own"])
def test_four_threads_and_a_forked_child(warm: Path, pool: str) -> None:
    code = (
        MULTIPLY
        + """
import threading
from forks import start_fork, status_of
results = []
def work():
    for _ in range(30):
        results.append(multiply(m=640, n=640))
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
status = status_of(start_fork(lambda: multiply(m=640, n=640)))
print(json.dumps([len(results), all(results), status]))
"""
    )
    found = report(code, warm, GEMMULE_POOL=pool, NUMBA_NUM_THREADS=2)
    assert found == [120, True, 0]


QUANTISED = """
import json, numpy as np, gemmule as gm
Q = gm.quantize((np.arange(40 * 64.0, dtype=np.float32) % 9).reshape(40, 64), bits=8, group_size=64)
y = gm.matvec(Q, np.ones(64, np.float32), rung="vector_decode")
print(json.dumps(bool(np.abs(y - Q.dequantize().sum(1)).max() < 0.1)))
"""


@pytest.mark.skipif(missing_vectors() is not None, reason=str(missing_vectors()))
def test_kernels_of_a_partly_filled_cache_fit_the_rest(tmp_path: Path) -> None:
    assert report(QUANTISED, tmp_path) is True
    files = sorted((tmp_path / "kernels").glob("*/*.o"))
    for path in files[::2]:
        path.unlink()
    assert report(QUANTISED, tmp_path) is True


def test_thread_count_respects_the_user() -> None:
    numba = pytest.importorskip("numba")
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        assert thread_count() == 1
    finally:
        numba.set_num_threads(before)
    assert thread_count() == before


@functools.cache
def convert_kernel(source: str, target: str, working: str) -> Kernel:
    read, write = load(source, working), store(target, working)

    @kernel
    def convert(source_address: int, target_address: int, count: int) -> None:
        for i in range(count):
            write(target_address, i, read(source_address, i))

    return convert


def converted(values: np.ndarray[Any, Any], target: Any, working: str) -> np.ndarray[Any, Any]:
    result = np.empty(values.shape, target)
    names = (values.dtype.name, result.dtype.name, working)
    convert_kernel(*names)(values.ctypes.data, result.ctypes.data, values.size)
    return result


@pytest.mark.parametrize(
    "dtype",
    [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2],
)
def test_every_small_float_widens_exactly(dtype: Any) -> None:
    size = np.dtype(dtype).itemsize
    values = np.arange(256**size, dtype=f"u{size}").view(dtype)
    wide = converted(values, np.float32, "float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        expected = values.astype(np.float32)
    np.testing.assert_array_equal(wide, expected)  # equal, and NaN exactly where NaN is expected


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_store_rounds_to_nearest_even_and_keeps_nan(dtype: Any) -> None:
    halves = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)
    finite = halves[np.isfinite(halves)]
    ordered = np.sort(finite).astype(np.float64)
    ties = ((ordered[:-1] + ordered[1:]) / 2).astype(np.float32)  # exact: one bit more
    with np.errstate(over="ignore", invalid="ignore"):
        above, below = np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)
    special = np.array([np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, -0.0], np.float32)
    values = np.concatenate([finite, ties, above, below, special]).astype(np.float32)
    stored = converted(values, dtype, "float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        expected = values.astype(dtype)
    np.testing.assert_array_equal(stored.view(np.uint16), expected.view(np.uint16))
    payloads = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(converted(payloads, dtype, "float32").astype(np.float32)).all()


def test_integers_widen_by_their_sign_and_wrap() -> None:
    signed = np.arange(-128, 128).astype(np.int8)
    assert np.array_equal(converted(signed, np.int64, "int32"), signed.astype(np.int64))
    unsigned = np.arange(256).astype(np.uint8)
    assert np.array_equal(converted(unsigned, np.int64, "int64"), unsigned.astype(np.int64))
    top = np.array([2**64 - 1, 2**63], np.uint64)
    assert np.array_equal(converted(top, np.uint64, "int64"), top)

    @kernel
    def wrapped(left: int, right: int) -> int:
        return multiply_add(left, left, right)

    assert wrapped(2**62, 3) == 2**62 * 4 % 2**64  # 2^64: all bits gone


def test_numbers_follow_pythons_rules() -> None:
    @kernel
    def quotient(a: int, b: int) -> int:
        return a // b

    @kernel
    def rest(a: int, b: int) -> int:
        return a % b

    @kernel
    def by_constants(a: int) -> int:
        return a // 8 * 10000 + a % 8 * 100 + a // 12 * 10 + a % 12

    @kernel
    def counted(a: int, b: int) -> int:
        return (a > 0) + 10 * (b > 0) - 100 * (a == b)

    for a, b in itertools.product((-3, 0, 2), repeat=2):
        assert counted(a, b) == (a > 0) + 10 * (b > 0) - 100 * (a == b)
    for a in (-25, -24, -1, 0, 1, 7, 24, 2**40):
        assert by_constants(a) == a // 8 * 10000 + a % 8 * 100 + a // 12 * 10 + a % 12
        for b in (-12, -1, 1, 3, 12):
            assert (quotient(a, b), rest(a, b)) == (a // b, a % b)
        assert quotient(a, 0) == rest(a, 0) == 0


def test_control_flow_is_pythons() -> None:
    @kernel
    def steps(start: int, stop: int) -> int:
        total, last = 0, -1
        for i in range(start, stop, 3):
            if i == 4:
                continue
            if i > 40 or (i > 20 and total % 2 == 1):
                break
            total += i if i % 2 == 0 and i != 6 else 2 * i
            last = i
        for i in range(3, 0, -1):
            total = total * 10 + i
        count = 0
        while True:
            count += 1
            if count * count > total:
                return total + 1000 * last + count

    for start, stop in ((0, 0), (1, 10), (0, 100), (-7, 5), (5, 50)):
        assert steps(start, stop) == steps.function(start, stop)


def test_what_the_language_lacks_is_refused_with_the_line() -> None:
    @kernel
    def raises(a: int) -> int:
        if a < 0:
            raise ValueError
        return a

    with pytest.raises(TypeError, match="kernels have no Raise") as caught:
        raises(1)
    assert "in kernel raises, line" in "".join(caught.value.__notes__)


def test_pythons_arguments_are_checked() -> None:
    assert _sum(np.int64(2), True) == 3
    with pytest.raises(TypeError):
        _sum(2, "3")
    with pytest.raises(OverflowError):
        _sum(2, 2**63)


def test_a_closure_holds_only_what_has_a_stable_name() -> None:
    array = np.zeros(3)

    @kernel
    def holds() -> float:
        return array[0]

    with pytest.raises(TypeError, match="closure holds a ndarray"):
        _ = holds.key


def test_an_intrinsic_is_for_kernels_only() -> None:
    with pytest.raises(TypeError, match="only be used inside a kernel"):
        multiply_add(1, 2, 3)


def test_settings_are_read_from_the_environment(setting: Callable[..., None]) -> None:
    setting(GEMMULE_CACHE="/a/b")
    assert cache_folder() == Path("/a/b")
    setting(GEMMULE_CACHE=None, XDG_CACHE_HOME="/x")
    assert cache_folder() == Path("/x/gemmule")
    setting(XDG_CACHE_HOME="relative", HOME="/h")
    assert cache_folder() == Path("/h/.cache/gemmule")
    setting(GEMMULE_DEVICE="cuda:1")
    assert default_device() == "cuda:1"
    setting(GEMMULE_DEVICE="tpu")
    with pytest.raises(ValueError, match="must be cpu, cuda"):
        default_device()
    setting(GEMMULE_TUNE="0")
    assert not tuning_enabled()
    for given in ("1", ""):
        setting(GEMMULE_TUNE=given)
        assert tuning_enabled()


def test_settings_that_mean_nothing_are_refused_by_products(
    setting: Callable[..., None],
) -> None:
    A = np.ones((3, 3), np.float16)
    for name, value, words in (
        ("GEMMULE_TUNE", "yes", "must be 0 .* or 1"),
        ("GEMMULE_CACHE", "~no-such-user/x", "home of ~no-such-user is unknown"),
    ):
        before = os.environ.get(name)
        setting(**{name: value})
        forget_plans()
        with pytest.raises(ValueError, match=rf"{name} is '{value}'.*{words}"):
            gm.matvec(A, A[0])
        setting(**{name: before})
    forget_plans()


def test_a_relative_cache_in_a_folder_that_is_gone_is_refused(
    tmp_path: Path, setting: Callable[..., None]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    setting(GEMMULE_CACHE="here")
    before = Path.cwd()
    os.chdir(gone)
    gone.rmdir()
    try:
        with pytest.raises(ValueError, match="GEMMULE_CACHE is 'here', and the folder"):
            cache_folder()
    finally:
        os.chdir(before)


def test_a_warning_names_the_variable_to_set() -> None:
    from gemmule.backends.cpu.jit_cache import _warn_off

    with pytest.warns(GemmuleWarning, match="GEMMULE_CACHE"):
        _warn_off("a reason of this test")


def test_a_filled_cache_that_cannot_be_written_is_read(
    tmp_path: Path, setting: Callable[..., None], fault: Callable[..., Any]
) -> None:
    from gemmule.backends.cpu import jit_cache

    setting(GEMMULE_CACHE=tmp_path)
    jit_cache.kernel_folder.cache_clear()
    folder = jit_cache.kernel_folder()
    assert folder is not None
    fault(jit_cache.os, "access", lambda sound, *given: False)  # a system that is read-only
    try:
        for filled in (False, True):
            if filled:
                (folder / "kernel.o").touch()
            jit_cache.kernel_folder.cache_clear()
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                assert jit_cache.kernel_folder() == (folder if filled else None)
        folder.chmod(0o777)
        jit_cache.kernel_folder.cache_clear()
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            assert jit_cache.kernel_folder() is None
    finally:
        jit_cache.kernel_folder.cache_clear()


_get = load("float64", "float64")


@kernel
def _compared(at: int) -> int:
    a, b = _get(at, 0), _get(at, 1)
    low = (1 if a == b else 0) + (2 if a != b else 0) + (4 if a < b else 0)
    return low + (8 if a <= b else 0) + (16 if a > b else 0) + (32 if a >= b else 0)


def test_floats_compare_as_in_python() -> None:
    for a, b in itertools.product((0.0, -0.0, 1.5, -2.0, math.inf, -math.inf, math.nan), repeat=2):
        pair = np.array([a, b])
        asked = (a == b, a != b, a < b, a <= b, a > b, a >= b)
        wanted = sum(int(one) << i for i, one in enumerate(asked))
        assert _compared(pair.ctypes.data) == wanted, (a, b)
