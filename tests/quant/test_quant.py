"""Quantised matrices against a scalar reference, derived bounds and exhaustive tables."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmule.quant import layouts, library
from gemmule.quant import rounding as rounding
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.quantize import quantize
from quantized_products import SCALE_DTYPES, normal

pytestmark = pytest.mark.usefixtures("unwritten")

DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
KINDS_OF_CODES: list[dict[str, Any]] = [
    {"bits": 4, "group_size": 16},
    {"bits": 8, "group_size": 32, "symmetric": True},
    {"bits": 8, "group_size": None, "method": "mse"},
    {"bits": 4, "group_size": 16, "method": "hqq"},
    {"bits": 4, "group_size": 16, "method": "gptq", "hessian": np.eye(64)},
]
group_sizes = st.one_of(st.none(), st.just(-1), st.integers(1, 40))


def unpacked(Q: QuantizedMatrix) -> np.ndarray:
    """The codes of a row-layout matrix, one a byte, cut out by shifts of Python integers."""
    m, n = Q.stored_shape
    table = [[int(byte) for byte in row] for row in Q.codes]
    if Q.bits == 4:
        table = [[row[j // 2] >> 4 * (j % 2) & 15 for j in range(n)] for row in table]
    return np.array(table, np.int64).reshape(m, n)


def groups_of(m: int, n: int, group_size: int | None) -> dict[tuple[int, int], list[Any]]:
    """The places of each group, by the group's place in the array of scales."""
    groups: dict[tuple[int, int], list[Any]] = {}
    for i in range(m):
        for j in range(n):
            whole = group_size is None or group_size == -1
            key = (0 if group_size is None else i, 0 if whole else j // group_size)
            groups.setdefault(key, []).append((i, j))
    return groups


def check_against_scalars(
    W: np.ndarray, bits: int, group_size: int | None, symmetric: bool
) -> None:
    """Codes, scales and zero points of a float64 matrix, one at a time in Python floats."""
    Q = quantize(W, bits, group_size, symmetric)
    codes, dequantized = unpacked(Q), Q.dequantize("float64")
    qmax = 2**bits - 1
    for key, places in groups_of(*W.shape, group_size).items():
        low, high = min(0.0, *(W[p] for p in places)), max(0.0, *(W[p] for p in places))
        half = 2 ** (bits - 1)
        exact = max(high / (half - 1), -low / half) if symmetric else (high - low) / qmax
        scale = np.float32(exact)
        if float(scale) < exact:
            scale = np.nextafter(scale, np.float32(np.inf))
        zero = half if symmetric else round(-low / float(scale or 1))
        assert Q.scales[key] == scale
        if not symmetric:
            assert Q.zeros[key] == zero
        for p in places:
            code = min(max(round(W[p] / float(scale or 1)) + zero, 0), qmax)
            assert codes[p] == code
            assert dequantized[p] == float(scale) * (code - zero)


def check_bound(W: np.ndarray, bits: int, group_size: int | None, **options: Any) -> None:
    """The documented bound |w - w'| <= scale (1/2 + 6 qmax u), and 0 -> 0."""
    Q = quantize(W, bits, group_size, **options)
    u = 2.0**-53 if W.dtype == np.float64 else 2.0**-24
    scales = Q.scales.astype(np.longdouble)
    n = W.shape[1]
    if group_size is not None and group_size != -1:
        scales = np.repeat(scales, group_size, axis=1)[:, :n]
    exact = W.astype(np.longdouble)
    errors = np.abs(Q.dequantize("float64").astype(np.longdouble) - exact)
    assert (errors <= scales * (0.5 + 6 * (2**bits - 1) * u)).all()
    assert not Q.dequantize("float64")[W == 0].any()


@given(
    m=st.integers(1, 5),
    n=st.integers(1, 50),
    bits=st.sampled_from([4, 8]),
    group_size=group_sizes,
    symmetric=st.booleans(),
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(["normal", "small integers", "halves", "positive", "mostly zero"]),
)
@settings(deadline=None, max_examples=250)
def test_matches_scalar_reference(
    m: int, n: int, bits: int, group_size: int | None, symmetric: bool, seed: int, kind: str
) -> None:
    rng = np.random.default_rng(seed)
    W = {
        "normal": rng.standard_normal((m, n)),
        "small integers": rng.integers(-9, 9, (m, n)).astype(float),
        "halves": rng.integers(-16, 16, (m, n)) / 2,
        "positive": 5 + rng.random((m, n)),
        "mostly zero": rng.standard_normal((m, n)) * (rng.random((m, n)) < 0.1),
    }[kind]
    check_against_scalars(W, bits, group_size, symmetric)


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_error_is_at_most_half_a_step(bits: int, dtype: str, scale_dtype: str) -> None:
    for seed, shift, factor in [(0, 0, 1), (1, 3, 1), (2, -3, 1e-3), (3, 0, 1e-6), (4, 0, 300)]:
        W = ((normal(12, 130, seed, np.float64) + shift) * factor).astype(DTYPES[dtype])
        for group_size in (None, -1, 1, 2, 7, 64, 200):
            for symmetric in (False, True):
                check_bound(W, bits, group_size, symmetric=symmetric, scale_dtype=scale_dtype)


@pytest.mark.parametrize("bits", [4, 8])
def test_bound_holds_at_the_ends_of_the_floats(bits: int) -> None:
    tiny, huge = np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max
    extremes = np.array([[tiny, -tiny, 0, 3 * tiny, huge, -huge, huge, 1e-38]], np.float32)
    for group_size in (1, 2, 4, 8, -1, None):
        for symmetric in (False, True):
            check_bound(extremes, bits, group_size, symmetric=symmetric)
            check_bound(extremes.astype(float) * 1e-30, bits, group_size, symmetric=symmetric)


def test_ties_at_both_ends_are_clamped_by_half_a_step() -> None:
    # The limits lie 7.5 steps either side of 0, so that both round away and one has no code left.
    W = np.array([[-7.5, 7.5, 0.0]])
    Q = quantize(W, bits=4, group_size=-1)
    assert Q.scales.item() == 1
    check_bound(W, 4, -1)


def test_the_bound_kills_scales_rounded_to_nearest(fault: Callable[..., Any]) -> None:
    fault(rounding, "round_up", lambda sound, s, name: s.astype(DTYPES[name]))
    with pytest.raises(AssertionError):
        check_bound(normal(200, 64), 8, 16, scale_dtype="bfloat16")


def test_the_scalar_reference_kills_a_shifted_group(fault: Callable[..., Any]) -> None:
    fault(rounding, "per_column", lambda sound, v, n, g: np.roll(sound(v, n, g), 1, axis=-1))
    with pytest.raises(AssertionError):
        check_against_scalars(normal(2, 12, dtype=np.float64), 4, 5, False)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_integers_that_fill_the_range_come_back_exactly(bits: int, symmetric: bool) -> None:
    low = -(2 ** (bits - 1)) if symmetric else 0
    every = np.arange(low, low + 2**bits, dtype=np.float32)
    W = np.stack([np.roll(every, shift) for shift in range(len(every))])
    for dtype in ("float32", "float16", "float64", "bfloat16"):
        Q = quantize(W, bits, len(every), symmetric)
        np.testing.assert_array_equal(Q.dequantize(dtype).astype(np.float32), W)


def test_whole_zero_points_are_added_after_rounding() -> None:
    groups, scales = np.array([[[0.5, 1.5, 2.5, -0.5]]], np.float32), np.ones((1, 1), np.float32)
    codes = [rounding.steps(groups, scales, scales, 4, *given) for given in ((), (True,), (False,))]
    assert codes[0].ravel().tolist() == codes[1].ravel().tolist() == [1, 3, 3, 1]
    assert codes[2].ravel().tolist() == [2, 2, 4, 0]  # a sum may be a tie where its part is none


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("exponent", [-30, -20, -5, 0, 3, 14])
def test_scales_are_the_next_float_above(scale_dtype: str, exponent: int) -> None:
    exact = np.random.default_rng(1).random((1, 500)) * 2.0**exponent + 2.0**-40
    dtype = DTYPES[scale_dtype]
    rounded = rounding.round_up(exact, scale_dtype)
    assert rounded.dtype == dtype
    assert (rounded.astype(np.float64) >= exact).all()
    before = np.nextafter(rounded, np.array(0, dtype)).astype(np.float64)
    assert (before < exact).all()
    representable = rounded.astype(np.float64)
    np.testing.assert_array_equal(rounding.round_up(representable, scale_dtype), rounded)


def check_all_codes(bits: int) -> None:
    """Every byte value with every awkward zero point, against Python integers."""
    every = np.arange(256, dtype=np.uint8)[None, :]
    for zero in (-128, -1, 0, 1, 7, 8, 15, 16, 127, 128, 255, 300, 2.5):
        n = 256 if bits == 8 else 512
        Q = QuantizedMatrix.from_parts(
            every,
            np.array([[0.5]], np.float32),
            np.array([[zero]], np.float32),
            shape=(1, n),
            bits=bits,
            group_size=-1,
        )
        codes = range(256) if bits == 8 else [c >> 4 * h & 15 for c in range(256) for h in (0, 1)]
        expected = [0.5 * (code - zero) for code in codes]
        for dtype in ("float32", "float64", "float16"):
            assert Q.dequantize(dtype).tolist() == [expected]


@pytest.mark.parametrize("bits", [4, 8])
def test_all_byte_values_and_nibbles(bits: int) -> None:
    check_all_codes(bits)


@pytest.mark.parametrize("wrapping", [np.int8, np.uint8])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_table_kills_subtraction_in_bytes(
    bits: int, wrapping: Any, fault: Callable[..., Any]
) -> None:
    def wrapped(
        sound: Any, codes: np.ndarray, scales: Any, zeros: Any, size: Any, dtype: Any
    ) -> Any:
        difference = codes.astype(wrapping) - np.asarray(zeros).astype(np.int64).astype(wrapping)
        return difference.astype(dtype) * scales

    fault(rounding, "decode", wrapped)
    with pytest.raises(AssertionError):
        check_all_codes(bits)


def test_the_table_kills_swapped_nibbles(fault: Callable[..., Any]) -> None:
    fault(layouts, "unpack_nibbles", lambda sound, p, n: sound((p << 4) | (p >> 4), n))
    with pytest.raises(AssertionError):
        check_all_codes(4)


@pytest.mark.parametrize("zero", [-128, -1, 0, 15, 127])
def test_signed_codes_become_unsigned_as_documented(zero: int) -> None:
    signed = np.arange(-128, 128).astype(np.int8)[None, :]
    Q = QuantizedMatrix.from_parts(
        signed.view(np.uint8) ^ np.uint8(0x80),
        np.ones((1, 1), np.float32),
        np.full((1, 1), zero, np.float32) + 128,
        shape=(1, 256),
        bits=8,
        group_size=-1,
    )
    assert Q.dequantize().tolist() == [[code - zero for code in range(-128, 128)]]


@given(
    m=st.integers(0, 20),
    n=st.integers(0, 70),
    bits=st.sampled_from([4, 8]),
    group_size=group_sizes,
    symmetric=st.booleans(),
    layout=st.sampled_from(["row", "mma16"]),
    with_perm=st.booleans(),
)
@settings(deadline=None)
def test_shapes_layouts_and_transposes(
    m: int, n: int, bits: int, group_size: int | None, symmetric: bool, layout: str, with_perm: bool
) -> None:
    perm = np.random.default_rng(n).permutation(n) if with_perm else None
    Q = quantize(normal(m, n), bits, group_size, symmetric, perm=perm)
    n_groups = math.ceil(n / group_size) if group_size and group_size > 0 else 1
    assert Q.scales.shape == ((1, 1) if group_size is None else (m, n_groups))
    assert Q.n_groups == n_groups
    assert Q.symmetric == symmetric == (Q.zeros is None)
    assert Q.codes.shape == (m, n if bits == 8 else (n + 1) // 2)
    moved = Q.to(layout=layout)
    assert (moved.layout, moved.shape, moved.T.shape) == (layout, (m, n), (n, m))
    dense = Q.dequantize()
    assert dense.shape == (m, n)
    np.testing.assert_array_equal(moved.dequantize(), dense)
    np.testing.assert_array_equal(moved.T.dequantize(), dense.T)
    np.testing.assert_array_equal(moved.to(layout="row").codes, Q.codes)


@pytest.mark.parametrize("shape", [(0, 0), (0, 7), (7, 0)])
@pytest.mark.parametrize("group_size", [None, -1, 3])
def test_empty_matrices(shape: tuple[int, int], group_size: int | None) -> None:
    for bits in (4, 8):
        Q = quantize(np.zeros(shape), bits, group_size)
        assert Q.dequantize().shape == shape
        assert Q.T.dequantize("float64").shape == shape[::-1]
        assert np.isfinite(Q.scales).all()


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "transposed": lambda W: W.T,
    "every other column": lambda W: W[:, ::2],
    "negative": lambda W: W[::-1, ::-1],
    "broadcast": lambda W: np.broadcast_to(W[:1], W.shape),
    "one number": lambda W: np.broadcast_to(W[:1, :1], W.shape),
    "big endian": lambda W: W.astype(W.dtype.newbyteorder(">")),
    "fortran": np.asfortranarray,
}


@pytest.mark.parametrize("view", VIEWS)
def test_strides_do_not_matter(view: str) -> None:
    W = VIEWS[view](normal(300, 299))
    for group_size in (None, -1, 8):
        ours = quantize(W, 4, group_size)
        plain = quantize(np.array(W, np.float32, order="C"), 4, group_size)
        for name in ("codes", "scales", "zeros"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(plain, name))


@pytest.mark.parametrize(
    ("view", "whole"),
    [
        ("transposed", False),
        ("fortran", False),
        ("negative", True),
        ("every other column", True),
        ("broadcast", False),
        ("one number", True),
    ],
)
def test_weights_that_lie_by_columns_are_copied_tile_by_tile(
    view: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        rounding, "library_of", lambda one: asked.append(one) or library.library_of(one)
    )
    W = VIEWS[view](normal(300, 299))
    for order in (None, np.arange(W.shape[1])[::-1]):
        block = rounding.compute_block(W, slice(7, 290), order)
        plain = W[7:290] if order is None else W[7:290][:, order]
        np.testing.assert_array_equal(block, plain)
        assert block.flags.c_contiguous
        assert order is not None or bool(asked) == whole


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_quantise_as_their_float32_values(dtype: str) -> None:
    W = normal(20, 33, dtype=DTYPES[dtype])
    ours, wide = quantize(W, 8, 5), quantize(W.astype(np.float32), 8, 5)
    for name in ("codes", "scales", "zeros"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(wide, name))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_weights_are_named(bad: float, dtype: str) -> None:
    perm = np.random.default_rng(0).permutation(300)
    for i, j in [(0, 0), (4, 299), (3, 127), (2, 128), (1020, 5)]:
        W = normal(1021, 300, dtype=DTYPES[dtype])
        W[i, j] = bad
        for options in ({}, {"group_size": None}, {"perm": perm}, {"bits": 8, "group_size": -1}):
            with pytest.raises(ValueError, match=rf"^W\[{i}, {j}\] is {bad}"):
                quantize(W, **options)


def test_wrong_inputs_of_quantize() -> None:
    W = normal(2, 4)
    wrong: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (TypeError, "got list", (W.tolist(),), {}),
        (TypeError, "got QuantizedMatrix", (quantize(W),), {}),
        (TypeError, "nothing heeds the mask", (np.ma.masked_array(W),), {}),
        (TypeError, "dtype int64", (W.astype(int),), {}),
        (TypeError, "dtype complex64", (W.astype(np.complex64),), {}),
        (TypeError, "dtype float128|dtype longdouble", (W.astype(np.longdouble),), {}),
        (TypeError, "float8_e4m3fn", (W.astype(ml_dtypes.float8_e4m3fn),), {}),
        (TypeError, "dtype object", (W.astype(object),), {}),
        (ValueError, r"shape \(4,\)", (W[0],), {}),
        (ValueError, r"shape \(1, 2, 4\)", (W[None],), {}),
        (ValueError, "bits is 3", (W, 3), {}),
        (TypeError, "bits must be an int", (W, 4.0), {}),
        (TypeError, "bits must be an int", (W, True), {}),
        (ValueError, "group_size is 0", (W, 4, 0), {}),
        (ValueError, "group_size is -2", (W, 4, -2), {}),
        (ValueError, "group_size is", (W, 4, 10**30), {}),
        (TypeError, "group_size must be an int", (W, 4, 1.5), {}),
        (ValueError, "scale_dtype is 'float64'", (W,), {"scale_dtype": "float64"}),
        (TypeError, "scale_dtype must be a string", (W,), {"scale_dtype": np.float32}),
        (ValueError, "perm has shape", (W,), {"perm": np.arange(3)}),
        (ValueError, "holds 1 2 times", (W,), {"perm": np.array([0, 1, 1, 3])}),
        (ValueError, r"entries in -1\.\.2", (W,), {"perm": np.array([0, 1, 2, -1])}),
        (ValueError, r"entries in 0\.\.4", (W,), {"perm": np.array([0, 1, 2, 4])}),
        (TypeError, "perm has dtype float64", (W,), {"perm": np.arange(4.0)}),
        (ValueError, "overflows float16: use", (W * 1e7,), {"scale_dtype": "float16"}),
        (ValueError, "overflows float32: scale W", (W.astype(float) * 1e300,), {}),
    ]
    for error, words, args, options in wrong:
        with pytest.raises(error, match=words):
            quantize(*args, **options)


TORCH = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("group_size", [None, -1, 1, 7, 64, 500])
def test_torch_gives_the_codes_of_numpy(dtype: str, method: str, group_size: int | None) -> None:
    W, perm = normal(7, 131, dtype=DTYPES[dtype]), np.random.default_rng(3).permutation(131)
    tensor = torch.from_numpy(W.astype(np.float64)).to(TORCH[dtype]).requires_grad_()
    importance = np.random.default_rng(4).random(131)
    for bits, symmetric, scale_dtype in ((4, False, "bfloat16"), (8, True, "float32")):
        options = {"method": method, "perm": perm, "importance": importance}
        ours = quantize(tensor, bits, group_size, symmetric, scale_dtype, **options)
        plain = quantize(W, bits, group_size, symmetric, scale_dtype, **options)
        for name in ("codes", "scales", "zeros", "perm"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(plain, name))
        assert ours.error == pytest.approx(plain.error)
    strided = quantize(tensor.T, 4, group_size)
    np.testing.assert_array_equal(strided.dequantize(), quantize(W.T, 4, group_size).dequantize())


def test_torch_matrices_are_checked() -> None:
    W = torch.from_numpy(normal(4, 300))
    for error, words, wrong in (
        (TypeError, "dtype int64", W.long()),
        (ValueError, r"shape \(300,\)", W[0]),
        (
            ValueError,
            r"^W\[3, 7\] is nan",
            W.index_put((torch.tensor(3), torch.tensor(7)), torch.tensor(torch.nan)),
        ),
    ):
        with pytest.raises(error, match=words):
            quantize(wrong)


class Exporter:
    """An array of a library nobody knows, through DLPack alone."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_dlpack_is_enough() -> None:
    W = normal(4, 40)
    np.testing.assert_array_equal(quantize(Exporter(W)).codes, quantize(W).codes)


def test_quantize_needs_little_memory_beside_the_result() -> None:
    W = normal(4096, 2048)
    Q = quantize(W)
    tracemalloc.start()
    try:
        Q = quantize(W)
        Q.to(layout="mma16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * Q.nbytes + 6 * 2**20 < W.nbytes / 2


@pytest.mark.parametrize(
    "kind", [*KINDS_OF_CODES, {"format": "mxfp4"}, {"format": "nvfp4"}], ids=str
)
def test_a_user_who_makes_numpy_raise_gets_codes_of_small_weights(kind: dict[str, Any]) -> None:
    """Of the smallest floats, beside large ones: scales, codes and errors underflow."""
    W = normal(4, 64)
    W[1] *= np.float32(1e-38)
    W[2], W[3, 40:] = 1e-45, 3e30
    expected = quantize(W, **kind)
    with np.errstate(all="raise"):
        made = quantize(W, **kind)
        for dtype in DTYPES:
            assert np.array_equal(made.dequantize(dtype), expected.dequantize(dtype))
    assert made.error == expected.error


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_what_a_library_makes_lies_where_its_arrays_lie(where: str) -> None:
    """On another device than the default one: PyTorch's for shapes alone serves for any."""
    beside = torch.empty((3, 4), dtype=torch.float16, device=where)
    made_by = library.library_of(beside)
    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    made = {
        "float32": made_by.empty((3, 4), "float32"),
        "bfloat16": made_by.cast(beside, "bfloat16"),
        "uint8": made_by.dense(beside.T, "uint8").T,
        "float16": made_by.dense(beside, "float16"),
    }
    for name, array in [*made.items(), ("float32", made_by.asarray(host))]:
        assert (array.device, tuple(array.shape)) == (beside.device, (3, 4))
        assert array.dtype == getattr(torch, name)
    assert made["float16"] is beside
    assert made["uint8"].T.is_contiguous()
    host[:] = 0
    assert where == "meta" or made_by.asarray(host).data_ptr() != host.ctypes.data
