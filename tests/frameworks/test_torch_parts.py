"""Codes of layers on a GPU, once in memory: their order, what is saved, moved, loaded and shared.

Tensors of the host stand for a GPU's, by their storage, and kernels are emulated.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cuemu.toolchain import missing_tools  # noqa: E402
from emulated_driver import emulated  # noqa: E402
from gemmule.backends.cuda.device_array import DeviceArray  # noqa: E402
from gemmule.dispatch.torch_repeats import REPEATS  # noqa: E402
from gemmule.quant.layouts import get_layout  # noqa: E402
from gemmule.torch import parts  # noqa: E402
from gemmule.torch.experts import QuantStack  # noqa: E402
from gemmule.torch.linear import QuantLinear, quantize_  # noqa: E402
from gemmule.torch.quantized_linear import again  # noqa: E402

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))

NAMES = ("codes", "scales", "zeros", "perm")


class Gpu:
    """Tensors of the host whose storages count as a GPU's."""

    def __init__(self) -> None:
        self.kept: list[Any] = []  # so that no storage's address is used twice

    def hold(self, tensor: Any) -> Any:
        self.kept.append(tensor.untyped_storage())
        return tensor

    def has(self, tensor: Any) -> bool:
        if tensor.is_meta:
            return False
        return any(tensor.untyped_storage()._cdata == one._cdata for one in self.kept)

    def take(self, tensor: Any) -> Any:
        """Move a tensor there, as ``.to("cuda")`` does."""
        return tensor if self.has(tensor) else self.hold(tensor.clone())

    def leave(self, tensor: Any) -> Any:
        """Move a tensor to the host."""
        return tensor.clone() if self.has(tensor) else tensor


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    there, beside, closed = Gpu(), DeviceArray.beside, parts.closed

    def made_beside(array: Any, shape: Any, dtype: str) -> Any:
        made = beside(array, shape, dtype)
        there.hold(made.owner)
        return made

    def made_closed(tensor: Any) -> Any:
        if not there.has(tensor):
            return closed(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        given = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), dtype, 0, tensor
        return DeviceArray(*given)

    monkeypatch.setattr(parts, "order_at", lambda t: "mma16" if there.has(t) else "row")
    monkeypatch.setattr(parts, "closed", made_closed)
    monkeypatch.setattr(DeviceArray, "beside", made_beside)
    monkeypatch.setattr(DeviceArray, "stream", 0)
    with emulated():
        yield there


def layer_of(**options: Any) -> Any:
    torch.manual_seed(3)
    return QuantLinear.from_linear(torch.nn.Linear(70, 37), **{"group_size": 32, **options})


def applied(module: Any, move: Callable[[Any], Any]) -> Any:
    """Do to a module's tensors what ``.to`` and its kin do, and return it."""
    return module._apply(move)


def parts_of(layer: Any) -> Any:
    """Return the tensors that a layer holds, in the order that kernels read or as given."""
    return tuple(getattr(layer, name) for name in NAMES)


def held(layer: Any) -> list[Any]:
    return [None if part is None else part.clone() for part in parts_of(layer)]


def same(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            a, b = (one.reshape(-1).clone().view(torch.uint8) for one in (a, b))
            assert torch.equal(a, b)


OPTIONS = [
    {"bits": 4},
    {"bits": 8, "symmetric": True, "scale_dtype": "float16"},
    {"bits": 4, "group_size": None, "scale_dtype": "bfloat16"},
    {"bits": 8, "group_size": -1, "perm": np.random.default_rng(0).permutation(70)},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_layer_holds_what_kernels_read_and_gives_back_what_it_was_given(
    options: dict[str, Any], gpu: Gpu
) -> None:
    layer = layer_of(**options)
    canonical, floats = held(layer), layer.matrix.dequantize()
    expected = layer.matrix.to(layout="mma16")
    assert applied(layer, gpu.take) is layer
    there = layer.matrix
    assert (there.layout, there.device) == ("mma16", "cuda:0")
    for name in NAMES:  # the matrix reads the layer's own memory: there is no second copy
        part, own = getattr(layer, name), getattr(there, name)
        if part is not None:
            assert (part.data_ptr(), tuple(part.shape)) == (own.pointer, own.shape)
            assert gpu.has(part)
    np.testing.assert_array_equal(there.codes.to_host(), expected.codes)
    assert there.scales.to_host().flags.f_contiguous
    found = there.dequantize()
    assert found.library == "torch"
    np.testing.assert_array_equal(found.to_host(), floats)
    state = layer.state_dict()
    same([state.get(name) for name in NAMES], canonical)
    assert all(state[name].is_contiguous() for name in NAMES if name in state)
    del state  # which could be taken for what a tensor that moves becomes: here all is one device
    applied(layer, gpu.leave)
    same(parts_of(layer), canonical)
    assert not any(gpu.has(part) for part in parts_of(layer) if part is not None)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_stack_lies_by_rows_on_a_gpu_too_and_an_expert_is_a_part_of_it(
    bits: int, gpu: Gpu
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 64, 48)
    layer = QuantStack.from_weight(weight, bits=bits, group_size=32)
    canonical, floats = held(layer), layer.stack.dequantize()
    applied(layer, gpu.take)
    stack = layer.stack
    assert (stack.matrix.layout, stack.device) == ("row", "cuda:0")
    assert stack.matrix.codes.pointer == layer.codes.data_ptr()
    for expert in (0, 2, -1):
        own = stack[expert]
        assert own.codes.pointer == layer.codes[expert % 3 * 48].data_ptr()
        np.testing.assert_array_equal(own.dequantize().to_host(), floats[expert])
    whole = stack.dequantize()
    assert (whole.shape, whole.strides) == ((3, 64, 48), (64 * 48, 1, 64))
    np.testing.assert_array_equal(whole.mT.to_host(), floats.swapaxes(1, 2))
    same(parts_of(layer), canonical)


def test_no_matrix_has_codes_of_one_shape_in_two_orders() -> None:
    order = get_layout("mma16")
    for bits in (4, 8):
        for m in (*range(1, 40), 4096):
            for n in (*range(1, 140), 1024, 1 << 20):
                row = (m, -(-n * bits // 8))
                assert order.storage_shape(m, n, bits) != row
                assert (
                    parts.Shape(m, n, bits, 32).order_of(torch.empty(row, device="meta")) == "row"
                )


@pytest.mark.parametrize("assign", [False, True])
def test_a_layer_on_a_gpu_loads_what_was_saved_anywhere(assign: bool, gpu: Gpu) -> None:
    source, target = layer_of(bits=4), layer_of(bits=4)
    torch.manual_seed(5)
    other = QuantLinear.from_linear(torch.nn.Linear(70, 37), bits=4, group_size=32)
    target.load_state_dict(other.state_dict())
    applied(target, gpu.take)
    codes, wanted = target.codes, held(source)
    target.load_state_dict(source.state_dict(), assign=assign)
    assert (target.codes is codes) == (not assign)
    same([target.state_dict().get(name) for name in NAMES], wanted)
    applied(source, gpu.take)
    applied(other, gpu.take)
    saved = other.state_dict()
    kept = {name: tensor.clone() for name, tensor in saved.items()}
    other.load_state_dict(source.state_dict(), assign=assign)
    same([other.state_dict().get(name) for name in NAMES], wanted)
    assert all(torch.equal(saved[name], kept[name]) for name in NAMES[:3])  # it is the user's
    floats = [one.matrix.dequantize().to_host() for one in (other, source)]
    np.testing.assert_array_equal(*floats)
    with pytest.raises(RuntimeError, match=r"size mismatch for codes: .*\[37, 35\]"):
        other.load_state_dict({"codes": torch.zeros(37, 34, dtype=torch.uint8)}, strict=False)
    same([other.state_dict().get(name) for name in NAMES], wanted)


def test_part_of_a_state_changes_that_part_alone(gpu: Gpu) -> None:
    layer = layer_of(bits=8)
    before = held(layer)
    applied(layer, gpu.take)
    there = parts_of(layer)
    layer.load_state_dict({"scales": 2 * before[1]}, strict=False)
    assert all(now is then for now, then in zip(parts_of(layer), there, strict=True))
    same([layer.state_dict().get(name) for name in NAMES], [before[0], 2 * before[1], *before[2:]])


def test_layers_that_share_codes_share_them_everywhere(gpu: Gpu) -> None:
    first, second = torch.nn.Linear(70, 37), torch.nn.Linear(70, 37)
    second.weight = first.weight
    model = quantize_(torch.nn.Sequential(first, second), group_size=32).model
    one, two = model[0], model[1]
    for move in (gpu.take, gpu.leave, gpu.take):
        applied(model, move)
        assert all(a is b for a, b in zip(parts_of(one), parts_of(two), strict=True))
        assert one.matrix is two.matrix
        state = model.state_dict()
        assert state["0.codes"].data_ptr() == state["1.codes"].data_ptr()
    changed = {name: tensor ^ 1 if "codes" in name else tensor for name, tensor in state.items()}
    model.load_state_dict(changed)
    assert one.codes is two.codes
    assert torch.equal(model.state_dict()["1.codes"], changed["0.codes"])


@pytest.mark.parametrize("how", ["copied", "pickled", "saved"])
def test_copies_of_a_layer_are_as_good_as_it(how: str, gpu: Gpu) -> None:
    layer = layer_of(bits=4)
    canonical, x = held(layer), torch.randn(2, 70)
    expected = layer(x)
    applied(layer, gpu.take)
    if how == "saved":
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        made = torch.load(file, weights_only=False)
    else:
        made = copy.deepcopy(layer) if how == "copied" else pickle.loads(pickle.dumps(layer))
    # It lies on the host now, in the order that it had; the first product puts that right.
    assert torch.equal(made(x), expected)
    same(parts_of(made), canonical)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", ["shape", "place", "dtype", ""])
def test_parts_on_a_gpu_are_of_one_shape_place_and_dtype(name: str, wrong: str) -> None:
    sizes = {"codes": (37, 70), "scales": (37, 3), "zeros": (37, 3), "perm": (70,)}
    kinds = dict(zip(NAMES, (torch.uint8, torch.float16, torch.float32, torch.int32), strict=True))
    places = dict.fromkeys(NAMES, "meta")  # for a GPU
    if wrong == "shape":
        sizes[name] = (*sizes[name][:-1], sizes[name][-1] + 1)
    elif wrong == "place":
        places[name] = "cpu"
    elif wrong == "dtype":
        kinds[name] = torch.int64
    given = tuple(torch.zeros(sizes[n], dtype=kinds[n], device=places[n]) for n in NAMES)
    check = partial(parts.check_on_device, given, parts.Shape(37, 70, 8, 32), "row")
    if wrong:
        with pytest.raises(TypeError if wrong == "dtype" else ValueError, match="has"):
            check()
    else:
        check()


def test_codes_put_in_by_others_are_put_in_order_by_the_first_product(gpu: Gpu) -> None:
    layer, x = layer_of(bits=4), torch.randn(2, 70)
    canonical = held(layer)
    for name in NAMES[:3]:  # as libraries that load models part by part do
        setattr(layer, name, gpu.take(layer.get_buffer(name)))
    with pytest.raises(TypeError, match="cuda"):  # x lies elsewhere
        layer(x)
    assert layer.codes.shape == layer.matrix.codes.shape == (3, 1024)
    same([layer.state_dict().get(name) for name in NAMES], canonical)


def test_nothing_is_put_in_order_on_the_device_meta(gpu: Gpu) -> None:
    layer = applied(layer_of(bits=4), gpu.take)
    layer.to("meta")
    assert (layer.codes.shape, layer.codes.device.type) == ((37, 35), "meta")
    layer.to_empty(device="cpu")
    assert layer.codes.shape == (37, 35)


# --- the call that served a layer before ----------------------------------------------------------


@pytest.fixture
def served(gpu: Gpu) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """A layer with a call kept for single vectors, which returns what it was given."""
    layer = applied(layer_of(bits=4, perm=np.random.default_rng(1).permutation(70)), gpu.take)
    layer.bias = None
    matrix = layer.matrix
    key = "a layer", (matrix, torch.ones(70), None)
    REPEATS.keep(*key, lambda *given: given)
    yield layer, lambda x: again(dict(layer.named_buffers()), layer.bias, x)
    REPEATS.calls.clear()


def test_a_product_like_one_served_before_goes_to_its_call(served: tuple[Any, Any]) -> None:
    layer, ask = served
    x = torch.zeros(70)
    there, given, third = ask(x)
    assert given is x
    assert third is None
    packed = np.frombuffer(there.places[None], np.uint64).tolist()
    assert packed == [part.data_ptr() for part in parts_of(layer)]
    assert ask(torch.zeros(2, 70)) is None
    assert ask(np.zeros(70)) is None
    layer.scales.mul_(2)  # in the memory that kernels read
    assert ask(x) is not None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["replaced", "moved", "written"])
def test_a_part_that_was_replaced_is_seen(
    name: str, how: str, served: tuple[Any, Any], gpu: Gpu
) -> None:
    layer, ask = served
    part = layer.get_buffer(name)
    if how == "replaced":
        setattr(layer, name, gpu.hold(part.clone()))
    elif how == "moved":
        part.data = gpu.hold(part.clone())
    else:
        part.add_(0)
    # A permutation has to be looked at again: kernels would read outside of x.
    seen = how != "written" or name == "perm"
    assert (ask(torch.zeros(70)) is None) == seen


def test_a_bias_that_wants_a_gradient_is_seen(served: tuple[Any, Any]) -> None:
    layer, ask = served
    layer.bias = torch.nn.Parameter(torch.ones(37))
    REPEATS.keep("a layer", (layer.matrix, torch.ones(70), layer.bias), lambda *given: given)
    assert ask(torch.zeros(70)) is None
    with torch.no_grad():
        assert ask(torch.zeros(70))[2] is layer.bias
    layer.bias.requires_grad_(False)
    assert ask(torch.zeros(70))[2] is layer.bias
