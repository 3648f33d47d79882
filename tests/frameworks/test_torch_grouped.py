"""Grouped products as PyTorch knows them: gradients of every order, tracing, batches, fakes."""

from __future__ import annotations

import random
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


def alike(a: Any, w: Any, ends: Any, dtype: Any = None) -> Any:
    """Return the product by PyTorch's own operators, expert by expert, with zeros behind them."""
    begin, parts = 0, []
    for matrix, end in zip(w, ends.tolist(), strict=True):
        parts.append(a[begin:end] @ matrix)
        begin = end
    result = torch.cat([*parts, a[begin:] @ torch.zeros_like(w[0])])
    return result if dtype is None else result.to(dtype)


def laid(rng: random.Random, tensor: Any) -> Any:
    """Return the tensor's numbers in another order in memory, with gaps or behind others."""
    others: list[Any] = [
        tensor,
        tensor.mT.contiguous().mT,
        torch.stack([tensor, tensor.flip(0)], -1)[..., 0],
        torch.cat([tensor[:1], tensor])[1:],
    ]
    return rng.choice(others)


def mapped(one: Any, dims: list[Any], operands: Any) -> Any:
    """Return ``one`` over a batch by a loop; dims: which axis of each operand it is, or None."""
    size = next(t.shape[d] for t, d in zip(operands, dims, strict=True) if d is not None)
    pairs = list(zip(operands, dims, strict=True))
    entry = lambda i: (t if d is None else t.select(d, i) for t, d in pairs)  # noqa: E731
    return torch.stack([one(*entry(i)) for i in range(size)])


@pytest.mark.parametrize("number", range(60))
def test_random_calls_are_those_of_pytorchs_loop(number: int) -> None:
    """Dtypes, strides, autocast, batches along any axis, gradients, and codes as weights."""
    rng = random.Random(f"grouped {number}")
    torch.manual_seed(number)
    tokens, k, n, experts = rng.randint(1, 9), rng.choice((32, 64)), rng.randint(1, 7), 3
    dtype = rng.choice((torch.float64, torch.float32, torch.float16, torch.bfloat16))
    coded = rng.random() < 0.3 and dtype != torch.float64
    batched, grads = not coded and rng.random() < 0.5, not coded and rng.random() < 0.5
    dims = [
        rng.choice((None, *axes)) if batched else None for axes in ((0, 1, -1),) * 2 + ((0, 1),)
    ]
    dims[0] = 1 if batched and not any(d is not None for d in dims) else dims[0]
    shape = lambda own, d: own if d is None else (*own[:d], 2, *own[d:]) if d >= 0 else (*own, 2)  # noqa: E731
    a = laid(rng, torch.randn(shape((tokens, k), dims[0]), dtype=dtype) / 8)
    w = laid(rng, torch.randn(shape((experts, k, n), dims[1]), dtype=dtype) / 8)
    ends = torch.randint(tokens + 1, shape((experts,), dims[2]), dtype=torch.int32)
    ends = ends.sort(1 if dims[2] == 0 else 0).values
    wide = rng.choice((None, torch.float32)) if dtype != torch.float64 else None
    ours: list[Any] = [t.detach().clone().requires_grad_(grads) for t in (a, w)]
    theirs: list[Any] = [t.detach().clone().requires_grad_(grads) for t in (a, w)]
    if coded:
        ours[1] = gm.quantize_experts(w.float(), bits=8, group_size=32)
        theirs[1] = torch.as_tensor(ours[1].dequantize()).to(dtype)
    product = lambda a, w, e: gm.grouped_matmul(a, w, e, out_dtype=wide)  # noqa: E731
    known = lambda a, w, e: alike(a, w, e, wide)  # noqa: E731
    cast = rng.random() < 0.4
    with torch.autocast("cpu", torch.bfloat16, enabled=cast), torch.set_grad_enabled(grads):
        if batched:
            found = torch.vmap(product, in_dims=tuple(dims))(*ours, ends)
            wanted = mapped(known, dims, (*theirs, ends))
        else:
            found, wanted = product(*ours, ends), known(*theirs, ends)
    rough = cast or dtype in (torch.float16, torch.bfloat16)
    close = {"rtol": 0.04, "atol": 0.04} if rough else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found, wanted, **close)
    if grads:
        toward = torch.randn_like(found)
        found.backward(toward)
        wanted.backward(toward)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad, **close)


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
    halves = a.detach().half(), w.detach().half(), ends
    wide = {"out_dtype": torch.float32}
    torch.library.opcheck(torch.ops.gemmule.grouped_matmul.default, halves, wide)
    grad = torch.randn(12, 6, dtype=torch.float64)
    torch.library.opcheck(torch.ops.gemmule.grouped_outer.default, (a, grad, ends))


def test_what_has_no_gradient_says_so() -> None:
    a, w, ends = operands(torch.float32)
    with pytest.raises(ValueError, match="a result written into a given tensor has none"):
        gm.grouped_matmul(a.requires_grad_(), w, ends, out=torch.empty(12, 6))
    with pytest.raises(ValueError, match="where the operator chooses"):
        gm.grouped_matmul(a, w, ends, rung="one_by_one")


def stacked() -> tuple[Any, Any]:
    """Return a stack, and the matrices that it stands for."""
    stack = gm.quantize_experts(torch.randn(4, 64, 6), bits=8, group_size=32)
    return stack, torch.from_numpy(stack.dequantize().copy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_beside_a_stack_are_those_beside_its_matrices(dtype: Any) -> None:
    (_, _, ends), (stack, w) = operands(), stacked()
    x = torch.randn(12, 64, dtype=dtype)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    result = gm.grouped_matmul(ours, stack, ends)
    assert result.dtype == dtype
    result.float().square().sum().backward()
    gm.grouped_matmul(theirs, w.to(dtype), ends).float().square().sum().backward()
    off = (ours.grad - theirs.grad).float().norm() / theirs.grad.float().norm()
    assert off < (1e-5 if dtype == torch.float32 else 2e-2)
    assert not ours.grad[11:].any()
    tangent = torch.func.jvp(lambda x: gm.grouped_matmul(x, stack, ends), (x,), (x,))[1]
    torch.testing.assert_close(tangent, gm.grouped_matmul(x, stack, ends))


def routed_loop(a: Any, w: Any, indices: Any, weights: Any, gated: bool) -> Any:
    """Multiply slot by slot; a slot that names no expert is zeros."""
    slots = []
    for t, own in enumerate(indices.tolist()):
        for j, e in enumerate(own):
            row = a[t, j] if a.ndim == 3 else a[t]
            found = row @ w[e] if 0 <= e < len(w) else 0 * row[0] * w[0, 0]
            if gated:
                gate, up = found.chunk(2)
                found = torch.nn.functional.silu(gate) * up
            slots.append(found)
    found = torch.stack(slots).unflatten(0, indices.shape)
    return found if weights is None else (found * weights[..., None]).sum(1)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("own", [False, True], ids=["rows of tokens", "rows of slots"])
def test_gradients_by_indices(gated: bool, weighted: bool, own: bool) -> None:
    torch.manual_seed(0)
    indices = torch.tensor([[0, 3], [3, 1], [-1, 3], [4, 0], [3, 3]])
    shape = (5, 2, 8) if own else (5, 8)
    a = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 8, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(5, 2, dtype=torch.float64, requires_grad=True) if weighted else None
    given = (a, w, weights) if weighted else (a, w)

    def product(a: Any, w: Any, weights: Any = None) -> Any:
        epilogue = "silu_gate" if gated else None
        return gm.grouped_matmul(a, w, indices=indices, weights=weights, epilogue=epilogue)

    wanted = routed_loop(a, w, indices, weights, gated)
    torch.testing.assert_close(product(*given), wanted)
    with torch.no_grad():
        torch.testing.assert_close(product(*given), wanted)
    assert torch.autograd.gradcheck(product, given, fast_mode=True, check_forward_ad=True)
    if not weighted:
        return
    if gated:
        compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*given), wanted)
    wish = weights.detach().requires_grad_()  # and nobody else
    product(a.detach(), w.detach(), wish).sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(wish.grad, weights.grad)
    batch = torch.vmap(lambda one: product(one, *given[1:]))(torch.stack([a, 2 * a]))
    torch.testing.assert_close(batch[0], wanted)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_halves_are_rounded_once_where_gradients_are_asked_for(gated: bool, weighted: bool) -> None:
    torch.manual_seed(0)
    a = torch.randn(40, 8, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(4, 8, 64, dtype=torch.bfloat16)
    indices, shares = torch.randint(0, 4, (40, 2)), torch.rand(40, 2, dtype=torch.bfloat16)
    weights, epilogue = shares if weighted else None, "silu_gate" if gated else None
    found = gm.grouped_matmul(a, w, indices=indices, weights=weights, epilogue=epilogue)
    wide = None if weights is None else weights.double()
    wanted = routed_loop(a.double(), w.double(), indices, wide, gated)
    assert found.requires_grad
    alike = (found == wanted.to(torch.bfloat16)).double().mean()
    assert alike > 0.99, "else a sum was rounded before its gate or its weight"


def test_a_stack_by_indices() -> None:
    stack, w = stacked()
    indices, weights = torch.tensor([[0, 3], [3, 1], [2, 3]]), torch.rand(3, 2)
    x = torch.randn(3, 64, requires_grad=True)
    found = gm.grouped_matmul(x, stack, indices=indices, weights=weights)
    torch.testing.assert_close(found, routed_loop(x, w, indices, weights, gated=False))
    with torch.no_grad():
        same = gm.grouped_matmul(x, stack, indices=indices, weights=weights)
    torch.testing.assert_close(found, same)


@pytest.mark.filterwarnings("ignore")
def test_the_operators_of_a_stacks_tensors_keep_pytorchs_rules() -> None:
    import gemmule.torch as gt

    held, _ = stacked()
    module = gt.QuantStack(held)
    form = module.codes, module.scales, module.zeros, 4, 64, 8, 32
    x = torch.randn(12, 64, requires_grad=True)
    ends = torch.tensor([3, 3, 9, 11], dtype=torch.int32)
    given = (x, ends, False, None, *form)
    torch.library.opcheck(torch.ops.gemmule.quantized_grouped.default, given)
    weights = torch.rand(12, 2, requires_grad=True)
    indices = torch.randint(0, 4, (12, 2))
    given = (x, indices, weights, None, *form)
    torch.library.opcheck(torch.ops.gemmule.quantized_routed.default, given)
    torch.testing.assert_close(
        module(x, indices=indices, weights=weights),
        gm.grouped_matmul(x, held, indices=indices, weights=weights),
    )
    torch.testing.assert_close(module(x, ends), gm.grouped_matmul(x, held, ends))
    nobody = (*(part[:0] for part in form[:3]), 0, *form[4:])  # as a process without experts
    given = torch.zeros(3, 64, device="meta"), ends[:0].to("meta"), False, None
    made = torch.ops.gemmule.quantized_grouped.default(
        *given, *(part.to("meta") for part in nobody[:3]), *nobody[3:]
    )
    assert made.shape == (3, 0)
    a, w, _ = operands()
    given = (a.requires_grad_(), w.requires_grad_(), indices, weights.double(), None, "silu_gate")
    torch.library.opcheck(torch.ops.gemmule.routed_matmul.default, given)
    with torch.no_grad():  # by the kernel itself, which nothing composes
        found = torch.ops.gemmule.routed_matmul.default(*given)
    wanted = routed_loop(a, w, indices, weights.double(), gated=True)
    torch.testing.assert_close(found, wanted.detach())


def test_the_layer_of_the_examples_is_a_loop_over_its_experts() -> None:
    names = runpy.run_path(str(ROOT / "examples" / "experts_layer.py"))
    torch.manual_seed(0)
    layer = names["Layer"]("small", "cpu", torch.float32)
    ways = {name: way for name, (way, _) in names["ways_of"](layer).items()}
    ways["sorted"] = names["by_sorting"](gm.grouped_matmul, *layer.matrices)
    for tokens in (1, 20):
        x = torch.randn(tokens, 256)
        with torch.no_grad():
            wanted = layer(x, ways["loop"])
            for name in ("gemmule", "sorted"):
                torch.testing.assert_close(layer(x, ways[name]), wanted)
            off = layer(x, ways["gemmule int4"]) - wanted
        assert off.norm() < 0.25 * wanted.norm()


class Placed(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True


def test_gradients_of_weights_go_to_pytorch_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it takes them: rows of whole 16 bytes; then ends may say anything."""
    import gemmule.frameworks.grouped  # noqa: F401

    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("PyTorch has none before 2.10")
    met: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda a, b, offs: met.append(offs.tolist()) or a
    )
    a, grad = (torch.zeros(7, n, dtype=torch.bfloat16).as_subclass(Placed) for n in (16, 24))
    ends = torch.tensor([2, 1, 9], dtype=torch.int32)
    assert torch.ops.gemmule.grouped_outer(a, grad, ends).shape == (16, 7)
    assert met == [[2, 2, 7]]
