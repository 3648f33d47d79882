"""The dtype rules, the shape rules and the problem's derived figures."""

from __future__ import annotations

import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from children import printed
from gemmule.core.problem import (
    COMPLEX,
    DTYPES,
    FLOAT8,
    FLOATS,
    INTEGERS,
    ITEMSIZE,
    UNIT_ROUNDOFF,
    Problem,
    QuantSpec,
    check_problem,
    layout_of,
    longest_int32_sum,
    matmul_shape,
    matvec_shape,
    numpy_dtype,
    result_dtype,
)


@pytest.mark.parametrize("name", DTYPES)
def test_item_sizes_are_those_of_numpy(name: str) -> None:
    assert numpy_dtype(name).itemsize == ITEMSIZE[name]
    assert numpy_dtype(name).name == name


@pytest.mark.parametrize("name", FLOATS + FLOAT8 + COMPLEX)
def test_unit_roundoffs_are_half_a_step_at_one(name: str) -> None:
    info = np.finfo(name) if name in ("float64", "float32", *COMPLEX) else ml_dtypes.finfo(name)
    assert UNIT_ROUNDOFF[name] == float(info.eps) / 2
    assert set(UNIT_ROUNDOFF) == {*FLOATS, *FLOAT8, *COMPLEX, "tf32"}
    assert UNIT_ROUNDOFF["tf32"] == UNIT_ROUNDOFF["float16"]  # ten bits behind the first, both


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("float64", "float32", "float64"),
        ("float16", "float32", "float32"),
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "float64", "float64"),
        ("float16", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float8_e4m3fn", "float8_e5m2", "float32"),
        ("float8_e4m3fn", "float16", "float16"),
        ("float8_e5m2", "bfloat16", "bfloat16"),
        ("int8", "int8", "int32"),
        ("int8", "uint8", "int32"),
        ("uint8", "uint8", "int32"),
        ("int8", "int16", "int64"),
        ("uint8", "uint16", "uint64"),
        ("uint32", "int32", "int64"),
        ("uint64", "uint8", "uint64"),
        ("int64", "int64", "int64"),
        ("complex64", "float32", "complex64"),
        ("complex64", "float64", "complex128"),
        ("complex128", "complex64", "complex128"),
    ],
)
def test_result_dtype(a: str, b: str, expected: str) -> None:
    assert result_dtype(a, b) == expected
    assert result_dtype(b, a) == expected


@pytest.mark.parametrize("a", INTEGERS)
@pytest.mark.parametrize("b", FLOATS + FLOAT8)
def test_integers_do_not_mix_with_floats(a: str, b: str) -> None:
    for pair in ((a, b), (b, a)):
        with pytest.raises(TypeError, match=rf"{pair[0]} with {pair[1]}.*Convert"):
            result_dtype(*pair)


@pytest.mark.parametrize("signed", ["int8", "int16", "int32", "int64"])
def test_no_integer_type_holds_uint64_and_signed(signed: str) -> None:
    with pytest.raises(TypeError, match="no integer dtype holds both"):
        result_dtype("uint64", signed)


def test_wider_floats_hold_every_narrower_one() -> None:
    for a in FLOATS:
        for b in FLOATS:
            common = numpy_dtype(result_dtype(a, b))
            values = np.array([1.0, 1.0078125, -3.0]).astype(numpy_dtype(a))  # 1 + 2^-7: bfloat16
            np.testing.assert_array_equal(values.astype(common).astype(values.dtype), values)


@pytest.mark.parametrize(
    ("a", "b", "out", "words"),
    [
        ("float32", "float32", "int64", "kind float"),
        ("int8", "int8", "float32", "kind integer"),
        ("float32", "float32", "complex64", "kind float"),
        ("int8", "int8", "int16", "int32, int64 or uint64"),
        ("float32", "float32", "bool", "it must be one of"),
        ("float32", "float32", "longdouble", "it must be one of"),
    ],
)
def test_out_dtype_of_another_kind_is_refused(a: str, b: str, out: str, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        result_dtype(a, b, out)


def test_out_dtype_of_the_same_kind_is_taken() -> None:
    assert result_dtype("float32", "float32", "float64") == "float64"
    assert result_dtype("float16", "float16", "float32") == "float32"
    assert result_dtype("int8", "int8", "int64") == "int64"


@pytest.mark.parametrize(
    ("a", "b", "limit"),
    [
        ("int8", "int8", 131_071),
        ("uint8", "int8", 65_793),
        ("int8", "uint8", 65_793),
        ("uint8", "uint8", 33_025),
    ],
)
def test_8_bit_sums_end_where_int32_ends(a: str, b: str, limit: int) -> None:
    ranges = [(int(np.iinfo(t).min), int(np.iinfo(t).max)) for t in (a, b)]
    extremes = [p * q for p, q in itertools.product(*ranges)]
    assert all(-(2**31) <= e * limit < 2**31 for e in extremes)
    assert not all(-(2**31) <= e * (limit + 1) < 2**31 for e in extremes)
    longest = Problem("matvec", 1, limit, a=a, b=b, out="int32")
    assert check_problem(longest) is longest
    for op, sizes in (("matvec", {"n": limit + 1}), ("matmul", {"n": 2, "k": limit + 1})):
        over = Problem(op, 1, a=a, b=b, out="int32", **sizes)
        with pytest.raises(ValueError, match=rf"{limit + 1:,} .*{limit:,}.*out_dtype='int64'"):
            check_problem(over)
        check_problem(replace(over, out="int64"))


def test_the_documented_limit_is_that_of_int8() -> None:
    assert longest_int32_sum("int8", "int8") == 131_071  # 131,071 * 2^14 < 2^31


@pytest.mark.parametrize("field", ["precision", "accumulate"])
def test_unknown_options_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=rf"{field} is 'half'; it must be"):
        check_problem(Problem("matvec", 1, 1, **{field: "half"}))


SHAPES = [(), (3,), (2, 3), (3, 2), (1, 3), (4, 2, 3), (1, 2, 3), (5, 1, 2, 3), (0, 3), (2, 0)]


@pytest.mark.parametrize(
    ("op", "a", "b"),
    [("matvec", a, x) for a in SHAPES for x in SHAPES]
    + [("matmul", a, b) for a in SHAPES for b in SHAPES if min(len(a), len(b)) > 1],
)
def test_shapes_are_numpy_s(op: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    shape = {"matvec": matvec_shape, "matmul": matmul_shape}[op]
    try:
        expected = getattr(np, op)(np.zeros(a), np.zeros(b)).shape
    except ValueError:
        with pytest.raises(ValueError, match=op):
            shape(a, b)
    else:
        assert shape(a, b) == expected


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((3, 4), (4, 1), "row"),
        ((3, 4), (9, 1), "row"),
        ((3, 4), (1, 3), "col"),
        ((3, 4), (1, 7), "col"),
        ((3, 4), (3, 1), "strided"),  # rows overlap
        ((3, 4), (1, 2), "strided"),
        ((3, 4), (-4, 1), "strided"),
        ((3, 4), (4, -1), "strided"),
        ((3, 4), (0, 1), "strided"),
        ((3, 4), (8, 2), "strided"),
        ((1, 4), (0, 1), "row"),
        ((1, 4), (77, 5), "col"),  # one row: its stride means nothing
        ((3, 1), (1, 0), "row"),
        ((3, 1), (5, 77), "row"),
        ((1, 1), (0, 0), "row"),
        ((0, 4), (4, 1), "row"),
        ((3, 0), (1, 1), "row"),
    ],
)
def test_layout_of(shape: tuple[int, int], strides: tuple[int, int], expected: str) -> None:
    assert layout_of(shape, strides) == expected


def test_compulsory_bytes_count_each_operand_once() -> None:
    one = Problem("matvec", 10, 20, a="float16", b="float32", out="float32")
    assert one.compulsory_bytes == 10 * 20 * 2 + 20 * 4 + 10 * 4
    shared = Problem("matvec", 10, 20, batch=3, shared_a=True)
    assert shared.compulsory_bytes == 10 * 20 * 4 + 3 * (20 + 10) * 4
    product = Problem("matmul", 2, 3, k=5, batch=4, shared_b=True, a="float64", b="float64")
    assert product.compulsory_bytes == 4 * 2 * 5 * 8 + 5 * 3 * 8 + 4 * 2 * 3 * 4
    few = Problem("grouped", 2, 3, 5, batch=7)  # as many experts as tokens, and every end
    assert few.compulsory_bytes == 4 * (2 * 5 + 2 * 5 * 3 + 2 * 3 + 7)
    assert product.flops == 2 * 4 * 2 * 3 * 5
    assert (one.reduction, one.outputs) == (20, 10)
    assert (product.reduction, product.outputs) == (5, 6)


def test_one_product_of_a_batch_shares_nothing() -> None:
    batch = Problem("matmul", 2, 3, 5, batch=4, shared_a=True, shared_b=True, layout_b="col")
    assert batch.alone() == Problem("matmul", 2, 3, 5, layout_b="col")


@pytest.mark.parametrize(
    ("group_size", "zeros", "groups"), [(128, True, 3 * 3), (-1, False, 3), (None, True, 1)]
)
def test_bytes_of_a_quantised_matrix(group_size: int | None, zeros: bool, groups: int) -> None:
    spec = QuantSpec(4, group_size, zeros, "row", "float16", transposed=False)
    flipped = QuantSpec(4, group_size, zeros, "row", "float16", transposed=True)
    expected = 3 * 151 + groups * (2 + (4 if zeros else 0))
    assert Problem("matvec", 3, 301, a="uint4", quant=spec).matrix_bytes == expected
    assert Problem("matvec", 301, 3, a="uint4", quant=flipped).matrix_bytes == expected


def test_descriptions_name_sizes_and_dtypes() -> None:
    spec = QuantSpec(4, 128, True, "row", "float16", transposed=True)
    text = Problem("matvec", 3, 5, batch=2, a="uint4", quant=spec).describe()
    assert text == "matvec A 3 x 5 row, batch 2, int4 g128 zeros transposed x float32 -> float32"
    text = Problem("matmul", 3, 5, k=7, layout_b="col").describe()
    assert text == "matmul A 3 x 7 row, B 7 x 5 col, float32 x float32 -> float32"


def test_results_of_bfloat16_are_known_before_numpy_knows_it() -> None:
    code = (
        "import sys; from gemmule.core.problem import result_dtype as of\n"
        "print(*[of('bfloat16', b) for b in ('bfloat16', 'float32', 'complex64')],\n"
        "      of('float64', 'bfloat16'), 'ml_dtypes' in sys.modules)\n"
    )
    assert printed(code).split() == ["bfloat16", "float32", "complex64", "float64", "False"]
