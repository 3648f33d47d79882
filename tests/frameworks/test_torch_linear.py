"""Quantised linear layers: what they compute, their gradients, graphs, state and errors."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import io
import itertools
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkout import ROOT

torch = pytest.importorskip("torch")

import gemmule as gm  # noqa: E402
from gemmule.torch import linear as gl  # noqa: E402

OPTIONS = [
    {"bits": 4, "group_size": 16},
    {"bits": 8, "group_size": -1, "symmetric": True, "scale_dtype": "float16"},
    {"bits": 4, "group_size": None, "scale_dtype": "bfloat16"},
    {"bits": 4, "group_size": 32, "perm": np.random.default_rng(0).permutation(48)},
]


def linear(seed: int = 0, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Linear(48, 20).to(dtype)


def dense(layer: Any, x: Any) -> Any:
    """The layer with its exact weights, in float64."""
    weight = torch.from_numpy(layer.matrix.dequantize("float64"))
    return x.double() @ weight.T + (0 if layer.bias is None else layer.bias.double())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward(options: dict[str, Any], dtype: Any) -> None:
    plain = linear(dtype=dtype)
    layer = gl.QuantLinear.from_linear(plain, **options)
    Q = gm.quantize(plain.weight, **options)
    np.testing.assert_array_equal(layer.matrix.dequantize(), Q.dequantize())
    for shape in ((48,), (1, 48), (3, 48), (2, 3, 48), (0, 48)):
        x = torch.randn(shape, dtype=dtype)
        y = layer(x)
        assert (y.dtype, y.shape) == (dtype, (*shape[:-1], 20))
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(y.double(), dense(layer, x), rtol=tolerance, atol=tolerance)
    strided = torch.randn(48, 7, dtype=dtype).T
    torch.testing.assert_close(layer(strided), layer(strided.contiguous()))


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients(options: dict[str, Any]) -> None:
    layer = gl.QuantLinear.from_linear(linear().double(), **options)
    x = torch.randn(3, 48, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x)
    layer(x).sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((20,), 3.0, dtype=torch.float64))


@pytest.mark.parametrize("options", OPTIONS[:3])  # a permutation is copied, and goes the long way
@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_met_before_is_differentiated_as_at_first_sight(
    options: dict[str, Any], biased: bool
) -> None:
    """Autograd is given and keeps less then: the same numbers, the same tensors are saved."""
    layer = gl.QuantLinear.from_linear(linear(), **options)
    layer.bias.requires_grad_(biased)
    x, seed = torch.randn(5, 48, requires_grad=True), torch.randn(5, 20, requires_grad=True)
    wanted = [x, *([layer.bias] if biased else [])]
    found = []
    for _ in range(3):
        saved: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda one, saved=saved: saved.append(one) or one, lambda one: one
        ):
            y = layer(x)
        first = torch.autograd.grad(y, wanted, seed, create_graph=True)
        second = torch.autograd.grad(first[0].sum(), seed, retain_graph=True)
        found.append((y.grad_fn.name(), len(saved), [y, *first, *second]))
    assert found[0][0] != found[1][0] == found[2][0], "the short way is taken"
    assert found[0][1] == found[1][1] == found[2][1] > 0
    for again in found[1:]:
        for one, other in zip(found[0][2], again[2], strict=True):
            assert torch.equal(one, other)
    weight = torch.from_numpy(layer.matrix.dequantize("float64")).float()
    torch.testing.assert_close(found[1][2][1], seed.detach() @ weight, rtol=1e-4, atol=1e-4)


def test_a_layer_met_before_still_tells_what_has_no_derivative() -> None:
    layer = gl.QuantLinear.from_linear(linear(), bits=8, group_size=16)
    x = torch.randn(3, 48, requires_grad=True)
    layer(x), layer(x).sum().backward()
    y = layer(x)
    layer.codes.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    layer(x)
    assert torch.func.grad(lambda x: layer(x).sum())(x.detach()).shape == x.shape
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
    for part in (layer.scales, layer.zeros):
        part.requires_grad_(True)
        with pytest.raises(ValueError, match="scales or zero points"):
            layer(x).sum().backward()
        part.requires_grad_(False)


def test_the_operator_is_sound() -> None:
    layer = gl.QuantLinear.from_linear(linear(), **OPTIONS[3])
    parts = (layer.codes, layer.scales, layer.zeros, layer.perm, 20, 48, 4, 32)
    x = torch.randn(3, 48, requires_grad=True)
    torch.library.opcheck(torch.ops.gemmule.quantized_linear.default, (x, *parts))
    bias = torch.randn(20, requires_grad=True)
    torch.library.opcheck(torch.ops.gemmule.quantized_linear.default, (x, *parts, False, bias))


@pytest.mark.parametrize("options", OPTIONS)
def test_the_operator_adds_a_bias(options: dict[str, Any]) -> None:
    layer = gl.QuantLinear.from_linear(linear(), **options)
    form = (20, 48, layer.bits, layer.group_size)
    parts = (layer.codes, layer.scales, layer.zeros, layer.perm, *form)
    operator = torch.ops.gemmule.quantized_linear.default
    x, bias = torch.randn(2, 3, 48), torch.randn(20)
    kept = bias.clone()
    plain = operator(x, *parts)
    assert torch.equal(operator(x, *parts, False, bias), plain + bias)
    assert torch.equal(operator(x[0, 0], *parts, False, bias), operator(x[0, 0], *parts) + bias)
    assert torch.equal(operator(x[:0], *parts, False, bias), plain[:0])
    other = torch.randn(48)
    back = operator(plain, *parts, True, other)
    torch.testing.assert_close(back, operator(plain, *parts, True) + other)
    assert torch.equal(bias, kept)
    operator(x, *parts, False, bias.requires_grad_()).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((20,), 6.0))
    for wrong in (torch.ones(19), torch.ones(1, 20), torch.ones(())):
        with pytest.raises(ValueError, match="bias has shape"):
            operator(x, *parts, False, wrong)
        with pytest.raises(ValueError, match="bias has shape"):
            operator(x.to("meta"), *parts, False, wrong)


def test_who_wants_gradients_of_a_bias() -> None:
    layer = gl.QuantLinear.from_linear(linear(), bits=8)
    x = torch.randn(2, 3, 48)
    with torch.no_grad():
        expected = layer(x)
    assert not expected.requires_grad
    for wants_x, wants_bias in itertools.product((False, True), repeat=2):
        given = x.clone().requires_grad_(wants_x)
        layer.bias.requires_grad_(wants_bias).grad = None
        y = layer(given)
        assert torch.equal(y, expected)
        assert y.requires_grad == (wants_x or wants_bias)
        if y.requires_grad:
            y.sum().backward()
        assert (given.grad is not None, layer.bias.grad is not None) == (wants_x, wants_bias)
        if wants_bias:
            torch.testing.assert_close(layer.bias.grad, torch.full((20,), 6.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bias_of_another_dtype_is_added_as_it_is(dtype: Any) -> None:
    layer = gl.QuantLinear.from_linear(linear(), bits=8)
    with torch.no_grad():
        layer.bias.normal_(std=100)
        x = torch.randn(3, 48, dtype=dtype)
        y, bare = layer(x), gl.QuantLinear.from_matrix(layer.matrix)(x)
        assert y.dtype == dtype
        assert torch.equal(y, (bare.float() + layer.bias).to(dtype))


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(48, 96), torch.nn.GELU(), torch.nn.Linear(96, 48)
        )
        self.again = self.inner[0]
        self.attention = torch.nn.MultiheadAttention(48, 4)
        self.head = torch.nn.Linear(48, 5, bias=False)

    def forward(self, x: Any) -> Any:
        return self.head(x + self.inner(x))


def test_a_whole_model_compiles_without_a_break() -> None:
    torch.manual_seed(0)
    model = gl.quantize_(Block(), group_size=16).model
    x = torch.randn(4, 48)
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(compiled(x[:2]), expected[:2])


def test_quantize_replaces_what_the_filter_takes() -> None:
    torch.manual_seed(0)
    seen: list[str] = []
    model = Block()
    same = gl.quantize_(model, filter=lambda name, _: seen.append(name) or name != "head").model
    assert same is model
    assert seen == ["again", "head", "inner.0", "inner.2"]
    assert type(model.head) is torch.nn.Linear
    assert model.again is model.inner[0]
    assert type(model.inner[0]) is gl.QuantLinear
    assert isinstance(model.attention.out_proj, torch.nn.Linear)
    with pytest.raises(ValueError, match="from_linear"):
        gl.quantize_(linear())


def test_state_goes_round() -> None:
    torch.manual_seed(0)
    model, other = (gl.quantize_(Block(), bits=8, scale_dtype="bfloat16").model for _ in "ab")
    x = torch.randn(2, 48)
    assert not torch.equal(model(x), other(x))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)
    empty = gl.QuantLinear(48, 96, bits=8, scale_dtype="bfloat16")
    empty.load_state_dict(model.inner[0].state_dict())
    torch.testing.assert_close(empty(x), model.inner[0](x), rtol=0, atol=0)
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"was saved with {'bits': 8,"):
        gl.QuantLinear(48, 96, bits=4, scale_dtype="bfloat16").load_state_dict(empty.state_dict())


def test_scales_that_another_dtype_does_not_hold_are_refused() -> None:
    for size in (1.0, 2.0**-30):
        state = gl.QuantLinear.from_linear(linear(), bits=8).state_dict()
        state["scales"] = state["scales"] / state["scales"].max() * size
        halves = gl.QuantLinear(48, 20, bits=8, group_size=128, scale_dtype="float16")
        with pytest.raises(RuntimeError, match=r"which torch.float16 does not hold"):
            halves.load_state_dict(state)


def test_a_bias_to_be_trained_is_added_in_the_dtype_of_the_vectors() -> None:
    layer = gl.QuantLinear.from_linear(linear(), bits=8)
    assert layer.bias.requires_grad
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert layer(torch.ones(2, 48, dtype=dtype)).dtype == dtype


def test_a_derivative_forwards_has_the_dtype_of_the_result() -> None:
    layer = gl.QuantLinear.from_linear(linear(), bits=8).requires_grad_(False)
    x = torch.ones(2, 48, dtype=torch.float16)

    def of(x: Any, bias: Any) -> Any:
        return torch.func.functional_call(layer, {"bias": bias}, (x,))

    directions = torch.ones_like(x), torch.ones(20)
    y, derivative = torch.func.jvp(of, (x, layer.bias.detach()), directions)
    assert y.dtype == derivative.dtype == torch.float16


def test_a_change_in_place_is_seen() -> None:
    layer = gl.QuantLinear.from_linear(linear(), bits=8, group_size=-1)
    x, before = torch.ones(48), None
    before = layer(x)
    layer.scales *= 2
    torch.testing.assert_close(layer(x) - layer.bias, 2 * (before - layer.bias))


def test_the_operator_sees_a_change_in_place_and_another_reading_of_the_same_codes() -> None:
    layer = gl.QuantLinear.from_linear(torch.nn.Linear(32, 8, bias=False), bits=4, group_size=16)
    parts, x = (layer.codes, layer.scales, layer.zeros, None), torch.ones(2, 32)
    multiply = torch.ops.gemmule.quantized_linear
    first = multiply(x, *parts, 8, 32, 4, 16)
    assert torch.equal(multiply(x, *parts, 8, 32, 4, 16), first)
    layer.scales.mul_(2)
    assert torch.equal(multiply(x, *parts, 8, 32, 4, 16), 2 * first)
    wide = multiply(x[:, :16], *parts, 8, 16, 8, 8)  # a byte is one code there
    assert not torch.equal(wide, 2 * first)
    assert torch.equal(multiply(x, *parts, 8, 32, 4, 16), 2 * first)


def test_other_dtypes_leave_the_numbers_alone() -> None:
    layer = gl.QuantLinear.from_linear(linear(), method="hqq", group_size=16)
    parts = {name: tensor.clone() for name, tensor in layer.named_buffers()}
    layer.half()
    for name, tensor in parts.items():
        assert torch.equal(getattr(layer, name), tensor)
    assert layer.bias.dtype == torch.float16
    assert layer(torch.ones(48).half()).dtype == torch.float16


def test_matrices_are_forgotten_with_their_tensors() -> None:
    def held() -> int:
        gc.collect()
        return sum(isinstance(one, gm.QuantizedMatrix) for one in gc.get_objects())

    before = held()
    layer = gl.QuantLinear.from_linear(linear())
    layer(torch.ones(48))
    assert held() > before
    del layer
    assert held() == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.float64])
def test_autocast_is_that_of_a_linear_layer(dtype: Any, given: Any) -> None:
    plain = linear(dtype=given)
    layer, x = gl.QuantLinear.from_linear(plain, bits=8), torch.randn(2, 48, dtype=given)
    with torch.autocast("cpu", dtype):
        y = layer(x)
        assert y.dtype == plain(x).dtype
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), y)
    with torch.no_grad():
        assert torch.equal(y, layer(x.to(y.dtype)))
        assert layer(x).dtype == given


def test_layers_without_inputs_or_outputs() -> None:
    for shape in ((3, 0), (1, 0), (0, 0), (0,), (2, 3, 0)):
        for layer in (gl.QuantLinear(0, 2), gl.QuantLinear(0, 2, bias=False)):
            assert torch.equal(layer(torch.ones(shape)), torch.zeros(*shape[:-1], 2))
    assert gl.QuantLinear(4, 0)(torch.ones(3, 4)).shape == (3, 0)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_pytorchs_own_transformer(training: bool, grad: bool) -> None:
    """Outside of training it has a kernel of its own, which wants float weights."""
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False).train(training)
    coarse = gl.quantize_(copy.deepcopy(model), bits=8).model
    assert sum(isinstance(one, gl.QuantLinear) for one in coarse.modules()) == 4
    assert all(one.training == training for one in coarse.modules())
    x = torch.randn(2, 5, 16)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(coarse(x), model(x), rtol=0.05, atol=0.05)


def test_the_layer_that_cannot_be_quantised_is_named() -> None:
    model = torch.nn.Sequential(linear(), torch.nn.Sequential(linear()))
    with torch.no_grad():
        model[1][0].weight[2, 3] = torch.nan
    with pytest.raises(ValueError, match=r"layer '1\.0': W\[2, 3\] is nan"):
        gl.quantize_(model)
    for wrong in (torch.nn.Conv1d(4, 4, 1), torch.nn.Embedding(3, 4), None):
        with pytest.raises(TypeError, match=r"is no torch\.nn\.Linear"):
            gl.QuantLinear.from_linear(wrong)
    for sizes, options, words in (
        ((4, -2), {}, "sizes must lie in"),
        ((4, 2), {"group_size": 0}, "group_size is 0"),
        ((4, 2), {"bits": 5}, "bits is 5"),
    ):
        with pytest.raises(ValueError, match=words):
            gl.QuantLinear(*sizes, **options)
    with pytest.raises(TypeError, match="must be an int"):
        gl.QuantLinear(4.5, 2)


def test_wrong_layers_and_tensors() -> None:
    Q = gm.quantize(np.ones((20, 48), np.float32), group_size=16)
    with pytest.raises(ValueError, match="transposed"):
        gl.QuantLinear.from_matrix(Q.T)
    with pytest.raises(ValueError, match="bias has shape"):
        gl.QuantLinear.from_matrix(Q, torch.ones(3))
    layer = gl.QuantLinear.from_matrix(Q)
    with pytest.raises(ValueError, match="summed axis"):
        layer(torch.ones(47))
    with pytest.raises(TypeError, match="multiplies"):
        layer(torch.ones(48, dtype=torch.int64))
    for scalar in (torch.tensor(1.0), torch.tensor(1.0, requires_grad=True)):
        with pytest.raises(ValueError, match="x is 0-D"):
            layer(scalar)
    with pytest.raises(TypeError, match=r"takes a torch\.Tensor"):
        layer(np.ones(48, np.float32))
    layer.codes = layer.codes[:, :-1]
    with pytest.raises(ValueError, match="codes have shape"):
        layer(torch.ones(48))
    layer.codes, layer.scales = _fresh(Q), torch.full_like(layer.scales, torch.nan)
    with pytest.raises(ValueError, match="finite"):
        layer(torch.ones(48))


def _fresh(Q: Any) -> Any:
    return torch.from_numpy(Q.codes.copy())


def test_the_page_runs() -> None:
    page = (ROOT / "docs" / "quantised.md").read_text("utf-8")
    names: dict[str, object] = {}
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page, re.S)):
        exec(compile(block, f"quantised.md block {number}", "exec"), names)


EXAMPLE = ROOT / "examples" / "generate_tokens.py"


def test_the_example_says_what_it_needs(
    fault: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    names = runpy.run_path(str(EXAMPLE))
    fault(importlib.util, "find_spec", lambda sound, name: None)
    names["main"]()
    assert capsys.readouterr().out.startswith("skipped: this example needs transformers")


@pytest.mark.skipif(
    not hasattr(torch, "_weight_int4pack_mm_for_cpu"), reason="this PyTorch has no tinygemm on CPUs"
)
def test_what_the_example_compares_computes_the_same() -> None:
    """PyTorch's int4 layers and ours, of the same weights, are both within int4 of the layer."""
    names = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(5)
    model = torch.nn.Sequential()
    model.add_module("inner", torch.nn.Linear(256, 64, bias=False, dtype=torch.bfloat16))
    model.add_module(names["LAST"], torch.nn.Linear(64, 16, bias=False, dtype=torch.bfloat16))
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        exact = model.inner(x).float()
        for name, change in names["ways"]():
            changed = change(copy.deepcopy(model))
            error = (changed.inner(x).float() - exact).norm() / exact.norm()
            assert error < {"bfloat16": 1e-6, "gemmule int8": 0.02}.get(name, 0.2), name
            assert type(getattr(changed, names["LAST"])) is torch.nn.Linear
            assert (type(changed.inner) is torch.nn.Linear) == (name == "bfloat16")


class PreTrainedModel(torch.nn.Module):
    """What transformers' class of this name does with a model that is saved."""

    def save_pretrained(self, folder: Path, state_dict: Any = None) -> None:
        torch.save(self.state_dict() if state_dict is None else state_dict, folder / "model.pt")


class Pretrained(PreTrainedModel):
    def __init__(self, inner: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or torch.nn.Linear(64, 32)
        self.head = torch.nn.Embedding(2, 4)


def test_a_model_of_transformers_refuses_to_lose_its_quantised_layers(tmp_path: Path) -> None:
    plain = Pretrained()
    plain.save_pretrained(tmp_path)
    model, parent = gl.quantize_(Pretrained()).model, Pretrained(gl.quantize_(Pretrained()).model)
    held = Pretrained(torch.nn.Sequential(gl.QuantLinear(8, 8)))
    for one, layer in ((model, "inner"), (parent, "inner.inner"), (held, "inner.0")):
        for save in (one.save_pretrained, functools.partial(PreTrainedModel.save_pretrained, one)):
            message = f"Pretrained whose layer '{layer}' is .*random weights.*torch.save"
            with pytest.raises(ValueError, match=message):
                save(tmp_path)
        assert one.state_dict().keys()
    again = gl.quantize_(Pretrained()).model
    again.load_state_dict(model.state_dict())
    model._hf_peft_config_loaded = True  # adapters alone are saved, which are whole
    model.save_pretrained(tmp_path)
    again.inner = torch.nn.Linear(64, 32)  # and nothing is lost where no layer is left
    again.save_pretrained(tmp_path)


def test_other_ways_to_save_are_not_those_of_transformers(tmp_path: Path) -> None:
    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(64, 32)

        def save_pretrained(self) -> Any:
            return self.state_dict()

    model = gl.quantize_(Other()).model
    assert model.save_pretrained().keys() == model.state_dict().keys()
