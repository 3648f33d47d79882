"""What becomes of a model's layers when they are quantised: ties, hooks, attributes, state."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gemmule.torch import linear as gl  # noqa: E402
from gemmule.torch.parts import PARTS  # noqa: E402

X = torch.randn(3, 48)


def linear() -> Any:
    return torch.nn.Linear(48, 20)


def quantised(**options: Any) -> Any:
    return gl.QuantLinear.from_linear(linear(), **{"bits": 4, "group_size": 16, **options})


def parts_of(layer: Any) -> list[Any]:
    return [getattr(layer, part) for part in PARTS if getattr(layer, part) is not None]


# ---- memory -------------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_layer_that_was_written_to_multiplies_by_what_it_holds_now(
    bits: int, symmetric: bool
) -> None:
    layer, other = (quantised(bits=bits, symmetric=symmetric).requires_grad_(False) for _ in "ab")
    for x in (X[:1], X):
        layer(x)
    layer.load_state_dict(other.state_dict())
    for x in (X[:1], X):
        assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize("scale_dtype", ["float32", "float16", "bfloat16"])
def test_a_layer_of_a_matrix_shares_no_memory_with_it(scale_dtype: str) -> None:
    matrix = quantised(scale_dtype=scale_dtype).matrix
    floats = matrix.dequantize()
    for part in parts_of(gl.QuantLinear.from_matrix(matrix)):
        part.zero_()
    np.testing.assert_array_equal(matrix.dequantize(), floats)


# ---- ties ---------------------------------------------------------------------------------------
class Tied(torch.nn.Module):  # type: ignore[misc]
    """Layers of one Parameter, of two on the same memory, one layer in two places of a parent."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = linear(), linear(), linear()
        self.two.weight = self.one.weight
        self.three.weight = torch.nn.Parameter(self.one.weight.data)
        self.again = self.one
        self.eval()
        self.two.train()


def are_tied(model: Any) -> bool:
    first = [part.data_ptr() for part in parts_of(model.one)]
    layers = (model.two, model.three)
    return all([part.data_ptr() for part in parts_of(one)] == first for one in layers)


def through_a_file(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def on_another_device_and_back(model: Any) -> Any:
    """The meta device stands for it; what it lost is loaded again."""
    state = {name: part.clone() for name, part in model.state_dict().items()}
    model.to("meta").to_empty(device="cpu").load_state_dict(state)
    return model


STAY: dict[str, Callable[[Any], Any]] = {
    "as they are": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_a_file,
    "half": lambda model: copy.deepcopy(model).half().float(),
    "type": lambda model: copy.deepcopy(model).type(torch.float64).float(),
    "device": on_another_device_and_back,
    "share_memory": lambda model: model.share_memory(),
}


@pytest.mark.parametrize("way", STAY)
def test_ties_stay(way: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = Tied()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.half())  # so that no dtype of a bias rounds it
    alone = gl.QuantLinear.from_linear(copy.deepcopy(plain.two), bits=8, group_size=None)
    model = STAY[way](gl.quantize_(plain, bits=8, group_size=None, scale_dtype="bfloat16").model)
    assert model.again is model.one
    assert are_tied(model)
    assert [one.training for one in (model, model.one, model.two)] == [False, False, True]
    assert model.one.scales.dtype == torch.bfloat16
    assert model.one.codes.dtype == torch.uint8
    assert torch.equal(model.one.bias, plain.one.bias)
    torch.testing.assert_close(model.two(X), alone(X), rtol=0.02, atol=0.05)
    torch.testing.assert_close(model.three(X) - model.three.bias, model.one(X) - model.one.bias)
    assert not caplog.records


def test_tied_layers_have_the_dtype_of_the_float_layers() -> None:
    model = gl.quantize_(Tied().to(torch.bfloat16), group_size=16).model
    for layer in (model.one, model.two, model.three):
        assert layer.weight.dtype == layer.weight_dtype == torch.bfloat16


def test_layers_that_were_written_to_are_tied_no_more() -> None:
    for written in ("one", "two"):
        model = gl.quantize_(Tied(), group_size=16).model
        model.one.to("meta")
        getattr(model, written).codes.zero_()
        model.two.to("meta")
        assert model.two.codes is not model.one.codes
        assert model.two.scales is not model.one.scales


def test_layers_that_were_moved_otherwise_are_tied_no_more() -> None:
    model = gl.quantize_(Tied(), group_size=16).model
    codes = model.one.codes.clone()
    for layer, move in ((model.one, torch.zeros_like), (model.two, torch.clone)):
        layer._apply(move)
    assert not model.one.codes.any()
    assert torch.equal(model.two.codes, codes)


def test_states_and_layers_that_are_odd_are_told_or_taken() -> None:
    layer = gl.QuantLinear.from_linear(linear(), bits=8)
    state = layer.state_dict()
    state["scales"] = state["scales"].clone()
    state["scales"][0, 0] = torch.nan
    layer.load_state_dict(state)
    assert layer.scales.isnan().sum() == 1
    odd = torch.nn.Sequential(linear())
    odd[0].weight = None
    with pytest.raises(ValueError, match="layer '0': its weight is no Parameter"):
        gl.quantize_(odd)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    model = torch.nn.Sequential(linear())
    model.nested = torch.nn.Parameter(nested, requires_grad=False)
    assert isinstance(gl.quantize_(model).model[0], gl.QuantLinear)


@pytest.mark.parametrize("names", [("table", "head"), ("head", "table")])
def test_a_tie_to_what_is_not_quantised_is_told(
    names: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    parts = {"table": torch.nn.Embedding(20, 48), "head": linear()}
    model = torch.nn.ModuleDict({name: parts[name] for name in names})
    model.head.weight = model.table.weight
    table = model.table.weight.detach().clone()
    with caplog.at_level(logging.WARNING, "gemmule"):
        gl.quantize_(model, group_size=16)
    (told,) = caplog.messages
    assert "'head' is quantised, but 'table.weight'" in told
    assert torch.equal(model.table.weight, table)
    with pytest.raises(AttributeError, match="no weight"):
        model.head.weight = model.table.weight  # as libraries tie them, once more


# ---- what goes with a layer, and what cannot ----------------------------------------------------
def test_hooks_attributes_buffers_and_layers_within_go_along() -> None:
    model, seen = torch.nn.Sequential(linear()).eval(), []
    layer = model[0]
    handles = [
        layer.register_forward_pre_hook(lambda m, x, k: seen.append("pre"), with_kwargs=True),
        layer.register_forward_hook(lambda m, x, y: y * 0 + 1, always_call=True),
        layer.register_full_backward_pre_hook(lambda m, g: seen.append("before")),
        layer.register_full_backward_hook(lambda m, x, y: seen.append(type(m).__name__)),
    ]
    layer.note, layer.inner = {"its": "own"}, torch.nn.Sequential(linear())
    vars(layer).update({"_of_a_library": "its mark", "a b": 3})
    layer.register_buffer("kept", torch.ones(2))
    layer.register_buffer("passing", torch.ones(2), persistent=False)
    layer.bias.requires_grad_(False)
    note, kept = layer.note, layer.kept
    gl.quantize_(model, group_size=16)
    new = model[0]
    assert type(new) is type(new.inner[0]) is gl.QuantLinear
    assert (new.note, new.kept, new.training, new.bias.requires_grad) == (note, kept, False, False)
    assert (vars(new)["_of_a_library"], vars(new)["a b"]) == ("its mark", 3)
    assert {"kept", "codes", "inner.0.codes"} < set(new.state_dict())
    assert "passing" not in new.state_dict()
    y = model(X.clone().requires_grad_())
    assert torch.equal(y, torch.ones(3, 20))
    y.sum().backward()
    assert seen == ["pre", "before", "QuantLinear"]
    for handle in handles:
        handle.remove()
    assert not torch.equal(model(X), y)
    assert len(seen) == 3


def pruned() -> Any:
    from torch.nn.utils import prune

    return prune.l1_unstructured(linear(), "weight", amount=0.5)


def with_state_hook() -> Any:
    layer = linear()
    layer.register_state_dict_pre_hook(lambda *_: None)
    return layer


def compiled() -> Any:
    layer = linear()
    layer.compile(backend="eager")
    return layer


def with_attribute(name: str, value: Any) -> Any:
    layer = linear()
    if isinstance(value, torch.Tensor):
        layer.register_buffer(name, value)
    else:
        setattr(layer, name, value)
    return layer


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "pruned": (pruned, "weight is computed"),
    "normed": (lambda: torch.nn.utils.weight_norm(linear()), "weight is computed"),
    "state": (with_state_hook, "hooks of its state_dict"),
    "compiled": (compiled, "compiled in place"),
    "forward": (lambda: with_attribute("forward", abs), "forward of its own"),
    "bits": (lambda: with_attribute("bits", 3), "bits of its own"),
    "scales": (lambda: with_attribute("scales", torch.ones(2)), "scales of its own"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_lost_is_refused_and_nothing_replaced(name: str) -> None:
    make, words = REFUSED[name]
    model = torch.nn.Sequential(linear(), make())
    with pytest.raises(ValueError, match=f"layer '1': .*{words}"):
        gl.quantize_(model, group_size=16)
    assert type(model[0]) is torch.nn.Linear
    gl.quantize_(model, group_size=16, filter=lambda name, _: name == "0")
    assert type(model[0]) is gl.QuantLinear


def test_what_is_not_quantised_may_be_anything() -> None:
    odd = {"lazy": torch.nn.LazyLinear(8), "sparse": torch.nn.Module(), "none": linear()}
    odd["sparse"].weight = torch.nn.Parameter(torch.eye(3).to_sparse())
    odd["none"].register_module("nothing", None)
    model = gl.quantize_(torch.nn.ModuleDict(odd), group_size=16).model
    assert type(model["lazy"]) is torch.nn.LazyLinear
    assert type(model["none"]) is gl.QuantLinear
    for model, filter_ in ((5, None), (torch.nn.Linear, None), (torch.nn.Sequential(), "head")):
        with pytest.raises(TypeError, match="quantize_ takes"):
            gl.quantize_(model, filter=filter_)


# ---- state --------------------------------------------------------------------------------------
def test_a_state_of_other_groups_or_finer_scales_is_refused() -> None:
    state = quantised().state_dict()
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"group_size": 20}, "'group_size': 16}, but this one has"),
        ({"group_size": 16, "scale_dtype": "float16"}, "which torch.float16 does not hold"),
        ({"group_size": 16, "symmetric": True}, "Unexpected key"),
    )
    for options, words in cases:
        layer = gl.QuantLinear(48, 20, bits=4, **options)
        before = [part.clone() for part in parts_of(layer)]
        with pytest.raises(RuntimeError, match=words):
            torch.nn.Sequential(layer)[0].load_state_dict(state)
        if words != "Unexpected key":
            assert all(map(torch.equal, parts_of(layer), before))
    coarse = quantised(scale_dtype="float16").state_dict()
    wider = gl.QuantLinear(48, 20, bits=4, group_size=16)
    wider.load_state_dict(coarse)
    assert torch.equal(wider.scales, coarse["scales"].float())
    with torch.device("meta"):
        empty = gl.QuantLinear(48, 20, bits=4, group_size=16, scale_dtype="float16").to("meta")
    empty.load_state_dict(state, assign=True)
    assert empty.scales.dtype == torch.float32


def test_a_layer_without_data_tells_shapes() -> None:
    layer = quantised().to("meta")
    assert layer(X.to("meta")).shape == (3, 20)
    for one, x in ((layer, X), (quantised(), X.to("meta"))):
        with pytest.raises(TypeError, match="meta"):
            one(x)
