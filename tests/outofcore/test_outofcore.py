"""Products of host operands on a GPU that takes them in panels: under a device that works late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import gemmule as gm
from gemmule.arrays.interop import unwrap
from gemmule.backends.cuda import driver
from gemmule.core.operand import c_strides
from gemmule.core.problem import numpy_dtype
from gemmule.outofcore import buffers, engine, feeder, products, schedule, sources, staging, upload
from gemmule.outofcore.pieces import Transfer, pieces
from gemmule.outofcore.schedule import Sizes, Tiling
from gemmule.outofcore.tiling import Demand, chosen
from gemmule.settings import device_budget
from gemmule_lab.cli import cli
from late_driver import LateDriver, late
from products import shortening

Array = np.ndarray[Any, Any]


@pytest.fixture
def small(
    setting: Callable[..., None], limit: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[LateDriver]:
    """A device that may take 128 KiB, by copies of a page."""
    limit(staging, CHUNK_BYTES=4096)
    monkeypatch.setattr(staging, "spare_lanes", {})
    monkeypatch.setattr(staging, "_links", {})
    monkeypatch.setattr(buffers, "_pool", {})
    setting(GEMMULE_DEVICE_BUDGET="128 KiB")
    with late(seed=7) as driver:
        products.cut_of.cache_clear()
        yield driver
        staging.spare_lanes.clear()
        buffers.empty_pool(0)
        products.cut_of.cache_clear()


def whole_numbers(shape: tuple[int, ...], dtype: Any, seed: int = 1) -> Array:
    """Return small integers, whose sums are exact in every dtype."""
    values = np.random.default_rng(seed).integers(-3, 4, shape)
    return values.astype(dtype)


def laid(values: Array, how: str) -> Array:
    """Return the same values in another arrangement of memory."""
    if how == "row":
        return values
    if how == "col":
        return np.asfortranarray(values)
    wide = np.zeros([2 * size for size in values.shape], values.dtype)
    wide[tuple(slice(None, None, 2) for _ in values.shape)] = values
    return wide[tuple(slice(None, None, 2) for _ in values.shape)]


@pytest.mark.usefixtures("small")
def test_lines_are_read_as_they_lie() -> None:
    """The order decides how many bytes lie side by side, not what the product is."""
    wide, tall = np.zeros((4, 6)), np.zeros((6, 4))
    for A, columns in ((wide, False), (tall, False), (wide.T, True), (wide[::-1], False)):
        assert sources.Dense.of(unwrap(A, "A"), 0).column_major is columns
    for column, as_column in ((np.zeros((5, 1)), False), (np.zeros(5), True)):
        assert sources.Dense.of(unwrap(column, "x"), 0, as_column=as_column).column_major


PRODUCTS = [
    ("matvec", (300, 257), (257,)),
    ("matvec", (3, 60_001), (60_001,)),  # one row does not fit
    ("vecmat", (257,), (257, 300)),
    ("vecmat", (20_011,), (20_011, 3)),
    ("matmul", (130, 200), (200, 170)),
    ("matmul", (70, 3000), (3000, 90)),  # no panels of whole sums fit
    ("matmul", (1, 30_000), (30_000, 1)),
    ("matmul", (1000,), (1000, 70)),
    ("matmul", (60_000,), (60_000,)),
    ("matmul", (3, 90, 100), (100, 90)),  # batches, several at a time and one by one
    ("matmul", (2, 1, 90, 100), (3, 100, 95)),
    ("matvec", (150, 120), (5, 2, 120)),
    ("vecmat", (4, 3, 100), (3, 100, 170)),
]


def test_a_map_that_becomes_shorter_on_the_way_is_refused(
    small: LateDriver, tmp_path: Path, fault: Callable[..., Any]
) -> None:
    """And a product after it is right, as nothing is under way any more."""
    path = tmp_path / "A.npy"
    A, x = np.ones((512, 512), np.float32), np.ones(512, np.float32)
    check_map = shortening(path, 300_000, 30)
    fault(feeder, "check_map", lambda sound, part: check_map(part))
    np.save(path, A)
    with pytest.raises(ValueError, match=r"A\.npy became shorter"):
        gm.matvec(np.load(path, mmap_mode="r"), x, device="cuda")
    np.save(path, A)
    assert (gm.matvec(np.load(path, mmap_mode="r"), x, device="cuda") == 512).all()


@pytest.mark.parametrize("how", ["row", "col", "stepped"])
@pytest.mark.parametrize(("op", "left", "right"), PRODUCTS)
def test_every_element(
    small: LateDriver, op: str, left: tuple[int, ...], right: tuple[int, ...], how: str
) -> None:
    dtypes = {"row": np.float32, "col": np.float16, "stepped": np.int8}
    a, b = (laid(whole_numbers(s, dtypes[how], n), how) for n, s in enumerate((left, right)))
    wide = [one.astype(np.int64) for one in (a, b)]
    if op == "matvec":
        expected = (wide[0] @ wide[1][..., None])[..., 0]
    elif op == "vecmat":
        expected = (wide[0][..., None, :] @ wide[1])[..., 0, :]
    else:
        expected = wide[0] @ wide[1]
    before = small.taken
    small.most_bytes = before
    got = getattr(gm, op)(a, b, device="cuda")
    assert got.dtype == {"row": "float32", "col": "float16", "stepped": "int32"}[how]
    assert (got == expected).all()
    assert small.most_bytes - before <= 128 * 1024
    assert not any(small.queues.values())


@pytest.mark.parametrize("how", ["row", "col", "stepped"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64])
def test_scalars(small: LateDriver, dtype: Any, how: str) -> None:
    A, B = whole_numbers((90, 1100), dtype), whole_numbers((1100, 80), dtype, 2)
    A[:, 3:] = 0  # small sums, which halves hold
    C = laid(whole_numbers((90, 80), dtype, 3), how)
    expected = -2 * A.astype(np.int64) @ B.astype(np.int64) + 3 * C.astype(np.int64)
    assert gm.gemm(A, laid(B, how), C, alpha=-2, beta=3, device="cuda") is C
    assert (C.astype(np.int64) == expected).all()
    y = np.full(90, 7, dtype)
    x = whole_numbers((1100,), dtype, 4)
    product = A.astype(np.int64) @ x.astype(np.int64)
    assert (gm.gemv(A, x, y, beta=-1, device="cuda").astype(np.int64) == product - 7).all()
    poisoned = A if dtype == np.int64 else A * dtype(np.nan)
    assert (gm.gemv(poisoned, x, np.full(90, 5, dtype), alpha=0, beta=2, device="cuda") == 10).all()


def test_integers_beyond_doubles(small: LateDriver) -> None:
    A, B = whole_numbers((90, 1100), np.int64), whole_numbers((1100, 80), np.int64, 2)
    C = whole_numbers((90, 80), np.int64, 3)
    alpha, beta = 2**53 + 1, -(2**61) - 1
    expected = (A @ B) * np.int64(alpha) + C * np.int64(beta)
    assert (gm.gemm(A, B, C, alpha=alpha, beta=beta, device="cuda") == expected).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group_size", "symmetric"), [(32, False), (-1, True), (None, True)])
def test_quantised(small: LateDriver, bits: Any, group_size: int | None, symmetric: bool) -> None:
    random = np.random.default_rng(5)
    Q = gm.quantize(
        random.standard_normal((700, 260)).astype(np.float32),
        bits=bits, group_size=group_size, symmetric=symmetric,
    )  # fmt: skip
    W = Q.dequantize("float64")
    for op, left, right in (
        ("matvec", Q, 260), ("vecmat", 700, Q), ("matvec", Q.T, 700), ("vecmat", 260, Q.T),
        ("matmul", Q, (260, 9)), ("matmul", (5, 700), Q), ("matmul", Q.T, (700, 3)),
    ):  # fmt: skip
        pair = [
            one if one in (Q, left, right) and isinstance(one, gm.QuantizedMatrix)
            else random.standard_normal(one).astype(np.float32)
            for one in (left, right)
        ]  # fmt: skip
        plain = [
            (W.T if one.transposed else W) if isinstance(one, gm.QuantizedMatrix) else one
            for one in pair
        ]
        got = getattr(gm, op)(*pair, device="cuda")
        bound = np.abs(plain[0]) @ np.abs(plain[1]) * 2.0**-20
        assert (np.abs(got - plain[0] @ plain[1].astype(np.float64)) <= bound).all(), op


def test_permuted_columns(small: LateDriver) -> None:
    W = np.random.default_rng(6).standard_normal((600, 256)).astype(np.float32)
    Q = gm.quantize(W, bits=8, group_size=64)
    perm = np.random.default_rng(7).permutation(256)
    P = gm.QuantizedMatrix.from_parts(
        Q.codes, Q.scales, Q.zeros, shape=(600, 256), bits=8, group_size=64, perm=perm
    )
    dense, x = P.dequantize("float64"), whole_numbers((256,), np.float32)
    y = whole_numbers((600,), np.float32)
    assert np.allclose(gm.matvec(P, x, device="cuda"), dense @ x, rtol=0, atol=2e-3)
    assert np.allclose(gm.vecmat(y, P, device="cuda"), y @ dense, rtol=0, atol=2e-3)


def test_batch_invariant(small: LateDriver) -> None:
    random = np.random.default_rng(8)
    A = random.standard_normal((400, 150)).astype(np.float32)
    X = random.standard_normal((3, 150)).astype(np.float32)
    together = gm.matvec(A, X, device="cuda", batch_invariant=True)
    alone = [gm.matvec(A, x, device="cuda", batch_invariant=True) for x in X]
    assert (together == alone).all()
    product = gm.matmul(X, A.T, device="cuda", batch_invariant=True)
    rows = [gm.vecmat(x, A.T, device="cuda", batch_invariant=True) for x in X]
    assert (product == rows).all()


def test_page_locked_operands_are_not_staged(small: LateDriver) -> None:
    values = whole_numbers((300, 257), np.float32)
    block = staging.PinnedBlock(values.nbytes, 0)
    A = block.bytes.view(np.float32).reshape(values.shape)
    A[...] = values
    x = whole_numbers((257,), np.float32)
    for view in (A, A[:, 5:200], A[::-1], A[3:100].T, A[::2, ::3]):
        vector = np.resize(x, view.shape[1])
        assert (gm.matvec(view, vector, device="cuda") == np.array(view) @ vector).all()


@pytest.mark.parametrize(
    ("left", "right", "out", "sums"),  # dtypes of the operands and the result, error of a sum
    [
        ("float16", "float16", "float16", 1e-5),
        ("bfloat16", "bfloat16", "bfloat16", 1e-5),
        ("float16", "bfloat16", "float32", 1e-5),
        ("float64", "float64", "float32", 1e-11),
        ("float64", "float32", "float32", 1e-11),
        ("float16", "float64", "float64", 1e-11),
        ("float32", "float32", "float64", 1e-11),
    ],
)
def test_partial_sums_are_rounded_once(
    small: LateDriver, left: str, right: str, out: str, sums: float
) -> None:
    random = np.random.default_rng(9)
    A = random.uniform(0, 1, (2, 60_000)).astype(numpy_dtype(left))
    x = random.uniform(0, 1, 60_000).astype(numpy_dtype(right))
    exact = A.astype(np.float64) @ x.astype(np.float64)
    got = gm.matvec(A, x, out_dtype=out, device="cuda")
    assert got.dtype == out
    assert (np.abs(got - exact) <= (ml_dtypes.finfo(got.dtype).eps / 2 + sums) * exact).all()


def test_plan_tells_the_traffic(small: LateDriver) -> None:
    A, x = whole_numbers((300, 257), np.float32), whole_numbers((257,), np.float32)
    plan = gm.plan("matvec", A, x, device="cuda")
    words = plan.explain()
    assert f"traffic    {A.nbytes + x.nbytes:,} bytes in, {300 * 4:,} out" in words
    assert "of 131,072 bytes" in words
    assert (plan(A, x) == A @ x).all()
    for other in ((A[1:], x), (A, x.astype(np.float64)), (A, np.repeat(x, 2)[::2])):
        with pytest.raises(ValueError, match=r"this plan is for float32 \(300, 257\).*Plan anew"):
            plan(*other)
    assert "HostPlan(matvec A 300 x 257" in repr(plan)
    small_plan = gm.plan("matvec", A[:3], x, device="cuda:0")
    assert f"{A[:3].nbytes + x.nbytes:,} bytes in, 12 out" in small_plan.explain()
    assert isinstance(gm.plan("matvec", A, x, device="cpu"), gm.Plan)


def test_out_is_used_and_checked(small: LateDriver) -> None:
    A, x = whole_numbers((300, 257), np.float16), whole_numbers((257,), np.float16)
    out = np.empty(600, np.float16)[::2]
    assert gm.matvec(A, x, out=out, device="cuda") is out
    assert (out == A.astype(int) @ x.astype(int)).all()
    with pytest.raises(ValueError, match="out"):
        gm.matvec(A, x, out=np.empty(299, np.float16), device="cuda")
    with pytest.raises(ValueError, match="overlap"):
        gm.matmul(A[:, :200], A[:200], out=A[:, :257], device="cuda")


@pytest.mark.parametrize("given", ["much", "0", "-3", "12 XB", "1e9"])
def test_a_budget_that_is_none(setting: Callable[..., None], given: str) -> None:
    setting(GEMMULE_DEVICE_BUDGET=given)
    with pytest.raises(ValueError, match=f"GEMMULE_DEVICE_BUDGET is {given!r}"):
        device_budget()


@pytest.mark.parametrize(
    ("given", "size"),
    [("20GB", 20 * 10**9), ("512 MiB", 2**29), ("1.5g", 15 * 10**8), ("77", 77), ("2KiB", 2048)],
)
def test_budgets(setting: Callable[..., None], given: str, size: int) -> None:
    setting(GEMMULE_DEVICE_BUDGET=given)
    assert device_budget() == size


def test_no_room_at_all(small: LateDriver, setting: Callable[..., None]) -> None:
    setting(GEMMULE_DEVICE_BUDGET="1000")
    A = whole_numbers((300, 257), np.float32)
    for op, pair in (("matvec", (A, A[0])), ("matmul", (A, A.T))):
        with pytest.raises(gm.DeviceError, match=r"finds no room in the 1,000 bytes.*BUDGET"):
            getattr(gm, op)(*pair, device="cuda")


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuLaunchKernel", "cuMemAlloc", "cuEventRecord"])
def test_an_error_ends_everything(small: LateDriver, call: str) -> None:
    """A typed error comes out, nothing is under way afterwards, and the next product is right."""
    A, B = whole_numbers((150, 300), np.float32), whole_numbers((300, 140), np.float32, 2)
    expected = A @ B
    assert (gm.matmul(A, B, device="cuda") == expected).all()
    buffers.empty_pool(0)
    taken = small.taken
    small.faults[call] = "CUDA_ERROR_LAUNCH_FAILED"
    with pytest.raises(gm.DeviceError, match="LAUNCH_FAILED"):
        gm.matmul(A, B, device="cuda")
    del small.faults[call]
    assert not any(small.queues.values())
    buffers.empty_pool(0)
    assert small.taken == taken
    assert (gm.matmul(A, B, device="cuda") == expected).all()


def test_a_lane_is_one_product_s_until_that_ends_or_cannot_begin(small: LateDriver) -> None:
    def panels(sound: int) -> Iterator[list[Transfer]]:
        yield from [[]] * sound
        raise KeyboardInterrupt

    first, second = (staging.take_lane(0, feeder.SLOTS) for _ in range(2))
    assert first is not second
    for lane in (first, second):
        staging.give_lane(lane, 0)
    for sound in (0, 1, 2):
        with pytest.raises(KeyboardInterrupt):
            feeder.Feeder(panels(sound), 0)
        assert staging.spare_lanes[0, feeder.SLOTS] == [first]
    assert staging.take_lane(0, feeder.SLOTS) is first
    assert staging.take_lane(0, feeder.SLOTS) is not first


def test_memory_stays_for_the_next_product(
    small: LateDriver, setting: Callable[..., None], limit: Callable[..., None]
) -> None:
    """As long as it is little, within the next one's budget, and nobody else has need of it."""
    A = whole_numbers((300, 257), np.float32)
    x = A[0]

    def product() -> int:
        """Return the bytes that a product takes anew."""
        before, small.most_bytes = small.taken, small.taken
        assert (gm.matvec(A, x, device="cuda") == A @ x).all()
        return small.most_bytes - before

    first = product()
    kept = buffers.pooled_bytes(0)
    assert kept
    assert product() == first - kept
    setting(GEMMULE_DEVICE_BUDGET="40 KiB")
    assert product() == 0, "what is kept goes first"
    assert 0 < buffers.pooled_bytes(0) <= small.taken <= 40 << 10 < kept
    setting(GEMMULE_DEVICE_BUDGET="128 KiB")
    product()
    assert buffers.pooled_bytes(0) == kept
    small.free_bytes = 100
    block = driver.allocate(buffers.pooled_bytes(0), 0)
    assert not buffers.pooled_bytes(0)
    driver.free(block, 0)
    small.free_bytes = 1 << 30
    limit(buffers, POOLED_BYTES=1000)
    product()
    assert not buffers.pooled_bytes(0)


def test_an_interrupt_ends_everything(small: LateDriver) -> None:
    A, B = whole_numbers((150, 300), np.float32), whole_numbers((300, 140), np.float32, 2)

    def interrupted(done: int, steps: int) -> None:
        if done == steps // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), engine.watched(interrupted):
        gm.matmul(A, B, device="cuda")
    assert not any(small.queues.values())
    assert (gm.matmul(A, B, device="cuda") == A @ B).all()


def test_files_larger_than_the_device(small: LateDriver, tmp_path: Path) -> None:
    A, B = whole_numbers((150, 300), np.float32), whole_numbers((300, 140), np.float32, 2)
    np.save(tmp_path / "A.npy", A)
    np.save(tmp_path / "B.npy", B)
    given = ["multiply", str(tmp_path / "A.npy"), str(tmp_path / "B.npy"), "--device", "cuda"]
    ran = CliRunner().invoke(cli, [*given, "-o", str(tmp_path / "C.npy")])
    assert ran.exit_code == 0, ran.output
    assert (np.load(tmp_path / "C.npy") == A @ B).all()
    ran = CliRunner().invoke(cli, [*given, "-o", str(tmp_path / "D.npy"), "--check"])
    assert ran.exit_code == 0, ran.output


@pytest.mark.parametrize("size", [64, 100, 1000])
@pytest.mark.parametrize("gap", [0, 20, 500])
def test_pieces_are_the_arrays_where_they_belong(size: int, gap: int) -> None:
    """Whatever is cut or put together: each byte once, none beyond a piece's size, gaps left."""
    random = np.random.default_rng(size + gap)
    shapes = ((7, 60), (1, 333), (40, 4), (0, 9), (3, 1), (9, 130))
    arrays = [random.integers(1, 256, shape).astype(np.uint8) for shape in shapes]
    arrays += [random.standard_normal((5, 11)).astype(np.float32)[::2, 1:]]
    panel, address = [], 1000
    for array in arrays:
        panel.append(Transfer(array, address, direct=False))
        address += array.nbytes + gap
    found = list(pieces(panel, iter(lambda: size, None)))
    there = np.zeros(address, np.uint8)
    for piece in found:
        assert 0 < piece.nbytes <= size
        slot = np.full(size, 255, np.uint8)
        for part, start in piece.parts:
            slot[start : start + part.nbytes] = np.frombuffer(part.tobytes(), np.uint8)
            assert start + part.nbytes <= piece.nbytes
        held = slice(piece.address, piece.address + piece.nbytes)
        assert not there[held].any()
        there[held] = slot[: piece.nbytes]
    for transfer in panel:
        held = slice(transfer.address, transfer.address + transfer.array.nbytes)
        assert there[held].tobytes() == transfer.array.tobytes()
        assert gap < 64 or not there[held.stop : held.stop + gap].any()
    assert not there[:1000].any()
    whole = sum(array.nbytes + (gap if gap < 64 else 0) for array in arrays)
    if size == 1000:
        assert len(found) <= (4 * whole / 3 / size + 1 if gap < 64 else len(arrays) + 3)


def test_page_locked_lines_go_straight_there_unless_they_overlap_or_lie_backwards() -> None:
    array = np.arange(60, dtype=np.float32).reshape(6, 10)
    window = np.lib.stride_tricks.sliding_window_view(array[0], 4)
    for straight in (array, array[:, :7], array[::2], array[:1, ::-1][:, :1], window[:1]):
        (piece,) = pieces([Transfer(straight, 64, direct=True)], iter(lambda: 1000, None))
        assert piece.direct
    for held in (window, np.broadcast_to(array[0], (3, 10)), array[::-1], array[:, ::2]):
        (piece,) = pieces([Transfer(held, 64, direct=True)], iter(lambda: 1000, None))
        assert not piece.direct
        assert b"".join(part.tobytes() for part, _ in piece.parts) == held.tobytes()


WHOLES = [Sizes(5, 7, 3), Sizes(1, 9, 4), Sizes(8, 1, 1), Sizes(6, 6, 6)]


@pytest.mark.parametrize("whole", WHOLES)
@pytest.mark.parametrize("slots", [(1, 1), (2, 3), (40, 40)])
def test_schedules(whole: Sizes, slots: tuple[int, int]) -> None:
    """Slots hold what steps need, and no load comes before the last reader of what it replaces."""
    tiling = Tiling(Sizes(1, 1, 1), *slots, 2)
    held: dict[tuple[str, int], Any] = {}
    read: dict[tuple[str, int], int] = {}
    done, loads = set(), 0
    for number, step in enumerate(schedule.steps(whole, tiling)):
        for load in step.loads:
            place = load.side, load.slot
            assert load.after == read.get(place, -1)
            held[place] = load.place
            loads += 1
        assert held["left", step.left] == (step.i, step.part)
        assert held["right", step.right] == (step.part, step.j)
        read["left", step.left] = read["right", step.right] = number
        assert (step.i, step.j, step.part) not in done
        done.add((step.i, step.j, step.part))
        parts = sum(one[:2] == (step.i, step.j) for one in done)
        assert step.first == (parts == 1)
        assert step.last == (parts == whole.k)
    assert len(done) == whole.m * whole.n * whole.k
    if slots == (40, 40):  # everything stays: each panel once
        assert loads == whole.k * (whole.m + whole.n)


def test_more_room_is_less_traffic() -> None:
    def of_bytes(budget: int) -> Any:
        demand = Demand(
            Sizes(65536, 65536, 65536),
            (4, 4, 4),
            budget,
            50e9,
            lambda t: (t.m * t.n * t.k / 2e13, 0),
        )
        tiling = chosen(demand)
        assert demand.memory(tiling) <= budget
        return demand.forecast(tiling)

    small, large = of_bytes(2 * 10**9), of_bytes(20 * 10**9)
    whole = 65536**2 * 4
    assert large.bytes_out == small.bytes_out == whole
    assert 2 * whole <= large.bytes_in <= 4.5 * whole
    assert large.bytes_in < small.bytes_in
    assert large.seconds <= 65536**3 / 2e13 * 1.06


@pytest.mark.parametrize("how", ["row", "col", "stepped"])
@pytest.mark.parametrize(
    "shape", [(300, 257), (70_001,), (5, 60, 70), (0, 9), (2, 3, 0), (2, 0, 3), (0, 3, 2), (0,)]
)
def test_arrays_brought_to_stay(
    small: LateDriver, limit: Callable[..., None], shape: tuple[int, ...], how: str
) -> None:
    limit(upload, PANEL_BYTES=1000)
    values = laid(whole_numbers(shape, np.float32), how)
    there = gm.asarray(values, device="cuda")
    assert there.shape == shape
    turned = values.T.flags.c_contiguous and not values.flags.c_contiguous and values.ndim == 2
    assert there.strides == (c_strides(shape[::-1])[::-1] if turned else c_strides(shape))
    assert (gm.asarray(there) == values).all()
    assert not any(small.queues.values())


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("k", [9, 600, 6000])  # in one piece, in panels, in parts of sums
def test_scaled_sums_are_rounded_once(small: LateDriver, dtype: Any, k: int) -> None:
    random = np.random.default_rng(10)
    A, x, y = (random.uniform(0.5, 1, shape).astype(dtype) for shape in ((90, k), (k,), (90,)))
    exact = 0.7 / k * (A.astype(np.float64) @ x.astype(np.float64)) + 3 * y.astype(np.float64)
    got = gm.gemv(A, x, y, alpha=0.7 / k, beta=3, device="cuda")
    assert (np.abs(got - exact) <= (ml_dtypes.finfo(dtype).eps / 2 + 1e-5) * exact).all()


def test_alpha_meets_whole_sums_alone(small: LateDriver) -> None:
    A, x = np.zeros((3, 60_000), np.float32), np.ones(60_000, np.float32)
    A[:, -1] = 1, -1, 1  # every other part of a sum is zero
    A[2, 0] = 2**10
    assert (gm.gemv(A, x, alpha=np.inf, device="cuda") == [np.inf, -np.inf, np.inf]).all()
    A[:, 0] -= 2.0**20
    A[:, 1] += 2.0**20
    A[:, 30_000:30_002] = 2.0**100, -(2.0**100)
    got = gm.gemv(A[:2], x, alpha=1e30, device="cuda")
    assert np.isfinite(got).all()
