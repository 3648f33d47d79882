"""Quantising where the weights are: every library's arrays, the host's codes, any stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule.quant.matrix import QuantizedMatrix

torch = pytest.importorskip("torch")

SHAPE = (519, 1030)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"group_size": 48, "method": "mse", "scale_dtype": "float16"},
    {"bits": 8, "group_size": -1, "symmetric": True},
    {"bits": 8, "group_size": None, "method": "mse", "scale_dtype": "bfloat16"},
)


def same(found: QuantizedMatrix, expected: QuantizedMatrix) -> None:
    assert found.device == "cuda:0"
    rows = found.to("cpu", layout="row")
    for part in ("codes", "scales", "zeros"):
        left, right = getattr(rows, part), getattr(expected, part)
        assert (left is None) == (right is None)
        if left is not None:
            np.testing.assert_array_equal(left, right)


def given(dtype: str) -> Any:
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(SHAPE, generator=generator, device="cuda").to(getattr(torch, dtype))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_tensors_of_any_layout_and_stream(dtype: str, options: dict[str, Any]) -> None:
    W = given(dtype)
    expected = gm.quantize(W.cpu(), **options)
    same(gm.quantize(W, **options), expected)
    same(gm.quantize(W.T.contiguous().T, **options), expected)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # what follows on this stream is not there yet
        late = W.repeat(2, 2)[: SHAPE[0], : SHAPE[1]]
        same(gm.quantize(late, **options), expected)


@pytest.mark.parametrize("options", OPTIONS)
def test_arrays_of_other_libraries(options: dict[str, Any]) -> None:
    W = given("float32")
    expected = gm.quantize(W.cpu(), **options)
    same(gm.quantize(gm.asarray(W.cpu().numpy(), device="cuda"), **options), expected)
    cupy, jax = pytest.importorskip("cupy"), pytest.importorskip("jax")
    array = cupy.asarray(W)
    same(gm.quantize(array, **options), expected)
    same(gm.quantize(cupy.flip(cupy.asfortranarray(cupy.flip(array)), None), **options), expected)
    same(gm.quantize(jax.dlpack.from_dlpack(W), **options), expected)


def test_a_matrix_that_was_quantised_there_multiplies_there() -> None:
    W, x = given("float32"), torch.randn(SHAPE[1], device="cuda")
    Q = gm.quantize(W)
    exact = torch.from_numpy(Q.to("cpu").dequantize("float64")).cuda() @ x.double()
    torch.testing.assert_close((Q @ x).double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("columns", [2, 5, 17])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 64)])
def test_a_column_has_its_bits_alone_and_among_others(bits: int, group: int, columns: int) -> None:
    """By request, however the columns lie, and from both sides."""
    W = given("bfloat16")
    Q, options = gm.quantize(W, bits=bits, group_size=group), {"batch_invariant": True}
    generator = torch.Generator("cuda").manual_seed(2)
    X, Z = (
        torch.randn((columns, size), generator=generator, device="cuda").bfloat16()
        for size in (SHAPE[1], SHAPE[0])
    )
    alone = torch.stack([gm.matvec(Q, x, **options) for x in X], 1)
    for among in (X.T, X.T.contiguous()):
        assert torch.equal(gm.matmul(Q, among, **options), alone)
    assert torch.equal(gm.matmul(X, Q.T, **options).T, alone)
    across = torch.stack([gm.vecmat(z, Q, **options) for z in Z])
    assert torch.equal(gm.matmul(Z, Q, **options), across)
