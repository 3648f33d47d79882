"""What is to be computed: the frozen `Problem`, the dtype rules, and the only input validation.

A problem is *canonical*. ``vecmat(x, A)`` is the matvec of ``A.T``, so there are two operations:

- ``matvec``: ``A: (m, n)``, ``x: (n,)``, ``y: (m,)``; the reduction has length n;
- ``matmul``: ``A: (m, k)``, ``B: (k, n)``, ``C: (m, n)``; the reduction has length k;
- ``grouped``: ``A: (m, k)``, ``W: (batch, k, n)``, ``C: (m, n)``; each row of A meets one matrix of
  W, which one is known when it runs.

The layout of a 2-D operand tells how it lies in memory: ``row`` (unit stride along its last axis),
``col`` (unit stride along its first axis) or ``strided`` (neither, or a stride that is not
positive). A matvec over a ``row`` matrix reads along the reduction; over a ``col`` matrix (a
row-major vecmat, say) it reads across it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import numpy as np

from gemmule.core import fork

FLOATS = ("float64", "float32", "float16", "bfloat16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
COMPLEX = ("complex64", "complex128")
DTYPES = FLOATS + FLOAT8 + INTEGERS + COMPLEX
HALVES = ("float16", "bfloat16")
FLOAT4 = {"float8_e8m0fnu": "mxfp4", "float8_e4m3fn": "nvfp4"}
"""By the dtype of a quantised matrix's scales the format whose 4-bit codes are floats (e2m1)."""
FLOAT4_DTYPE = "float4_e2m1fn"
FLOAT8_CODES = "float8_e4m3fn"
"""The dtype of 8-bit codes that are floats, whose scales are those of integers."""

ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8,
    "uint64": 8, "complex64": 8, "complex128": 16, "float8_e8m0fnu": 1,
}  # fmt: skip

# Unit roundoff u of each floating dtype: round to nearest is wrong by at most u * |value|.
UNIT_ROUNDOFF = {
    "float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3, "tf32": 2.0**-11,
    "complex64": 2.0**-24, "complex128": 2.0**-53,
}  # fmt: skip

PRECISIONS = ("float32", "float64", "ieee", "tf32")
BYTES = ("int8", "uint8")


@functools.cache
def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return the NumPy dtype of a dtype name; bfloat16 and float8 come from ml_dtypes."""
    if name in ("bfloat16", *FLOAT8, *FLOAT4):
        with fork.WHOLE:
            import ml_dtypes

        extension: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name))
        return extension
    return np.dtype(name)


def check_dtype(name: str, argument: str) -> str:
    """Return `name` if it is a dtype of this package, else raise TypeError."""
    if name not in DTYPES:
        near = "float64" if name in ("float128", "float96") else "float32"
        if name.startswith("complex"):
            near = "complex64" if name == "complex32" else "complex128"
        raise TypeError(
            f"{argument} has dtype {name}; supported are {', '.join(DTYPES)}. Convert it first, "
            f"for example with .astype('{near}'), a PyTorch tensor with .to(torch.{near})."
        )
    return name


def result_dtype(a: str, b: str, out_dtype: str | None = None) -> str:
    """Return the dtype of a product of dtypes `a` and `b`.

    Mixed floats promote (float16 with float32 gives float32, float16 with bfloat16 gives float32);
    8-bit integers give int32, other integers int64 or uint64 (modulo 2^64). An integer with a
    float is a TypeError, as is int64 with uint64, which no integer type holds. `out_dtype` may name
    a wider or narrower type of the same kind.
    """
    default = _default_result(a, b)
    if out_dtype is None:
        return default
    if out_dtype not in DTYPES:
        raise TypeError(f"out_dtype is {out_dtype}; it must be one of {', '.join(DTYPES)}.")
    if _kind(out_dtype) != _kind(default):
        raise TypeError(
            f"out_dtype is {out_dtype}, but the product of {a} and {b} is of kind "
            f"{_kind(default)} (default {default}). Give an out_dtype of that kind."
        )
    if _kind(out_dtype) == "integer" and out_dtype not in ("int32", "int64", "uint64"):
        raise TypeError(f"out_dtype is {out_dtype}; integer products are int32, int64 or uint64.")
    return out_dtype


def _kind(name: str) -> str:
    if name in INTEGERS:
        return "integer"
    return "complex" if name in COMPLEX else "float"


def _default_result(a: str, b: str) -> str:
    kinds = {_kind(a), _kind(b)}
    if kinds == {"integer"}:
        return _integer_result(a, b)
    if "integer" in kinds:
        raise TypeError(
            f"cannot multiply {a} with {b}: integers and floats do not mix. "
            "Convert the integer operand to the float dtype first."
        )
    if a in FLOAT8 or b in FLOAT8:
        return "float32" if a in FLOAT8 and b in FLOAT8 else _promote_float8(a, b)
    if {a, b} == {"float16", "bfloat16"}:
        return "float32"
    if "bfloat16" in (a, b):  # wider floats hold every bfloat16; NumPy's table does not know it
        return a if b == "bfloat16" else b
    return str(np.result_type(a, b))


def _promote_float8(a: str, b: str) -> str:
    return a if b in FLOAT8 else b


def _integer_result(a: str, b: str) -> str:
    if a in ("int8", "uint8") and b in ("int8", "uint8"):
        return "int32"
    common = np.result_type(a, b)
    if common.kind == "f":
        raise TypeError(
            f"cannot multiply {a} with {b}: no integer dtype holds both. "
            "Convert one operand to the dtype of the other."
        )
    return "int64" if common.kind == "i" else "uint64"


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """How the matrix of a quantised problem is stored (`gemmule.quant.matrix`).

    activations, exact: what the caller permits. `exact` forbids that weights are rounded to the
    dtype of x before they are multiplied.
    """

    bits: int
    group_size: int | None
    has_zeros: bool
    layout: str
    scale_dtype: str
    transposed: bool
    has_perm: bool = False
    activations: str = "float"
    exact: bool = False

    @property
    def format(self) -> str:
        """``"int4"``, ``"int8"``, or of 4-bit floats ``"mxfp4"`` or ``"nvfp4"``."""
        return FLOAT4.get(self.scale_dtype, f"int{self.bits}")


@dataclass(frozen=True, slots=True)
class Problem:
    """One product, canonical and hashable: sizes, dtypes, layouts, quantisation.

    Shapes: matvec ``A (m, n), x (n,), y (m,)`` with ``k == 1``; matmul ``A (m, k), B (k, n),
    C (m, n)``; grouped ``A (m, k), W (batch, k, n), C (m, n)``. `batch` counts independent
    products, of a grouped one the experts; a ``shared_*`` operand is one for all of them.
    `alignment` is the largest power of two, at most 16, that divides every base address and
    leading stride in bytes.
    """

    op: str
    m: int
    n: int
    k: int = 1
    batch: int = 1
    a: str = "float32"
    b: str = "float32"
    out: str = "float32"
    layout_a: str = "row"
    layout_b: str = "row"
    layout_out: str = "row"
    alignment: int = 16
    shared_a: bool = False
    shared_b: bool = False
    precision: str = "float32"
    accumulate: str | None = None
    batch_invariant: bool = False
    quant: QuantSpec | None = field(default=None)

    @property
    def reduction(self) -> int:
        """Length of the sum behind one element of the result."""
        return self.n if self.op == "matvec" else self.k

    @property
    def outputs(self) -> int:
        """Elements of one result (of one batch entry)."""
        return self.m if self.op == "matvec" else self.m * self.n

    @property
    def codes(self) -> QuantSpec:
        """How the matrix of a quantised problem is stored; TypeError for another problem."""
        if self.quant is None:
            raise TypeError(f"{self.describe()} is not quantised.")
        return self.quant

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the matrix A of one batch entry; quantised: codes, scales and zeros."""
        rows, cols = self.m, self.reduction
        if self.quant is None or self.op == "grouped":
            return rows * cols * ITEMSIZE[self.a]
        stored = (cols, rows) if self.quant.transposed else (rows, cols)
        return _stored_bytes(self.quant, *stored)

    @property
    def compulsory_bytes(self) -> int:
        """Bytes that have to move: each input read once, each output written once.

        Of a grouped product as many experts as there are tokens, at most all.
        """
        if self.op == "grouped":
            one = self.k * self.n * ITEMSIZE.get(self.b, 0)  # of codes 0
            touched = min(self.m, self.batch) * (one + _stored_bytes(self.quant, self.n, self.k))
            return self.matrix_bytes + touched + self.outputs * ITEMSIZE[self.out] + 4 * self.batch
        copies_a = 1 if self.shared_a else self.batch
        copies_b = 1 if self.shared_b else self.batch
        b_elements = self.n if self.op == "matvec" else self.k * self.n
        inputs = copies_a * self.matrix_bytes + copies_b * b_elements * ITEMSIZE[self.b]
        return inputs + self.batch * self.outputs * ITEMSIZE[self.out]

    @property
    def flops(self) -> int:
        """Multiplications plus additions."""
        products = 1 if self.op == "grouped" else self.batch
        return 2 * products * self.outputs * self.reduction

    def alone(self) -> Problem:
        """Return one product of the batch as a problem of its own."""
        return replace(self, batch=1, shared_a=False, shared_b=False)

    def describe(self) -> str:
        """Return one line for people: op, sizes, dtypes, layouts."""
        if self.op == "matvec":
            sizes = f"A {self.m} x {self.n} {self.layout_a}"
        else:
            sizes = f"A {self.m} x {self.k} {self.layout_a}, B {self.k} x {self.n} {self.layout_b}"
        matrix = self.a if self.quant is None else describe_quant(self.quant)
        matrix = matrix.replace("int8", "float8") if self.a == FLOAT8_CODES else matrix
        if self.op == "grouped":
            experts = f"{self.batch} experts of {self.k} x {self.n} {self.layout_b}"
            sizes = f"A {self.m} x {self.k} {self.layout_a}, {experts}"
            codes = self.b if self.quant is None else describe_quant(self.quant)
            codes = codes.replace("int8", "float8") if self.b == FLOAT8_CODES else codes
            return f"grouped {sizes}, {self.a} x {codes} -> {self.out}"
        batch = f", batch {self.batch}" if self.batch != 1 else ""
        return f"{self.op} {sizes}{batch}, {matrix} x {self.b} -> {self.out}"


def describe_quant(spec: QuantSpec) -> str:
    """Return a short name of a quantisation, such as ``int4 g128 zeros``."""
    group = {None: "per matrix", -1: "per row"}.get(spec.group_size, f"g{spec.group_size}")
    zeros = " zeros" if spec.has_zeros else ""
    return f"{spec.format} {group}{zeros}{' transposed' if spec.transposed else ''}"


def _stored_bytes(spec: QuantSpec | None, rows: int, cols: int) -> int:
    """Return the bytes of codes, scales and zeros of stored rows; none where nothing is coded."""
    if spec is None:
        return 0
    groups = _group_count(rows, cols, spec.group_size)
    per_group = ITEMSIZE[spec.scale_dtype] + (4 if spec.has_zeros else 0)
    return rows * -(-cols * spec.bits // 8) + groups * per_group


def _group_count(rows: int, cols: int, group_size: int | None) -> int:
    if group_size is None:
        return 1
    return rows if group_size == -1 else rows * -(-cols // group_size)


def check_problem(problem: Problem) -> Problem:
    """Return `problem` if its options are legal and its sums fit, else raise."""
    if problem.precision not in PRECISIONS:
        raise ValueError(
            f"precision is {problem.precision!r}; it must be one of {', '.join(PRECISIONS)}."
        )
    if problem.precision == "float64" and problem.out != "float64":
        raise ValueError(
            f"precision='float64' is for products of float64; this one of {problem.a} and "
            f"{problem.b} is {problem.out}. Convert the operands, or leave precision out."
        )
    if problem.accumulate not in (None, "float16", "float32"):
        raise ValueError(
            f"accumulate is {problem.accumulate!r}; it must be None, 'float32' or 'float16'."
        )
    small = problem.quant is None and problem.a in BYTES and problem.b in BYTES
    if small and problem.out == "int32":
        longest = longest_int32_sum(problem.a, problem.b)
        if problem.reduction > longest:
            raise ValueError(
                f"a sum of {problem.reduction:,} products of {problem.a} and {problem.b} can "
                f"exceed int32 (limit {longest:,}). Pass out_dtype='int64'."
            )
    return problem


@functools.cache
def longest_int32_sum(a: str, b: str) -> int:
    """Return the most products of two 8-bit integer dtypes whose sum always fits int32.

    The extreme products decide: (-128)^2 = 2^14 for int8 with int8, 255 * -128 for uint8 with
    int8, 255^2 for uint8 with uint8. The signs differ, and int32 reaches one further below zero.

    >>> [longest_int32_sum(*pair) for pair in (("int8",) * 2, ("uint8", "int8"), ("uint8",) * 2)]
    [131071, 65793, 33025]
    """
    of_a, of_b = np.iinfo(a), np.iinfo(b)
    corners = [int(p) * int(q) for p in (of_a.min, of_a.max) for q in (of_b.min, of_b.max)]
    highest = (2**31 - 1) // max(corners)
    lowest = min(corners)
    return highest if lowest >= 0 else min(highest, 2**31 // -lowest)


def matvec_shape(
    a_shape: tuple[int, ...], x_shape: tuple[int, ...], *, op: str = "matvec"
) -> tuple[int, ...]:
    """Return the result shape of ``(..., m, n), (..., n) -> (..., m)``; ValueError if illegal."""
    if len(a_shape) < 2 or len(x_shape) < 1:
        raise ValueError(
            f"{op} needs a matrix of two or more dimensions and a vector of one or more; "
            f"got shapes {a_shape} and {x_shape}."
        )
    if a_shape[-1] != x_shape[-1]:
        raise ValueError(
            f"{op}: the matrix has {a_shape[-1]} elements along the summed axis and the vector "
            f"{x_shape[-1]} (shapes {a_shape} and {x_shape}"
            f"{', the matrix seen transposed' if op == 'vecmat' else ''}); they must be equal."
            + _columns_meant(a_shape, x_shape, op)
        )
    return (*_broadcast(a_shape[:-2], x_shape[:-1], op), a_shape[-2])


def _columns_meant(a_shape: tuple[int, ...], x_shape: tuple[int, ...], op: str) -> str:
    """Return what to call where vectors were given as columns instead of rows, or nothing."""
    if len(x_shape) != 2 or x_shape[0] != a_shape[-1]:
        return ""
    if x_shape[1] == 1:
        return " One vector has one axis: give x[:, 0]."
    columns = "gm.matmul(A, X)" if op == "matvec" else "gm.matmul(X.T, A)"
    return f" Vectors are the rows of a batch here; for columns call {columns}."


def matmul_shape(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the result shape of a matmul of two operands of two or more dimensions."""
    if a_shape[-1] != b_shape[-2]:
        raise ValueError(
            f"matmul: the first operand has {a_shape[-1]} columns and the second {b_shape[-2]} "
            f"rows (shapes {a_shape} and {b_shape}); they must be equal."
            + (" For vectors that are rows call gm.matvec(A, X)." * (a_shape[-1] == b_shape[-1]))
        )
    return (*_broadcast(a_shape[:-2], b_shape[:-2], "matmul"), a_shape[-2], b_shape[-1])


def _broadcast(left: tuple[int, ...], right: tuple[int, ...], op: str) -> tuple[int, ...]:
    if left == right:
        return left
    axes = max(len(left), len(right))  # NumPy's own function knows 32 of the 64 it has
    pairs = [*zip(*((1,) * (axes - len(one)) + one for one in (left, right)), strict=True)]
    if not all(a == b or 1 in (a, b) for a, b in pairs):
        raise ValueError(
            f"{op}: batch dimensions {left} and {right} do not broadcast together; each pair must "
            "be equal, or one of them 1."
        )
    return tuple(b if a == 1 else a for a, b in pairs)


def layout_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    """Return ``row``, ``col`` or ``strided`` for a 2-D view; strides in elements.

    A size of one makes its stride meaningless, so a single row or column is ``row`` or ``col``
    whatever its strides say. Rows must not overlap: ``row`` needs a leading stride of at least
    the row's length.
    """
    (rows, cols), (row_step, col_step) = shape, strides
    if (col_step == 1 or cols <= 1) and (row_step >= max(cols, 1) or rows <= 1):
        return "row"
    if (row_step == 1 or rows <= 1) and col_step >= max(rows, 1):  # more than one column
        return "col"
    return "strided"
