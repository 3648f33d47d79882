"""Copies that a product needs: in panels, bounded in memory, asked for before they are made."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from children import printed
from gemmule.backends.cpu import jit, panels
from gemmule.core import memory, registry
from gemmule.core.caches import forget_plans
from products import shortening

DTYPES = ("float32", "float64", "float16", "int8", "int64", "complex64")


@pytest.fixture(params=[1, 64, 1000])
def small_panels(request: pytest.FixtureRequest, limit: Callable[..., None]) -> Iterator[int]:
    limit(panels, MOST_BYTES=request.param, LEAST_BYTES=1)
    forget_plans()
    yield request.param
    forget_plans()


def stepped(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    """Return small integers that lie two rows and three columns apart, the columns backwards."""
    *batch, m, n = shape
    return rng.integers(-4, 5, (*batch, m * 2, n * 3)).astype(dtype)[..., ::2, ::-3]


def wide(array: Any) -> Any:
    return array.astype("complex128" if array.dtype.kind == "c" else "float64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul"])
def test_panels_of_any_size_give_the_whole_product(op: str, dtype: str, small_panels: int) -> None:
    rng = np.random.default_rng(small_panels)
    for batch, (m, n) in itertools.product([(), (3,)], [(1, 5), (7, 1), (37, 53)]):
        A = stepped(rng, (*batch, m, n), dtype)
        if op == "matmul":
            B = stepped(rng, (*batch, n, 11), dtype)
            given, exact = (A, B), wide(A) @ wide(B)
        else:
            x = rng.integers(-4, 5, (*batch, n if op == "matvec" else m)).astype(dtype)
            given = (A, x) if op == "matvec" else (x, A)
            turned = A if op == "matvec" else np.swapaxes(A, -1, -2)
            exact = (wide(turned) @ wide(x)[..., None])[..., 0]
        result = getattr(gm, op)(*given)
        np.testing.assert_array_equal(wide(result), exact)


def test_alpha_and_beta_go_through_panels(small_panels: int) -> None:
    rng = np.random.default_rng(1)
    A, x, y = stepped(rng, (37, 53), "float32"), np.ones(53, "float32"), np.arange(74.0)[::2]
    whole = 2 * wide(A) @ x - 3 * y
    np.testing.assert_array_equal(gm.gemv(A, x, y.astype("float32"), alpha=2, beta=-3), whole)


def test_a_view_beyond_the_memory_needs_little() -> None:
    """A matrix of 8 GB that broadcasting made of one number, where 1.5 GB may be taken."""
    program = """
import resource
import numpy as np, gemmule as gm
resource.setrlimit(resource.RLIMIT_DATA, (3 << 29, 3 << 29))
A = np.broadcast_to(np.float32(2), (20_000, 100_000))
assert (gm.matvec(A[:5000], np.ones(100_000, np.float32)) == 200_000).all()
try:
    np.ascontiguousarray(A)
except MemoryError:
    print("right")
"""
    assert printed(program) == "right\n"


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="Linux tells it there")
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_map_of_a_file_is_multiplied_in_little_memory(tmp_path: Path, order: str) -> None:
    """Maps of 256 MiB where 64 MiB more may be taken: what is read of a file is no copy of it."""
    program = f"""
import resource
import numpy as np, gemmule as gm
shape = (8192, 8192)
A = np.memmap({str(tmp_path / "A")!r}, np.float32, "w+", shape=shape, order={order!r})  # holes
A[[0, 4000, -1], [5, -1, 7]] = 2, 3, 5
A.flush()
x = np.arange(1, 8193, dtype=np.float32)
small = np.array(A[:64, :64], order={order!r})  # what is compiled now takes no memory later
gm.matvec(small, x[:64]), gm.vecmat(x[:64], small)
lines = open("/proc/self/status").read().splitlines()
taken = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (taken + 2**26, taken + 2**26))
y, z = gm.matvec(A, x), gm.vecmat(x, A)
assert (y[[0, 4000, -1]] == [12, 24576, 40]).all() and np.count_nonzero(y) == 3
assert (z[[5, -1, 7]] == [2, 12003, 40960]).all() and np.count_nonzero(z) == 3
try:
    np.array(A)
except MemoryError:
    print("right")
"""
    assert printed(program) == "right\n"


# ---- products that take long --------------------------------------------------------------------
APART = [rung for rung in registry.all_rungs("cpu") if rung.rows_apart]


@pytest.fixture
def in_pieces(limit: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Products in pieces of 64 rows, however short they are; the rows of each piece."""
    found: list[int] = []
    limit(panels, PIECE_S=1e-12, AGAIN=0)
    monkeypatch.setattr(panels, "check_map", lambda part: found.append(len(part)))
    forget_plans()
    yield found
    forget_plans()


@pytest.mark.parametrize("rung", APART, ids=lambda rung: f"{rung.op} {rung.name}")
def test_pieces_have_the_bits_of_the_whole(rung: Any, request: pytest.FixtureRequest) -> None:
    rng, cases = np.random.default_rng(3), []
    multiply = getattr(gm, rung.op)
    if rung.available() is not None:
        pytest.skip(rung.available())
    for dtype, m, k, n in (
        *(("float32", 197, 700, 5), ("float64", 131, 33, 130), ("float16", 260, 257, 64)),
        *(("int8", 257, 1025, 7), ("int64", 193, 40, 21), ("complex64", 129, 5, 3)),
    ):
        A = (8 * rng.standard_normal((m, k))).astype(dtype)
        B = (8 * rng.standard_normal((k,) if rung.op == "matvec" else (k, n))).astype(dtype)
        problem = gm.plan(rung.op, A, B).choice.problem
        if rung.refusal(problem) is None:
            cases += [(A, B, multiply(A, B, rung=rung.name))]
    assert cases
    pieces = request.getfixturevalue("in_pieces")
    for A, B, whole in cases:
        for _ in "twice":  # the second call takes the fast path
            pieces.clear()
            out = np.zeros_like(whole)
            assert multiply(A, B, rung=rung.name, out=out).tobytes() == whole.tobytes()
            assert pieces[0] == 64


@pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))
@pytest.mark.parametrize("rung", ["packed", "packed_threads"])
def test_packed_operands_of_a_long_product_are_read_packed(in_pieces: list[int], rung: str) -> None:
    rng = np.random.default_rng(4)
    A, B = rng.standard_normal((500, 280), "f4"), rng.standard_normal((280, 40), "f4")
    whole = gm.matmul(A, B, rung=rung)
    left, right = gm.prepare(A, side="left", rung=rung), gm.prepare(B, rung=rung)
    assert left.rungs == right.rungs == (rung,)
    for pair in ((A, right), (left, B), (left, right)):
        in_pieces.clear()
        for _ in "twice":  # the second call takes the fast path
            np.testing.assert_array_equal(gm.matmul(*pair, rung=rung), whole)
        assert not in_pieces


def test_an_interrupt_is_heard_between_pieces(
    in_pieces: list[int], fault: Callable[..., Any]
) -> None:
    asked = itertools.count()

    def interrupting(sound: Any, part: Any) -> None:
        if next(asked) == 4:
            signal.raise_signal(signal.SIGINT)

    A, B = np.ones((640, 30), np.int64), np.ones((30, 8), np.int64)
    C = np.full((640, 8), 7)
    fault(panels, "check_map", interrupting)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever ran before
    try:
        with pytest.raises(KeyboardInterrupt):
            gm.matmul(A, B, out=C, rung="packed")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert set(C[:, 0]) == {30, 7}
    assert np.array_equal(gm.gemm(A, B, C, alpha=2), np.full((640, 8), 60))


def test_short_products_are_of_one_piece() -> None:
    A = np.ones((2000, 2000), np.int64)
    for multiply in (gm.matvec, gm.matmul):
        choice = gm.plan(multiply.__name__, A, A if multiply is gm.matmul else A[0]).choice
        assert panels.pieces(replace(choice, expected_s=1e-3)) is None
        assert panels.pieces(replace(choice, expected_s=60.0)) is not None


def test_what_a_rung_refuses_is_no_panel(limit: Callable[..., None]) -> None:
    """Not even at the edge: 37 rows by twos leave one."""
    limit(panels, MOST_BYTES=1000, LEAST_BYTES=1)
    A = stepped(np.random.default_rng(0), (37, 53), "int64")
    choice = gm.plan("matvec", A, A[0]).choice
    assert panels.sizes(choice) == (2, 53)
    for rows in (1, 2):
        some = replace(choice.rung, accepts_quant=lambda one, rows=rows: one.m != rows)
        assert panels.sizes(replace(choice, rung=some)) is None


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_map_that_becomes_shorter_between_panels_is_refused(
    tmp_path: Path, dtype: str, small_panels: int, fault: Callable[..., Any]
) -> None:
    path = tmp_path / "A.npy"
    np.save(path, np.ones((512, 300), dtype))
    check_map = shortening(path, 200_000, 5)
    fault(panels, "check_map", lambda sound, part: check_map(part))
    A, x = np.load(path, mmap_mode="r")[:, ::3], np.ones(100, dtype)
    with pytest.raises(ValueError, match=r"A\.npy became shorter while it was mapped"):
        gm.matvec(A, x)
    with pytest.raises(ValueError, match="became shorter"):
        gm.matmul(A, np.ones((100, 2), dtype))
    assert np.array_equal(gm.matvec(A[:50], x), np.full(50, 100))  # what is there can be read
    os.truncate(path, 2 * 10**6)
    memory.check_map(A)


def test_a_conversion_beyond_the_memory_is_refused_before_it_is_made() -> None:
    foreign = np.broadcast_to(np.zeros((), ">f4"), (10**6, 10**6))
    room = memory.available_bytes()
    assert room is not None
    with pytest.raises(MemoryError, match=r"takes 4,000,000,000,000 bytes, and .* are available"):
        gm.matvec(foreign, np.zeros(10**6, np.float32))
    view = np.broadcast_to(np.zeros((), "f4"), (10**6, 10**6))
    for side in ("left", "right"):
        with pytest.raises(MemoryError, match="the copy of B takes 4,000,000,000,000 bytes, and "):
            gm.prepare(view, side=side)


def test_a_limit_of_the_control_group_counts(tmp_path: Path) -> None:
    told = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert told is not None
    unlimited = pytest.approx(1024 * int(told[1]), rel=0.5)
    assert memory.available_bytes(tmp_path) == unlimited
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert memory.available_bytes(tmp_path) == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes(tmp_path) == unlimited
