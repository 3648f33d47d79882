"""Repeated products of layers on the host: the same bits, nothing lost that PyTorch has to know.

A layer's second product of a form goes by addresses. Each test multiplies often enough for that,
then changes something that the shorter way must see.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gemmule.core.caches import forget_plans  # noqa: E402
from gemmule.torch import QuantLinear  # noqa: E402
from gemmule.torch.on_host import HostCalls  # noqa: E402

SHAPES = ((), (1,), (3,), (1, 1), (16,), (2, 13), (1, 64), (0,))


def layer(bits: int = 4, out: int = 70, inner: int = 256, bias: bool = True) -> Any:
    torch.manual_seed(bits)
    floats = torch.nn.Linear(inner, out, bias=bias).requires_grad_(False)
    return QuantLinear.from_linear(floats, bits=bits, group_size=128)


def again(one: Any, x: Any) -> Any:
    """Return what the bound product says of x, None where there is none."""
    return one.matrix.kept(HostCalls).again("matvec", one.matrix, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_repetition_has_the_same_bits(bits: int, dtype: Any) -> None:
    for bias in (False, True):
        one = layer(bits, bias=bias)
        for lead in SHAPES:
            x = torch.randn(*lead, 256).to(dtype)
            first = one(x)
            assert first.shape == (*lead, 70)
            assert first.dtype == dtype
            for _ in range(2):
                assert torch.equal(one(x), first)
            with torch.inference_mode():
                assert torch.equal(one(x), first)
    assert again(one, torch.randn(256).to(dtype)) is not None, "vectors go by addresses"


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_written_to_a_layer_is_seen(bits: int) -> None:
    one, x = layer(bits), torch.randn(5, 256).bfloat16()
    vector = torch.randn(256)
    one.zeros.round_()  # kernels keep whole zero points of bytes in another form
    for part in ("codes", "scales", "zeros", "codes"):
        for _ in range(3):
            one(x), one(vector)
        held = getattr(one, part)
        held.copy_(held.flip(0))
        fresh = QuantLinear.from_tensors(
            *(getattr(one, name).clone() for name in ("codes", "scales", "zeros")),
            shape=(70, 256),
            bits=bits,
            group_size=128,
        )
        fresh.bias = one.bias
        assert torch.equal(one(vector), fresh(vector)), part
        assert torch.equal(one(x), fresh(x)), part
    for _ in range(2):
        one(x)
    other = layer(12 - bits, bias=False)
    one.codes, one.scales, one.zeros = other.codes, other.scales, other.zeros
    one.bits, one.bias = other.bits, None
    assert torch.equal(one(x), other(x))


def test_no_gradient_is_lost() -> None:
    """Neither x's, of which repetitions were met with and without, nor a bias's."""
    one, x = layer(), torch.randn(256)
    asked = x.clone().requires_grad_(True)
    with torch.no_grad():
        for _ in range(3):
            one(x), one(asked)
    for _ in range(3):
        assert not one(x).requires_grad
        assert one(asked).requires_grad
    (found,) = torch.autograd.grad(one(asked).sum(), asked)
    torch.testing.assert_close(found, one.dequantize().sum(0).clone(), rtol=1e-4, atol=1e-4)
    one.bias.requires_grad_(True)
    one(x).sum().backward()
    assert torch.equal(one.bias.grad, torch.ones(70))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_pytorch_handles_in_other_ways_is_left_to_it() -> None:
    one, x = layer(), torch.randn(5, 256)
    for _ in range(3):
        plain = one(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert one(x).dtype == torch.bfloat16
    batches = torch.func.vmap(one)(x.expand(3, 5, 256))
    assert torch.equal(batches[2], one(x.expand(3, 5, 256))[2])
    _, along = torch.func.jvp(one, (x,), (x,))
    torch.testing.assert_close(along, plain - one.bias, rtol=1e-4, atol=1e-4)
    traced = torch.jit.trace(one, x)
    assert torch.equal(traced(2 * x), one(2 * x))
    with pytest.raises(TypeError, match="lies on meta"):
        one(x.to("meta"))


def test_x_that_lies_otherwise() -> None:
    one, x = layer(bias=False), torch.randn(6, 256)
    for _ in range(3):
        one(x)
    turned = x.T.contiguous().T
    assert torch.equal(one(turned), one(x))
    imaginary = torch.complex(torch.zeros_like(x), x).conj().imag  # x, negated when it is read
    assert imaginary.is_neg()
    assert torch.equal(one(imaginary), one(-x))
    with pytest.raises((ValueError, RuntimeError)):
        one(torch.randn(6, 255))


def test_what_tiles_refuse_is_multiplied_the_other_way() -> None:
    one, x = layer(bias=False), torch.ones(4, 256).bfloat16()
    for _ in range(3):
        one(x)
    x[3, 7] = torch.inf
    found = one(x)
    assert not found[3].isfinite().any()
    assert found[:3].isfinite().all()


def test_other_threads_and_other_plans() -> None:
    one, before = layer(8, 700), torch.get_num_threads()
    given = [torch.randn(64, 256).bfloat16(), torch.randn(9, 256).bfloat16(), torch.randn(256)]
    wanted = [one(x) for x in given]
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            for x, y in zip(given, wanted, strict=True):
                assert all(torch.equal(one(x), y) for _ in range(3))
            forget_plans()
    finally:
        torch.set_num_threads(before)


def test_a_layer_is_forgotten_whole() -> None:
    one = layer()
    for _ in range(3):
        one(torch.randn(5, 256).bfloat16()), one(torch.randn(256))
    matrix = weakref.ref(one.matrix.codes)
    gc.disable()
    try:
        del one
        assert matrix() is None, "no cycle holds the codes"
    finally:
        gc.enable()
