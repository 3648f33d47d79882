"""Every quantised CPU rung against ``Q.dequantize("float64") @ x``: sizes, groups, zeros, NaN."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from children import printed
from gemmule.backends.cpu import pool, simd, steps, target
from gemmule.core.problem import numpy_dtype
from gemmule.core.rung import ACTIVATION_GROUP, Machine, Rung
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.rungs.quantized.cpu import _operands, _product
from gemmule.rungs.quantized.cpu.plain import products
from gemmule.rungs.quantized.cpu.vector import activations as arranged
from gemmule.rungs.quantized.cpu.vector import codes, integers, panels, quads, rows
from quantized_products import (
    KINDS,
    NAMES,
    RUNGS,
    SCALE_DTYPES,
    activations,
    bound_of,
    check,
    check_across_rows,
    dtype_for,
    make_matrix,
    problem_of,
    run,
    rung_called,
    takes,
)

HAS_QUADS = quads.quad_pieces(512, 4, 32) > 0
FLOAT_NAMES = [n for n in NAMES if "int8" not in n]
MACHINE = Machine("cpu", "test", "x86_64", 2, 40e9, 32 << 20)

SIZES = [(1, 1), (3, 7), (4, 64), (5, 129), (9, 300), (2, 513)]
GROUPS = [1, 3, 8, 24, 32, 64, 100, 128, 256, -1, None]


def address(array: np.ndarray[Any, Any]) -> int:
    return array.ctypes.data


def x_shape(rung: Rung, Q: QuantizedMatrix, columns: int = 5) -> tuple[int, ...]:
    return (Q.shape[1],) if rung.op == "matvec" else (Q.shape[1], columns)


def views(Q: QuantizedMatrix) -> list[QuantizedMatrix]:
    return [Q, Q.T]


def test_the_ladder_holds_the_rungs_of_this_package() -> None:
    declared = {rung.name for rung in RUNGS}
    assert {"unpack_loop", "four_rows", "threads", "vector_decode", "int8_activations"} <= declared
    assert {"panels", "vector_panels", "few_columns", "dequantise_blas"} <= declared


@pytest.mark.parametrize("name", NAMES)
def test_within_the_declared_arithmetic(name: str) -> None:
    rung, runs = rung_called(name), 0
    for i, ((m, n), group) in enumerate(itertools.product(SIZES, GROUPS)):
        Q0 = make_matrix(m, n, KINDS[i % len(KINDS)][0], group, *KINDS[i % len(KINDS)][1:])
        for Q in views(Q0):
            x = activations(x_shape(rung, Q), dtype_for(rung))
            if takes(rung, Q, None if x.ndim == 1 else 5, dtype_for(rung), "float32"):
                check(rung, Q, x)
                runs += 1
    assert runs >= 30


@pytest.mark.parametrize("group", [16, 64])
@pytest.mark.parametrize("name", [n for n in ("vector_decode", "vector_panels") if n in NAMES])
def test_groups_of_halves_within_blocks_that_a_row_fills(name: str, group: int) -> None:
    for n in (256, 277):
        Q0 = make_matrix(7, n, 4, group, "float16", "fraction")
        Q = Q0.T if name == "vector_panels" else Q0
        check(rung_called(name), Q, activations((Q.shape[1],), "float32"))


@pytest.mark.parametrize(
    ("group", "scale_dtype", "zeros"),
    [
        (16, "float32", "fraction"),
        (16, "float16", "none"),
        (32, "float32", "integer"),
        (64, "bfloat16", "none"),
        (128, "float32", "fraction"),
        (256, "float16", "none"),
        (512, "float32", "integer"),
    ],
)
def test_groups_of_quads(group: int, scale_dtype: str, zeros: str) -> None:
    """Whole quads and parts of one, an odd number of rows; bitwise, as every sum is exact."""
    if "int8_activations" not in NAMES:
        pytest.skip("this CPU cannot run it")
    rung, rng = rung_called("int8_activations"), np.random.default_rng(group)
    for n in (512, 1411):
        assert not HAS_QUADS or quads.quad_pieces(n, 4, group) == 512 // group
        Q = make_matrix(5, n, 4, group, scale_dtype, zeros, exact=True)
        x = rng.integers(-8, 9, n).astype(np.float32)
        x[::ACTIVATION_GROUP] = 127  # a step of one
        x[ACTIVATION_GROUP : 2 * ACTIVATION_GROUP] *= 2.0**-100  # no other group meets its scale
        truth = Q.dequantize("float64") @ x.astype(np.float64)
        assert np.array_equal(run(rung, Q, x), truth.astype(np.float32))
        Q = make_matrix(5, n, 4, group, scale_dtype, zeros)
        check(rung, Q, activations((n,), "float32"))


@pytest.mark.parametrize(("bits", "group"), [(4, 100), (8, -1)])
def test_groups_go_on_in_the_next_panel(bits: int, group: int) -> None:
    """Across the rows, where results are more than a panel and no group ends with it."""
    Q = make_matrix(7, products.PANEL_COLUMNS + 30, bits, group, "float32", "fraction")
    check(rung_called("panels"), Q.T, activations((7,), "float32"))


def test_quads_are_taken_where_few_blocks_are_missing() -> None:
    if not HAS_QUADS:
        pytest.skip("this CPU has no quads")
    by_n = {n: [quads.quad_pieces(n, 4, g) for g in (32, 128)] for n in (128, 384, 640, 900)}
    assert by_n == {128: [0, 0], 384: [16, 0], 640: [16, 0], 900: [16, 4]}
    assert [quads.quad_pieces(2048, 4, g) for g in (8, 24, 384, 2048, 4096)] == [0, 0, 0, 1, 1]
    assert quads.quad_pieces(2048, 8, 32) == 0


AT_A_PAGE_S_END = """
import ctypes, mmap, numpy as np
from gemmule.quant.matrix import QuantizedMatrix
from quantized_products import activations, check, make_matrix, rung_called
kept, libc = [], ctypes.CDLL(None)
def at_end(array):
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    kept.append(mmap.mmap(-1, size + mmap.PAGESIZE))
    memory = np.frombuffer(kept[-1], np.uint8)
    locked = ctypes.c_void_p(memory.ctypes.data + size)
    assert libc.mprotect(locked, mmap.PAGESIZE, 0) == 0
    moved = memory[size - array.nbytes : size].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved
for group, scales, zeros in (16, "float16", "none"), (32, "float32", "integer"):
    for n in 512, 1411:
        Q = make_matrix(5, n, 4, group, scales, zeros)
        parts = [None if p is None else at_end(p) for p in (Q.codes, Q.scales, Q.zeros)]
        P = QuantizedMatrix.from_parts(*parts, shape=(5, n), bits=4, group_size=group)
        assert np.shares_memory(P.codes, parts[0]) and np.shares_memory(P.scales, parts[1])
        check(rung_called("int8_activations"), P, activations((n,), "float32"))
print("all right")
"""


def test_quads_read_nothing_behind_the_last_row() -> None:
    if sys.platform != "linux" or "int8_activations" not in NAMES:
        pytest.skip("needs Linux and a CPU that can run it")
    said = printed(AT_A_PAGE_S_END, GEMMULE_DEVICE="cpu")
    assert said.splitlines()[-1:] == ["all right"]


@pytest.mark.parametrize("name", NAMES)
def test_small_integers_are_exact(name: str) -> None:
    """Powers of two times small integers: every sum is exact, so every order must agree bitwise."""
    rung, runs = rung_called(name), 0
    for (m, n), group, kind in itertools.product([(5, 129), (9, 300)], GROUPS, KINDS[:5:2]):
        for Q in views(make_matrix(m, n, kind[0], group, kind[1], kind[2], exact=True)):
            shape = x_shape(rung, Q)
            x = np.random.default_rng(1).integers(-8, 9, shape).astype(numpy_dtype(dtype_for(rung)))
            x[::ACTIVATION_GROUP] = 127  # so that the 8-bit activations have a step of one
            if not takes(rung, Q, None if len(shape) == 1 else 5, dtype_for(rung), "float32"):
                continue
            truth = Q.dequantize("float64") @ x.astype(np.float64)
            assert np.array_equal(run(rung, Q, x), truth), f"{name} {Q!r}"
            runs += 1
    assert runs >= 12


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_and_permutation(name: str) -> None:
    rung = rung_called(name)
    for bits, perm in itertools.product((4, 8), (False, True)):
        Q0 = make_matrix(37, 200, bits, 32, "float32", "integer", perm=perm)
        for Q, (a, b, out) in itertools.product(views(Q0), rung.signatures):
            x = activations(x_shape(rung, Q), b)
            columns = None if x.ndim == 1 else 5
            if a == ("uint8" if bits == 8 else "uint4") and takes(rung, Q, columns, b, out):
                check(rung, Q, x, out)


@pytest.mark.parametrize("name", NAMES)
def test_more_than_one_task_and_every_parameter(name: str) -> None:
    rung = rung_called(name)
    for Q in views(make_matrix(515, 1000, 8, 128, "float32", "integer")):
        x = activations(x_shape(rung, Q, 3), "float32")
        if not takes(rung, Q, None if x.ndim == 1 else 3, "float32", "float32"):
            continue
        check(rung, Q, x)
        results = [
            run(rung, Q, x, **{key: value})
            for key, values in rung.params.items()
            for value in values
        ]
        limit = 2 * bound_of(rung, Q, x, "float32")
        assert all((np.abs(r.astype(float) - results[0]) <= limit).all() for r in results)


@pytest.mark.parametrize("zeros", ["none", "fraction"])
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_rows_longer_than_a_block_of_weights(scale_dtype: str, zeros: str) -> None:
    rung = rung_called("dequantise_blas")
    Q = make_matrix(9, 2**18 + 24, 4, 2**16, scale_dtype, zeros, exact=True)
    least = min(rung.params["block_bytes"])
    assert least < 4 * Q.shape[1]
    x = np.zeros((Q.shape[1], 3), np.float32)
    x[::999] = np.arange(-1, 2)  # of few terms, so that sums are exact, and no bound hides a row
    W, how = Q.dequantize("float64"), {"rung": rung.name, "params": {"block_bytes": least}}
    across = np.arange(27, dtype=np.float32).reshape(9, 3)
    for order in ("C", "F"):
        C = np.full((9, 3), np.nan, np.float32, order)
        np.testing.assert_array_equal(gm.matmul(Q, np.asarray(x, order=order), out=C, **how), W @ x)
        C = np.full((Q.shape[1], 3), np.nan, np.float32, order)
        gm.matmul(Q.T, np.asarray(across, order=order), out=C, **how)
        np.testing.assert_array_equal(C, W.T @ across)


@pytest.mark.parametrize("name", NAMES)
def test_empty_sizes(name: str) -> None:
    rung = rung_called(name)
    for (m, n), bits in itertools.product([(0, 5), (5, 0), (0, 0)], (4, 8)):
        for Q in views(make_matrix(m, n, bits, 8, "float32", "integer")):
            x = activations(x_shape(rung, Q), "float32")
            if takes(rung, Q, None if x.ndim == 1 else 5, "float32", "float32"):
                assert (run(rung, Q, x) == 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_spread_by_the_ieee_rule(name: str, bad: float) -> None:
    rung = rung_called(name)
    for bits, group in itertools.product((4, 8), (32, 128)):
        for Q in views(make_matrix(6, 260, bits, group, "float32", "integer", exact=True)):
            length = Q.shape[1]
            for place in {0, 1, 3, length // 2, length - 1}:
                x = np.ones(x_shape(rung, Q, 2), np.float32)
                x[place if x.ndim == 1 else (place, 1)] = bad
                if not takes(rung, Q, None if x.ndim == 1 else 2, "float32", "float32"):
                    continue
                with np.errstate(invalid="ignore"):
                    truth = Q.dequantize("float64") @ x.astype(np.float64)
                np.testing.assert_array_equal(run(rung, Q, x), truth.astype(np.float32))


@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_every_code_and_zero_point(name: str) -> None:
    """Each code beside each awkward zero point, one weight at a time."""
    rung = rung_called(name)
    for bits, points in ((4, (0, 7.5, 15)), (8, (0, 127, 128, 255, -3.25))):
        codes = np.arange(2**bits, dtype=np.uint8).reshape(-1, 1)
        for point in points:
            Q0 = QuantizedMatrix.from_parts(
                codes,
                np.full((1, 1), 0.5, np.float32),
                np.full((1, 1), point, np.float32),
                shape=codes.shape,
                bits=bits,
                group_size=None,
            )
            for Q in views(Q0):
                x = np.ones(x_shape(rung, Q, 1), np.float32)
                if takes(rung, Q, None if x.ndim == 1 else 1, "float32", "float32"):
                    truth = Q.dequantize("float64") @ x
                    assert np.array_equal(run(rung, Q, x), truth)


@pytest.mark.skipif(
    "int8_activations" not in NAMES, reason="this processor lacks the rung's instructions"
)
def test_eight_bit_activations_are_rounded_and_keep_small_groups_apart() -> None:
    """A huge element spoils its own 32 columns only; without rounding the result would be equal."""
    Q = make_matrix(8, 256, 4, 64, "float32", "integer")
    x = activations((256,), "float32")
    x[100] = 1e6
    truth = Q.dequantize("float64") @ x.astype(np.float64)
    rung = rung_called("int8_activations")
    assert not np.allclose(run(rung, Q, x), truth, rtol=1e-6, atol=0)
    check(rung, Q, x)


@pytest.mark.skipif(
    "int8_activations" not in NAMES, reason="this processor lacks the rung's instructions"
)
def test_tiny_activations_do_not_overflow_the_codes() -> None:
    Q = make_matrix(8, 64, 8, 32, "float32", "integer", exact=True)
    for scale in (1e-38, 1e-44, 0.0):
        y = run(rung_called("int8_activations"), Q, np.full(64, scale, np.float32))
        truth = Q.dequantize("float64") @ np.full(64, np.float32(scale), np.float64)
        assert (np.abs(y - truth) <= 64 * 1024 * (scale / 64 + 3e-45)).all()


@pytest.mark.parametrize("columns", [None, 3])
@pytest.mark.parametrize("group", [32, 128])
def test_tiny_weights_keep_their_products_by_small_activations(
    group: int, columns: int | None
) -> None:
    """The product of both scales is below float32's range where the results are within it."""
    name = "int8_activations" if columns is None else "few_columns_int8"
    if name not in NAMES:
        pytest.skip("this processor lacks the rung's instructions")
    Q = make_matrix(7, 256, 4, group, "float32", "none")
    tiny = dataclasses.replace(Q, scales=np.full_like(Q.scales, 2.0**-126))
    shape = (256,) if columns is None else (256, columns)
    x = activations(shape, "float32") * np.float32(2.0**-18)
    rung = rung_called(name)
    y = run(rung, tiny, x)
    truth = tiny.dequantize("float64") @ x.astype(np.float64)
    assert 2.0**-146 < np.abs(truth).max() < 2.0**-126
    check(rung, tiny, x)
    np.testing.assert_allclose(y, truth, rtol=0.1, atol=np.abs(truth).max() / 20)


@pytest.mark.parametrize("name", ["few_columns", "few_columns_int8"])
@pytest.mark.parametrize("columns", [2, 4])
def test_sums_of_long_rows_wait_in_memory_between_chunks_of_x(name: str, columns: int) -> None:
    """Rows of several chunks: sums of four rows by several columns are put down and taken up."""
    if name not in NAMES:
        pytest.skip("this processor lacks the rung's instructions")
    Q = make_matrix(9, 16 * rows.CHUNK_BYTES // 64 + 129, 4, 32, "float32", "integer")
    check(rung_called(name), Q, activations((Q.shape[1], columns), "float32"))


def test_every_problem_has_a_suggestion_that_is_the_fast_one() -> None:
    features = target.missing_features("avx512f", "avx512bw", "avx512vnni")
    Q0 = make_matrix(64, 256, 4, 128, "float32", "integer")
    big = {"m": 4096, "n": 4096}
    for Q, columns, kind in itertools.product(views(Q0), (None, 8, 512), ("float", "int8")):
        for b in ("float32", "float64"):
            problem = problem_of(Q, columns, b, b, kind)
            sizes = {**big, "n": columns, "k": 4096} if columns else big
            problem = dataclasses.replace(problem, **sizes)
            found = {}
            for rung in RUNGS:
                if rung.refusal(problem) is not None:
                    continue
                rounds = rung.arithmetic(problem).activations_bits is not None
                suggestion = rung.suggest(problem, MACHINE)
                if rounds == (kind == "int8") and suggestion is not None:
                    rung.check_params(problem, suggestion.params)
                    found[rung.name] = suggestion.expected_s
            assert found
            if features is None and b == "float32" and not Q.transposed and columns is None:
                best = "vector_decode" if kind == "float" else "int8_activations"
                assert min(found, key=found.__getitem__) == best


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [16, 96, 192])
def test_few_rows_by_many_columns_on_many_cores_wait_for_one_thread_that_arranges_x(
    bits: int, rows: int
) -> None:
    """So what shares the packing of x, too, is expected to be quicker than tiles are."""
    Q = make_matrix(64, 256, bits, 128, "float32", "integer")
    problem = dataclasses.replace(problem_of(Q, 8, "float32", "float32", "float"), m=rows)
    problem = dataclasses.replace(problem, n=1024, k=1024)
    many = dataclasses.replace(MACHINE, units=16)
    by_name = {rung.name: rung.suggest(problem, many) for rung in RUNGS}
    times = {name: found.expected_s for name, found in by_name.items() if found is not None}
    for name in ("few_columns", "sixteen_rows", "tile_registers"):
        assert times[name] > times["packed_codes"]


@pytest.mark.parametrize("own_cache", [0, 1 << 30])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 24), (8, -1)])
def test_products_across_rows_split_by_columns_and_by_rows(
    bits: int, group: int, own_cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_across_rows(bits, group, own_cache, monkeypatch)


@pytest.mark.skipif(not target.has_wide_vectors(), reason="registers of 16 lanes lift bytes")
@pytest.mark.parametrize("zeros", ["none", "integer", "fraction"])
@pytest.mark.parametrize("group", [16, 24, 64, 128, -1])
def test_lifted_bytes_have_the_bits_of_converted_ones(
    zeros: str, group: int, fault: Callable[..., Any]
) -> None:
    def both() -> list[np.ndarray]:
        Q = make_matrix(37, 300, 8, group, "float32", zeros)
        assert (codes.lifted_zeros(_operands.stored(Q)) is None) == (zeros == "fraction")
        along = run(rung_called("vector_decode"), Q, activations((300,), "float32"))
        across = run(rung_called("vector_panels"), Q.T, activations((37,), "float32"))
        return [along, across]

    lifted = both()
    fault(rows, "lifted_zeros", _converted)
    fault(panels, "lifted_zeros", _converted)
    for one, other in zip(lifted, both(), strict=True):
        np.testing.assert_array_equal(one, other)


def _converted(sound: Any, parts: _operands.Stored) -> None:
    return None


@pytest.mark.parametrize("bug", ["lanes", "pieces", "zeros", "prefix", "quads", "groups"])
def test_the_checks_catch_planted_bugs(bug: str, fault: Callable[..., Any]) -> None:
    if target.missing_vectors() is not None:
        pytest.skip("the planted bugs sit in the vector rungs")
    if bug == "pieces" and target.has_wide_vectors():
        pytest.skip("one register asks which group each lane belongs to")
    name = "vector_panels" if bug == "quads" else "vector_decode"

    def checked() -> None:
        Q = make_matrix(9, 300, 4, 32, "float32", "integer")  # a new one: it keeps what was derived
        view = Q.T if bug == "quads" else Q
        check(rung_called(name), view, activations((view.shape[1],), "float32"))

    checked()
    _plant(bug, fault)
    with pytest.raises(AssertionError, match="beyond by"):
        checked()


def _plant(bug: str, fault: Callable[..., Any]) -> None:
    @functools.cache
    def shifted(sound: Any, n: int, bits: int, group: int) -> _operands.Blocks:
        blocks = sound(n, bits, group)
        if bug == "groups":
            return dataclasses.replace(blocks, first=np.maximum(blocks.first - 1, 0))
        if bug == "pieces":
            return dataclasses.replace(blocks, pieces=2 * blocks.pieces)
        return dataclasses.replace(blocks, lanes=np.roll(blocks.lanes, 1, axis=1).copy())

    def wrong_zeros(sound: Any, matrix: QuantizedMatrix) -> _operands.Stored:
        parts = sound(matrix)
        assert parts.zeros is not None
        return dataclasses.replace(parts, zeros=parts.zeros + np.float32(1))

    def one_column_short(sound: Any, matrix: QuantizedMatrix) -> _operands.Stored:
        return dataclasses.replace(sound(matrix), n=matrix.stored_shape[1] - 1)

    if bug in ("lanes", "pieces", "groups"):
        for module in (rows, codes):
            fault(module, "blocks_of", shifted)
    elif bug == "zeros":
        fault(_operands, "stored", wrong_zeros)
    elif bug == "prefix":
        fault(_operands, "stored", one_column_short)
    else:
        fault(panels, "Across", lambda sound, *a, units, **rest: sound(*a, units=units - 1, **rest))


@pytest.mark.parametrize("part", ["matrix", "stored"])
def test_what_is_kept_for_a_matrix_is_made_of_what_all_threads_have(part: str) -> None:
    both, made, got = threading.Barrier(2), [], []

    def make(matrix: Any) -> object:
        both.wait(10)  # neither has kept its own yet
        made.append(object())
        return made[-1]

    Q = make_matrix(4, 64, 8, 32, "float32", "integer")
    holder = Q if part == "matrix" else _operands.stored(Q)
    threads = [threading.Thread(target=lambda: got.append(holder.kept(make))) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(made) == 2
    assert got[0] is got[1] is holder.kept(make)


@pytest.mark.parametrize("op", ["matvec", "vecmat"])
def test_a_matrix_keeps_what_its_products_have_addresses_of(op: str) -> None:
    Q = make_matrix(8, 250, 8, 16, "float32", "integer")
    x = np.ones(250 if op == "matvec" else 8, np.float32)
    multiply = {"matvec": lambda: gm.matvec(Q, x), "vecmat": lambda: gm.vecmat(x, Q)}[op]
    first = multiply()
    blocks = weakref.ref(_operands.blocks_of(250, 8, 16).first)
    _operands.blocks_of.cache_clear()  # as after many matrices of other forms
    gc.collect()
    assert (multiply() == first).all()
    assert target.missing_vectors() is not None or blocks() is not None


@pytest.mark.parametrize("offset", range(0, 128, 16))
def test_results_across_the_rows_begin_at_lines_that_are_no_other_thread_s(offset: int) -> None:
    if "vector_panels" not in NAMES:
        pytest.skip("this CPU cannot run it")
    m, n = 9, 300
    Q = make_matrix(m, n, 8, 32, "float32", "integer", exact=True)
    x = np.arange(m, dtype=np.float32)
    parts = Q.kept(_operands.stored)
    ready = parts.kept(panels.across)
    y, part_floats = np.empty(n, np.float32), ready.blocks * ready.product.x_step // 4
    ready_steps = ready.steps((True, 1))
    size = ready_steps.buffer_bytes // 4
    memory = np.full(size + 128, np.nan, np.float32)
    start = (-address(memory) % 128 + offset) // 4
    buffer = memory[start : start + size]
    ready_steps.words[steps.MEMORY] = address(buffer)
    assert ready_steps(0, address(x), address(y))
    assert np.array_equal(y, x @ Q.dequantize())
    written, x_fours = ~np.isnan(memory), 4 * (m // 4 + m % 4)
    begin = start + -offset % 128 // 4  # of what is prepared of x, which begins such a line too
    first = begin + x_fours + int(np.argmax(written[begin + x_fours :]))
    assert (address(memory) + 4 * begin) % 128 == (address(memory) + 4 * first) % 128 == 0
    assert np.flatnonzero(written)[[0, -1]].tolist() == [begin, first + part_floats - 1]
    assert first + part_floats <= start + size


def records_by_loops(x: np.ndarray, bits: int) -> np.ndarray:
    """Records of 8-bit activations, one element after the other."""
    width, sides = simd.codes_per_lane(bits), integers.planes(bits)
    blocks = -(-x.size // simd.block_columns(bits))
    codes = np.zeros((blocks, sides, 64), np.int8)
    sums, scales = np.zeros((blocks, 16), np.int32), np.zeros((blocks, 16), np.float32)
    for j, value in enumerate(x):
        low = j // ACTIVATION_GROUP * ACTIVATION_GROUP
        scale = np.abs(x[low : low + ACTIVATION_GROUP]).max() / np.float32(127)
        ratio = value / scale if scale > 0 else np.float32(0)
        code = int(np.rint(min(127, max(-127, ratio))))
        block, lane = j // (16 * width), j // width % 16
        codes[block, j % sides, 4 * lane + j % width // sides] = code
        sums[block, lane] += code
        scales[block, lane] = scale
    parts = [part.reshape(blocks, -1).view(np.uint8) for part in (codes, sums, scales)]
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_in_vector_registers_equals_rounding_in_loops(bits: int) -> None:
    if target.missing_features("avx512f", "avx512bw", "avx512vnni") is not None:
        pytest.skip("the rounding is for rungs that this CPU cannot run")
    rng = np.random.default_rng(bits)
    block, record = simd.block_columns(bits), integers.record_bytes(bits)
    vectors = arranged.quantise_kernel(bits)
    for n, scale in itertools.product((1, 31, 32, 33, 64, 129, 500), (1.0, 1e-40, 1e37, 0.0)):
        x = (rng.standard_normal(n) * scale).astype(np.float32)
        blocks = -(-n // block)
        slow, fast = records_by_loops(x, bits), np.full((blocks, record), 7, np.uint8)
        assert vectors(address(x), n, 1, address(fast), 0) == 0
        used = -(-(n - (blocks - 1) * block) // simd.codes_per_lane(bits))
        for records in (slow, fast):  # lanes without columns have codes of 0 and any scale
            records[-1, record - 64 + 4 * used :] = 0
        assert np.array_equal(slow, fast)
        for strange in (np.nan, np.inf, -np.inf):
            x[rng.integers(n)] = strange
            assert vectors(address(x), n, 1, address(fast), 0) != 0


@pytest.mark.parametrize("vectors", [1, 2])
def test_records_of_quads_hold_what_those_of_blocks_do(vectors: int) -> None:
    if not HAS_QUADS:
        pytest.skip("records of quads are for kernels that this CPU cannot run")
    block, record = integers.record_bytes(4), quads.quad_record_bytes(vectors)
    for n, scale in itertools.product((1, 33, 500, 512, 700), (1.0, 1e-40, 1e37, 0.0)):
        x = (np.random.default_rng(n).standard_normal(n) * scale).astype(np.float32)
        count = -(-n // 512)
        slow, fast = np.zeros((4 * count, block), np.uint8), np.full((count, record), 7, np.uint8)
        arranged.quantise_kernel(4, 1)(address(x), n, 1, address(slow), 0)
        round_quads = arranged.quantise_quads_kernel(vectors, 8)
        assert round_quads(address(x), n, 1, address(fast), 0) == 0
        assert np.array_equal(fast[:, :512].reshape(-1, 128), slow[:, :128])
        # Quad, vector, 16 bytes of the codes, block or half of one; a lane holds eight columns.
        shape = (count, vectors, 4, 4 // vectors, vectors)
        sums, scales = (
            slow[:, 128:]
            .view(np.int32)
            .reshape(count, vectors, 4 // vectors, 2, 4, 4)
            .transpose(3, 0, 1, 4, 2, 5)
            .reshape(2, *shape, 4 // vectors)
        )
        found = fast[:, 512:].view(np.int32).reshape(count, 3, *shape[1:]).swapaxes(0, 1)
        assert np.array_equal(found[0], -8 * sums.sum(-1))
        used = sums.any(-1)
        assert np.array_equal(found[1].view(np.float32), sums.sum(-1))
        assert np.array_equal(found[2][used], scales[..., 0][used])
        x[n // 2] = np.inf
        assert round_quads(address(x), n, 1, address(fast), 0) != 0


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("op", ["matvec", "vecmat"])
def test_vectors_of_any_kind_give_the_same_bits(bits: int, op: str) -> None:
    """Kernels are compiled for plain writable arrays; others tell where they lie."""
    rng = np.random.default_rng(8)
    Q = gm.quantize(rng.standard_normal((96, 96)).astype(np.float32), bits=bits, group_size=32)
    x = rng.standard_normal(96).astype(np.float32)
    locked, unaligned = x.copy(), np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.float32)
    locked.flags.writeable = False
    unaligned[:] = x
    product = (lambda v: gm.matvec(Q, v)) if op == "matvec" else (lambda v: gm.vecmat(v, Q))
    plan = gm.plan(op, *((Q, x) if op == "matvec" else (x, Q)))
    wanted = product(x)
    np.testing.assert_array_equal(plan(*((Q, x) if op == "matvec" else (x, Q))), wanted)
    for other in (locked, unaligned, np.repeat(x, 2)[::2], x.view(np.recarray)):
        np.testing.assert_array_equal(product(other), wanted)
        np.testing.assert_array_equal(plan(*((Q, other) if op == "matvec" else (other, Q))), wanted)
    reference = Q.dequantize().astype(float)
    exact = reference @ x if op == "matvec" else x @ reference
    np.testing.assert_allclose(wanted, exact, rtol=1e-4, atol=1e-4)
    whole = x.astype(np.int32)
    with pytest.raises(TypeError, match="int32"):
        plan(*((Q, whole) if op == "matvec" else (whole, Q)))


def test_panels_take_threads_where_they_are_asked_to_and_no_others(
    fault: Callable[..., Any],
) -> None:
    found: dict[bool, bool] = {}  # whether the pool is asked

    def noted(sound: Any, parts: Any, working: str, threads: bool, now: Any) -> Any:
        made = sound(parts, working, threads, now)
        found[asked] = made.pool != 0
        return made

    fault(products, "_steps_across", noted)
    Q, x = make_matrix(2048, 4096, 8, 32, "float32", "integer"), np.ones(2048, np.float32)
    for asked in (True, False):
        gm.vecmat(x, Q, rung="panels", params={"threads": asked})
    assert found == {True: pool.team()[0] > 1, False: False}


@pytest.mark.parametrize("name", NAMES)
def test_sums_are_declared_as_wide_as_they_are(name: str) -> None:
    """The bound follows from it: one of float32's for sums in float64 would see nothing."""
    rung, seen = rung_called(name), set()
    for code, b, out in rung.signatures:
        Q = make_matrix(8, 64, 4 if code == "uint4" else 8, 32, "float32", "fraction")
        kind = "int8" if "int8" in name else "float"
        found = rung.arithmetic(problem_of(Q, 5, b, out, kind))
        assert found.accumulator == ("float64" if b == "float64" else "float32")
        assert (found.activations_bits is not None) == (kind == "int8")
        seen.add(b)
    assert "float32" in seen


@pytest.mark.parametrize("seed", range(24))
def test_a_product_is_cut_and_laid_out_as_its_way_says(seed: int) -> None:
    """The kernel is a recorder: it takes the words and writes each element's place in y."""
    rng = np.random.default_rng(seed)
    columns, panel, most = (int(rng.integers(1, high)) for high in (70, 9, 40))
    padded, takes, alone_below = bool(seed % 2), seed % 8 != 7, int(rng.choice((0, 1 << 30)))
    panels, panel_bytes = (columns + panel - 1) // panel, int(rng.choice((64, 32 << 10)))
    parts = SimpleNamespace(m=12, codes=np.zeros((12, 50), np.uint8))
    x, y = np.ones((20, columns), np.float32), np.full((12, columns), np.nan, np.float32)
    ran, of_matrix = [], _product.Product._fields.index("x")
    fields = dict(zip(_product.Product._fields, range(100), strict=False))

    def prepare(given: np.ndarray, place: int, nbytes: int) -> int | None:
        assert given is x
        assert place % 64 == 0
        assert nbytes == panel_bytes
        memory = (ctypes.c_ubyte * (panels * panel_bytes)).from_address(place)
        assert not any(memory[:: max(1, panel_bytes // 64)])
        memory[-1] = 1
        return 5 if takes else None

    def kernel(words: tuple[int, ...], m: int, unit: int, rows: int, *, alone: bool) -> None:
        told = _product.Product(*words)
        wide = panels * panel if padded else columns
        assert words[:of_matrix] == tuple(fields.values())[:of_matrix]
        assert (told.columns, told.factor, m, unit) == (wide, 5, 12, 4)
        assert rows == (most if most < 30 else 30)
        assert alone == (12 * 50 * wide < alone_below)
        memory = (ctypes.c_float * (12 * wide)).from_address(told.y)
        memory[:] = range(12 * wide)
        ran.append(wide)

    way = _product.Way(
        rows=SimpleNamespace(run=kernel),  # type: ignore[arg-type]
        product=_product.Product(*fields.values()),
        kept=None,
        unit=4,
        panel=panel,
        panel_bytes=panel_bytes,
        prepare=prepare,
        padded=padded,
        most_rows=most,
        alone_below=alone_below,
    )
    assert _product.multiply(parts, way, x, y, 30) is takes  # type: ignore[arg-type]
    assert len(ran) == takes
    if takes:
        expected = np.arange(12 * ran[0], dtype=np.float32).reshape(12, ran[0])[:, :columns]
        np.testing.assert_array_equal(y, expected)
    else:
        assert np.isnan(y).all()
