"""Products bound as builtin functions: the bits of the ordinary way, and only where they fit."""

from __future__ import annotations

import itertools
import sys
import threading
import time
import tracemalloc
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from children import printed
from gemmule.backends.cpu import blas_threads
from gemmule.backends.cpu import pool as cpu_pool
from gemmule.backends.cpu.calls import blas, builtin
from gemmule.backends.cpu.threads import processors
from gemmule.core.registry import all_rungs
from gemmule.core.rung import CpuRung
from gemmule.settings import builtin_enabled
from gemmule_lab import doctor
from products import small

pytestmark = pytest.mark.skipif(
    builtin.unusable() is not None, reason=f"no builtin functions: {builtin.unusable()}"
)
parallel = pytest.importorskip("numba.np.ufunc.parallel")
OPS = ("matvec", "vecmat")
FORMATS = ("float64", "float32", "float16", "bfloat16", "int8", "int4", "int4 x int8")


def operands(op: str, kind: str, m: int, n: int, seed: int = 1) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    A, x = small(rng, (m, n)), small(rng, (n if op == "matvec" else m,))
    matrix: Any = A
    if kind.startswith("int"):
        matrix, x = gm.quantize(A, bits=int(kind[3]), group_size=16), x.astype(np.float32)
    elif kind == "bfloat16":
        bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
        matrix, x = A.astype(bfloat16), x.astype(bfloat16)
    else:
        matrix, x = A.astype(kind), x.astype(kind)
    return (matrix, x) if op == "matvec" else (x, matrix)


def planned(op: str, kind: str, a: Any, b: Any, **more: Any) -> gm.Plan:
    activations = {"activations": "int8"} if "x" in kind else {}
    return gm.plan(op, a, b, **activations, **more)


def bound_of(plan: gm.Plan) -> Any:
    """Return what makes builtin calls of a plan's operands, None where it makes none."""
    return plan.launcher.bound


@pytest.fixture(autouse=True)
def nobody_started_numbas_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of this process may have, and then no bound product is launched."""
    monkeypatch.setattr(parallel, "_is_initialized", False)


@pytest.mark.skipif(processors() == 1, reason="products have one thread here")
def test_where_numba_has_threads_products_go_the_ordinary_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = operands("matvec", "float16", 384, 384)
    plan = planned("matvec", "float16", a, b)
    first, call = plan(a, b), bound_of(plan)(a, b)
    assert np.array_equal(call(a, b), first)
    monkeypatch.setattr(parallel, "_is_initialized", True)
    monkeypatch.setattr(parallel, "get_num_threads", lambda: 2)
    out = np.zeros_like(first)
    assert call(a, b) is None
    assert call(a, b, out) is None
    assert not out.any()
    assert np.array_equal(plan(a, b), first)
    assert np.array_equal(plan(a, b, out=out), first)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("m", "n"), [(384, 384), (33, 70), (1, 5), (700, 3)])
def test_the_second_product_has_the_bits_of_the_first(op: str, kind: str, m: int, n: int) -> None:
    if "x" in kind and op == "vecmat":
        pytest.skip("rounded activations are along the rows")
    a, b = operands(op, kind, m, n)
    plan = planned(op, kind, a, b)
    first = plan(a, b)
    for _ in range(3):
        again = plan(a, b)
        assert again.dtype == first.dtype
        assert again.flags.owndata
        assert np.array_equal(again, first)
    others = operands(op, kind, m, n, seed=2)
    apart = getattr(gm, op)(*others, rung=plan.rung.name) if "x" not in kind else None
    if apart is not None:
        assert np.array_equal(plan(*others), apart)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("op", OPS)
def test_a_given_result_is_filled(op: str, kind: str) -> None:
    a, b = operands(op, kind, 72, 72)
    plan = planned(op, kind, a, b)
    first, call = plan(a, b), bound_of(plan)(a, b)
    size, dtype = first.shape, first.dtype
    if kind == "float32" and blas_threads.routine("cblas_sgemv") is None:
        pytest.skip("this NumPy's BLAS has no address")
    assert call is not None
    out = np.full(size, 7, dtype)
    before = sys.getrefcount(out)
    assert call(a, b, out) is out
    assert np.array_equal(out, first)
    out[:] = 7
    assert plan(a, b, out=out) is out
    assert np.array_equal(out, first)
    assert sys.getrefcount(out) == before
    view, gaps = np.full(80, 7, dtype)[4:76], np.full(144, 7, dtype)[::2]
    locked, other = np.full(size, 7, dtype), np.full(size, 7, np.float64)
    locked.flags.writeable = False
    vector = b if op == "matvec" else a
    for unfit in (view, gaps, locked, other, np.full(71, 7, dtype), np.full((72, 1), 7, dtype)):
        assert call(a, b, unfit) is None
        assert (unfit == 7).all()
    assert call(a, b, vector) is None
    assert call(a, b, None) is None
    for fit in (view, gaps):
        assert plan(a, b, out=fit) is fit
        assert np.array_equal(fit, first)
    for refused in (locked, other, vector):
        with pytest.raises((ValueError, TypeError)):
            plan(a, b, out=refused)
    for operand in (a, b):
        if isinstance(operand, np.ndarray):
            lent = operand[:] if operand is a else operand.view()
            pair = (lent, b) if operand is a else (a, lent)
            assert call(*pair, out) is None
            assert np.array_equal(plan(*pair, out=out), first)


def test_a_user_can_do_without(setting: Callable[..., None]) -> None:
    setting(GEMMULE_BUILTIN="0")
    for op, kind in itertools.product(OPS, ("float32", "float16", "int8")):
        a, b = operands(op, kind, 45, 77)
        plan = planned(op, kind, a, b)
        assert bound_of(plan) is None
        first = plan(a, b)
        assert np.array_equal(plan(a, b), first)
    assert doctor.planned_calls().found == "planned products through Python: GEMMULE_BUILTIN is 0"
    setting(GEMMULE_BUILTIN="no")
    with pytest.raises(ValueError, match="'no'; it must be 0"):
        builtin_enabled()


def test_every_rung_with_a_job_is_right_in_every_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_pool, "thread_count", lambda: 5)  # shares enough for every step
    bound = 0
    for rung in all_rungs("cpu"):
        if not isinstance(rung, CpuRung) or rung.job is None or rung.available() is not None:
            continue
        for op, kind, shape in itertools.product(OPS, FORMATS, [(96, 160), (357, 519)]):
            a, b = operands(op, kind, *shape)
            try:
                plan = planned(op, kind, a, b, rung=rung.name)
            except (TypeError, ValueError):
                continue
            if plan.rung is not rung or plan.choice.copies:
                continue
            run = plan.launcher
            assert run.bound is not None, rung.name
            call = run.bound(a, b)
            if rung.name == "blas" and blas_threads.routine("cblas_sgemv") is None:
                continue
            assert call is not None, rung.name
            found = call(a, b)
            assert found is not None, rung.name
            expected = np.full_like(found, 7)
            run.product(*((b, a) if plan.choice.call.swapped else (a, b)), expected)
            assert np.array_equal(found, expected), (rung.name, op, kind)
            bound += 1
    assert bound >= 30


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("order", ["CC", "CF", "FC", "FF", "gaps", "self"])
def test_matrix_products_by_blas(dtype: str, order: str) -> None:
    rng = np.random.default_rng(3)
    A, B = (small(rng, shape).astype(dtype) for shape in ((70, 90), (90, 50)))
    if order == "gaps":
        A, B = np.tile(A, 2)[:, :90], np.tile(B, (2, 1))[:90]
    elif order == "self":
        B = A.T
    else:
        A, B = np.asarray(A, order=order[0]), np.asarray(B, order=order[1])
    plan = gm.plan("matmul", A, B)
    call = bound_of(plan)(A, B)
    assert (call is None) == (blas_threads.routine("cblas_sgemm") is None)
    expected = A.astype(np.float64) @ B
    for _ in range(3):
        assert np.array_equal(plan(A, B), expected)
    if call is not None:
        found = call(A, B)
        assert found is None if order == "self" else np.array_equal(found, expected)
        assert call(A.astype(np.float16), B) is None


def test_vectors_of_ones_beside_gaps_and_columns() -> None:
    rng = np.random.default_rng(4)
    wide = small(rng, (60, 100)).astype(np.float32)
    for A in (wide[:, :40], wide.T, wide[:, :40].T, wide[::2], wide[:, ::2], wide[::-1]):
        x, z = np.ones(A.shape[1], np.float32), np.ones(A.shape[0], np.float32)
        matvec, vecmat = gm.plan("matvec", A, x), gm.plan("vecmat", z, A)
        for _ in range(3):
            assert np.array_equal(matvec(A, x), A.sum(1))
            assert np.array_equal(vecmat(z, A), A.sum(0))


def test_what_is_not_as_planned_goes_the_ordinary_way() -> None:
    a, x = operands("matvec", "float16", 64, 96)
    plan = gm.plan("matvec", a, x)
    call = bound_of(plan)(a, x)
    expected = plan(a, x)
    assert np.array_equal(call(a, x), expected)
    wide = np.zeros((64, 200), np.float16)
    wide[:, :96] = a
    room = np.zeros(2 * 96 + 1, np.uint8)
    apart = room[1:].view(np.float16)
    apart[:] = x
    of_class = a.view(type("Other", (np.ndarray,), {}))
    for left, right in [
        (wide[:, :96], x),
        (a[:32], x),
        (a, x[::-1][::-1][:95]),
        (a, apart),
        (of_class, x),
        (a.astype(">f2"), x),
        (a.astype(np.float32), x),
        (a.tolist(), x),
        (None, x),
        (a, 3),
    ]:
        assert call(left, right) is None
    assert call(a) is None
    assert call(a, x, x) is None
    assert np.array_equal(plan(wide[:, :96], x), expected)
    assert np.array_equal(plan(a, apart), expected)


@pytest.mark.parametrize(("planned_rows", "planned_columns"), [(24, 12), (12, 24)])
def test_a_part_of_another_size_is_not_taken_for_the_planned_one(
    planned_rows: int, planned_columns: int
) -> None:
    wide = small(np.random.default_rng(7), (24, 64)).astype(np.float16)
    part, x = wide[:planned_rows, :planned_columns], np.ones(planned_columns, np.float16)
    z = np.ones(planned_rows, np.float16)
    plans = gm.plan("matvec", part, x), gm.plan("vecmat", z, part)
    for plan, operands_ in zip(plans, ((part, x), (z, part)), strict=True):
        assert np.array_equal(plan(*operands_), part.sum(1 if plan is plans[0] else 0))
    for rows, columns in ((planned_rows, planned_columns + 8), (planned_rows - 8, planned_columns)):
        other = wide[:rows, :columns]  # at the same address, with the same strides
        with pytest.raises(ValueError, match=r"this plan computes|must be equal"):
            plans[0](other, x)
        with pytest.raises(ValueError, match=r"this plan computes|must be equal"):
            plans[1](z, other)


def test_a_matrix_of_codes_of_another_form_is_not_taken_for_the_planned_one() -> None:
    a, x = operands("matvec", "int4", 64, 96)
    other = gm.quantize(small(np.random.default_rng(5), (64, 96)), bits=8)
    plan = gm.plan("matvec", a, x)
    assert np.array_equal(plan(a, x), plan(a, x))
    with pytest.raises(ValueError, match="this plan computes"):
        plan(other, x)
    twin = gm.quantize(small(np.random.default_rng(6), (64, 96)), bits=4, group_size=16)
    assert np.array_equal(plan(twin, x), gm.matvec(twin, x))
    assert not np.array_equal(plan(twin, x), plan(a, x))


def test_nothing_is_leaked_or_freed_twice() -> None:
    a, x = operands("matvec", "bfloat16", 40, 64)
    plan = gm.plan("matvec", a, x)
    plan(a, x)
    dtype = a.dtype
    before = [sys.getrefcount(one) for one in (a, x, dtype)]
    kept = [plan(a, x) for _ in range(1000)]
    assert sys.getrefcount(kept[0]) == sys.getrefcount([np.empty(40)][0]) + 1
    del kept
    after = [sys.getrefcount(one) for one in (a, x, dtype)]
    assert after == before


def test_activations_that_cannot_be_rounded_are_multiplied_as_they_are() -> None:
    a, x = operands("matvec", "int4 x int8", 64, 96)
    plan = planned("matvec", "int4 x int8", a, x)
    plan(a, x)
    strange = x.copy()
    strange[7] = np.nan
    assert np.isnan(plan(a, strange)).all()
    assert np.array_equal(plan(a, x), plan(a, x))


def test_threads_that_bind_first_share_what_python_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "_METHOD", [])
    both, seen = threading.Barrier(2), []

    def work() -> None:
        both.wait()
        seen.append(builtin.way_in())

    with monkeypatch.context() as patch:
        address = builtin._enter.address(3)
        slow = lambda *given, **named: (time.sleep(0.05), address)[1]  # noqa: E731
        patch.setattr(builtin, "_enter", types.SimpleNamespace(address=slow))
        threads = [threading.Thread(target=work) for _ in range(2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert len(seen) == 2
    assert seen[0] is seen[1] is builtin.way_in()


def test_threads_share_a_plan() -> None:
    pairs = [operands("matvec", "float16", 512, 512, seed) for seed in range(6)]
    plan = gm.plan("matvec", *pairs[0])
    expected = [plan(*pair) for pair in pairs]
    wrong: list[int] = []

    def many(number: int) -> None:
        for _ in range(200):
            if not np.array_equal(plan(*pairs[number]), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=many, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


AFTER = """
import os, sys
import numpy as np
import gemmule as gm
from forks import start_fork, status_of
A = np.ones((1024, 1024), np.float16)
Q = gm.quantize(np.ones((512, 512), np.float32), bits=8)
x, z = A[0].copy(), np.ones(512, np.float32)
plan, codes = gm.plan("matvec", A, x), gm.plan("matvec", Q, z)
a, b = np.ones((32, 64), np.float16), np.ones(64, np.float16)
y, alone = codes(Q, z), gm.plan("matvec", a, b)

def right():
    return all((plan(A, x) == 1024).all() and np.array_equal(codes(Q, z), y) for _ in range(4))

assert right()
call, short = (one.launcher.bound(*given) for one, given in ((plan, (A, x)), (alone, (a, b))))
assert call is None or (call(A, x) is not None and short(a, b) is not None)

def leaves_helpers():
    # In a child, which lacks them, a call that is bound to them is on one core for ever.
    left = call is None or call(A, x) is None or len(os.sched_getaffinity(0)) == 1
    return left and (call is None or short(a, b) is not None)

if sys.argv[1] == "fork":
    assert status_of(start_fork(lambda: right() and leaves_helpers())) == 0
else:
    import numba
    numba.set_num_threads(1)
    assert leaves_helpers()
assert right()
print("right")
"""


@pytest.mark.parametrize("how", ["fork", "numba"])
def test_after_a_fork_and_beside_numbas_threads(how: str) -> None:
    assert printed(AFTER, how, NUMBA_NUM_THREADS=2) == "right\n"


def test_a_product_that_is_left_to_numpy_leaves_no_result_behind() -> None:
    """A matrix by itself turned: NumPy computes half of it, so the bound call gives it back."""
    A, B = np.ones((2, 64, 64), np.float32)
    for _ in range(3):
        gm.matmul(A, B.T)
    tracemalloc.start()
    try:
        gm.matmul(A, A.T)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            gm.matmul(A, A.T)
        assert tracemalloc.get_traced_memory()[0] - before < A.nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("step", [4, 5, 4.5])
def test_blas_is_given_rows_that_are_whole_numbers_apart(step: float) -> None:
    """As of a field of a record: BLAS counts a leading dimension in numbers, not in bytes."""
    A = np.ndarray((3, 4), np.float32, bytearray(64), 0, (int(4 * step), 4))
    assert (blas.gemv(A) is None) == (step == 4.5)
    assert (blas.gemv(A.T) is None) == (step == 4.5)


PRODUCTS = """
import sys
import numpy as np
import gemmule as gm
from gemmule.backends.cpu.calls import builtin
from gemmule.backends.cpu.threads import processors

for dtype in ("float16", "float32"):
    A, x = np.ones((384, 384), dtype), np.ones(384, dtype)
    for _ in range(3):
        gm.matvec(A, x)
        gm.vecmat(x, A)
assert builtin._METHOD
"""


def test_nothing_freed_is_used_when_the_interpreter_ends() -> None:
    printed(PRODUCTS, PYTHONMALLOC="malloc", MALLOC_PERTURB_=255)


def test_what_cannot_be_bound_goes_the_ordinary_way(fault: Callable[..., Any]) -> None:
    A, x = operands("matvec", "float16", 384, 384)
    expected = gm.matvec(A, x)
    fault(builtin, "unusable", lambda sound: "a reason of this test")
    job = builtin.Job(0, ())
    assert builtin.bound(job, (A, x), expected, swapped=False) is None
    plan = gm.plan("matvec", A, x)
    for _ in range(4):
        np.testing.assert_array_equal(plan(A, x), expected)
