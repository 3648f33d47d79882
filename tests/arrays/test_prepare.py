"""`gm.prepare` on a GPU, emulated: the bits of unprepared products, by fewer launches."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from cuemu.build import compile_cu
from cuemu.toolchain import missing_tools
from emulated_driver import EmulatedDriver, Poisoned, emulated
from gemmule.arrays.interop import unwrap
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.backends.cuda.packed import launch as packed_launch
from gemmule.backends.cuda.packed.launch import PackedLauncher
from gemmule.core.packing import Move

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
Array = np.ndarray[Any, Any]
HALVES, REPACKED = "wgmma_3xfp16", "wgmma_repacked"
# Launches of a product of one prepared operand, and of two: of float32 a pass for maxima and one
# for halves, the words that are brought together, the product, what is computed anew.
LAUNCHES = {HALVES: (5, 3), REPACKED: (2, 1)}


@pytest.fixture
def gpu() -> Iterator[EmulatedDriver]:
    """Give a device of three multiprocessors, so that blocks take several tiles."""
    with emulated(3, Poisoned) as driver:
        driver.attributes["MULTIPROCESSOR_COUNT"] = 3
        yield driver


def placed(array: Array) -> DeviceArray:
    """Return an array of the device that lies as one of the host does."""
    low, high = np.lib.array_utils.byte_bounds(array)
    memory = bytearray(low % 16) + ctypes.string_at(low, high - low)
    held = gm.asarray(np.frombuffer(memory, np.uint8), device="cuda:1")
    at = held.pointer + int(array.__array_interface__["data"][0]) - low + low % 16
    steps = tuple(step // array.itemsize for step in array.strides)
    return DeviceArray(at, array.shape, steps, array.dtype.name, 1, held)


def values(shape: tuple[int, ...], dtype: str, seed: int, *, hard: bool = True) -> Array:
    """Return numbers of which some are tiny, and one is infinite, if `hard`."""
    drawn = np.random.default_rng(seed).standard_normal(shape)
    if hard:
        drawn.flat[:: drawn.size // 5] *= 2.0**-45 if dtype == "float32" else 2.0**-10
        drawn.flat[drawn.size // 3] = np.inf
    return drawn.astype(dtype)


def laid(array: Array, how: str) -> Array:
    """Return the same values, laid out by rows, by columns, at odd places, or with gaps."""
    *batch, rows, cols = array.shape
    if how == "col":
        return np.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2)
    if how == "odd":
        room = np.zeros((*batch, rows, cols + 3), array.dtype)
        room[..., 1:-2] = array
        return room[..., 1:-2]
    if how == "steps":
        room = np.zeros((*batch, rows, 2 * cols), array.dtype)
        room[..., ::-2] = array
        return room[..., ::-2]
    return np.ascontiguousarray(array)


def workspace(plan: gm.Plan) -> int:
    found = re.search(r"workspace ([\d,]+) bytes", plan.explain())
    assert found is not None
    return int(found[1].replace(",", ""))


def same(left: DeviceArray, right: DeviceArray) -> bool:
    return bool(np.array_equal(left.to_host(), right.to_host(), equal_nan=True))


@pytest.mark.parametrize("how", ["row", "col", "odd", "steps"])
@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        ((140, 70), (70, 200)),
        ((2, 65, 70), (70, 40)),
        ((65, 70), (2, 70, 40)),
        ((2, 33, 70), (2, 70, 72)),
    ],
)
def test_float32_products_have_the_unprepared_bits(
    gpu: EmulatedDriver, how: str, of_a: tuple[int, ...], of_b: tuple[int, ...]
) -> None:
    A, B = values(of_a, "float32", 1), laid(values(of_b, "float32", 2), how)
    a, b = placed(laid(A, how)), placed(B)
    product = functools.partial(gm.matmul, rung=HALVES)
    wanted = product(a, b)
    right, left = (
        gm.prepare(one, side=side, rung=HALVES) for one, side in ((b, "right"), (a, "left"))
    )
    for pair, count in (((a, right), 5), ((left, b), 5), ((left, right), 3)):
        before = len(gpu.launches)
        found = product(*pair)
        assert len(gpu.launches) - before == count, pair
        assert same(found, wanted), pair
    exact = A.astype(float) @ B.astype(float)
    finite = np.isfinite(exact)
    assert finite.any()
    assert np.abs(wanted.to_host() - exact)[finite].max() < 1e-4


@pytest.mark.parametrize("how", ["row", "col", "odd"])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_halves_are_lined_up_once(gpu: EmulatedDriver, how: str, batch: tuple[int, ...]) -> None:
    A, B = values((*batch, 70, 45), "float16", 1), values((45, 51), "float16", 2)
    a, b = placed(laid(A, how)), placed(laid(B, how))
    product = functools.partial(gm.matmul, rung=REPACKED)
    wanted = product(a, b)
    right, left = gm.prepare(b), gm.prepare(a, side="left")
    assert right.rungs == left.rungs == (REPACKED,)
    for pair, count in (((a, right), 2), ((left, b), 2), ((left, right), 1)):
        before = len(gpu.launches)
        assert same(product(*pair), wanted), pair
        assert len(gpu.launches) - before == count, pair
    plain = functools.partial(gm.matmul, rung="tensor_core")
    assert same(plain(left, right), plain(a, b)), "the packed copy is an array, with its own steps"


def test_halves_with_gaps_are_read_as_an_aligned_copy_is(gpu: EmulatedDriver) -> None:
    A, B = values((64, 64), "bfloat16", 1, hard=False), values((64, 64), "bfloat16", 2, hard=False)
    a, b = placed(A), gm.prepare(placed(laid(B, "steps")))
    assert gm.plan("matmul", a, b).problem == gm.plan("matmul", a, placed(B)).problem
    assert same(gm.matmul(a, b), gm.matmul(a, placed(B)))


def test_a_transpose_stands_on_the_other_side(gpu: EmulatedDriver) -> None:
    A, B = values((70, 66), "float32", 1), values((66, 40), "float32", 2)
    a, b = placed(A), placed(B)
    wanted = gm.matmul(a, b, rung=HALVES)
    turned = gm.prepare(placed(np.ascontiguousarray(B.T)), side="left", rung=HALVES).T
    before = len(gpu.launches)
    assert same(gm.matmul(a, turned, rung=HALVES), wanted)
    assert len(gpu.launches) - before == 5
    assert (turned.side, turned.shape, turned.T.shape) == ("right", (66, 40), (40, 66))


def test_batches_walked_otherwise_are_right_and_told(gpu: EmulatedDriver) -> None:
    A, B = values((2, 3, 5, 66), "float32", 1), values((3, 66, 40), "float32", 2)
    a, b = placed(A), placed(B)
    prepared = gm.prepare(b, rung=HALVES)
    plan = gm.plan("matmul", a, prepared, rung=HALVES)
    assert "are not walked" in plan.explain()
    assert same(plan(a, prepared), gm.matmul(a, b, rung=HALVES))


def test_a_product_reads_nothing_back_and_waits_for_nothing(gpu: EmulatedDriver) -> None:
    a, b = placed(values((70, 66), "float32", 1)), placed(values((66, 40), "float32", 2))
    wanted, prepared = gm.matmul(a, b, rung=HALVES), gm.prepare(b, rung=HALVES)
    gm.matmul(a, prepared, rung=HALVES)
    for call in ("cuMemcpyAsync", "cuStreamSynchronize", "cuCtxSynchronize"):
        gpu.faults[call] = "CUDA_ERROR_LAUNCH_FAILED"
    found = gm.matmul(a, prepared, rung=HALVES)
    gpu.faults.clear()
    assert same(found, wanted)


def test_prepare_itself_waits(gpu: EmulatedDriver) -> None:
    """So that what it made may be read on any stream."""
    b = placed(values((66, 40), "float32", 2))
    gpu.faults["cuStreamSynchronize"] = "CUDA_ERROR_LAUNCH_FAILED"
    with pytest.raises(gm.DeviceError, match="LAUNCH_FAILED"):
        gm.prepare(b)
    gpu.faults.clear()


def test_words_are_gathered_by_few_blocks() -> None:
    module = compile_cu(packed_launch.GATHER, names=["gather"])
    sources = [np.arange(count, dtype=np.uint32) + count for count in (700, 1, 0, 513)]
    targets = [np.zeros(one.size + 2, np.uint32) for one in sources]
    work = targets[0].ctypes.data
    moves = [
        (which, Move(0, to[1:].ctypes.data - work, one.nbytes))
        for which, (one, to) in enumerate(zip(sources, targets, strict=True))
    ]
    args = [packed_launch.ranges(moves, [one.ctypes.data for one in sources], work)]
    module.launch("gather", grid=(2, 1, 1), block=(256, 1, 1), args=args, seed=3)
    for one, to in zip(sources, targets, strict=True):
        assert np.array_equal(to, np.pad(one, 1))


def test_it_is_a_copy_and_gives_its_memory_back(gpu: EmulatedDriver) -> None:
    B = values((66, 40), "float32", 2)
    b, free = placed(B), gpu.free_bytes
    a = placed(values((70, 66), "float32", 1))
    wanted, free = gm.matmul(a, b, rung=HALVES), gpu.free_bytes
    prepared = gm.prepare(b, rung=HALVES)
    assert free - gpu.free_bytes == prepared.nbytes > 2 * B.nbytes
    held = gm.asarray(np.zeros(1, np.uint8), device="cuda:1")
    ctypes.memset(b.pointer, 0x7F, B.nbytes)
    del held
    assert same(gm.matmul(a, prepared, rung=HALVES), wanted)
    turned = prepared.T
    del prepared
    assert same(gm.matmul(a, turned.T, rung=HALVES), wanted)
    del turned
    assert gpu.free_bytes == free


def test_plans_out_and_scalars(gpu: EmulatedDriver) -> None:
    A, B = values((70, 66), "float32", 1, hard=False), values((66, 40), "float32", 2, hard=False)
    a, b = placed(A), placed(B)
    first, second = gm.prepare(b, rung=HALVES), gm.prepare(placed(2 * B), rung=HALVES)
    plan = gm.plan("matmul", a, first, rung=HALVES)
    out = placed(np.zeros((70, 40), np.float32))
    assert plan(a, first, out=out) is out
    assert same(out, gm.matmul(a, b, rung=HALVES))
    assert np.array_equal(plan(a, second).to_host(), 2 * out.to_host())
    assert same(plan(a, b), out), "an array of the planned problem is taken too"
    text = plan.explain()
    assert f"B on the right: read packed by {HALVES}" in text
    assert "10,560 bytes as an array" in text
    C = values((70, 40), "float32", 3, hard=False)
    c, d = placed(C), placed(C)
    plain = gm.plan("matmul", a, b, rung=HALVES)
    for one, right, result in ((plain, b, c), (plan, first, d)):
        operands = (unwrap(array, "operand") for array in (a, right, result))
        one.execute(*operands, 3.0, 0.5)
    assert same(c, d)
    assert np.allclose(d.to_host(), 3 * out.to_host() + 0.5 * C, rtol=1e-5)
    gm.gemm(a, first, c, alpha=3)
    gm.gemm(a, b, d, alpha=3)
    assert same(c, d)
    assert workspace(plain) - workspace(plan) > 40 * 66 * 4, "the halves of B lie elsewhere"
    other = gm.plan("matmul", a, first, rung="vector_tile").explain()
    assert f"read by vector_tile as an array (packed for {HALVES})" in other


def test_every_public_product_takes_it(gpu: EmulatedDriver) -> None:
    A, B = values((3, 66), "float32", 1, hard=False), values((66, 40), "float32", 2, hard=False)
    a, b, x = placed(A), placed(B), placed(A[0].copy())
    right, left = gm.prepare(b), gm.prepare(placed(B.T.copy()), side="left")
    assert same(x @ right, gm.matmul(x, b))
    assert same(gm.vecmat(x, right), gm.vecmat(x, b))
    assert same(gm.vecmat(a, right), gm.vecmat(a, b))
    assert same(gm.matvec(left, x), gm.matvec(placed(B.T.copy()), x))
    assert same(left @ placed(A.T.copy()), gm.matmul(placed(B.T.copy()), placed(A.T.copy())))
    halves = placed(A.astype(np.float16))
    assert same(gm.matmul(halves, right), gm.matmul(halves, b))
    assert right.rungs in ((), (HALVES,))  # as a model of the device expects of more rows
    assert same(gm.matmul(a, right, rung=HALVES), gm.matmul(a, b, rung=HALVES))
    packed = gm.prepare(b, rung=HALVES)
    mixed = gm.plan("matmul", halves, packed, rung=HALVES)
    assert f"read packed by {HALVES}" in mixed.explain()
    assert same(mixed(halves, packed), gm.matmul(halves, b, rung=HALVES))


def test_what_is_refused(gpu: EmulatedDriver) -> None:
    a, b = placed(values((70, 66), "float32", 1)), placed(values((66, 40), "float32", 2))
    prepared = gm.prepare(b)
    with pytest.raises(ValueError, match=r"on the right .* is the left operand .*side='left'"):
        gm.matmul(prepared, a)
    with pytest.raises(ValueError, match=r"x was prepared .* is a vector"):
        gm.matvec(a, gm.prepare(placed(np.ones((2, 66), np.float32))))
    with pytest.raises(ValueError, match="66 columns"):
        gm.matmul(a, gm.prepare(placed(values((60, 40), "float32", 2))))
    with pytest.raises(TypeError, match="numpy array on cpu and B a gemmule array on cuda:1"):
        gm.matmul(np.ones((70, 66), np.float32), prepared)
    with pytest.raises(TypeError, match="never written"):
        gm.matmul(placed(np.ones((66, 66), np.float32)), b, out=prepared)
    with pytest.raises(TypeError, match="prepared already"):
        gm.prepare(prepared)
    with pytest.raises(TypeError, match="dtype int8"):
        gm.prepare(placed(np.ones((4, 4), np.int8)))
    with pytest.raises(ValueError, match="two axes"):
        gm.prepare(placed(np.ones(4, np.float32)))
    with pytest.raises(ValueError, match="side is 'up'"):
        gm.prepare(b, side="up")
    with pytest.raises(ValueError, match="'vector_tile' packs none"):
        gm.prepare(b, rung="vector_tile")
    with pytest.raises(ValueError, match=f"{HALVES} does not take this matrix: .*64 terms"):
        gm.prepare(placed(np.ones((60, 40), np.float32)), rung=HALVES)


def test_what_plans_choose_is_packed(gpu: EmulatedDriver) -> None:
    """Whole products of this machine take the halves; a few columns are never worth them."""
    gpu.attributes["MULTIPROCESSOR_COUNT"] = 132
    wide, narrow = gm.asarray(np.ones((128, 1024), np.float32), device="cuda:1"), np.ones((64, 4))
    assert gm.prepare(wide).rungs == (HALVES,)
    for other in (narrow.astype(np.float32), narrow, np.ones((0, 5), np.float32)):
        prepared = gm.prepare(gm.asarray(other, device="cuda:1"))
        assert prepared.rungs == ()
        assert prepared.nbytes == other.nbytes
    assert "packed for no rung" in repr(prepared)


def test_quantised_matrices_come_in_the_layout_of_the_device(gpu: EmulatedDriver) -> None:
    Q = gm.quantize(values((64, 64), "float32", 1, hard=False), bits=4, group_size=32)
    assert gm.prepare(Q) is Q
    assert gm.prepare(Q.to("cuda", layout="row")).layout == "mma16"
    with pytest.raises(ValueError, match="one layout for all"):
        gm.prepare(Q, rung=HALVES)


class Tensor:
    """What the fast path asks of a tensor: where it lies."""

    def __init__(self, array: DeviceArray) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return self.array.pointer


@pytest.fixture
def short(gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the fast path's module, whose launches are emulated, and streams noted."""
    pytest.importorskip("torch")
    import torch

    from gemmule.dispatch import torch as module
    from gemmule.dispatch.torch_repeats import RepeatGuard
    from host_tensors import put_library

    written: list[Any] = []
    current = [7]

    def maker(shape: tuple[int, ...], dtype: Any, ordinal: int) -> Any:
        name = "uint8" if len(shape) == 1 else str(dtype)
        return lambda: Tensor(DeviceArray.empty(shape, name, ordinal))

    library = SimpleNamespace(
        uint8="uint8",
        float32="float32",
        float16="float16",
        autograd=torch.autograd,
        Size=lambda shape: SimpleNamespace(numel=lambda: int(np.prod(shape))),
        _C=SimpleNamespace(
            _cuda_getDevice=lambda: 1,
            _cuda_getCurrentRawStream=lambda _: current[0],
            _increment_version=written.extend,
        ),
    )
    put_library(monkeypatch, library, maker)
    monkeypatch.setattr(RepeatGuard, "admits", lambda *given: True)
    return SimpleNamespace(module=module, current=current, written=written)


@pytest.mark.parametrize(("rung", "dtype"), [(HALVES, "float32"), (REPACKED, "float16")])
def test_the_fast_path_of_tensors_starts_the_same_kernels(
    short: Any, gpu: EmulatedDriver, rung: str, dtype: str
) -> None:
    A, B = values((70, 67), dtype, 1), values((67, 41), dtype, 2)
    a, b = placed(A), placed(B)
    wanted = gm.matmul(a, b, rung=rung)
    right, left = gm.prepare(b, rung=rung), gm.prepare(a, side="left", rung=rung)
    for pair in ((a, right), (left, b)):
        plan = gm.plan("matmul", *pair, rung=rung)
        run = plan.launcher
        assert isinstance(run, PackedLauncher)
        call = short.module.bound_call(run, plan.choice.call, plan.forms, 1)
        tensors = [one if isinstance(one, gm.PreparedMatrix) else Tensor(one) for one in pair]
        for stream in (7, 0):  # the second call finds its arguments made
            gpu.launches.clear()
            short.current[0] = stream
            assert same(call(*tensors, None).array, wanted)
            assert [launch[-1] for launch in gpu.launches] == [stream] * LAUNCHES[rung][0]
        out = Tensor(placed(np.zeros((70, 41), dtype)))
        assert call(*tensors, out) is out
        assert same(out.array, wanted)
        assert short.written == [out], "PyTorch learns that out was written"
        short.written.clear()
        (tensor,) = (one for one in tensors if isinstance(one, Tensor))
        assert call(*tensors, tensor) is None, "out overlaps an operand"
        (matrix,) = (one for one in pair if isinstance(one, gm.PreparedMatrix))
        assert call(*tensors, Tensor(matrix.array)) is None, "out overlaps the prepared one"


def test_the_fast_path_of_a_matrix_that_is_read_as_an_array(short: Any) -> None:
    a, b = placed(values((5, 66), "float32", 1)), placed(values((66, 40), "float32", 2))
    right, left = gm.prepare(b), gm.prepare(b.T, side="left")
    cases = (
        ("matmul", (a, right), (a.pointer, right.array.pointer)),
        ("vecmat", (DeviceArray(a.pointer, (66,), (1,), "float32", 1, a), right), None),
        ("matvec", (left, DeviceArray(a.pointer, (66,), (1,), "float32", 1, a)), None),
    )
    for op, pair, expected in cases:
        met: list[tuple[int, ...]] = []
        plan = gm.plan(op, *pair)
        run = SimpleNamespace(starter=lambda _, met=met: lambda *given: met.append(given))
        run.workspace = 0
        call = short.module.bound_call(run, plan.choice.call, plan.forms, 1)
        tensors = [one if isinstance(one, gm.PreparedMatrix) else Tensor(one) for one in pair]
        out = call(*tensors, None)
        matrix = (right if op != "matvec" else left).array.pointer
        assert met == [(7, *(expected or (matrix, a.pointer)), out.data_ptr(), 0)], op
