"""Tensors that few multiply: what PyTorch would have to know is told, or refused in our words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gemmule as gm

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

A = torch.arange(12.0).reshape(3, 4)
X = torch.arange(4.0)
B = torch.arange(20.0).reshape(4, 5)


def wants_gradient() -> Any:
    return torch.ones(3, 4).requires_grad_()


# ---- memory that is written, or that is there no more -------------------------------------------
WAYS: dict[str, Callable[[Any], Any]] = {
    "matvec": lambda out: gm.matvec(A, X, out=out),
    "gemv": lambda out: gm.gemv(A, X, out),
    "plan": lambda out: gm.plan("matvec", A, X)(A, X, out=out),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_needs_what_was_overwritten_fails(way: str) -> None:
    kept, factor = torch.ones(3), torch.ones(3, requires_grad=True)
    total = (factor * kept).sum()  # its gradient is what `kept` holds
    assert WAYS[way](kept) is kept
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


ROWS, STACK, BYTES = torch.ones(3, 4), torch.ones(2, 4, 5), torch.ones(3, 4, dtype=torch.int8)
OTHERS: dict[str, Callable[[Any], Any]] = {  # whose results are matrices
    "grouped": lambda out: gm.grouped_matmul(
        ROWS, STACK, torch.tensor([1, 3], dtype=torch.int32), out=out
    ),
    "routed": lambda out: gm.grouped_matmul(
        ROWS,
        STACK,
        indices=torch.zeros(3, 1, dtype=torch.int32),
        weights=ROWS[:, :1].clone(),
        out=out,
    ),
    "scaled": lambda out: gm.matmul(
        BYTES, torch.ones(4, 5, dtype=torch.int8), scale_a=2.0, out=out
    ),
    "gemm": lambda out: gm.gemm(ROWS, STACK[0], out),
}


@pytest.mark.parametrize("way", OTHERS)
def test_a_gradient_that_needs_an_overwritten_matrix_fails(way: str) -> None:
    kept, factor = torch.ones(3, 5), torch.ones(3, 5, requires_grad=True)
    total = (factor * kept).sum()
    assert OTHERS[way](kept) is kept
    assert (kept != 1).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("way", WAYS)
def test_an_out_that_requires_a_gradient_is_refused(way: str) -> None:
    out = torch.zeros(3, requires_grad=True)
    with pytest.raises(ValueError, match="requires a gradient"):
        WAYS[way](out)
    with torch.no_grad():
        assert WAYS[way](out) is out
    assert torch.equal(out.detach(), A @ X)


@pytest.mark.parametrize("nbytes", [0, 20])
def test_a_storage_that_was_given_back_is_not_read(nbytes: int) -> None:
    gone = A.clone()
    column = gone[:, :1]
    gone.untyped_storage().resize_(nbytes)
    calls: list[Callable[[], Any]] = [
        lambda: gm.matvec(gone, X),
        lambda: gm.matmul(A, X[:, None], out=column),
        lambda: gm.quantize(gone),
        lambda: gm.prepare(gone),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="storage was resized to"):
            call()
    spread = torch.ones(1, 4).expand(3, 4)  # more elements than memory, and all of them there
    assert torch.equal(gm.matvec(spread, X), spread @ X)


def test_a_conjugated_view_of_what_is_read_is_no_out() -> None:
    matrix = torch.ones(3, 3, dtype=torch.complex64)
    with pytest.raises(ValueError, match="overlaps an input"):
        gm.matvec(matrix.conj(), matrix[0].clone(), out=matrix[:, 0])


# ---- what PyTorch has to know -------------------------------------------------------------------
@pytest.fixture(params=["gradient", "dual", "tracing"])
def known(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A matrix, while PyTorch has to know of what is done with it."""
    if request.param == "gradient":
        yield wants_gradient()
    elif request.param == "dual":
        with torch.autograd.forward_ad.dual_level():
            yield torch.autograd.forward_ad.make_dual(A, A)
    else:
        found: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gemmule.dispatch.tracked._scripted", lambda: found)
            yield A


def test_the_blas_forms_lose_no_gradient_in_silence(known: Any) -> None:
    for call in (lambda: gm.gemv(known, X), lambda: gm.gemm(known, B, torch.zeros(3, 5))):
        with pytest.raises(ValueError, match=r"without PyTorch's knowledge.*torch\.no_grad"):
            call()
    with pytest.raises(ValueError, match="gemm computes"):
        gm.gemm(A, B, torch.zeros(3, 5, requires_grad=True), beta=1)


def test_the_blas_forms_and_plans_know_no_vmap() -> None:
    with pytest.raises(ValueError, match="gemv computes"):
        torch.vmap(lambda x: gm.gemv(A, x))(torch.ones(2, 4))
    with pytest.raises(TypeError, match=r"outside torch\.vmap"):
        torch.vmap(lambda x: gm.plan("matvec", A, x))(torch.ones(2, 4))
    with pytest.raises(ValueError, match="out= under torch"):
        torch.vmap(lambda x: gm.matvec(A, x, out=torch.zeros(3)))(torch.ones(2, 4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("trace", [torch.jit.trace, lambda f, given: make_fx(f)(*given)])
def test_a_traced_product_is_no_constant(trace: Any) -> None:
    traced = trace(lambda a, x: gm.matvec(a, x), (A, X))
    assert torch.equal(traced(2 * A, X), 2 * (A @ X))


def test_a_default_device_does_not_move_a_result() -> None:
    with torch.device("meta"):
        assert gm.matmul(X, X).item() == 14.0


# ---- beside a quantised matrix ------------------------------------------------------------------
def test_batches_and_directions_beside_a_quantised_matrix() -> None:
    Q, many = gm.quantize(A), torch.ones(2, 4) * torch.tensor([[1.0], [2.0]])
    dense = torch.from_numpy(np.asarray(Q))
    for multiply in (gm.matvec, gm.matmul):
        assert torch.allclose(torch.vmap(lambda x, m=multiply: m(Q, x))(many), many @ dense.T)
    columns = torch.vmap(lambda x: gm.matmul(Q, x[:, None]), in_dims=1, out_dims=2)(many.T)
    assert torch.allclose(columns[:, 0], dense @ many.T)
    assert torch.allclose(torch.vmap(lambda x: gm.vecmat(x, Q.T))(many), many @ dense.T)
    _, slope = torch.func.jvp(lambda x: gm.matvec(Q, x), (X,), (many[1],))
    assert torch.allclose(slope, dense @ many[1])
    rows = torch.vmap(torch.func.jacrev(lambda x: gm.matvec(Q, x)))(many)
    assert torch.allclose(rows, dense.expand(2, 3, 4))


# ---- tensors without dense memory ---------------------------------------------------------------
@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.to_sparse(),
        lambda t: torch.nested.nested_tensor([t, t]),
        lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
        lambda t: t.to("meta"),
        lambda t: torch.quantize_per_tensor(t, 1.0, 0, torch.qint8),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_dense_memory_are_refused_by_name(make: Any) -> None:
    tensor = make(A)
    for call in (gm.quantize, gm.asarray, lambda a: gm.gemv(a, X)):
        with pytest.raises((TypeError, ValueError), match=r"needed is a|gives no array|computes"):
            call(tensor)
    if tensor.is_quantized:
        with pytest.raises(TypeError, match=r"A is a quantised torch\.qint8 tensor"):
            gm.matvec(tensor, X)
    if tensor.is_sparse:
        with pytest.raises(TypeError, match="dense strided"):
            gm.matvec(tensor.requires_grad_(), X)


def test_a_kind_of_tensor_that_hides_its_memory_is_refused_by_name() -> None:
    from fake_tensors import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3, 4)
    for call in (gm.prepare, gm.asarray):
        with pytest.raises(TypeError, match="gives no array"):
            call(fake)
