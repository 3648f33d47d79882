"""Scaled products of 8-bit matrices: by kernels, on the host, and traced by PyTorch."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import device_tensors
import gemmule as gm
from cuda_emulation import Emulator
from cuemu.toolchain import missing_tools
from device_tensors import Tensor
from emulated_driver import emulated
from gemmule import scaled as products
from gemmule.core.problem import BYTES, numpy_dtype
from gemmule.core.registry import cuda_rungs
from gemmule.core.rung import CudaRung
from gemmule.dispatch import torch as torch_calls
from gemmule.oracle import scaled
from proofs import device as verify_device
from proofs import proofs

SCALING = [rung for rung in cuda_rungs() if rung.scaled]
needs_emulator = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


def test_these_rungs_scale() -> None:
    assert {rung.name for rung in SCALING} == {"wgmma_int8", "wgmma_float8", "wgmma_split_bytes"}


@needs_emulator
@pytest.mark.parametrize("rung", SCALING, ids=lambda rung: rung.name)
@pytest.mark.parametrize("out", ["float32", "bfloat16"])
def test_kernels_scale_rows_and_columns(rung: CudaRung, out: str) -> None:
    a, b, _ = rung.scaled[-1]
    plain = proofs.plain_of(rung, (a, b, out), ",scaled")
    trials = list(scaled.some(rung, verify_device.trials(rung, plain, few=True), out))
    assert len(trials) > 3
    assert {trial.seed % len(scaled.EACH) for trial in trials} > {0, 1}
    emulator = Emulator()
    for emulator.seed, trial in enumerate(trials):
        verdict = scaled.judge_trial(rung, trial, emulator.run)
        assert verdict.ok, f"{trial}: {verdict.text}"


FAULTS: dict[str, Any] = {
    "right": lambda product, a, b: product * a[:, None] * b,
    "rows alone": lambda product, a, b: product * a[:, None],
    "columns alone": lambda product, a, b: product * b,
    "neither": lambda product, a, b: product,
    "of the next row": lambda product, a, b: product * np.roll(a, 1)[:, None] * b,
    "of the first column": lambda product, a, b: product * a[:, None] * b[0],
    "rounded before": lambda product, a, b: (
        product.astype(numpy_dtype("bfloat16")) * a[:, None] * b
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rung", SCALING, ids=lambda rung: rung.name)
def test_what_is_scaled_otherwise_is_seen(rung: CudaRung, fault: str) -> None:
    def run(rung: Any, inputs: Any, params: Any, *, scales: Any) -> Any:
        product = inputs.a.astype(np.float64) @ inputs.b.astype(np.float64)
        for one in scales:  # what a kernel reads beside them spoils its result
            assert np.isnan([*one.base[:16], *one.base[-16:]]).all()
        a, b = (one.astype(np.float64) for one in scales)
        inputs.out[...] = FAULTS[fault](product, np.broadcast_to(a, product.shape[:1]), b)
        return inputs.out

    signature = rung.scaled[0]
    problem = verify_device.awkward(rung, signature, None, 0)
    trial = verify_device.Trial(problem, {}, "integers", "contiguous", 4)
    with np.errstate(over="ignore"):
        assert scaled.judge_trial(rung, trial, run).ok == (fault == "right")


def operands(dtypes: tuple[str, str], seed: int = 0) -> list[Any]:
    """Return two matrices and scales of their rows and columns."""
    rng = np.random.default_rng(seed)
    shapes = ((33, 70), (70, 21))
    matrices = []
    for dtype, shape in zip(dtypes, shapes, strict=True):
        if dtype in BYTES:
            info = np.iinfo(dtype)
            matrices.append(rng.integers(info.min, info.max + 1, shape).astype(dtype))
        else:
            matrices.append(rng.standard_normal(shape).astype(numpy_dtype(dtype)))
    return [*matrices, rng.random(33, np.float32) + 0.5, rng.random(21, np.float32) - 0.5]


def truth(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
    product = a.astype(np.float64) @ b.astype(np.float64)
    return product * np.reshape(scale_a, (-1, 1)).astype(np.float64) * np.float64(scale_b)


PAIRS = [("int8", "int8"), ("uint8", "int8"), ("float8_e4m3fn", "float8_e5m2")]


@pytest.mark.parametrize("dtypes", PAIRS, ids=" x ".join)
@pytest.mark.parametrize("out_dtype", [None, "bfloat16", "float16"])
def test_on_the_host(dtypes: tuple[str, str], out_dtype: str | None) -> None:
    a, b, rows, columns = operands(dtypes)
    u = {None: 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}[out_dtype]
    rows, columns = rows / 256, columns / 256
    for scale_a, scale_b in ((rows, columns), (rows[:, None], columns[None]), (0.25, columns)):
        got = gm.matmul(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype)
        exact = truth(a, b, scale_a, scale_b)
        size = truth(abs(a.astype(float)), abs(b.astype(float)), abs(scale_a), abs(scale_b))
        assert got.dtype == (out_dtype or "float32")
        assert (
            abs(got.astype(np.float64) - exact) <= u * abs(exact) + 2.0**-20 * size + 2.0**-25
        ).all()
    out = np.empty((33, 21), np.float32)
    assert gm.matmul(a, b, scale_a=rows, out=out) is out
    assert np.allclose(out, truth(a, b, rows, 1.0), rtol=1e-4, atol=1e-4)


@needs_emulator
@pytest.mark.parametrize("dtypes", PAIRS, ids=" x ".join)
def test_on_a_device(dtypes: tuple[str, str], only_proved: Any) -> None:
    """One launch by a named rung; where none is proved, arrays of our own are refused."""
    a, b, rows, columns = operands(dtypes)
    name = "wgmma_int8" if dtypes[0] in BYTES else "wgmma_float8"
    with emulated():
        given = [gm.asarray(one, device="cuda:1") for one in (a, b, rows, columns)]
        for scale_b, of_b in ((given[3], columns), (None, 1.0)):
            got = gm.matmul(*given[:2], scale_a=given[2], scale_b=scale_b, rung=name).to_host()
            size = truth(abs(a.astype(float)), abs(b.astype(float)), abs(rows), abs(of_b))
            assert (abs(got - truth(a, b, rows, of_b)) <= 2.0**-12 * size).all()
        with pytest.raises(ValueError, match=f"{name} has no parameter 'nonesuch'"):
            gm.matmul(*given[:2], scale_a=given[2], rung=name, params={"nonesuch": 1})
        only_proved("cuda", ())
        with pytest.raises(TypeError, match="no proved kernel"):
            gm.matmul(*given[:2], scale_a=given[2])
        del given, scale_b


@needs_emulator
def test_tensors_met_before_are_told_apart_by_how_they_lie(fault: Any) -> None:
    """A call is kept for tensors of a kind: by one of other strides the product was another."""
    a, b, rows, columns = operands(PAIRS[0])
    names = ("int8", "uint8", "float32", "bfloat16")
    torch = device_tensors.library((1,), **{name: name for name in names})
    fault(torch_calls, "maker", lambda sound, *given: device_tensors.maker(*given))
    imported = mock.patch.object(products, "sys", SimpleNamespace(modules={"torch": torch}))
    with emulated(), imported:
        lies = itertools.product((a, np.asfortranarray(a)), (b, np.asfortranarray(b)))
        for left, right in [*lies, (a, b)]:
            hosts = (left, right, rows[::-1].copy(), columns)
            given = [Tensor(gm.asarray(one, device="cuda:1")) for one in hosts]
            scales = {"scale_a": given[2], "scale_b": given[3]}
            got = gm.matmul(*given[:2], **scales, rung="wgmma_int8")
            assert type(got) is Tensor
            np.testing.assert_allclose(got.array.to_host(), truth(*hosts), rtol=1e-4, atol=1e-3)
            del given, scales, got


def test_what_is_no_scale_is_refused() -> None:
    a, b, rows, columns = operands(PAIRS[0])
    refused = (
        (ValueError, "one for each of the 33 rows of A", {"scale_a": columns}),
        (ValueError, "one for each of the 21 columns of B", {"scale_b": rows}),
        (TypeError, "scales are float32", {"scale_a": rows.astype(np.float64)}),
        (TypeError, "those of a scaled product", {"scale_a": rows, "precision": "ieee"}),
        (TypeError, "a scaled product is float32", {"scale_b": columns, "out_dtype": "int32"}),
        (ValueError, "dtype|shape", {"scale_a": rows, "out": np.empty((33, 20), np.float32)}),
    )
    for error, words, options in refused:
        with pytest.raises(error, match=words):
            gm.matmul(a, b, **options)
    with pytest.raises(TypeError, match="of int8 and uint8, or of float8"):
        gm.matmul(a.astype(np.float32), b, scale_a=rows)
    with pytest.raises(ValueError, match="two matrices"):
        gm.matmul(a[None], b, scale_a=rows)
    with pytest.raises(ValueError, match="can exceed int32"):
        gm.matmul(np.zeros((1, 140_000), np.int8), np.zeros((140_000, 1), np.int8), scale_a=1.0)


def test_pytorch_traces_it() -> None:
    torch = pytest.importorskip("torch")
    from fake_tensors import FakeTensorMode

    a, b, rows, columns = (torch.from_numpy(one) for one in operands(PAIRS[0]))

    def twice(*given: Any) -> Any:
        scales = {"scale_a": given[2], "scale_b": given[3]}
        return 2 * gm.matmul(*given[:2], **scales, out_dtype=torch.bfloat16)

    compiled = torch.compile(twice, backend="eager", fullgraph=True)
    assert torch.equal(compiled(a, b, rows, columns), twice(a, b, rows, columns))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(one) for one in (a, b, rows, columns)]
        assert twice(*fakes).shape == (33, 21)
        assert twice(*fakes).dtype == torch.bfloat16
        with pytest.raises(ValueError, match="for each of the 33 rows"):
            gm.matmul(*fakes[:2], scale_a=fakes[3])
    with pytest.raises(ValueError, match="no out="):
        torch.compile(
            lambda *g: gm.matmul(*g[:2], scale_a=g[2], rung="wgmma_int8"), backend="eager"
        )(a, b, rows)
