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
from gemmule.core.problem import BYTES, FLOAT8, numpy_dtype
from gemmule.core.registry import cuda_rungs
from gemmule.core.rung import CudaRung
from gemmule.dispatch import torch as torch_calls
from gemmule.oracle import scaled
from proofs import device as verify_device
from proofs import proofs

SCALING = [rung for rung in cuda_rungs() if rung.scaled]
needs_emulator = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


def test_these_rungs_scale() -> None:
    assert {rung.name for rung in SCALING if not rung.by_blocks} == {
        "wgmma_int8",
        "wgmma_float8",
        "wgmma_split_bytes",
    }
    assert [rung.name for rung in SCALING if rung.by_blocks] == ["wgmma_float8_blocks"]


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
@pytest.mark.parametrize("rung", [r for r in SCALING if not r.by_blocks], ids=lambda r: r.name)
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


OF_BLOCKS: dict[str, Any] = {
    "right": lambda a, b: (a, b),
    "A's of the next steps": lambda a, b: (np.roll(a, 1, 1), b),
    "A's of the next row": lambda a, b: (np.roll(a, 1, 0), b),
    "A's of the first steps": lambda a, b: (a[:, :1], b),
    "B's of the next steps": lambda a, b: (a, np.roll(b, 1, 0)),
    "B's of the next columns": lambda a, b: (a, np.roll(b, 1, 1)),
    "B's of the first columns": lambda a, b: (a, b[:, :1]),
    "no A's": lambda a, b: (a[:1, :1] * 0 + 1, b),
    "no B's": lambda a, b: (a, b[:1, :1] * 0 + 1),
}


@pytest.mark.parametrize("fault", OF_BLOCKS)
@pytest.mark.parametrize("kind", ["integers", "normal"])
def test_scales_of_other_blocks_are_seen(fault: str, kind: str) -> None:
    (rung,) = (one for one in SCALING if one.by_blocks)

    def run(rung: Any, inputs: Any, params: Any, *, scales: Any) -> Any:
        for one in scales:  # what a kernel reads beside them spoils its result
            assert np.isnan([*one.base[:16], *one.base[-16:]]).all()
        found = OF_BLOCKS[fault](*scales)
        a, b = (
            one.astype(np.float64) * scaled.spread(scale, one.shape)
            for one, scale in zip((inputs.a, inputs.b), found, strict=True)
        )
        inputs.out[...] = a @ b
        return inputs.out

    problem = verify_device.awkward(rung, rung.scaled[0], None, 2)
    trial = verify_device.Trial(problem, {}, kind, "contiguous", 4)
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


def blocks_of(rng: Any, m: int, n: int, k: int, kinds: tuple[str, str]) -> list[Any]:
    """Return scales of A and of B: by fine or coarse blocks, of each row or column, or one."""
    of_steps, found = -(-k // 128), []
    for axis, (size, kind) in enumerate(zip((m, n), kinds, strict=True)):
        shape = {
            "fine": (size, of_steps),
            "coarse": (-(-size // 128), of_steps),
            "each": (size, 1),
            "one": (1, 1),
        }[kind]
        scale = (rng.random(shape, np.float32) + 0.5) * rng.choice((-1, 1), shape)
        scale = scale.astype(np.float32).reshape(shape if axis == 0 else shape[::-1])
        found.append(np.asfortranarray(scale) if rng.random() < 0.5 else scale)
    return found


def scaled_by_blocks(matrices: Any, scales: Any) -> tuple[Any, Any]:
    """Return the product in float64, and that of absolute values."""
    a, b = (
        one.astype(np.float64) * scaled.spread(scale, one.shape)
        for one, scale in zip(matrices, scales, strict=True)
    )
    return a @ b, abs(a) @ abs(b)


KINDS = [(a, b) for a in ("fine", "coarse") for b in ("coarse", "fine", "one", "each")]
KINDS += [("each", "coarse"), ("one", "coarse"), ("each", "fine")]


@pytest.mark.parametrize("kinds", KINDS, ids=" by ".join)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_blocks_on_the_host(kinds: tuple[str, str], library: str) -> None:
    """Random sizes, ragged last blocks, either order of scales, results in every dtype."""
    rng = np.random.default_rng(len(kinds[0]) + 10 * len(kinds[1]))
    torch = pytest.importorskip("torch") if library == "torch" else None
    for dtype in ("float8_e4m3fn", "float8_e5m2", "int8"):
        m, n, k = (int(rng.integers(1, most)) for most in (200, 300, 500))
        scales = blocks_of(rng, m, n, k, kinds)
        matrices = [
            rng.integers(-99, 99, shape).astype(dtype)
            if dtype == "int8"
            else rng.standard_normal(shape).astype(numpy_dtype(dtype))
            for shape in ((m, k), (k, n))
        ]
        exact, size = scaled_by_blocks(matrices, scales)
        given = [*matrices, *scales]
        if torch is not None:
            bits = [torch.from_numpy(one.view(np.uint8)) for one in matrices]
            given = [one.view(getattr(torch, dtype)) for one in bits]
            given += [torch.from_numpy(one) for one in scales]
        for out, u in (("float32", 2.0**-22), ("bfloat16", 2.0**-8)):
            out_dtype = getattr(torch, out) if torch is not None else out
            got = gm.matmul(*given[:2], scale_a=given[2], scale_b=given[3], out_dtype=out_dtype)
            assert str(got.dtype).endswith(out)
            found = got.float().numpy() if torch is not None else got.astype(np.float64)
            assert (abs(found - exact) <= u * abs(exact) + (k + 8) * 2.0**-23 * size).all()


@needs_emulator
def test_blocks_on_a_device() -> None:
    """By the kernel where scales of B are blocks of 128 columns, or one; in any order in memory."""
    rng, name = np.random.default_rng(5), "wgmma_float8_blocks"
    mixes = itertools.cycle(itertools.product(FLOAT8, repeat=2))
    taken = [kinds for kinds in KINDS if kinds[1] in ("coarse", "one")]
    with emulated():
        for at, (kinds, mix) in enumerate(zip(taken, mixes, strict=False)):
            m, n, k = (int(rng.integers(most // 2, most)) for most in (200, 400, 500))
            scales = blocks_of(rng, m, n, k, kinds)
            matrices = [
                np.array(rng.standard_normal(shape), numpy_dtype(dtype), order="FC"[at // turn % 2])
                for shape, turn, dtype in zip(((m, k), (k, n)), (1, 2), mix, strict=True)
            ]
            exact, size = scaled_by_blocks(matrices, scales)
            given = [gm.asarray(one, device="cuda:1") for one in (*matrices, *scales)]
            found = gm.matmul(*given[:2], scale_a=given[2], scale_b=given[3], rung=name)
            assert (abs(found.to_host() - exact) <= 2.0**-12 * size).all()
            del given, found
        hosts = (*matrices, *blocks_of(rng, m, n, k, ("fine", "fine")))
        given = [gm.asarray(one, device="cuda:1") for one in hosts]
        with pytest.raises(ValueError, match="computes no scaled product"):
            gm.matmul(*given[:2], scale_a=given[2], scale_b=given[3], rung=name)
        del given


def test_blocks_that_do_not_fit_are_refused() -> None:
    rng = np.random.default_rng(0)
    a, b = (
        rng.standard_normal(s).astype(numpy_dtype("float8_e4m3fn")) for s in ((9, 300), (300, 200))
    )
    for name, shape in (
        ("scale_a", (3, 9)), ("scale_a", (9, 2)), ("scale_a", (1, 4)), ("scale_b", (2, 3)),
        ("scale_b", (2, 2)), ("scale_b", (200, 3)), ("scale_b", (4, 200)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="by blocks of 128 of the 300 steps"):
            gm.matmul(a, b, **{name: np.ones(shape, np.float32)})
    fits = {"scale_a": np.ones((9, 3), np.float32), "scale_b": np.ones((3, 2), np.float32)}
    with pytest.raises(TypeError, match="scales are float32"):
        gm.matmul(a, b, **{name: one.astype(np.float64) for name, one in fits.items()})


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


@needs_emulator
def test_plans_say_what_applies_the_scales(caplog: Any) -> None:
    """And so does the log where no kernel does, once."""
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(s).astype(numpy_dtype("float8_e4m3fn")) for s in ((64, 256),) * 2)
    fine, coarse = (np.ones(s, np.float32) for s in ((64, 2), (2, 1)))
    host = gm.plan("matmul", a, b.T, scale_a=fine, scale_b=coarse)
    assert np.array_equal(
        host(a, b.T, scale_a=fine, scale_b=coarse), gm.matmul(a, b.T, scale_a=fine, scale_b=coarse)
    )
    with pytest.raises(ValueError, match="other shapes"):
        host(a, b.T, scale_a=fine, scale_b=fine.T)
    for more in ({"epilogue": gm.Epilogue()}, {"device": "cuda"}):
        with pytest.raises(ValueError, match="scales are planned with matmul alone"):
            gm.plan("matmul", a, b.T, scale_a=fine, **more)
    with emulated():
        given = [gm.asarray(one, device="cuda:1") for one in (a, b.T, fine, coarse, fine.T)]
        whole = {"scale_a": given[2], "scale_b": given[3]}
        plan = gm.plan("matmul", *given[:2], **whole, rung="wgmma_float8_blocks")
        assert plan.explain().endswith("64 x 2 and 2 x 1, of blocks: by the kernel that multiplies")
        assert plan.choice.rung.name == "wgmma_float8_blocks"
        whole["scale_b"] = given[4]
        with caplog.at_level("WARNING", "gemmule"):
            plans = [gm.plan("matmul", *given[:2], **whole) for _ in range(2)]
        assert plans[1].explain().endswith("A and B are scaled first and multiplied in float32")
        assert caplog.text.count("no proved kernel scales it") == 1
        del given, whole, plans, plan
