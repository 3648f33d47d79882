"""The CUDA back end without a GPU: typed errors, the kernel cache, devices, streams, fork."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from fake_driver import FakeDriver, driver_of, forget
from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import convert, device_array, driver, nvrtc
from gemmule.backends.cuda import launch as cuda_launch
from gemmule.backends.cuda.device_array import TYPESTR, DeviceArray
from gemmule.core.operand import Form, Operand
from gemmule.core.problem import DTYPES, FLOAT8, ITEMSIZE, result_dtype
from gemmule.core.registry import all_rungs
from gemmule.errors import CompileError, DeviceError, GemmuleWarning
from gemmule.plan import resolve
from gemmule.storage import ceilings as stored_ceilings
from late_driver import late
from planted import planted

RUNG = next(r for r in all_rungs("cuda") if r.name == "thread_per_row")
KERNEL = ("thread_per_row<float, float, float, 128>",)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of cubins, which depend on nothing that a test with a fake driver changes."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def fake(
    setting: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: Path
) -> Iterator[FakeDriver]:
    """A driver with two devices in the place of NVIDIA's, and no tuned or measured values."""
    setting(GEMMULE_CACHE=tmp_path / "cache")
    monkeypatch.setattr(nvrtc, "cache_folder", lambda: compiled)
    with driver_of(FakeDriver()) as stand_in:
        yield stand_in


def on(device: int, *shape: int, dtype: str = "float32") -> DeviceArray:
    return DeviceArray.from_host(np.ones(shape, dtype), device)


# --- what is missing is said ----------------------------------------------------------------------


def test_missing_bindings_name_the_package(modules: Callable[..., None]) -> None:
    modules({"cuda.bindings": None})
    forget()
    with pytest.raises(DeviceError, match=r"cuda-bindings.*not installed.*pip install"):
        driver.bindings()


def refuse() -> None:
    raise RuntimeError("libnvrtc.so is missing")


@pytest.mark.parametrize(
    "found",
    [
        {"cuda.core": None, "cuda": None},
        {"cuda": SimpleNamespace(), "cuda.bindings": None},
        {
            "cuda": SimpleNamespace(core=SimpleNamespace()),
            "cuda.bindings": SimpleNamespace(nvrtc=SimpleNamespace(nvrtcVersion=refuse)),
        },
    ],
    ids=["cuda.core", "cuda.bindings", "the library, which is loaded by its first call"],
)
def test_each_missing_part_of_the_compiler_is_said(
    modules: Callable[..., None], found: dict[str, Any]
) -> None:
    modules(found)
    nvrtc.cuda_core.cache_clear()
    with pytest.raises(CompileError, match=r"need NVRTC and cuda-core.*pip install"):
        nvrtc.cuda_core()


def test_a_missing_driver_is_said(fake: FakeDriver) -> None:
    def init(flags: int) -> Any:
        raise RuntimeError("libcuda.so.1 was not found")

    fake.cuInit = init
    with pytest.raises(DeviceError, match=r"no NVIDIA driver .*libcuda.*CPU back end works"):
        driver.device_count()
    assert gm.matvec(np.ones((2, 3)), np.ones(3)).tolist() == [3, 3]


@pytest.mark.parametrize("code", ["CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"])
def test_a_driver_that_does_not_start_names_its_answer(
    fake: FakeDriver, setting: Callable[..., None], code: str
) -> None:
    setting(CUDA_VISIBLE_DEVICES="")
    fake.faults["cuInit"] = code
    with pytest.raises(DeviceError, match=rf"{code}.*CUDA_VISIBLE_DEVICES=\)"):
        driver.device_count()


@pytest.mark.parametrize("ordinal", [2, 7])
def test_an_absent_device_is_refused(fake: FakeDriver, ordinal: int) -> None:
    with pytest.raises(DeviceError, match=f"cuda:{ordinal} was asked for, but there are 2"):
        cuda_launch.CudaBackend().machine(f"cuda:{ordinal}")


@pytest.mark.parametrize("name", ["cuda:", "cuda:x", "gpu", "cuda:-1", "cuda 0"])
def test_device_names_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match="device is"):
        device_arrays.ordinal_named(name)


def test_an_old_device_is_refused(fake: FakeDriver) -> None:
    fake.attributes |= {"COMPUTE_CAPABILITY_MAJOR": 7, "COMPUTE_CAPABILITY_MINOR": 0}
    with pytest.raises(DeviceError, match=r"capability 7\.0; 7\.5 or newer"):
        cuda_launch.CudaBackend().machine("cuda")


def test_a_kernel_the_driver_cannot_load_is_said(fake: FakeDriver) -> None:
    fake.faults["cuLibraryLoadData"] = "CUDA_ERROR_NO_BINARY_FOR_GPU"
    with pytest.raises(DeviceError, match="built for another architecture") as caught:
        gm.matvec(on(0, 4, 4), on(0, 4), rung=RUNG.name)
    assert not caught.value.restart


def test_much_shared_memory_is_asked_for(fake: FakeDriver) -> None:
    """A launch has 48 KiB without, its static memory, of 16 at most, included."""
    for kib, asked in ((0, False), (32, False), (33, True), (200, True)):
        kernel = driver.load(b"cubin", "f", 0, kib << 10)
        assert fake.shared.pop(kernel, None) == (kib << 10 if asked else None)


# --- memory and faults ----------------------------------------------------------------------------


def test_out_of_memory_says_how_much_and_leaks_nothing(fake: FakeDriver) -> None:
    before = fake.free_bytes
    with pytest.raises(DeviceError, match=r"4,294,967,296 bytes \(1,073,741,824 of") as caught:
        DeviceArray.empty((1 << 30,), "float32")
    assert not caught.value.restart
    assert fake.free_bytes == before
    small = DeviceArray.empty((16,), "float32")
    assert fake.free_bytes == before - 64
    del small
    gc.collect()
    assert fake.free_bytes == before
    assert not fake.memory


@pytest.mark.parametrize("code", ["CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED"])
def test_a_lost_context_asks_for_a_restart_every_time(fake: FakeDriver, code: str) -> None:
    a, x = on(0, 4, 4), on(0, 4)
    for call in ("cuLaunchKernel", "cuCtxSynchronize", "cuStreamSynchronize", "cuMemAlloc"):
        fake.faults[call] = code
    for _ in range(2):
        with pytest.raises(DeviceError, match=f"{code}.*Restart") as caught:
            gm.matvec(a, x, rung=RUNG.name, out=x_like(fake, x))
        assert caught.value.restart
    with pytest.raises(DeviceError, match="Restart"):
        driver.synchronize(0)
    with pytest.raises(DeviceError, match="Restart"):
        DeviceArray.empty((4,), "float32")


def x_like(fake: FakeDriver, x: DeviceArray) -> DeviceArray:
    """Return an array beside x, allocated although allocations are planted to fail."""
    fault = fake.faults.pop("cuMemAlloc", None)
    try:
        return DeviceArray.empty(x.shape, x.dtype, x.ordinal)
    finally:
        if fault is not None:
            fake.faults["cuMemAlloc"] = fault


def test_a_refused_launch_is_no_lost_context(fake: FakeDriver) -> None:
    a, x = on(0, 4, 4), on(0, 4)
    fake.faults["cuLaunchKernel"] = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
    with pytest.raises(DeviceError, match=r"launching thread_per_row.*OUT_OF_RESOURCES") as caught:
        gm.matvec(a, x, rung=RUNG.name)
    assert not caught.value.restart
    fake.faults.clear()
    gm.matvec(a, x, rung=RUNG.name)
    assert len(fake.launches) == 1


def test_a_forked_process_is_refused(fake: FakeDriver) -> None:
    a, x = on(0, 4, 4), on(0, 4)
    with (
        planted(os, "getpid", lambda sound: sound() + 1),
        pytest.raises(DeviceError, match=r"forked after CUDA had started.*spawn"),
    ):
        gm.matvec(a, x, rung=RUNG.name)
    gm.matvec(a, x, rung=RUNG.name)


# --- where work goes ------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("current", [None, 0, 1])
def test_work_goes_to_the_operands_device(
    fake: FakeDriver, device: int, current: int | None
) -> None:
    a, x = on(device, 300, 8), on(device, 8)
    if current is not None:
        fake.contexts.append(1000 + current)
    y = gm.matvec(a, x, rung=RUNG.name)
    assert y.device == f"cuda:{device}"
    (launch,) = fake.launches
    context, grid, block, _, stream = launch
    assert (context, grid, block[0] * grid[0] >= 300, stream) == (1000 + device, grid, True, 0)
    assert fake.contexts == ([] if current is None else [1000 + current])


@pytest.mark.parametrize(
    ("name", "static", "dynamic", "workspace"),
    [
        ("shared_tile", 2 * 32 * 32 * 4, 0, 0),
        ("shared_x", 0, 128 * 4, 0),
        ("two_step", 32 * 4, 0, 0),
        ("y_blocks", 32 * 4, 0, 4 * 64 * 4),
    ],
)
def test_memory_is_stated_with_that_of_the_code(
    fake: FakeDriver, name: str, static: int, dynamic: int, workspace: int
) -> None:
    """Shared memory that a kernel declares with a size counts beside that of its launch."""
    right = (64, 64) if name == "shared_tile" else (64,)
    op = "matmul" if name == "shared_tile" else "matvec"
    words = gm.plan(op, on(0, 64, 64), on(0, *right), rung=name).explain()
    assert f"workspace {workspace:,} bytes" in words
    total = f"shared memory {static + dynamic:,} bytes (static {static:,}, dynamic {dynamic:,})"
    assert f"{total} a block" in words


def test_devices_do_not_mix(fake: FakeDriver) -> None:
    with pytest.raises(TypeError, match=r"cuda:0.*cuda:1"):
        gm.matvec(on(0, 4, 4), on(1, 4), rung=RUNG.name)
    with pytest.raises(TypeError, match=r"cuda:0.*cpu"):
        gm.matvec(on(0, 4, 4), np.ones(4, np.float32), rung=RUNG.name)


def test_nothing_is_launched_for_nothing(fake: FakeDriver) -> None:
    assert gm.matvec(on(0, 0, 4), on(0, 4), rung=RUNG.name).shape == (0,)
    assert fake.launches == []
    assert gm.matvec(on(0, 4, 0), on(0, 0), rung=RUNG.name).shape == (4,)
    assert len(fake.launches) == 1  # four zeros have to be stored


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8", "int64"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(0, 65), (257, 0), (0, 0), (65, 0), (0, 1)], ids=str)
def test_empty_products_of_every_layout(
    fake: FakeDriver, shape: tuple[int, int], turned: bool, dtype: str
) -> None:
    matrix = on(0, *shape[::-1], dtype=dtype).T if turned else on(0, *shape, dtype=dtype)
    for op, (a, b), size in (
        ("matvec", (matrix, on(0, shape[1], dtype=dtype)), shape[0]),
        ("vecmat", (on(0, shape[0], dtype=dtype), matrix), shape[1]),
        ("matmul", (matrix, on(0, shape[1], 3, dtype=dtype)), shape[0]),
    ):
        fake.launches.clear()
        result = getattr(gm, op)(a, b)
        assert result.shape == ((size, 3) if op == "matmul" else (size,))
        assert bool(fake.launches) == bool(size)  # zeros have to be stored where there are places
        assert "reason" in gm.plan(op, a, b).explain()


@pytest.mark.parametrize(
    ("op", "shape", "strides", "dtype"),
    [
        ("matvec", (1, 9), (54, 3), "float64"),  # each lost the context of an H200
        ("vecmat", (1, 32, 1), (192, 6, 3), "float32"),
    ],
)
def test_strides_beside_a_unit_size_bound_the_alignment(
    fake: FakeDriver, op: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str
) -> None:
    whole = on(0, 192, dtype=dtype)
    a = DeviceArray(whole.pointer, shape, strides, dtype, 0, whole)
    x = on(0, shape[-1] if op == "matvec" else shape[-2], dtype=dtype)
    planned = gm.plan(op, a, x) if op == "matvec" else gm.plan(op, x, a)
    assert planned.problem.alignment == 8


def test_unproved_rungs_are_not_chosen(fake: FakeDriver, only_proved: Callable[..., None]) -> None:
    only_proved("cuda", ())
    with pytest.raises(TypeError, match="no proved cuda rung"):
        gm.matvec(on(0, 4, 4), on(0, 4))
    only_proved("cuda", {RUNG.name})
    assert gm.plan("matvec", on(0, 4, 4), on(0, 4)).rung.name == RUNG.name


def operand(library: str, array: Any = None) -> Operand:
    return Operand(array, 256, Form((4,), (1,), "float32", 16), "cuda:1", library, array)


def test_each_librarys_current_stream_is_used(modules: Callable[..., None]) -> None:
    asked: list[int] = []

    def raw_stream(ordinal: int) -> int:
        asked.append(ordinal)
        return 111

    torch = SimpleNamespace(_C=SimpleNamespace(_cuda_getCurrentRawStream=raw_stream))
    modules(torch=torch)
    assert device_arrays.current_stream(operand("torch"), 1) == 111
    assert asked == [1]

    class Device:
        def __init__(self, ordinal: int) -> None:
            asked.append(10 + ordinal)

        def __enter__(self) -> None:
            return None

        def __exit__(self, *_: object) -> None:
            return None

    current = SimpleNamespace(ptr=222)
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=Device, get_current_stream=lambda: current))
    modules(cupy=cupy)
    assert device_arrays.current_stream(operand("cupy"), 1) == 222
    assert asked == [1, 11]


def test_other_arrays_carry_their_stream_or_get_the_default() -> None:
    speaking = SimpleNamespace(__cuda_stream__=lambda: (0, 333))
    assert device_arrays.current_stream(operand("dlpack", speaking), 0) == 333
    for declared, expected in ((None, 0), (1, 0), (2, 2), (444, 444)):
        array = SimpleNamespace(__cuda_array_interface__={"stream": declared})
        assert device_arrays.current_stream(operand("interface", array), 0) == expected
    assert device_arrays.current_stream(operand("gemmule", object()), 0) == 0
    with device_arrays.using_stream(555):
        assert device_arrays.current_stream(operand("gemmule", object()), 0) == 555
    assert device_arrays.current_stream(operand("gemmule", object()), 0) == 0


def test_a_chosen_stream_reaches_the_launch(fake: FakeDriver) -> None:
    a, x = on(0, 4, 4), on(0, 4)
    with device_arrays.using_stream(777):
        gm.matvec(a, x, rung=RUNG.name)
    gm.matvec(a, x, rung=RUNG.name)
    assert [launch[-1] for launch in fake.launches] == [777, 0]


def test_threads_share_no_argument_memory(fake: FakeDriver) -> None:
    operands = [(on(0, 4, 4), on(0, 4)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda pair: gm.matvec(*pair, rung=RUNG.name).pointer, operands * 25))
    assert len(fake.launches) == 100
    assert len(found) == 100


def test_host_arrays_go_there_and_come_back(fake: FakeDriver) -> None:
    result = gm.matvec(
        np.ones((5, 3), np.float32), np.ones(3, np.float32), device="cuda:1", rung=RUNG.name
    )
    assert isinstance(result, np.ndarray)
    assert result.shape == (5,)
    assert [launch[0] for launch in fake.launches] == [1001]
    gc.collect()
    resolve.cache_clear()
    gc.collect()
    assert not fake.memory, "copies of the operands stayed on the device"


@pytest.mark.parametrize(("asked", "device"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
def test_a_quantised_matrix_names_its_device_as_arrays_do(
    fake: FakeDriver, asked: str, device: str
) -> None:
    Q = gm.asarray(gm.quantize(np.ones((4, 64), np.float32), group_size=32), device=asked)
    assert Q.device == device == on(int(device[5:]), 64).device
    assert Q.layout == "mma16", "packed there: codes, scales and zero points by a launch each"
    assert len(fake.launches) == 3
    gm.matvec(Q, on(int(device[5:]), 64), rung="fragment_codes")
    assert len(fake.launches) == 4
    assert gm.asarray(Q, device="cpu").device == "cpu"


def test_device_arrays_keep_their_order(fake: FakeDriver) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    for host in (rows, np.asfortranarray(rows), rows.T):
        there = DeviceArray.from_host(host)
        assert there.strides == tuple(step // 4 for step in host.strides)
        np.testing.assert_array_equal(there.to_host(), host)
        np.testing.assert_array_equal(there.T.to_host(), host.T)


def test_an_empty_array_of_any_strides_comes_back(fake: FakeDriver) -> None:
    there = DeviceArray(0, (7, 0), (0, 0), "float32", 0, None)  # as CuPy's empty arrays have them
    assert there.to_host().shape == (7, 0)
    assert there.T.to_host().shape == (0, 7)


def test_a_stepped_view_goes_to_the_device_in_pieces(
    fake: FakeDriver, limit: Callable[..., None]
) -> None:
    limit(device_array, PIECE_BYTES=100)
    for shape in ((7, 3, 50), (1, 1, 300), (150,), (2, 90, 2), (30, 0)):
        view = np.arange(2 * math.prod(shape), dtype=np.float32).reshape(*shape, 2)[..., 1]
        there = DeviceArray.from_host(view)
        assert there.shape == shape
        np.testing.assert_array_equal(there.to_host(), view)


def test_what_does_not_fit_is_refused_before_it_is_copied(fake: FakeDriver) -> None:
    view = np.broadcast_to(np.float32(1), (10**6, 10**6))
    with pytest.raises(DeviceError, match=r"no room for 4,000,000,000,000 bytes"):
        gm.asarray(view, device="cuda")


FLOATS = ("float64", "float32", "float16", "bfloat16")


@pytest.mark.parametrize("left", FLOATS)
def test_every_pair_of_floats_is_multiplied(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    given: list[tuple[str, str]] = []
    monkeypatch.setattr(
        cuda_launch.CudaBackend,
        "prepare",
        lambda self, choice: lambda a, b, *rest: given.append((a.form.dtype, b.form.dtype)),
    )
    monkeypatch.setattr(
        convert,
        "widened",
        lambda one, dtype, like: one._replace(form=one.form._replace(dtype=dtype)),
    )
    cases = {"matvec": ((5, 8), (8,)), "vecmat": ((8,), (8, 5)), "matmul": ((4, 8), (8, 20))}
    for right, (op, shapes) in itertools.product(FLOATS, cases.items()):
        wide = result_dtype(left, right)
        operands = [on(0, *shape, dtype=t) for shape, t in zip(shapes, (left, right), strict=True)]
        given.clear()
        assert getattr(gm, op)(*operands).dtype == wide
        plan = gm.plan(op, *operands)
        assert given == [(plan.problem.a, plan.problem.b)]
        called = given[0][::-1] if plan.choice.call.swapped else given[0]
        assert (" converted from " in plan.explain()) == (called != (left, right))
        matrix = 0 if op == "matvec" else 1
        if op != "matmul" and (left, right)[1 - matrix] != "float64":
            assert called[matrix] == (left, right)[matrix], "only the vector is converted"


def test_a_converted_vector_goes_before_the_product(fake: FakeDriver) -> None:
    A, x = on(1, 5, 8), on(1, 8, dtype="float16")
    assert gm.matvec(A, x, rung=RUNG.name).dtype == "float32"
    assert [launch[1] for launch in fake.launches] == [(1, 1, 1), (1, 1, 1)]
    assert {launch[0] for launch in fake.launches} == {1001}
    plan = gm.plan("matvec", A, x, rung=RUNG.name)
    assert "x converted from float16 to float32, 32 bytes" in plan.explain()
    out = on(1, 5)
    assert plan(A, x, out=out) is out
    with pytest.raises(TypeError, match="integers and floats do not mix"):
        gm.matvec(A, on(1, 8, dtype="int8"))


# --- compiling and its cache ----------------------------------------------------------------------


@pytest.fixture
def builds(setting: Callable[..., None], tmp_path: Path) -> Iterator[list[Any]]:
    """An empty cache folder, and a list that grows with each compilation."""
    setting(GEMMULE_CACHE=tmp_path / "cache")
    with planted(nvrtc, "build", lambda sound, *given: sound(*given)) as calls:
        yield calls


def compile_it() -> nvrtc.Module:
    return nvrtc.compile_file(RUNG.source_path, KERNEL, "sm_90a")


def entry(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache" / "cubin").glob("*.cubin")
    return path


def test_the_second_compilation_is_read_from_disk(builds: list[Any], tmp_path: Path) -> None:
    first = compile_it()
    assert compile_it() == first
    assert len(builds) == 1
    assert entry(tmp_path).stat().st_mode & 0o077 == 0
    assert (tmp_path / "cache" / "cubin").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-100],
        lambda data: data[:10],
        lambda data: b"",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: b"{}\n" + data.partition(b"\n")[2],
        lambda data: b"[" * 5000 + b"\n" + data.partition(b"\n")[2],
        lambda data: data.replace(b'": "_Z', b'": "_Y', 1),  # the symbol of another kernel
        lambda data: hashlib.sha256(b"[]\nx").hexdigest().encode() + b"\n[]\nx",
    ],
)
def test_a_broken_entry_is_compiled_again(builds: list[Any], tmp_path: Path, spoil: Any) -> None:
    first = compile_it()
    path = entry(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    assert compile_it() == first
    assert len(builds) == 2
    assert compile_it() == first, "the broken entry was not replaced"
    assert len(builds) == 2


def test_another_users_folder_is_not_trusted(builds: list[Any], tmp_path: Path) -> None:
    compile_it()
    nvrtc.trusted_folder.cache_clear()
    with (
        planted(os, "getuid", lambda sound: sound() + 1),
        pytest.warns(GemmuleWarning, match="another user's"),
    ):
        compile_it()
    assert len(builds) == 2


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_others_may_write_to_is_not_trusted(
    builds: list[Any], tmp_path: Path, mode: int
) -> None:
    folder = tmp_path / "cache" / "cubin"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.warns(GemmuleWarning, match="writable by others"):
        compile_it()
    assert list(folder.iterdir()) == []


def test_threads_that_compile_the_same_kernel_agree(builds: list[Any], tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: compile_it(), range(8)))
    assert all(module == found[0] for module in found)
    builds.clear()
    assert compile_it() == found[0]
    assert builds == []
    assert [p.name for p in entry(tmp_path).parent.iterdir()] == [entry(tmp_path).name]


def test_a_kernel_that_does_not_compile_says_why(tmp_path: Path, builds: list[Any]) -> None:
    broken = tmp_path / "broken.cu"
    broken.write_text("template <class T> __global__ void f(T* p) { p[0] = missing_name; }\n")
    with pytest.raises(
        CompileError, match=r"broken\.cu for sm_90a \(f<float>\).*missing_name"
    ) as e:
        nvrtc.compile_file(broken, ("f<float>",), "sm_90a")
    assert "broken.cu" in e.value.log
    assert not (tmp_path / "cache" / "cubin").exists() or not list(
        (tmp_path / "cache" / "cubin").glob("*.cubin")
    )
    with pytest.raises(CompileError, match="for sm_1 "):
        nvrtc.compile_file(RUNG.source_path, KERNEL, "sm_1")


# --- the stored read ceiling ----------------------------------------------------------------------


def test_a_measured_ceiling_replaces_the_datasheets(fake: FakeDriver) -> None:
    machine = cuda_launch.CudaBackend().machine("cuda")
    assert machine.read_bytes_per_s == pytest.approx(0.92 * 2 * 3.201e9 * 6016 / 8)
    assert stored_ceilings.save(machine, 4.5e12) is not None
    forget()
    assert cuda_launch.CudaBackend().machine("cuda").read_bytes_per_s == 4.5e12


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "no json",
        "[" * 5000,
        "x" * 100_000,
        '{"schema": 2, "device": "Fake GPU", "read_bytes_per_s": 4e12}',
        '{"schema": 1, "device": "Another", "read_bytes_per_s": 4e12}',
        '{"schema": 1, "device": "Fake GPU", "read_bytes_per_s": "4e12"}',
        '{"schema": 1, "device": "Fake GPU", "read_bytes_per_s": NaN}',
        '{"schema": 1, "device": "Fake GPU", "read_bytes_per_s": 1e20}',
        '{"schema": 1, "device": "Fake GPU", "read_bytes_per_s": -1.0}',
    ],
)
def test_a_ceiling_that_cannot_be_right_is_overlooked(fake: FakeDriver, text: str) -> None:
    machine = cuda_launch.CudaBackend().machine("cuda")
    path = stored_ceilings.save(machine, 4.5e12)
    assert path is not None
    path.write_text(text)
    names = (machine.backend, machine.name, machine.arch, machine.units)
    assert stored_ceilings.read(*names) is None
    with pytest.raises(ValueError, match="no read rate"):
        stored_ceilings.save(machine, 0.0)


def test_ceilings_are_ignored_with_tuning_off(
    fake: FakeDriver, setting: Callable[..., None]
) -> None:
    machine = cuda_launch.CudaBackend().machine("cuda")
    stored_ceilings.save(machine, 4.5e12)
    setting(GEMMULE_TUNE="0")
    assert stored_ceilings.read("cuda", machine.name, machine.arch, machine.units) is None


def test_what_the_assembler_says_of_each_kernel_is_read() -> None:
    """Of several kernels, of which some spill, and some have shared memory of their own."""
    given = [("f", 8, 4, 12, 40, 0), ("g_2", 0, 0, 0, 255, 4096), ("h", 16, 20, 0, 32, 128)]
    report = "".join(
        f"ptxas info    : Compiling entry function '{name}' for 'sm_90a'\n"
        f"ptxas info    : Function properties for {name}\n"
        f"    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers"
        + (f", {shared} bytes smem" if shared else "")
        + ", 400 bytes cmem[0]\n"
        for name, stack, stores, loads, registers, shared in given
    )
    found = [dataclasses.astuple(one) for one in nvrtc.resources(report)]
    assert found == [
        (name, registers, stores + loads, stack, shared)
        for name, stack, stores, loads, registers, shared in given
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_another_library_is_given_is_the_array(dtype: str, fake: FakeDriver) -> None:
    """By DLPack and by the CUDA array interface: address, device, dtype, shape and strides."""
    block = DeviceArray.empty((4, 3, 2), dtype, 1)
    views = (
        block,
        block.T,
        block.mT,
        block.view((), ()),
        block.view((5,), (3,), 8 * ITEMSIZE[dtype]),
    )
    for array in views:
        by_dlpack = partial(device_arrays.from_dlpack, array, "dlpack", "A")
        by_interface = partial(device_arrays.from_interface, array, "A")
        found = []
        if dtype in FLOAT8:  # what cuda.core and the interface have no name for
            with pytest.raises(TypeError, match="DLPack"):
                by_dlpack()
        else:
            found.append(by_dlpack())
        if dtype in TYPESTR:
            found.append(by_interface())
        assert found or dtype in FLOAT8
        for one in found:
            told = one.pointer, one.form.shape, one.form.strides, one.form.dtype, one.device
            assert told == (array.pointer, array.shape, array.strides, dtype, "cuda:1")
    assert block.__dlpack_device__() == (2, 1)
    with pytest.raises(BufferError, match="in place only"):
        block.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="in place only"):
        block.__dlpack__(dl_device=(2, 0))


def test_another_library_is_asked_to_be_ready_on_the_stream_that_products_are_on(
    fake: FakeDriver,
) -> None:
    class Asked:
        """An exporter that notes what it was asked for."""

        def __init__(self) -> None:
            self.array, self.given = DeviceArray.empty((3, 2), "float32", 1), dict[str, Any]()

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

        def __dlpack__(self, **given: Any) -> Any:
            self.given = given
            return self.array.__dlpack__(**given)

    exporter = Asked()
    operand = device_arrays.from_dlpack(exporter, "dlpack", "A")
    assert operand.pointer == exporter.array.pointer
    assert exporter.given["stream"] == 1, "the legacy default stream, by its number in DLPack"


def test_what_other_streams_still_write_is_waited_for_before_the_host_reads_it() -> None:
    with late(seed=5) as driver:
        there = gm.asarray(np.zeros(5), device="cuda")
        foreign = type("Foreign", (), {"__cuda_array_interface__": there.__cuda_array_interface__})
        _, stream = driver.cuStreamCreate("")
        new = np.arange(5.0)
        driver.cuMemcpyAsync(there.pointer, new.ctypes.data, new.nbytes, stream)
        np.testing.assert_array_equal(gm.asarray(foreign()), new)
        del there, foreign


@pytest.mark.parametrize(
    "where", ["nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "CUDA_HOME", "CUDA_PATH", "none"]
)
def test_headers_are_found_wherever_they_may_be(
    where: str, tmp_path: Path, fault: Callable[..., Any], setting: Callable[..., None]
) -> None:
    include = tmp_path / "include"
    (include / "cccl").mkdir(parents=True)
    (include / "cuda_fp16.h").touch()

    def files(sound: Any, package: str) -> Any:
        if package != where:
            raise metadata.PackageNotFoundError(package)
        header = include / "cuda_fp16.h"
        return [SimpleNamespace(name=header.name, locate=lambda: header)]

    fault(metadata, "files", files)
    fault(Path, "is_file", lambda sound, path: tmp_path in path.parents and sound(path))
    setting(**{name: tmp_path if name == where else None for name in ("CUDA_HOME", "CUDA_PATH")})
    nvrtc.include_folders.cache_clear()
    try:
        if where == "none":
            with pytest.raises(CompileError, match=r"headers.*were not found"):
                nvrtc.include_folders()
        else:
            assert nvrtc.include_folders() == (include, include / "cccl")
    finally:
        nvrtc.include_folders.cache_clear()
