"""Matrix products in tile registers: in AMX's where there are some, in memory everywhere."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule.backends.cpu.jit import kernel
from gemmule.core.caches import forget_plans
from gemmule.core.problem import numpy_dtype
from gemmule.rungs.matmul.cpu import _tile_steps, dot_products, half_sums, tile_products
from gemmule.rungs.matmul.cpu._tile_blocks import carried
from gemmule.rungs.matmul.cpu.tile_products import block_groups, blocks_together
from gemmule_lab.verify import check
from tile_emulation import emulated_tiles

Array = np.ndarray[Any, Any]
NAME = "tile_products"
DTYPES = ("bfloat16", "float16")


def drawn(rng: np.random.Generator, shape: tuple[int, int], dtype: str, layout: str) -> Array:
    rows, columns = shape
    if layout == "row":
        return rng.standard_normal(shape).astype(numpy_dtype(dtype))
    if layout == "col":
        return rng.standard_normal((columns, rows)).astype(numpy_dtype(dtype)).T
    return rng.standard_normal((2 * rows, 3 * columns)).astype(numpy_dtype(dtype))[::2, ::3]


def judged(A: Array, B: Array, *, rung: str = NAME, **options: Any) -> float:
    """Return the largest error over its bound, which must not exceed 1."""
    plan = gm.plan("matmul", A, B, rung=rung, **options)
    plan(A, B)  # the second product is of a builtin function
    verdict = check.judge("matmul", A, B, plan(A, B), check.Rounding.of(plan))
    assert verdict.ok, verdict.text
    return verdict.ratio


SHAPES = ((1, 1, 1), (16, 16, 32), (31, 33, 31), (65, 47, 97), (2, 100, 65))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout_b", ["row", "col", "strided"])
@pytest.mark.parametrize("layout_a", ["row", "col", "strided"])
@pytest.mark.parametrize("small", [256**3, 0])
def test_every_layout_at_the_edges(
    dtype: str, layout_a: str, layout_b: str, small: int, limit: Callable[..., None]
) -> None:
    limit(tile_products, _SMALL=small)
    forget_plans()
    rng = np.random.default_rng(1)
    for m, n, k in SHAPES:
        A, B = drawn(rng, (m, k), dtype, layout_a), drawn(rng, (k, n), dtype, layout_b)
        for out in (dtype, "float32"):
            judged(A, B, out_dtype=out)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_passes_over_several_blocks(dtype: str) -> None:
    rng = np.random.default_rng(2)
    A, B = drawn(rng, (300, 1100), dtype, "row"), drawn(rng, (1100, 290), dtype, "row")
    assert judged(A, B, out_dtype="float32", params={"rows": 256, "columns": 256}) > 0
    out = np.full((300, 600), 7, np.float32)
    gm.matmul(A, B, out=out[:, 5:295], out_dtype="float32", rung=NAME)
    assert (out[:, :5] == 7).all()
    assert (out[:, 295:] == 7).all()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_below_each_other_read_what_the_first_has_packed_of_B(dtype: str) -> None:
    """Sums are the same in any blocks, and several passes of B lie side by side then."""
    rng = np.random.default_rng(7)
    A, B = drawn(rng, (180, 1100), dtype, "row"), drawn(rng, (1100, 100), dtype, "row")
    plan = gm.plan("matmul", A, B, rung=NAME)
    C = np.empty((180, 100), numpy_dtype(dtype))
    tile_products.RUNG.bind(plan.problem, {"rows": 32, "columns": 32})(A, B, C)
    judged(A, B)
    np.testing.assert_array_equal(C, plan(A, B))


@pytest.mark.parametrize("threads", [1, 2, 6, 16, 96])
def test_blocks_of_one_thread_are_together_where_nobody_waits_longer(threads: int) -> None:
    for down, across in itertools.product(range(1, 20), repeat=2):
        together = blocks_together(down, across, threads)
        shares = -(-down // together) * across
        assert 1 <= together <= down
        assert -(-shares // threads) * together <= -(-down * across // threads)
        assert together == 1 or threads == 1 or shares >= 2 * threads
    assert blocks_together(4, 4, 1) == 4
    assert blocks_together(4, 4, 16) == 1


@pytest.mark.parametrize(("rung", "beyond"), [(dot_products, 2.0**-130), (half_sums, 6e4)])
@pytest.mark.parametrize("small", [256**3, 0])
def test_dot_products_take_what_tiles_do(
    rung: Any, beyond: float, small: int, limit: Callable[..., None]
) -> None:
    """Every layout at the edges, several passes, what is beyond them, and prepared operands."""
    missing = rung.RUNG.available()
    if missing is not None:
        pytest.skip(missing)
    limit(tile_products, _SMALL=small)
    forget_plans()
    name, dtype = rung.__name__.rpartition(".")[2], rung.RUNG.signatures[0][0]
    rng = np.random.default_rng(8)
    for layout_a, layout_b in itertools.product(("row", "col", "strided"), repeat=2):
        for m, n, k in (*SHAPES, (40, 33, 1100)):
            A = drawn(rng, (m, k), dtype, layout_a)
            B = drawn(rng, (k, n), dtype, layout_b)
            for out in (dtype, "float32"):
                judged(A, B, out_dtype=out, rung=name)
    prepared = gm.prepare(B, rung=name)
    np.testing.assert_array_equal(gm.matmul(A, prepared, rung=name), gm.matmul(A, B, rung=name))
    whole = functools.partial(gm.matmul, out_dtype="float32")
    assert (whole(A, B, rung=name) != whole(A, B, rung="packed_threads")).any()
    A[3, 5] = B[7, 9] = beyond
    np.testing.assert_array_equal(whole(A, B, rung=name), whole(A, B, rung="packed_threads"))


@pytest.mark.usefixtures("tiles")
def test_empty_and_stacked_products() -> None:
    rng = np.random.default_rng(3)
    for m, n, k in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        made = gm.matmul(np.ones((m, k), "f2"), np.ones((k, n), "f2"), rung=NAME)
        assert made.shape == (m, n)
        assert not made.any()
    A, B = rng.integers(-3, 4, (3, 20, 40)), rng.integers(-3, 4, (3, 40, 20))
    made = gm.matmul(A.astype("f2"), B.astype("f2"), rung=NAME)
    np.testing.assert_array_equal(made, A @ B)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    ("dtype", "size"),
    [("bfloat16", 2.0**-60), ("bfloat16", 2.0**-130), ("float16", np.inf), ("float16", np.nan)],
)
@pytest.mark.parametrize("small", [256**3, 0])
def test_what_tiles_do_not_carry_is_computed_plainly(
    dtype: str, size: float, small: int, limit: Callable[..., None]
) -> None:
    """Products and elements below the normal numbers, and what is no sum of two bfloat16."""
    limit(tile_products, _SMALL=small)
    forget_plans()
    rng = np.random.default_rng(4)
    A, B = drawn(rng, (20, 40), dtype, "row"), drawn(rng, (40, 18), dtype, "col")
    A[3, 5] = B[7, 9] = size
    options = {"out_dtype": "float32", "rung": NAME}
    plain = {**options, "rung": "packed_threads"}
    expected = gm.matmul(A, B, **plain)
    np.testing.assert_array_equal(gm.matmul(A, B, **options), expected)
    tiny = np.zeros_like(A)
    tiny[19, 5], B = size, drawn(rng, (40, 18), dtype, "col")  # in the last panel of A alone
    np.testing.assert_array_equal(gm.matmul(tiny, B, **options), gm.matmul(tiny, B, **plain))


@pytest.mark.usefixtures("tiles")
def test_infinity_and_nan_of_bfloat16_are_those_of_any_product() -> None:
    A, B = np.ones((20, 40), numpy_dtype("bfloat16")), np.ones((40, 18), numpy_dtype("bfloat16"))
    A[3, 5], A[4, 6], B[7, 9], B[8, 2] = np.inf, np.nan, -np.inf, 0
    with np.errstate(invalid="ignore"):
        expected = A.astype("f4") @ B.astype("f4")
    np.testing.assert_array_equal(gm.matmul(A, B, out_dtype="float32", rung=NAME), expected)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["row", "col", "strided"])
def test_prepared_operands_give_the_bits_of_others(dtype: str, layout: str) -> None:
    rng = np.random.default_rng(6)
    for m, n, k in SHAPES[1:]:
        A, B = drawn(rng, (m, k), dtype, layout), drawn(rng, (k, n), dtype, layout)
        right, left = gm.prepare(B, rung=NAME), gm.prepare(A, side="left", rung=NAME)
        assert right.rungs == left.rungs == (NAME,)
        wanted = gm.matmul(A, B, rung=NAME)
        for pair in ((A, right), (left, B), (left, right)):
            plan = gm.plan("matmul", *pair, rung=NAME)
            assert f"read packed by {NAME}" in plan.explain()
            np.testing.assert_array_equal(plan(*pair), wanted)
    judged(A, B, out_dtype="float32")
    stacked = rng.standard_normal((3, 20, 40)).astype(numpy_dtype(dtype))
    for one in (stacked, stacked[0]):
        prepared = gm.prepare(one, side="left", rung=NAME)
        product = gm.matmul(prepared, stacked.swapaxes(1, 2), rung=NAME)
        np.testing.assert_array_equal(product, gm.matmul(one, stacked.swapaxes(1, 2), rung=NAME))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    ("dtype", "size"), [("bfloat16", 2.0**-60), ("bfloat16", 2.0**-130), ("float16", np.inf)]
)
def test_what_tiles_do_not_carry_is_read_from_the_array_of_a_prepared_one(
    dtype: str, size: float
) -> None:
    rng = np.random.default_rng(7)
    A, B = drawn(rng, (20, 40), dtype, "row"), drawn(rng, (40, 18), dtype, "col")
    A[3, 5] = B[7, 9] = size
    expected = gm.matmul(A, B, out_dtype="float32", rung="packed_threads")
    right, left = gm.prepare(B, rung=NAME), gm.prepare(A, side="left", rung=NAME)
    for pair in ((A, right), (left, B), (left, right)):
        made = gm.matmul(*pair, out_dtype="float32", rung=NAME)
        np.testing.assert_array_equal(made, expected)


def test_the_least_sums_that_tiles_keep() -> None:
    """Exponents of -56 and of -56 make products whose last bit, 2^-126, is a normal number."""
    least = (127 - 56 << 7) - 1
    assert carried(1, least, 0, least, 0)
    assert not carried(1, least - 1, 0, least, 0)
    assert not carried(1, 126, 0, 250 << 7, 0)  # the largest subnormal number
    assert carried(1, 0xFFFF, 0, 0xFFFF, 0)  # zeros
    assert carried(2, 0, 0x7BFF, 0, 0x7BFF)
    for infinite in ((0x7BFF, 0x7C00), (0x7C00, 0x7BFF)):
        assert not carried(2, 0, infinite[0], 0, infinite[1])


def test_every_float16_is_the_sum_of_two_bfloat16() -> None:
    """Tiles of all finite numbers, whose extremes are noted as well."""
    split, note = _tile_steps.split_halves(), _tile_steps.note_extremes()

    @kernel
    def both(tile: int, extremes: int) -> None:
        note(tile, extremes)
        split(tile)

    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    values = values[np.isfinite(values)].reshape(-1, 512)
    for numbers in values:
        tiles = np.zeros((2, 512), np.uint16)
        tiles[0] = numbers.view(np.uint16)
        extremes = np.array([[0x1234] * 32, [0x0456] * 32], np.uint16)
        both(tiles.ctypes.data, extremes.ctypes.data)
        upper, lower = (tiles.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(upper + lower, numbers.astype(np.float32))
        assert (upper * lower >= 0).all()
        magnitudes = (numbers.view(np.uint16) & 0x7FFF).reshape(16, 32)
        less = (magnitudes - np.uint16(1)).min(axis=0)
        np.testing.assert_array_equal(extremes[0], np.minimum(less, 0x1234))
        np.testing.assert_array_equal(extremes[1], np.maximum(magnitudes.max(axis=0), 0x0456))


def test_pieces_are_multiplied_each_with_each() -> None:
    """Left out is what is below 2^-24 of the whole."""
    for pieces, pairs in _tile_steps.PRODUCTS.items():
        every = itertools.product(range(pieces[0]), range(pieces[1]))
        assert sorted(pairs) == [(a, b) for a, b in every if a + b <= 2]
        for (a, b), (c, d) in itertools.pairwise(pairs):
            assert (a == c) != (b == d)


@pytest.mark.parametrize("threads", [1, 2, 6, 16, 96])
def test_blocks_are_few_and_shared_evenly(threads: int) -> None:
    for down, across in ((1, 1), (2, 9), (16, 16), (33, 7), (128, 128)):
        rows, columns = block_groups(down, across, threads, (16, 8), (6, 11))
        assert 1 <= rows <= min(16, down)
        assert 1 <= columns <= min(8, across)
        blocks = -(-down // rows) * -(-across // columns)
        if threads == 1:
            assert blocks <= 2 * -(-down // 16) * -(-across // 8)
        assert -(-blocks // threads) * rows * columns <= 2 * -(-down * across // threads) + 4


@pytest.fixture
def emulated() -> Iterator[None]:
    with emulated_tiles():
        yield


@pytest.mark.usefixtures("emulated")  # first, so that what a fault replaced is put back before
@pytest.mark.parametrize("kind", ["resume", "add", "place"])
def test_faults_planted_in_tiles_are_seen(kind: str, fault: Callable[..., Any]) -> None:
    """Sums that begin anew at each pass, a piece left out, rows of B taken for columns."""
    rng = np.random.default_rng(5)
    A, B = drawn(rng, (40, 300), "float16", "row"), drawn(rng, (300, 40), "float16", "row")
    if kind == "resume":
        start = _tile_steps.start_sums()
        fault(_tile_steps, "resume_rows", lambda sound: restarted(start))
    elif kind == "add":
        fault(_tile_steps, "add_products", lambda sound, pieces, streamed="": sound((1, 1)))
    else:
        fault(tile_products, "places_kernel", lambda sound, paired, unit: sound(False, unit))
    with pytest.raises(AssertionError, match="elements wrong"):
        judged(A, B, out_dtype="float32")


def restarted(start: Any) -> Any:
    @kernel
    def resume(registers: int, sums: int) -> None:
        start(registers)

    return resume
