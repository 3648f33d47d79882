"""4-bit floats on a GPU: kept code by code, and multiplied as they are by every rung there."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmule as gm
from cuda_emulation import Emulator
from cuemu.toolchain import missing_tools
from emulated_driver import emulated
from fences import fenced
from gemmule import backends
from gemmule.core.problem import FLOAT4_DTYPE
from gemmule.core.registry import cuda_rungs
from gemmule.core.rung import CudaRung
from gemmule.oracle.inputs import make_inputs
from gemmule.oracle.judge import check
from gemmule.oracle.problems import float4_spec, make_problem, nonfinite_cases
from gemmule.quant.layouts import unwoven, woven
from gemmule.storage import evidence
from proofs import device as verify_device
from proofs import proofs, status

needs_emulator = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
TAKING = [
    pytest.param(rung, id=rung.name)
    for rung in cuda_rungs()
    if any(one[0] == FLOAT4_DTYPE for one in rung.signatures)
]
FORMATS = ("mxfp4", "nvfp4")


@pytest.fixture
def device() -> Iterator[None]:
    with emulated(seed=3):
        yield
        gc.collect()  # arrays are freed by the driver that made them


@pytest.fixture
def proved(device: None, only_proved: Callable[..., None]) -> None:
    """Stand for records of all rungs that take them."""
    only_proved("cuda", {str(param.id) for param in TAKING} | {"staged_fragments"})


def matrix(form: str, shape: tuple[int, int] = (35, 150), **more: Any) -> gm.QuantizedMatrix:
    W = np.random.default_rng(5).standard_normal(shape)
    return gm.quantize(W, format=form, **more)  # type: ignore[arg-type]


def test_these_take_them() -> None:
    names = {param.id for param in TAKING}
    assert {"any_codes", "any_columns", "fragment_codes", "fragment_columns"} <= names
    assert {"warpgroup_columns", "arranged_columns", "rounded_columns"} <= names
    assert {"transposed_fragments", "clustered_fragments", "transposed_columns"} <= names


def test_bits_lie_apart_and_come_back() -> None:
    every = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 512)
    assert np.array_equal(unwoven(woven(every)), every)
    words = woven(np.array([[0xF1, 0x00], [0x00, 0xA0]], np.uint8)).view("<u2").ravel()
    assert words.tolist() == [1 << 6 | 1 << 14 | 7 << 9, 1 << 12 | 2 << 3]


@needs_emulator
@pytest.mark.parametrize("rung", TAKING)
def test_right_under_the_emulator(rung: CudaRung) -> None:
    """Both formats, every dtype of x, both directions where a rung has them, and NaN and Inf."""
    count, formats = 0, set()
    for signature in [one for one in rung.signatures if one[0] == FLOAT4_DTYPE]:
        # Code by code every product takes long here, and the kernels differ in a weight alone.
        each = 3 if rung.name.startswith("any") else 1
        for quant in verify_device.taken_quants(rung, signature)[::each]:
            for which, kind in ((0, "integers"), (0, "normal"), (2, "cancel")):
                problem = verify_device.awkward(rung, signature, quant, which)
                problem = problem if each == 1 else replace(problem, m=17)
                if rung.refusal(problem) is not None:
                    continue
                params = rung.check_params(problem, None)
                trials = [verify_device.Trial(problem, params, kind, "contiguous", count)]
                if kind == "integers":
                    cases = list(nonfinite_cases(problem))[:: 2 + count % 3][:2]
                    trials += [replace(trials[0], kind="nonfinite", seed=c.seed) for c in cases]
                for trial in trials:
                    verdict = verify_device.judge_trial(rung, trial, Emulator(count % 4).run)
                    assert verdict.ok, f"{trial}: {verdict.text}"
                    count += 1
                formats.add(quant and quant.format)
    assert formats == set(FORMATS)


@needs_emulator
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("layout", ["row", "mma16"])
def test_gives_the_bits_of_the_host(form: str, layout: str, proved: None) -> None:
    for number, dtype in enumerate(("float32", "float16", "bfloat16")):
        perm = np.random.default_rng(1).permutation(150) if number == 1 else None
        Q = matrix(form, perm=perm)
        there = Q.to("cuda", layout=layout)
        for one, host in ((there, Q), (there.T, Q.T)):
            found = one.dequantize(dtype).to_host()
            np.testing.assert_array_equal(found, host.dequantize(dtype))


@needs_emulator
@pytest.mark.parametrize("form", FORMATS)
def test_moving_keeps_every_code(form: str, proved: None, tmp_path: Path) -> None:
    Q = matrix(form)
    there = Q.to("cuda:1")
    assert (there.format, there.bits, there.layout) == (form, 4, "mma16")
    assert there.nbytes < 1.8 * Q.nbytes  # padded to whole tiles, no wider codes
    for back in (there.to("cpu", layout="row"), there.to("cuda", layout="row").to("cpu")):
        for part in ("codes", "scales", "zeros"):
            mine, other = getattr(back, part), getattr(Q, part)
            assert (mine is None and other is None) or np.array_equal(
                mine.view(np.uint8), other.view(np.uint8)
            )
    there.save(tmp_path / "w.safetensors")
    loaded = gm.QuantizedMatrix.load(tmp_path / "w.safetensors", mmap=False)
    assert loaded.format == form
    assert np.array_equal(loaded.codes, Q.codes)
    np.testing.assert_array_equal(there[3:21].dequantize().to_host(), Q.dequantize()[3:21])


@needs_emulator
@pytest.mark.parametrize("form", FORMATS)
def test_products_by_the_public_functions(form: str, proved: None) -> None:
    Q = matrix(form)
    there, exact = Q.to("cuda:1"), Q.dequantize("float64")
    rng = np.random.default_rng(7)
    for name, u in (("float32", 2.0**-20), ("float16", 2.0**-9), ("bfloat16", 2.0**-6)):
        dtype: Any = getattr(ml_dtypes, name, None) or name
        for of, shape in ((exact, (150,)), (exact, (150, 3)), (exact.T, (35,)), (exact.T, (35, 2))):
            x = rng.standard_normal(shape).astype(dtype)
            Qs = there if of is exact else there.T
            found = (Qs @ gm.asarray(x, device="cuda:1")).to_host().astype(np.float64)
            wanted = of @ x.astype(np.float64)
            assert (np.abs(found - wanted) <= u * np.abs(wanted).max()).all()


@needs_emulator
def test_the_ends_of_the_exponents(proved: None) -> None:
    """From 2^-127, which is no normal float32, to where the largest weight is a float32."""
    rng = np.random.default_rng(4)
    for exponent in (0, 1, 2, 251):
        scales = np.full((5, 4), exponent, np.uint8).view(ml_dtypes.float8_e8m0fnu)
        codes = rng.integers(0, 256, (5, 64), np.uint8)
        Q = gm.QuantizedMatrix.from_parts(codes, scales, shape=(5, 128), bits=4, group_size=32)
        there = Q.to("cuda:1")
        np.testing.assert_array_equal(there.dequantize().to_host(), Q.dequantize())
        x = np.where(np.arange(128) % 2, 2.0**-4, -(2.0**-3)).astype(np.float32)
        exact = Q.dequantize("float64") @ x.astype(np.float64)
        found = (there @ gm.asarray(x, device="cuda:1")).to_host()
        limit = np.abs(Q.dequantize("float64")) @ np.abs(x).astype(np.float64) * 2.0**-20
        assert (np.abs(found - exact) <= limit + 2.0**-149).all()


@needs_emulator
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("missing", ["all", "fragment_codes"])
def test_what_is_not_proved_goes_as_codes_of_8_bits(
    form: str,
    missing: str,
    device: None,
    only_proved: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As long as one rung that would take them lacks a record."""
    names = {str(param.id) for param in TAKING}
    only_proved("cuda", set() if missing == "all" else names - {missing})
    Q = matrix(form)
    there = Q.to("cuda:1")
    assert (there.format, there.bits) == (None, 8)
    assert "twice the bytes" in caplog.text
    np.testing.assert_allclose(there.dequantize().to_host(), Q.dequantize(), rtol=2e-7, atol=0)


def test_records_open_the_door() -> None:
    """Today no record does: when it turns, say so in docs/quantised.md and the changelog."""
    backend = backends.get("cuda")
    spec, types = float4_spec(0, layout="mma16"), (FLOAT4_DTYPE, "bfloat16", "bfloat16")
    problem = make_problem("matvec", 64, 64, 1, types, quant=spec)
    (rung,) = (param.values[0] for param in TAKING if param.id == "fragment_codes")
    known = any(r.rung == rung.name and r.variant.startswith(FLOAT4_DTYPE) for r in evidence.read())
    assert backend.proved(rung, problem, proofs.proof_machine()) == known


@needs_emulator
@pytest.mark.parametrize("seed", [3, 2])
@pytest.mark.parametrize("rung", TAKING)
def test_nothing_beyond_the_parts_is_touched(rung: CudaRung, seed: int) -> None:
    """Fences of `Emulator`, closer than in other tests: scales may be read in pairs, not by 16."""
    found, at_end = 0, seed == 2
    for signature in [one for one in rung.signatures if one[0] == FLOAT4_DTYPE][:2]:
        for quant in verify_device.taken_quants(rung, signature):
            problem = verify_device.awkward(rung, signature, quant, 0)
            problem = replace(problem, m=problem.m - problem.m % 2)  # rows in pairs, too
            params = rung.check_params(problem, None)
            near = make_inputs(problem, "integers", 7)
            matrix = near.a.T if near.a.transposed else near.a
            parts = {
                name: fenced(part, at_end, 16 if name == "codes" else part.itemsize * 2)
                for name in ("codes", "scales", "zeros")
                if (part := getattr(matrix, name)) is not None
            }
            given = replace(matrix, **parts)
            held = replace(
                near,
                a=given.T if near.a.transposed else given,
                b=fenced(near.b, at_end, near.b.itemsize),
                out=fenced(near.out, at_end, near.out.itemsize),
            )
            out = Emulator(seed).run(rung, held, params)
            verdict = check(held, rung.arithmetic(problem), params, out)
            assert verdict.ok, f"{problem}: {verdict.text}"
            found += 1
    assert found


def test_without_their_proofs_the_evidence_still_fits() -> None:
    plain, floats = (
        ("quantized", "fragment_codes", ",".join((codes, "float16", "float16")))
        for codes in ("uint4", FLOAT4_DTYPE)
    )
    record = evidence.Record(*plain, "sm_90a", "k", "NVIDIA X", "2026-11-21", 3, 0.5)
    standing = status.judge({plain: "k", floats: "j"}, [record])
    assert (standing.missing, standing.unproved) == ([], [floats])
    assert standing.ok
    assert standing.to_prove() == {plain[:2]: frozenset({floats[2]})}
    assert standing.lines()[0].startswith("unproved, 4-bit floats go to a GPU as 8-bit codes")
