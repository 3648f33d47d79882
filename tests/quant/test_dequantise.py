"""Weights as floats again on a device, whole or in pieces for the vendor's library; emulated."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from cuemu.toolchain import missing_tools
from emulated_driver import Poisoned, emulated
from fake_cublas import FakeCublas, installed
from gemmule.backends.cuda import nvrtc
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.choose import eligible
from gemmule.core.architectures import LISTED
from gemmule.core.canonical import canonical
from gemmule.core.operand import Form
from gemmule.core.problem import Problem, QuantSpec
from gemmule.core.registry import device_rungs
from gemmule.options import options_of
from gemmule.quant.cuda import by_library, dequantise
from proofs import device as verify_device
from proofs import proofs
from proofs.device_runner import DeviceRunner

needs_emulator = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
(RUNG,) = (rung for rung in device_rungs() if rung.name == "dequantise_library")
# rows, columns, bits, group size, symmetric: tails of tiles, groups that no lane's columns lie in,
# rows that are whole vectors and such that are not.
CASES = (
    (37, 150, 4, 32, False),
    (16, 128, 4, 128, True),
    (33, 64, 8, 7, False),
    (17, 40, 8, None, True),
    (1, 90, 4, -1, False),
    (18, 72, 4, 24, False),  # groups of a lane's columns and a half
    (18, 44, 8, 4, False),
)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with emulated(seed=3, kind=Poisoned):
        yield
        gc.collect()  # arrays are freed by the driver that made them


def matrix(case: tuple[Any, ...], seed: int) -> Any:
    m, n, bits, group, symmetric = case
    W = np.random.default_rng(seed).standard_normal((m, n))
    scales = ("float32", "float16")[seed % 2]
    return gm.quantize(W, bits=bits, group_size=group, symmetric=symmetric, scale_dtype=scales)


@needs_emulator
@pytest.mark.parametrize("layout", ["mma16", "row"])
def test_gives_the_bits_of_the_host(layout: str) -> None:
    for seed, case in enumerate(CASES):
        Q = matrix(case, seed)
        dtype = dequantise.DTYPES[seed % 3]
        there = Q.to("cuda", layout=layout)
        for one, host in ((there, Q), (there.T, Q.T)):
            found = one.dequantize(dtype)
            assert isinstance(found, DeviceArray)
            np.testing.assert_array_equal(found.to_host(), host.dequantize(dtype))


@needs_emulator
def test_permuted_columns_go_where_they_belong() -> None:
    Q = replace(matrix(CASES[0], 1), perm=np.random.default_rng(1).permutation(150).astype("i4"))
    found = Q.to("cuda:1").dequantize("float16").to_host()
    np.testing.assert_array_equal(found, Q.dequantize("float16"))


@needs_emulator
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("most_bytes", [1, by_library.MOST_BYTES])
def test_products_of_pieces_are_right(
    bits: int, most_bytes: int, limit: Callable[..., None]
) -> None:
    """By a library that does what it is told; pieces of the fewest rows there are, and whole."""
    limit(by_library, MOST_BYTES=most_bytes)
    with installed(FakeCublas(workspace=512)):
        runner = DeviceRunner(arena_bytes=1 << 24)
        for signature in [s for s in RUNG.signatures if s[0] == f"uint{bits}"]:
            for trial in list(verify_device.trials(RUNG, signature, few=True))[::3]:
                verdict = verify_device.judge_trial(RUNG, trial, runner.run)
                assert verdict.ok, f"{trial}: {verdict.text}"
        runner.close()


def problem(n: int, *, dtype: str = "bfloat16", exact: bool = False) -> Problem:
    quant = QuantSpec(4, 128, False, "mma16", "float16", False, exact=exact)
    return Problem("matmul", 4096, n, 4096, a="uint4", b=dtype, out=dtype, quant=quant)


def test_rounds_weights_of_many_columns_only_and_where_it_may() -> None:
    assert eligible(RUNG, problem(17))
    assert not eligible(RUNG, problem(16))
    assert not eligible(RUNG, problem(4096, exact=True))
    assert eligible(RUNG, problem(4096, dtype="float32", exact=True)), "which rounds no more"
    assert RUNG.arithmetic(problem(17)).inputs == "bfloat16"


def test_a_piece_is_bounded_and_whole_tiles() -> None:
    for m, k, transposed in ((28672, 8192, False), (8192, 28672, True), (100, 70, True)):
        spec = replace(problem(1).quant, transposed=transposed)  # type: ignore[type-var]
        one = replace(problem(64), m=m, k=k, quant=spec)
        rows = by_library.rows_at_a_time(one)
        assert rows % 64 == 0
        assert by_library.workspace(one) <= by_library.MOST_BYTES + 256
        pieces = list(by_library.products(one, proofs.packed_call(one)))
        assert sum(dense.m for _, _, dense, _ in pieces) == m
        told = RUNG.spec(one, proofs.packed_call(one)).parts
        assert [part.first for part in told] == [first for first, *_ in pieces]
        assert len({part.packed for part in told}) == len(pieces)


@pytest.mark.parametrize("arch", LISTED)
def test_kernels_compile_for_every_architecture(arch: str) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    piece = dequantise.Piece(0, 64, 0, 60, 64)
    names = tuple(
        dequantise.kernel(QuantSpec(bits, group, zeros, layout, scale, False), dtype, piece)
        for bits, group, zeros, layout, scale, dtype in (
            (4, 128, False, "mma16", "float16", "bfloat16"),
            (8, 7, True, "mma16", "float32", "float16"),
            (4, -1, True, "row", "bfloat16", "float32"),
        )
    )
    module = nvrtc.build(dequantise.SOURCE, names, arch, ())[0]
    assert set(module.symbols) == set(names)


@pytest.mark.parametrize(
    ("named", "forbids"),
    [
        ({}, False),
        ({"precision": "float32"}, True),
        ({"precision": "ieee"}, True),
        ({"batch_invariant": True}, True),
    ],
)
def test_a_precision_by_name_keeps_weights_exact(named: dict[str, Any], forbids: bool) -> None:
    spec = QuantSpec(4, 64, True, "mma16", "float16", False)
    matrix = Form.packed((64, 128), "uint4")._replace(quant=spec)
    options = options_of("matmul", named)
    call = canonical("matmul", matrix, Form.packed((128, 40), "float16"), None, options)
    assert call.problem.quant is not None
    assert call.problem.quant.exact is forbids
