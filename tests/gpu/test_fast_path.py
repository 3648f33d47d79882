"""The fast path of CUDA tensors, and products that do not take it, against the general path."""

from __future__ import annotations

from typing import Any

import pytest

import gemmule as gm
from gemmule.arrays.interop import unwrap
from gemmule.dispatch.torch import TensorCall
from gemmule.torch.linear import QuantLinear

torch = pytest.importorskip("torch")

from host_tensors import negated  # noqa: E402

# Launches of one kernel and of several, with a cluster, with a workspace, with tensor maps.
KINDS = [
    ("matvec", "streamed_rows", (1000, 4096)),
    ("matvec", "clustered_rows", (100, 65536)),
    ("vecmat", "block_columns", (1000, 4096)),
    ("vecmat", "clustered_columns", (512, 512)),
    ("vecmat", "split_columns", (65536, 128)),
    ("matmul", "wgmma_3xfp16", (300, 200)),
    ("matmul", "few_columns", (4096, 4096)),
]


def operands(op: str, shape: tuple[int, int], seed: int) -> tuple[Any, Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    a = torch.randn(shape, generator=generator, device="cuda")
    size = shape[op != "vecmat"]
    wide = (size, 5) if op == "matmul" else (size,)
    x = torch.randn(wide, generator=generator, device="cuda")
    return (x, a) if op == "vecmat" else (a, x)


@pytest.mark.parametrize(("op", "rung", "shape"), KINDS)
def test_every_kind_of_launch(op: str, rung: str, shape: tuple[int, int]) -> None:
    first = operands(op, shape, 0)
    plan = gm.plan(op, *first, rung=rung)
    assert isinstance(plan.fast_path, TensorCall)
    for seed in range(20):  # back to back: workspaces and arguments of one call meet the next's
        left, right = operands(op, shape, seed)
        short = plan(left, right)
        general = plan.execute(unwrap(left, "A"), unwrap(right, "B"), None)
        assert torch.equal(short, general)
        exact = left.double() @ right.double()
        torch.testing.assert_close(short.double(), exact, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(("op", "rung", "shape"), KINDS)
def test_on_a_stream_of_its_own_and_into_out(op: str, rung: str, shape: tuple[int, int]) -> None:
    left, right = operands(op, shape, 3)
    expected = getattr(gm, op)(left, right, rung=rung)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = torch.full_like(expected, float("nan"))
        for _ in range(50):
            assert getattr(gm, op)(left, right, rung=rung, out=out) is out
    stream.synchronize()
    assert torch.equal(out, expected)


def test_a_lazily_negated_view_is_no_plain_memory() -> None:
    a = torch.randn((64, 64), device="cuda")
    x = negated(torch.randn(64, device="cuda"))
    assert x.is_neg()
    assert x.is_contiguous()
    expected = a.double() @ x.double()
    plan = gm.plan("matvec", a, x.clone())
    for result in (gm.matvec(a, x), plan(a, x)):
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-3)


# Quantised products of one launch, of a cluster, of several kernels.
CODED = [
    ("matvec", {}, (1000, 4096)),
    ("matvec", {"bits": 8, "group_size": 40}, (300, 1000)),
    ("vecmat", {"symmetric": True}, (1024, 2048)),
    ("vecmat", {}, (16384, 16384)),
    ("matmul", {}, (512, 1024)),
]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("op", "options", "shape"), CODED)
def test_a_quantised_matrix(
    op: str, options: dict[str, Any], shape: tuple[int, int], dtype: str
) -> None:
    def vector(seed: int) -> Any:
        generator = torch.Generator("cuda").manual_seed(seed)
        size = shape[op != "vecmat"]
        wide = (size, 5) if op == "matmul" else (size,)
        return torch.randn(wide, generator=generator, device="cuda").to(getattr(torch, dtype))

    def pair(matrix: Any, x: Any) -> tuple[Any, Any]:
        return (x, matrix) if op == "vecmat" else (matrix, x)

    Q, other = (gm.quantize(torch.randn(shape, device="cuda"), **options) for _ in range(2))
    plan = gm.plan(op, *pair(Q, vector(0)))
    assert isinstance(plan.fast_path, TensorCall)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for seed in range(10):
            matrix, x = (Q, other)[seed % 2], vector(seed)
            left, right = pair(matrix, x)
            expected = plan.execute(unwrap(left, "A"), unwrap(right, "B"), None)
            out = torch.full_like(expected, float("nan"))
            assert plan(left, right, out=out) is out
            results = plan(left, right), getattr(gm, op)(left, right), left @ right, out
            assert all(torch.equal(result, expected) for result in results)
    stream.synchronize()
    x = vector(1)
    square = gm.quantize(torch.randn((x.shape[0], x.shape[0]), device="cuda"), **options)
    with pytest.raises(ValueError, match="overlaps"):
        getattr(gm, op)(*pair(square, x), out=x)
    host = Q.to("cpu")
    with pytest.raises(TypeError, match="library"):
        plan(*pair(host, x))


def test_a_gradient_is_asked_for_beside_a_quantised_matrix() -> None:
    Q = gm.quantize(torch.randn((64, 96), device="cuda"))
    plan = gm.plan("matvec", Q, torch.randn(96, device="cuda"))
    x = torch.randn(96, device="cuda", requires_grad=True)
    for product in (lambda: Q @ x, lambda: gm.matvec(Q, x)):
        product().sum().backward()
        assert x.grad is not None
        x.grad = None
    assert not plan(Q, x.detach()).requires_grad


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("tokens", "bits"), [(1, 4), (1, 8), (5, 8), (20, 4)])
def test_a_layer_adds_its_bias(tokens: int, bits: Any, dtype: str) -> None:
    """By the kernel or after it: within a rounding of the exact sum, as far as the product is."""
    kind = getattr(torch, dtype)
    Q = gm.quantize(torch.randn((515, 768), device="cuda"), bits=bits, group_size=128)
    bias = torch.randn(515, device="cuda", dtype=kind) * 4
    layer = QuantLinear.from_matrix(Q, bias.clone()).requires_grad_(False)
    bare = QuantLinear.from_matrix(Q)
    x = torch.randn((tokens, 768), device="cuda", dtype=kind)
    found, exact = layer(x).double(), bare(x.float()).double() + bias.double()
    steps = torch.finfo(kind).eps * exact.abs().max()
    assert (found - exact).abs().max() <= 2 * steps + 1e-3
    assert torch.equal(layer(x), layer(x))


def test_a_layer_that_was_met_is_recorded_as_an_operator() -> None:
    layer = QuantLinear.from_linear(torch.nn.Linear(256, 128, device="cuda").requires_grad_(False))
    x, other = torch.randn(2, 3, 256, device="cuda").unbind()
    for _ in range(3):  # from the second on by what the first left
        layer(x)
    assert torch.equal(torch.jit.trace(layer, x)(other), layer(other))
