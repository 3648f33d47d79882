"""`gm.prepare` on the host: a copy that stands where the array did."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule.arrays import packing
from gemmule.arrays.interop import unwrap
from gemmule.arrays.prepared import PreparedMatrix
from gemmule.backends.cpu import jit
from gemmule.core.problem import Problem, numpy_dtype
from gemmule.core.registry import all_rungs
from gemmule.core.rung import CpuRung
from gemmule.rungs.matmul.cpu import packed, packed_threads
from gemmule_lab.verify import check

DTYPES = ("float64", "float32", "float16")
PACKS = ("packed", "packed_threads")
compiled = pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))


def numbers(*shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_products_are_those_of_the_array(dtype: str, batch: tuple[int, ...]) -> None:
    A, B = numbers(*batch, 20, 30, dtype=dtype), numbers(30, 10, dtype=dtype)
    for laid in (B, np.asfortranarray(B)):
        right, left = gm.prepare(laid), gm.prepare(A, side="left")
        wanted = gm.matmul(A, laid)
        plan = gm.plan("matmul", A, right)
        out = np.empty_like(wanted)
        found = [
            gm.matmul(A, right),
            A @ right,
            left @ laid,
            gm.matmul(left, right),
            gm.matmul(left, right),  # by the fast path, as it was seen before
            plan(A, right),
            gm.plan("matmul", left, right)(left, right),
        ]
        found += [gm.matmul(A, right, out=out), gm.matmul(A, right), plan(A, right, out=out)]
        for one in found:
            assert np.array_equal(one, wanted)
        assert found[-1] is out


def test_vectors_scalars_and_transposes() -> None:
    A, B, x = numbers(20, 30), numbers(30, 10), numbers(30)
    right, left = gm.prepare(B), gm.prepare(A, side="left")
    assert np.array_equal(gm.vecmat(x, right), gm.vecmat(x, B))
    assert np.array_equal(x @ right, gm.matmul(x, B))
    assert np.array_equal(gm.matvec(left, x), gm.matvec(A, x))
    assert np.array_equal(B.T @ left.T, B.T @ A.T)
    C = numbers(20, 10)
    expected = gm.gemm(A, B, C.copy(), alpha=2, beta=-1)
    assert np.array_equal(gm.gemm(A, right, C, alpha=2, beta=-1), expected)


def test_it_is_a_copy_that_nobody_writes() -> None:
    A, B = numbers(20, 30), numbers(30, 10)
    prepared, wanted = gm.prepare(B), gm.matmul(A, B)
    B[:] = np.nan
    assert np.array_equal(A @ prepared, wanted)
    assert not prepared.array.flags.writeable
    assert not prepared.T.array.flags.writeable
    assert not np.shares_memory(prepared.array, B)


def test_what_lies_with_gaps_is_packed_and_told() -> None:
    A, wide = numbers(20, 30), numbers(30, 20)
    prepared = gm.prepare(wide[:, ::-2])
    plan = gm.plan("matmul", A, prepared)
    assert plan.problem.layout_b == "row"
    assert gm.plan("matmul", A, wide[:, ::-2]).problem.layout_b == "strided"
    assert np.allclose(plan(A, prepared), A @ wide[:, ::-2], atol=1e-5)
    assert "prepared   B on the right: read by" in plan.explain()
    assert "no rung packs it" in plan.explain()
    assert "1,200 bytes" in plan.explain()
    assert "packed for no rung, 1,200 bytes" in repr(prepared)
    assert (prepared.ndim, prepared.dtype, prepared.nbytes) == (2, "float32", 1200)


def test_what_is_refused() -> None:
    A, B = numbers(20, 30), numbers(30, 10)
    prepared = gm.prepare(B)
    with pytest.raises(ValueError, match="prepared to stand on the right"):
        prepared @ A
    with pytest.raises(ValueError, match="stays where it is"):
        gm.matmul(A, prepared, device="cuda")
    with pytest.raises(ValueError, match=r"packs none of its operands.*packed_threads"):
        gm.prepare(B, rung="blas")
    with pytest.raises(TypeError, match="never written"):
        gm.matmul(A, B, out=prepared)
    with pytest.raises(ValueError, match="30 columns"):
        gm.matmul(A, gm.prepare(A))


def test_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    A, B = torch.randn(20, 30), torch.randn(30, 10).to(torch.bfloat16)
    prepared = gm.prepare(B.float())
    assert isinstance(prepared, PreparedMatrix)
    assert torch.equal(A @ prepared, gm.matmul(A, B.float()))
    assert gm.prepare(B).dtype == "bfloat16"
    assert gm.matmul(A.to(torch.bfloat16), gm.prepare(B)).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="add"):  # and is no tensor to PyTorch's other functions
        torch.add(A, prepared)
    with pytest.raises(ValueError, match="no gradient"):
        gm.matmul(A.requires_grad_(), prepared)
    with torch.no_grad():
        assert gm.matmul(A, prepared).shape == (20, 10)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_pickled_matrix_is_made_anew_and_stays_read_only(dtype: str, order: Any) -> None:
    rng = np.random.default_rng(6)
    S = np.array(rng.integers(-3, 4, (6, 6)), numpy_dtype(dtype), order=order)
    X = rng.integers(-3, 4, (6, 6)).astype(numpy_dtype(dtype))
    P = gm.prepare(S)
    for made in (pickle.loads(pickle.dumps(P)), copy.copy(P), copy.deepcopy(P)):
        assert (made.form, made.side, made.device) == (P.form, P.side, P.device)
        assert not made.array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            gm.matmul(X, made, out=made.array)
        spread = np.zeros((6, 12), numpy_dtype(dtype))[:, ::2]  # by the way that reads addresses
        np.testing.assert_array_equal(gm.matmul(X, made, out=spread), X @ S)
    again = pickle.loads(pickle.dumps(P))
    assert again.operand.pointer == again.array.__array_interface__["data"][0]


def test_a_pickled_left_matrix_stands_on_the_left() -> None:
    S = np.arange(6.0).reshape(2, 3)
    P = pickle.loads(pickle.dumps(gm.prepare(S, side="left")))
    assert (P.side, P.T.side) == ("left", "right")
    np.testing.assert_array_equal(P @ np.eye(3), S)


def test_it_becomes_an_array_again() -> None:
    S = np.arange(6.0).reshape(2, 3)
    P = gm.prepare(S)
    assert np.shares_memory(np.asarray(P), P.array)
    assert not np.asarray(P).flags.writeable
    for made in (np.array(P), np.asarray(P.T).T, np.asarray(P, "float32")):
        np.testing.assert_array_equal(made, S)
    assert np.array(P).flags.writeable


def test_on_the_left_of_a_quantised_matrix() -> None:
    rng = np.random.default_rng(7)
    a, Q = rng.standard_normal((3, 128), np.float32), gm.quantize(rng.standard_normal((128, 6)))
    P = gm.prepare(a, side="left")
    for product in (P @ Q, gm.matmul(P, Q), gm.plan("matmul", P, Q)(P, Q)):
        np.testing.assert_array_equal(product, a @ Q)
    with pytest.raises(ValueError, match="left"):
        gm.matmul(gm.prepare(a), Q)


def laid(array: np.ndarray[Any, Any], how: str) -> np.ndarray[Any, Any]:
    """Return the same values by rows, by columns, or with gaps."""
    if how == "col":
        return np.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2)
    if how == "gaps":
        room = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        room[..., ::-2] = array
        return room[..., ::-2]
    return array


# Rows, columns and terms: a tile that is not full, the narrow one, several stretches of terms, and
# more than a block.
SIZES = ((1, 2, 3), (13, 7, 150), (50, 70, 300), (500, 40, 280), (30, 1100, 520))


@compiled
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("how", ["row", "col", "gaps"])
@pytest.mark.parametrize("rung", PACKS)
def test_packed_operands_give_the_bits_of_unpacked_ones(dtype: str, how: str, rung: str) -> None:
    for m, n, k in SIZES:
        A = laid(numbers(m, k).astype(numpy_dtype(dtype)), how)
        B = laid(numbers(k, n, dtype="float64").astype(numpy_dtype(dtype)), how)
        right, left = gm.prepare(B, rung=rung), gm.prepare(A, side="left", rung=rung)
        wanted = gm.matmul(A, B, rung=rung)
        assert right.rungs == (rung,)
        assert left.rungs == ((rung,) if k >= 150 else ())
        for pair in ((A, right), (left, B), (left, right)):
            plan = gm.plan("matmul", *pair, rung=rung)
            for found in (plan(*pair), gm.matmul(*pair, rung=rung)):
                np.testing.assert_array_equal(found, wanted)
        assert f"B on the right: read packed by {rung}" in plan.explain()
        verdict = check.judge("matmul", A, B, plan(left, right), check.Rounding.of(plan))
        assert verdict.ok, verdict.text


@compiled
@pytest.mark.parametrize("rung", PACKS)
def test_batches_scalars_and_results_of_any_order(rung: str) -> None:
    A, B = numbers(2, 3, 20, 300, dtype="float16"), numbers(2, 3, 300, 40, dtype="float16")
    pairs = ((A, B), (A[0, 0], B), (A, B[0, 0]), (A[0, 0], B[0, 0]))
    for a, b in pairs:
        right, left = gm.prepare(b, rung=rung), gm.prepare(a, side="left", rung=rung)
        wanted = gm.matmul(a, b, rung=rung)
        for pair in ((a, right), (left, b), (left, right)):
            np.testing.assert_array_equal(gm.matmul(*pair, rung=rung), wanted)
            assert "read packed by" in gm.plan("matmul", *pair, rung=rung).explain()
    a, b = pairs[-1]
    right = gm.prepare(b, rung=rung)
    made = []
    for one in (b, right):
        C = numbers(20, 40, dtype="float16")
        plan = gm.plan("matmul", a, one, rung=rung)
        plan.execute(unwrap(a, "A"), unwrap(one, "B"), unwrap(C, "C"), 3, -2)
        made.append(C)
    np.testing.assert_array_equal(*made)
    for out in (np.empty((40, 20), "f2").T, np.empty((20, 80), "f2")[:, ::2]):
        assert gm.matmul(a, right, out=out, rung=rung) is out
        np.testing.assert_array_equal(out, gm.matmul(a, b, rung=rung))
    empty = gm.matmul(np.empty((0, 300), "f2"), right, rung=rung)
    assert empty.shape == (0, 40)


@compiled
def test_batches_walked_otherwise_read_the_array() -> None:
    A, B = numbers(2, 3, 5, 66), numbers(3, 66, 40)
    prepared = gm.prepare(B, rung="packed")
    plan = gm.plan("matmul", A, prepared, rung="packed")
    assert "are not walked" in plan.explain()
    np.testing.assert_array_equal(plan(A, prepared), gm.matmul(A, B, rung="packed"))
    assert "read packed" not in gm.plan("matmul", A, prepared, rung="blas").explain()


@compiled
def test_what_plans_choose_is_packed_and_its_memory_told() -> None:
    B = numbers(256, 64, dtype="float16")
    prepared = gm.prepare(B)
    chosen = {
        gm.plan("matmul", numbers(2**power, 256, dtype="float16"), B).rung.name
        for power in range(4, 15)
    }
    assert set(prepared.rungs) & chosen
    assert f"packed for {', '.join(prepared.rungs)}, {prepared.nbytes:,} bytes" in repr(prepared)
    named = gm.prepare(B, rung="packed")
    packed_bytes = 4 * 256 * 64 + 64
    assert (named.ready.own, named.ready.packed) == (B.nbytes, packed_bytes)
    assert named.nbytes == B.nbytes + packed_bytes
    assert gm.prepare(B.astype("f4")).rungs == ()


@compiled
def test_rungs_share_what_they_read() -> None:
    B = numbers(64, 48, dtype="float16")
    P = gm.prepare(B)
    if set(P.rungs) >= set(PACKS):
        assert P.packed(PACKS[0]) is P.packed(PACKS[1])
    assert packed.RUNG.packing is not None
    assert packed_threads.RUNG.packing is not None
    assert packed.RUNG.packing.pack is packed_threads.RUNG.packing.pack


@compiled
def test_a_transpose_reads_the_array_and_turns_back() -> None:
    A, B = numbers(20, 300), numbers(300, 40)
    right = gm.prepare(B, rung="packed")
    left = right.T
    assert (left.side, left.rungs, left.nbytes) == ("left", (), right.nbytes)
    assert left.T is right
    assert "the other side" in left.reason
    np.testing.assert_array_equal(
        gm.matmul(left, A.T, rung="packed"), gm.matmul(B.T, A.T, rung="packed")
    )
    again = pickle.loads(pickle.dumps(left))
    assert (again.side, again.rungs, again.T.rungs) == ("left", (), ("packed",))


@compiled
@pytest.mark.parametrize("how", ["row", "col"])
def test_what_was_packed_is_made_anew_by_a_pickle(how: str, fault: Callable[..., Any]) -> None:
    A, B = numbers(2, 20, 300), laid(numbers(2, 300, 40), how)
    P = gm.prepare(B, rung="packed")
    data = pickle.dumps(P)
    Q = pickle.loads(data)
    assert (Q.form, Q.rungs, Q.nbytes) == (P.form, P.rungs, P.nbytes)
    assert Q.address("packed") != P.address("packed")
    wanted = gm.matmul(A, B, rung="packed")
    np.testing.assert_array_equal(gm.matmul(A, Q, rung="packed"), wanted)
    others = tuple(replace(rung, available=lambda: "no such unit") for rung in packing_rungs())
    fault(packing, "all_rungs", lambda sound, backend: others)
    assert pickle.loads(data).rungs == (), "on a processor that lacks what the rung needs"


def packing_rungs() -> list[CpuRung]:
    return [rung for rung in all_rungs("cpu") if isinstance(rung, CpuRung) and rung.packing]


@pytest.mark.parametrize(
    ("layout", "prepared", "whole"), [("row", 0, 1), ("col", 0, 0), ("col", 1, 1)]
)
def test_rows_along_the_sum_are_packed_whole(layout: str, prepared: int, whole: int) -> None:
    """Either way is right; turning what lies as it is needed takes the time of a product."""
    problem = Problem("matmul", 9, 9, 9, layout_a=layout)
    assert packed.chunk_kernel_names(problem, (bool(prepared), False))[2] == whole
