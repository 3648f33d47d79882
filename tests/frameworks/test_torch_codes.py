"""Quantised matrices and layers as PyTorch sees them: derivatives, batches, recorded graphs."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import gemmule as gm  # noqa: E402
from gemmule.torch.linear import QuantLinear  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


class Alone(torch.nn.Module):  # type: ignore[misc]
    """A function as a module, which is what PyTorch exports."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def of_codes() -> tuple[dict[str, Any], Any]:
    """Return functions of one vector, each linear, and the matrix that they multiply by."""
    Q = gm.quantize(np.random.default_rng(3).standard_normal((5, 8)), bits=8, group_size=4)
    dense, layer = torch.from_numpy(Q.dequantize()), QuantLinear.from_matrix(Q)
    parts = (layer.codes, layer.scales, layer.zeros, layer.perm, 5, 8, 8, 4)
    called = torch.ops.gemmule  # by name, as graphs and other people's code call them
    return {
        "dense": lambda x: gm.matvec(dense, x),
        "operator": lambda x: called.matvec(dense, x),
        "operator with bias": lambda x: called.quantized_linear(x, *parts, False, torch.ones(5)),
        "matvec": lambda x: gm.matvec(Q, x),
        "vecmat": lambda x: gm.vecmat(x, Q.T),
        "matmul": lambda x: gm.matmul(Q, x),
        "turned": lambda x: x @ Q.T,
        "layer": layer,
        "with bias": QuantLinear.from_matrix(Q, torch.ones(5)),
    }, dense


@pytest.mark.parametrize("name", of_codes()[0])
def test_every_derivative_of_codes_is_that_of_the_matrix(name: str) -> None:
    functions, dense = of_codes()
    function, (x, other) = functions[name], torch.randn(2, 8)
    added = 1.0 if name.endswith("with bias") else 0.0
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    value, forwards = torch.func.jvp(function, (x,), (other,))
    close(value.detach(), dense @ x + added)
    close(forwards, dense @ other)
    with torch.autograd.forward_ad.dual_level():
        dual = function(torch.autograd.forward_ad.make_dual(x, other))
        close(torch.autograd.forward_ad.unpack_dual(dual).tangent, dense @ other)
    close(torch.func.jacfwd(function)(x), dense)
    close(torch.func.jacrev(function)(x), dense)
    square = torch.func.hessian(lambda x: function(x).square().sum())
    close(square(x), 2 * dense.T @ dense)
    _, back = torch.func.vjp(function, x)
    close(back(torch.ones(5))[0], dense.sum(0))
    if "layer" in name or "bias" in name:  # products of a matrix itself take no such batch
        leaf = x.clone().requires_grad_()
        own = torch.autograd.grad(function(leaf), leaf, torch.eye(5), is_grads_batched=True)
        close(own[0], dense)
    X = torch.randn(3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch says so where it loops over a batch
        close(torch.vmap(function)(X).detach(), X @ dense.T + added)
        close(torch.vmap(function, in_dims=1)(X.T).detach(), X @ dense.T + added)
    each = torch.vmap(torch.func.grad(lambda x: function(x).square().sum()))
    close(each(X), 2 * (X @ dense.T + added) @ dense)


def test_a_batch_of_layers_multiplies_each_by_its_own() -> None:
    linears = [torch.nn.Linear(8, 5) for _ in range(3)]
    layers = [QuantLinear.from_linear(one, bits=8, group_size=4) for one in linears]
    weights = torch.func.stack_module_state(layers)
    X = torch.randn(3, 2, 8)

    def one(parameters: Any, buffers: Any, x: Any) -> Any:
        return torch.func.functional_call(layers[0], (parameters, buffers), (x,))

    found = torch.vmap(one)(*weights, X)
    assert torch.equal(found, torch.stack([layer(x) for layer, x in zip(layers, X, strict=True)]))
    shared = torch.vmap(one, in_dims=(0, 0, None))(*weights, X[0])
    assert torch.equal(shared, torch.stack([layer(X[0]) for layer in layers]))


@pytest.mark.parametrize("name", ["dense", "layer", "with bias"])
def test_a_recorded_graph_multiplies_what_it_is_given(name: str) -> None:
    """And not by the product that it was recorded with."""
    function, (x, other) = of_codes()[0][name], torch.randn(2, 8)
    with torch.no_grad():
        for recorded in (
            torch.jit.trace(function, (x,)),
            make_fx(function)(x),
            torch.export.export(Alone(function), (x,)).module(),
        ):
            assert torch.equal(recorded(other), function(other))


@pytest.mark.parametrize("name", ["matvec", "turned"])
def test_a_matrix_in_a_recorded_graph_is_refused(name: str) -> None:
    function, x = of_codes()[0][name], torch.randn(8)
    for record in (make_fx(function), lambda x: torch.jit.trace(function, (x,))):
        with pytest.raises(ValueError, match=r"would be a constant: .* Trace a .*QuantLinear"):
            record(x)


def test_derivatives_by_a_bias_and_none_by_scales() -> None:
    layer = QuantLinear.from_linear(torch.nn.Linear(8, 5), bits=8, group_size=4)
    X, bias, other = torch.randn(3, 8), torch.randn(5), torch.randn(5)

    def by_bias(bias: Any) -> Any:
        return torch.func.functional_call(layer, {"bias": bias}, (X,))

    value, forwards = torch.func.jvp(by_bias, (bias,), (other,))
    torch.testing.assert_close(value, by_bias(bias))
    assert torch.equal(forwards, other.expand(3, 5))
    each = torch.func.grad(lambda bias: by_bias(bias).sum())(bias)
    assert torch.equal(each, torch.full((5,), 3.0))

    def by_scales(scales: Any) -> Any:
        return torch.func.functional_call(layer, {"scales": scales}, (X,)).sum()

    with pytest.raises(ValueError, match="derivative by scales"):
        torch.func.jvp(by_scales, (layer.scales,), (layer.scales,))
    with pytest.raises(ValueError, match="derivative by scales"):
        torch.func.grad(by_scales)(layer.scales)


@pytest.mark.parametrize(
    ("name", "backend"), [("dense", "aot_eager"), ("layer", "aot_eager"), ("operator", "eager")]
)
def test_a_compiled_graph_has_no_wrong_derivatives(name: str, backend: str) -> None:
    """PyTorch would take those of an operator, forwards, for zeros."""
    (functions, dense), (x, other) = of_codes(), torch.randn(2, 8)
    function = functions[name]
    compiled = functools.partial(torch.compile, backend=backend, fullgraph=True)
    forwards = compiled(lambda x: torch.func.jvp(function, (x,), (other,))[1])
    torch.testing.assert_close(forwards(x), dense @ other, rtol=1e-4, atol=1e-4)
    gradient = compiled(torch.func.grad(lambda x: function(x).sum()))
    torch.testing.assert_close(gradient(x), dense.sum(0), rtol=1e-4, atol=1e-4)

    def dual(x: Any) -> Any:
        with torch.autograd.forward_ad.dual_level():
            pair = function(torch.autograd.forward_ad.make_dual(x, other))
            return torch.autograd.forward_ad.unpack_dual(pair).tangent

    with pytest.raises(Exception, match=r"differentiated forwards .* within torch\.compile"):
        compiled(dual)(x)


@pytest.mark.parametrize("op", ["matvec_out", "vecmat_out", "matmul_out"])
def test_a_result_that_is_written_has_no_derivative(op: str) -> None:
    """Nor is there one of zeros."""
    A, x, out = torch.ones(4, 4), torch.ones(4), torch.zeros(4)
    pair = (x, A) if op == "vecmat_out" else (A, x)
    operator = getattr(torch.ops.gemmule, op)

    def written(x: Any) -> Any:
        fresh = torch.zeros(4)
        operator(*(x if one.ndim == 1 else one for one in pair), out=fresh)
        return fresh.sum()

    for transform in (torch.func.grad, torch.func.jacfwd, torch.vmap):
        with pytest.raises(ValueError, match="out= under"):
            transform(written)(torch.ones(4, 4) if transform is torch.vmap else x)
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(ValueError, match="given out= and a dual tensor"):
            written(torch.autograd.forward_ad.make_dual(x, x))
        with pytest.raises(ValueError, match="given out= and a dual tensor"):
            operator(*pair, out=torch.autograd.forward_ad.make_dual(out, x))
    with pytest.raises(ValueError, match="tensor that requires a gradient"):
        written(x.clone().requires_grad_())
    with torch.no_grad():
        assert written(x.clone().requires_grad_()).item() == 16.0


def test_operators_without_views_and_writes() -> None:
    """As torch.func.functionalize has them."""
    functions, _ = of_codes()
    x = torch.randn(8)
    for name in ("dense", "operator", "operator with bias"):
        assert torch.equal(torch.func.functionalize(functions[name])(x), functions[name](x))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_function_multiplies_by_a_matrix() -> None:
    """Outside of its graph, whatever is in it before and after."""
    A, x = torch.randn(5, 8), torch.randn(8)
    Q = gm.quantize(A, bits=4, group_size=4)
    host, dense = np.asarray(Q), torch.from_numpy(np.asarray(Q))
    codes = gm.quantize(A.numpy(), bits=4, group_size=4)

    cases: list[tuple[Any, Any, Any]] = [
        (lambda x: gm.matvec(Q, x * 2) + 1, x, dense @ (x * 2) + 1),
        (lambda x: gm.gemv(Q, x), x, dense @ x),
        (lambda x: x @ Q.T, x, dense @ x),
        (lambda x: torch.from_numpy(gm.matvec(host, x.numpy())) * 2, x, 2 * (dense @ x)),
        (lambda x: torch.from_numpy(gm.matvec(codes, x.numpy())) * 2, x, 2 * (dense @ x)),
    ]
    for function, given, wanted in cases:
        found = torch.compile(function, backend="eager")(given)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


MADE = {
    "sparse": (lambda: torch.eye(8).to_sparse(), "dense strided tensor"),
    "meta": (lambda: torch.eye(8, device="meta"), "with data"),
    "layer": (lambda: torch.nn.Linear(8, 8), r"got Linear. Give its \.weight"),
    "int8": (lambda: torch.eye(8).to(torch.int8), "W has dtype int8"),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_no_matrix_of_floats_is_said(name: str) -> None:
    make, words = MADE[name]
    with pytest.raises(TypeError, match=words):
        gm.quantize(make())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_importance_is_a_tensor_of_any_real_numbers(dtype: Any) -> None:
    W, importance = torch.randn(5, 8), torch.arange(8).to(dtype)
    wanted = gm.quantize(W, method="hqq", importance=np.arange(8.0))
    if dtype.is_floating_point:
        importance.requires_grad_()
    found = gm.quantize(W, method="hqq", importance=importance)
    assert np.array_equal(found.codes, wanted.codes)
    assert found.error == wanted.error
    with pytest.raises(TypeError, match="importance has dtype complex64"):
        gm.quantize(W, importance=torch.ones(8, dtype=torch.complex64))
    with pytest.raises(TypeError, match="importance has dtype"):
        gm.quantize(W, importance=["much"] * 8)
