"""Grouped products as PyTorch knows them: gradients of every order, tracing, batches, fakes."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import gemmule as gm  # noqa: E402
from checkout import ROOT  # noqa: E402


def operands(dtype: Any = torch.float64, tokens: int = 12) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    a, w = torch.randn(tokens, 8, dtype=dtype), torch.randn(4, 8, 6, dtype=dtype)
    return a, w, torch.tensor([3, 3, 9, 11], dtype=torch.int32)


def looped(a: Any, w: Any) -> Any:
    return torch.cat([a[0:3] @ w[0], a[3:9] @ w[2], a[9:11] @ w[3], torch.zeros_like(a[11:, :6])])


def test_gradients_of_both_directions_and_orders() -> None:
    a, w, ends = operands()
    a, w = a.requires_grad_(), w.requires_grad_()
    product = lambda a, w: gm.grouped_matmul(a, w, ends)  # noqa: E731
    torch.testing.assert_close(product(a, w), looped(a, w))
    assert torch.autograd.gradcheck(product, (a, w), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(product, (a, w), fast_mode=True)


def test_gradients_are_those_of_a_loop() -> None:
    a, w, ends = operands(torch.float32)
    ours, theirs = ([t.clone().requires_grad_() for t in (a, w)] for _ in range(2))
    gm.grouped_matmul(*ours, ends, out_dtype=torch.float32).square().sum().backward()
    looped(*theirs).square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert not ours[0].grad[11:].any()
    assert not ours[1].grad[1].any()


def test_compiled_without_a_break_and_transformed() -> None:
    a, w, ends = operands()
    compiled = torch.compile(gm.grouped_matmul, fullgraph=True, backend="aot_eager")
    left = a.clone().requires_grad_()
    result = compiled(left, w, ends)
    torch.testing.assert_close(result, looped(a, w))
    result.sum().backward()
    gradient = torch.func.grad(lambda x: gm.grouped_matmul(x, w, ends).sum())(a)
    torch.testing.assert_close(left.grad, gradient)
    batch = torch.vmap(lambda x, e: gm.grouped_matmul(x, w, e), in_dims=(0, 0))(
        torch.stack([a, 2 * a]), torch.stack([ends, ends])
    )
    torch.testing.assert_close(batch[1], 2 * looped(a, w))


@pytest.mark.filterwarnings("ignore")
def test_the_operators_keep_pytorchs_rules() -> None:
    a, w, ends = operands()
    given = a.requires_grad_(), w.requires_grad_(), ends
    torch.library.opcheck(torch.ops.gemmule.grouped_matmul.default, given)
    grad = torch.randn(12, 6, dtype=torch.float64)
    torch.library.opcheck(torch.ops.gemmule.grouped_outer.default, (a, grad, ends))


def test_what_has_no_gradient_says_so() -> None:
    a, w, ends = operands(torch.float32)
    stack = gm.quantize_experts(torch.randn(4, 64, 6), bits=8, group_size=32)
    x = torch.randn(12, 64)
    wanted = gm.grouped_matmul(x, stack, ends)
    assert isinstance(wanted, torch.Tensor)
    with pytest.raises(ValueError, match="QuantizedStack with a tensor that requires a gradient"):
        gm.grouped_matmul(x.requires_grad_(), stack, ends)
    with torch.no_grad():
        torch.testing.assert_close(gm.grouped_matmul(x, stack, ends), wanted)
    with pytest.raises(ValueError, match="a result written into a given tensor has none"):
        gm.grouped_matmul(a.requires_grad_(), w, ends, out=torch.empty(12, 6))
    with pytest.raises(ValueError, match="where the operator chooses"):
        gm.grouped_matmul(a, w, ends, rung="one_by_one")


def test_the_layer_of_the_examples_is_a_loop_over_its_experts() -> None:
    names = runpy.run_path(str(ROOT / "examples" / "experts_layer.py"))
    torch.manual_seed(0)
    layer = names["Experts"]("small", "cpu", torch.float32)
    weights = layer.gate_up.transpose(1, 2), layer.down.transpose(1, 2)
    codes = tuple(gm.quantize_experts(w, bits=8, group_size=64) for w in weights)
    for tokens in (1, 20):
        x = torch.randn(tokens, 256)
        with torch.no_grad():
            wanted = layer(x, names["looped"], weights)
            torch.testing.assert_close(layer(x, gm.grouped_matmul, weights), wanted)
            off = layer(x, gm.grouped_matmul, codes) - wanted
        assert off.norm() < 0.05 * wanted.norm()
