"""With `batch_invariant=True` a vector gets the same bits alone and in any batch."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from checkout import ROOT
from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver, launch_args
from gemmule.backends.cuda.launch import Launcher
from gemmule.choose import choose
from gemmule.core.caches import forget_plans
from gemmule.core.canonical import Options, canonical
from gemmule.core.operand import Form, Operand, c_strides
from gemmule.core.problem import QuantSpec, numpy_dtype
from gemmule.core.registry import all_rungs
from gemmule.core.rung import CpuRung, Machine

INVARIANT = {"batch_invariant": True}
SIZES = [(1, 5), (7, 33), (130, 1025), (600, 900), (3, 20_000), (5000, 17)]
DTYPES = ("float64", "float32", "float16", "bfloat16")
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "row": np.ascontiguousarray,
    "col": np.asfortranarray,
    "strided": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
}
Product = Callable[..., Any]


def operands(m: int, n: int, batch: int, dtype: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(m * n + batch)
    kind = numpy_dtype(dtype)
    A, X = rng.standard_normal((m, n)), rng.standard_normal((batch, n))
    return A.astype(kind), X.astype(kind)


def differing(batched: Any, alone: list[Any]) -> int:
    """Return how many vectors' results do not have the bits that they have alone."""
    assert len(batched) == len(alone)
    return sum(b.tobytes() != a.tobytes() for b, a in zip(batched, alone, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n"), SIZES)
def test_a_vector_has_its_bits_in_every_batch(m: int, n: int, dtype: str, layout: str) -> None:
    for batch in (1, 2, 3, 17):
        A, X = operands(m, n, batch, dtype)
        A = LAYOUTS[layout](A)
        alone = [gm.matvec(A, x, **INVARIANT) for x in X]
        for arranged in (X, np.asfortranarray(X), np.flip(np.flip(X, 1).copy(), 1)):
            assert differing(gm.matvec(A, arranged, **INVARIANT), alone) == 0
        alone = [gm.vecmat(x, A.T, **INVARIANT) for x in X]
        assert differing(gm.vecmat(X, A.T, **INVARIANT), alone) == 0
        assert differing(gm.matmul(X, A.T, **INVARIANT), alone) == 0
        for x, one in zip(X, alone, strict=True):
            assert gm.matmul(x[None], A.T, **INVARIANT)[0].tobytes() == one.tobytes()
            assert gm.matmul(x, A.T, **INVARIANT).tobytes() == one.tobytes()


def test_the_comparison_sees_what_differs() -> None:
    """Without the option the rows of a product share work, and rows of BLAS lose their bits."""
    seen = 0
    for m, n in SIZES:
        A, X = operands(m, n, 17, "float32")
        seen += differing(gm.matmul(X, A.T), [gm.vecmat(x, A.T, **INVARIANT) for x in X])
    assert seen
    A, X = operands(7, 33, 3, "float32")
    alone = [gm.matvec(A, x, **INVARIANT) for x in X]
    alone[1] = np.nextafter(alone[1], np.float32(9))
    assert differing(gm.matvec(A, X, **INVARIANT), alone) == 1


@pytest.mark.parametrize(("bits", "activations"), [(4, "float"), (8, "float"), (4, "int8")])
def test_quantised_matrices_keep_the_bits_too(bits: int, activations: str) -> None:
    A, X = operands(130, 1024, 17, "float32")
    Q = gm.quantize(A, bits=bits, group_size=128)
    options = {**INVARIANT, "activations": activations}
    alone = [gm.matvec(Q, x, **options) for x in X]
    for batch in (2, 17):
        some, wanted = X[:batch], alone[:batch]
        assert differing(gm.matvec(Q, some, **options), wanted) == 0
        assert differing(gm.matmul(some, Q.T, **options), wanted) == 0
        assert differing(gm.matmul(Q, some.T, **options).T, wanted) == 0
        assert differing(gm.matmul(Q, np.asfortranarray(some.T), **options).T, wanted) == 0
        room = np.full((130, 2 * batch), np.nan, "f4")
        for out in (room[:, :batch].copy(), room[:, :batch].copy(order="F"), room[:, ::2]):
            assert gm.matmul(Q, some.T, out=out, **options) is out
            assert differing(out.T, wanted) == 0


SHAPES = [
    ((4, 5), (5, 6)), ((2, 4, 5), (5, 6)), ((4, 5), (2, 5, 6)), ((2, 4, 5), (2, 5, 6)),
    ((3, 1, 4, 5), (2, 5, 6)), ((5,), (2, 5, 6)), ((2, 4, 5), (5,)), ((0, 5), (5, 6)),
    ((4, 0), (0, 6)), ((4, 5), (5, 0)), ((4, 5), (5, 1)), ((1, 5), (5, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_products_of_every_shape_are_right(left: Any, right: Any) -> None:
    rng = np.random.default_rng(8)
    a, b = (rng.integers(-4, 5, s).astype("f4") for s in (left, right))
    wanted = a @ b
    np.testing.assert_array_equal(gm.matmul(a, b, **INVARIANT), wanted)
    out = np.full(wanted.shape, np.nan, "f4")
    assert gm.matmul(a, b, out=out, **INVARIANT) is out
    np.testing.assert_array_equal(out, wanted)
    turned = np.full(wanted.shape[::-1], np.nan, "f4").T
    np.testing.assert_array_equal(gm.matmul(a, b, out=turned, **INVARIANT), wanted)


def test_batches_of_matrices_keep_the_bits() -> None:
    rng = np.random.default_rng(9)
    A = rng.standard_normal((3, 17, 300)).astype("f4")
    B = rng.standard_normal((3, 300, 40)).astype("f4")
    C = gm.matmul(A, B, **INVARIANT)
    for i in range(3):
        assert differing(C[i], [gm.vecmat(a, B[i], **INVARIANT) for a in A[i]]) == 0


def test_a_named_rung_computes_vector_by_vector() -> None:
    A, X = operands(40, 300, 5, "float32")
    options = {**INVARIANT, "rung": "scalar_loop"}
    alone = [gm.matvec(A, x, **options) for x in X]
    assert differing(gm.matmul(X, np.ascontiguousarray(A).T, **options), alone) == 0
    with pytest.raises(ValueError, match="it computes matmul, not matvec"):
        gm.matmul(X, A.T, rung="cache_blocks", **INVARIANT)


# ---- the plan ---------------------------------------------------------------------------------
def test_what_a_rung_refuses_as_a_batch_goes_vector_by_vector(fault: Callable[..., Any]) -> None:
    """As for quantised rungs on a GPU, which take one vector: the batch is walked outside."""
    A, X = operands(40, 300, 5, "float32")
    fault(
        CpuRung,
        "refusal",
        lambda sound, rung, problem: "no batches" if problem.batch > 1 else sound(rung, problem),
    )
    forget_plans()
    try:
        p = gm.plan("matvec", A, X, **INVARIANT)
        assert (p.choice.call.outer, p.problem.batch) == ((5,), 1)
        alone = [gm.matvec(A, x, **INVARIANT) for x in X]
        out = np.full((5, 40), np.nan, "f4")
        assert p(A, X, out=out) is out
        assert differing(p(A, X), alone) == differing(out, alone) == 0
        with pytest.raises(ValueError, match="Make another plan"):
            p(A, X[:4])
    finally:
        forget_plans()


@pytest.mark.parametrize("batch", [2, 40, 70_000])
@pytest.mark.parametrize(("m", "n"), [(64, 64), (1024, 4096), (33, 1001)])
def test_a_gpu_plan_of_a_batch_is_that_of_a_vector(
    only_proved: Callable[..., None], m: int, n: int, batch: int
) -> None:
    """Rung, parameters and alignment do not depend on the batch, whatever its size."""
    machine = Machine("cuda", "a GPU", "sm_90a", 132, 4.5e12, 50 << 20, 227 << 10)
    only_proved("cuda", {rung.name for rung in all_rungs("cuda")})
    A = Form((m, n), (n, 1), "float16", 16 if n % 8 == 0 else 2)
    options = Options(batch_invariant=True)

    def choice(*shape: int) -> Any:
        x = Form(shape, c_strides(shape), "float16", 16 if n % 8 == 0 or len(shape) < 2 else 2)
        return choose(canonical("matvec", A, x, None, options), machine)

    alone, together = choice(n), choice(batch, n)
    assert (together.rung.name, together.params) == (alone.rung.name, alone.params)
    assert together.problem.alignment == alone.problem.alignment
    steps = together.rung.steps(together.problem, together.params, machine)
    one = alone.rung.steps(alone.problem, alone.params, machine)
    assert [step.block for step in steps] == [step.block for step in one]


def test_a_gpu_walks_the_vectors_beside_a_quantised_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its quantised rungs take one vector, so each is launched with its own addresses."""
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    machine = Machine("cuda", "a GPU", "sm_90a", 132, 4.5e12, 50 << 20, 227 << 10)
    spec = QuantSpec(4, 64, False, "row", "float32", False)
    Q, x = Form((48, 128), (0, 0), "uint4", 16, spec), Form((3, 128), (160, 1), "float32", 16)
    call = canonical("matvec", Q, x, None, Options(batch_invariant=True, literal=True))
    launcher = Launcher(choose(call, machine, "int4_codes"))
    assert not launcher.workspace
    launched: list[tuple[int, ...]] = []

    def start(stream: int, matrix: bytes, *places: Any) -> None:
        *addresses, work, _ = places
        packed = matrix + struct.pack("<3Q", *addresses, work)
        whole = packed + launcher.template[len(packed) :]
        launched.append(launch_args.QUANT.unpack(whole)[:10])

    monkeypatch.setattr(launcher, "starter", lambda ordinal, end: start)
    monkeypatch.setattr(device_arrays, "current_stream", lambda out, ordinal: 0)
    monkeypatch.setattr(driver, "is_current", lambda ordinal: True)
    parts = SimpleNamespace(
        codes=SimpleNamespace(pointer=16), scales=SimpleNamespace(pointer=32), zeros=None, perm=None
    )
    a = Operand(parts, 0, Q, "cuda:0", "gemmule", parts)
    b = Operand(None, 4096, x, "cuda:0", "gemmule", None)
    out = Operand(None, 8192, Form((3, 48), (48, 1), "float32", 16), "cuda:0", "gemmule", None)
    launcher(a, b, out, 1.0, 0.0)
    addresses = [(4096 + 640 * i, 8192 + 192 * i) for i in range(3)]
    assert launched == [(16, 32, 0, 0, x_at, y_at, 0, 48, 128, 1) for x_at, y_at in addresses]


def test_the_page_runs() -> None:
    page = ROOT / "docs" / "batch_invariance.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.S)
    exec(compile(block, page.name, "exec"), {})
