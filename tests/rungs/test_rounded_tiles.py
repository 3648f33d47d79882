"""Codes by many columns in tiles of bfloat16: in AMX's, and in memory on AVX-512 alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import gemmule as gm
from gemmule.backends.cpu.target import has_wide_vectors
from gemmule.rungs.quantized.cpu.blocks import rounded
from gemmule_lab.verify import check
from quantized_products import activations, make_matrix

NAME = "rounded_tiles"
pytestmark = pytest.mark.skipif(not has_wide_vectors(), reason="codes are decoded by AVX-512")


def judged(Q: gm.QuantizedMatrix, B: np.ndarray, **options: object) -> None:
    plan = gm.plan("matmul", Q, B, rung=NAME, **options)
    verdict = check.judge("matmul", Q, B, plan(Q, B), check.Rounding.of(plan))
    assert verdict.ok, verdict.text


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("dtype", "columns", "options"),
    [
        ("bfloat16", 18, {}),
        ("bfloat16", 16, {}),
        ("bfloat16", 5, {"activations": "int8"}),
        ("float32", 18, {}),
        ("float16", 18, {}),
        ("float32", 18, {"activations": "int8"}),
    ],
    ids=["rounded", "exact", "bf16 as bytes", "float32", "float16", "as bytes"],
)
def test_every_group_and_zero_point(
    bits: int, dtype: str, columns: int, options: dict[str, str]
) -> None:
    """Groups that are looked up (one, two and four a chunk), others, and rows of odd length."""
    for group, zeros in itertools.product(
        (16, 24, 32, 64, 128, -1, None), ("none", "integer", "fraction")
    ):
        for scales in ("float32", "float16") if dtype == "float32" else ("float32",):
            Q = make_matrix(37, 333, bits, group, scales, zeros)
            judged(Q, activations((333, columns), dtype), **options)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("bits", [4, 8])
def test_every_order_of_operands_and_several_stretches(bits: int) -> None:
    """Sums are exact, so whatever is in another place is wrong; 1100 terms are three passes."""
    Q = make_matrix(70, 1100, bits, 64, "float16", "integer", exact=True)
    rng = np.random.default_rng(bits)
    cases = itertools.product(("bfloat16", "float32"), (17, 48), ("C", "F"), ("C", "F"))
    for dtype, columns, order, into in cases:
        B = rng.integers(-1, 2, (1100, columns)).astype(dtype)
        C = np.zeros((70, columns), np.float32, order=into)
        gm.matmul(Q, np.asarray(B, order=order), out=C, out_dtype="float32", rung=NAME)
        assert np.array_equal(C, Q.dequantize("float64") @ B.astype(np.float64)), (order, into)
    for dtype in ("bfloat16", "float32"):
        steps = np.zeros((2200, 40), dtype)
        steps[::2, ::2] = B[:, :20]
        found = gm.matmul(Q, steps[::2, ::2], rung=NAME)
        assert np.array_equal(found, gm.matmul(Q, B[:, :20].astype(dtype)))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("bits", [4, 8])
def test_across_the_rows_in_every_order_and_several_stretches(bits: int) -> None:
    """Every place of 70 rows by 333 columns and more: sums are exact, and so is what is right."""
    rng = np.random.default_rng(bits)
    shapes = ((70, 333, 64), (560, 140, 32), (33, 48, 16), (64, 256, 128), (1, 24, -1))
    for (m, n, group), zeros in itertools.product(shapes, ("none", "integer")):
        Q = make_matrix(m, n, bits, group, "float16", zeros, exact=True, perm=m == 70)
        truth = Q.dequantize("float64")
        for rows, order, into in itertools.product((17, 48), ("C", "F"), ("C", "F")):
            x = rng.integers(-1, 2, (rows, m)).astype(ml_dtypes.bfloat16)
            y = np.zeros((rows, n), np.float32, order=into)
            gm.matmul(np.asarray(x, order=order), Q, out=y, out_dtype="float32", rung=NAME)
            assert np.array_equal(y, x.astype(np.float64) @ truth), (m, n, zeros, order, into)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("bits", [4, 8])
def test_across_the_rows_of_every_group_and_zero_point(bits: int) -> None:
    for group, zeros in itertools.product(
        (16, 24, 32, 64, 128, -1, None), ("none", "integer", "fraction")
    ):
        Q = make_matrix(37, 333, bits, group, "float32", zeros)
        x = activations((18, 37), "bfloat16")
        plan = gm.plan("matmul", x, Q, rung=NAME)
        verdict = check.judge("matmul", x, Q, plan(x, Q), check.Rounding.of(plan))
        assert verdict.ok, verdict.text


@pytest.mark.usefixtures("tiles")
def test_more_columns_than_go_at_once(limit: Callable[..., None]) -> None:
    limit(rounded, MOST_COLUMNS=32)
    judged(make_matrix(33, 130, 4, 32, "float32", "none"), activations((130, 70), "bfloat16"))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("size", [2.0**-127, 2.0**-110])
def test_what_tiles_take_for_zero_is_multiplied_in_other_registers(size: float) -> None:
    """A subnormal x, and one whose products with small weights would be."""
    Q = make_matrix(33, 64, 8, 32, "float32", "integer", exact=True)
    Q = gm.QuantizedMatrix.from_parts(
        Q.codes, Q.scales * np.float32(2.0**-20), Q.zeros, shape=Q.shape, bits=8, group_size=32
    )
    B = np.full((64, 17), size).astype(ml_dtypes.bfloat16)
    C = gm.matmul(Q, B, out_dtype="float32", rung=NAME)
    truth = Q.dequantize("float64") @ B.astype(np.float64)
    assert np.abs(C - truth).max() <= 2.0**-148, "what the plain rung gives"
    assert np.abs(truth).max() > 2.0**-145
    x = np.full((17, 33), size).astype(ml_dtypes.bfloat16)
    truth = x.astype(np.float64) @ Q.dequantize("float64")
    found = gm.matmul(x, Q, out_dtype="float32", rung=NAME)
    assert np.abs(found - truth).max() <= 2.0**-146


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    "odd", [2.0**-140, 2.0**-126, 2.0**-100, 3e38, np.inf, np.nan], ids=lambda odd: f"{odd:.3g}"
)
@pytest.mark.parametrize("options", [{}, {"activations": "int8"}], ids=["float", "as bytes"])
def test_floats_that_no_pieces_serve_are_multiplied_in_other_registers(
    odd: float, options: dict[str, str]
) -> None:
    """Pieces that would be subnormal, sums that would be infinite before the last term."""
    Q = make_matrix(33, 64, 4, 32, "float32", "integer")
    B = np.ones((64, 18), np.float32)
    B[np.arange(18), np.arange(18)] = odd
    judged(Q, B, **options)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("whole", [True, False], ids=["zero points whole", "of 24 bits"])
@pytest.mark.parametrize(
    ("size", "factor"), [(2.0**60, 2.0**-110), (2.0**-71, 2.0**-40), (1, 1), (2.0**127, 2.0**-30)]
)
def test_every_bit_of_a_number_counts(size: float, factor: float, whole: bool) -> None:
    """One number of 24 bits in each column, the last the largest: no sum hides a lost piece."""
    Q, rng = make_matrix(33, 64, 4, 32, "float16", "integer"), np.random.default_rng(0)
    scales = Q.scales if factor == 1 else np.full(Q.scales.shape, 1.2345678 * factor, np.float32)
    zeros = Q.zeros if whole else rng.uniform(0, 15, Q.zeros.shape).astype(np.float32)
    Q = gm.QuantizedMatrix.from_parts(Q.codes, scales, zeros, shape=Q.shape, bits=4, group_size=32)
    B = np.zeros((64, 18), np.float32)
    B[np.arange(18), np.arange(18)] = size * np.append(rng.uniform(1, 2, 17), 2 - 2.0**-23)
    truth = Q.dequantize("float64") @ B.astype(np.float64)
    error = np.abs(gm.matmul(Q, B, rung=NAME) - truth)
    assert (error <= 2.0**-20 * np.abs(truth) + 2.0**-148).all()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bits_do_not_depend_on_what_lies_behind(dtype: str) -> None:
    """Panels are of 16 columns in groups of 32: in half of the groups' last ones nothing lies."""
    Q = make_matrix(37, 130, 4, 32, "float32", "fraction")
    for columns in (17, 33, 50):
        x, found = activations((130, columns), dtype), []
        for behind in (1.0, 6e-8, np.inf, np.nan):  # the second is subnormal among halves
            memory = np.full(x.size + 4096, behind, x.dtype)
            memory[: x.size] = x.reshape(-1)
            given = memory[: x.size].reshape(x.shape)
            found += [gm.matmul(Q, given, rung=NAME), gm.matmul(Q, given, rung=NAME)]
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0])
