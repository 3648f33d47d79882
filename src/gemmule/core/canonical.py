"""The canonical form of a product: its problem, and under which strides each array is seen.

Everything here works on shapes and strides alone, so it serves every device and its results can
be cached. A canonical view has axes ``(*outer, batch, rows, cols)``: `outer` are batch axes that
cannot be walked with one stride (usually none), and the batch axis is absent when batch is 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gemmule.core.operand import (
    ALONE,
    Batch,
    Form,
    Ints,
    View,
    broadcast_strides,
    c_strides,
    collapse,
    power_of_two,
    vector_alignment,
)
from gemmule.core.packing import Ready, check_sides
from gemmule.core.problem import (
    FLOATS,
    ITEMSIZE,
    Problem,
    QuantSpec,
    check_problem,
    layout_of,
    matmul_shape,
    matvec_shape,
    result_dtype,
)

NAMES = {"matvec": ("A", "x"), "vecmat": ("x", "A"), "matmul": ("A", "B")}  # of the operands
Frozen = tuple[tuple[str, Any], ...]  # parameter values, sorted by name


@dataclass(frozen=True, slots=True)
class Options:
    """The keyword options of a call: what shapes its problem, and the rung that was named."""

    out_dtype: str | None = None
    precision: str = "float32"
    accumulate: str | None = None
    batch_invariant: bool = False
    activations: str = "float"
    literal: bool = False  # a rung was named: keep the operation the user wrote
    rung: str | None = None
    params: Frozen | None = None
    scaled: bool = False  # by an alpha, before the sums are rounded to halves
    exact: bool = False  # a precision of float32 was named: no weight is rounded to a half


DEFAULT = Options()


@dataclass(frozen=True, slots=True)
class Call:
    """A canonical call. With `swapped`, the user's second operand is the canonical first.

    `ready`: of A and of B, what they were prepared for.
    """

    op: str
    problem: Problem
    a: View
    b: View
    out: View
    out_shape: Ints
    outer: Ints = ()
    swapped: bool = False
    transposed_quant: bool = False
    ready: tuple[Ready | None, Ready | None] = (None, None)


Views = tuple[View, View, View]  # of A, of x or B, of the result


class _Product(NamedTuple):
    """What was asked for: the operands' forms, that of a given `out`, and the result they have."""

    op: str
    a: Form
    b: Form
    out: Form | None
    options: Options
    dtype: str
    shape: Ints

    def exchanged(self) -> _Product:
        """Return the product with its operands in the other order."""
        return self._replace(a=self.b, b=self.a)

    def out_strides(self) -> Ints:
        """Return the strides of the result: those of `out`, else of a fresh array."""
        given = self.out is not None and self.out.shape == self.shape
        return self.out.strides if given and self.out is not None else c_strides(self.shape)


def canonical(op: str, a: Form, b: Form, out: Form | None, options: Options) -> Call:
    """Return the canonical call of ``op`` on operands of these forms.

    op: ``matvec`` (A, x), ``vecmat`` (x, A) or ``matmul`` (A, B); `out` is the form of the user's
    out, or None for a fresh C-ordered array. Raises as the public functions do.
    """
    if options.activations != "float" and a.quant is None and b.quant is None:
        raise ValueError(
            f"activations is {options.activations!r}, which quantises what a quantised matrix "
            f"multiplies, but both operands are dense ({a.dtype} and {b.dtype}). Quantise the "
            "matrix with gemmule.quantize, or leave activations away."
        )
    check_sides(op, NAMES[op], (a.ready, b.ready))
    if op == "matmul":
        return _matmul(a, b, out, options)
    matrix, vector = (a, b) if op == "matvec" else (b, a)
    shape = _swap_last(matrix.shape) if op == "vecmat" else matrix.shape
    strides = _swap_last(matrix.strides) if op == "vecmat" else matrix.strides
    seen = matrix._replace(shape=shape, strides=strides)
    if op == "vecmat":
        seen = seen._replace(quant=_flip(matrix.quant))
    call = _matvec(op, seen, vector, out, options)
    if op == "vecmat" and not call.swapped:
        return _with(call, swapped=True, transposed_quant=matrix.quant is not None)
    if op == "vecmat":
        return _with(call, swapped=False)
    return call


def _with(call: Call, *, swapped: bool, transposed_quant: bool = False) -> Call:
    turned = transposed_quant or call.transposed_quant
    return replace(call, swapped=swapped, transposed_quant=turned)


def _swap_last(values: Ints) -> Ints:
    return (*values[:-2], values[-1], values[-2]) if len(values) >= 2 else values


def _matvec(op: str, a: Form, x: Form, out: Form | None, options: Options) -> Call:
    shape = matvec_shape(a.shape, x.shape, op=op)
    asked = _Product(op, a, x, out, options, _result(a, x, options.out_dtype), shape)
    many = math.prod(shape[:-1]) != 1
    if many and len(a.shape) == 2 and not options.literal and not options.batch_invariant:
        stacked = _stacked_vectors(asked, asked.out_strides())
        if stacked is not None:
            return stacked
    return _assemble(asked, *_batch_and_views(asked, (2, 1, 1)))


def _batch_and_views(asked: _Product, axes: tuple[int, int, int]) -> tuple[Batch, Views]:
    """Return what lies in front of so many last axes of both operands and the result, and those."""
    a, b, shape, strides = asked.a, asked.b, asked.shape, asked.out_strides()
    of_a, of_b, of_out = (-count for count in axes)
    lead = shape[:of_out]
    steps = (
        broadcast_strides(a.shape[:of_a], a.strides[:of_a], lead),
        broadcast_strides(b.shape[:of_b], b.strides[:of_b], lead),
        strides[:of_out],
    )
    return collapse(lead, steps), (
        View(a.shape[of_a:], a.strides[of_a:]),
        View(b.shape[of_b:], b.strides[of_b:]),
        View(shape[of_out:], strides[of_out:]),
    )


def _stacked_vectors(asked: _Product, y_strides: Ints) -> Call | None:
    """See one matrix times many vectors as a matmul, where the vectors lie at one stride."""
    a, x, shape = asked.a, asked.b, asked.shape
    batch = collapse(shape[:-1], (x.strides[:-1], y_strides[:-1], y_strides[:-1]))
    if len(batch.shape) > 1:
        return None
    count = batch.shape[0] if batch.shape else 1
    x_step = batch.strides[0][0] if batch.shape else x.shape[-1]
    y_step = batch.strides[1][0] if batch.shape else shape[-1]
    rows, cols = a.shape
    x_view = View((count, cols), (x_step, x.strides[-1]))
    y_view = View((count, rows), (y_step, y_strides[-1]))
    if a.quant is not None:  # the quantised matrix stays the first operand
        flipped = View((cols, count), _swap_last(x_view.strides))
        y_flipped = View((rows, count), _swap_last(y_view.strides))
        return _assemble(asked, ALONE, (View(a.shape, a.strides), flipped, y_flipped))
    matrix = View((cols, rows), _swap_last(a.strides))
    return _with(_assemble(asked.exchanged(), ALONE, (x_view, matrix, y_view)), swapped=True)


def _matmul(a: Form, b: Form, out: Form | None, options: Options) -> Call:
    if not a.shape or not b.shape:
        raise ValueError(
            f"matmul does not take 0-D operands; got shapes {a.shape} and {b.shape}. "
            "Multiply by a scalar with *."
        )
    if len(a.shape) == 1:
        return _vector_first(a, b, out, options)
    if len(b.shape) == 1:
        return canonical("matvec", a, b, out, options)
    shape = matmul_shape(a.shape, b.shape)
    if b.quant is not None:
        return _quantized_second(a, b, shape, out, options)
    if options.batch_invariant:
        return _vector_by_vector(a, b, shape, out, options)
    asked = _Product("matmul", a, b, out, options, _result(a, b, options.out_dtype), shape)
    batch, views = _batch_and_views(asked, (2, 2, 2))
    if not options.literal:
        batch, views = _folded(asked, batch, views)
        vector = _single_vector(asked, batch, views)
        if vector is not None:
            return vector
    return _assemble(asked, batch, views)


def _vector_by_vector(a: Form, b: Form, shape: Ints, out: Form | None, options: Options) -> Call:
    """See a matmul as a batch of matvecs: of the rows of A, or of the columns of B beside Q."""
    if a.quant is not None:
        columns = _turned(b)
        result = Form.packed(shape, _result(a, b, options.out_dtype))
        call = _matvec("matmul", a, columns, _turned(out or result), options)
        return replace(call, out_shape=shape)
    matrix = _turned(b)
    if len(b.shape) > 2:  # every row of A meets the matrix of its batch entry
        matrix = matrix._replace(
            shape=(*matrix.shape[:-2], 1, *matrix.shape[-2:]),
            strides=(*matrix.strides[:-2], 0, *matrix.strides[-2:]),
        )
    return _with(_matvec("matmul", matrix, a, out, options), swapped=True)


def _turned(form: Form) -> Form:
    """Return the form of an array whose last two axes are seen in the other order."""
    return form._replace(shape=_swap_last(form.shape), strides=_swap_last(form.strides))


def _single_vector(asked: _Product, batch: Batch, views: Views) -> Call | None:
    """See a product with one column or one row as a matvec: it is bound by the matrix's bytes.

    Not where a batch shares the matrix: matvec after matvec would read it again for each. A
    quantised matrix stays the first operand.
    """
    a_view, b_view, c_view = views
    of_a, of_b, of_c = batch.strides
    if c_view.shape[1] == 1 and 0 not in of_a:
        x = View(b_view.shape[:1], b_view.strides[:1])
        y = View(c_view.shape[:1], c_view.strides[:1])
        return _assemble(asked, batch, (a_view, x, y))
    if c_view.shape[0] == 1 and 0 not in of_b and asked.a.quant is None:
        x = View(a_view.shape[1:], a_view.strides[1:])
        y = View(c_view.shape[1:], c_view.strides[1:])
        matrix = View(_swap_last(b_view.shape), _swap_last(b_view.strides))
        turned = Batch(batch.shape, (of_b, of_a, of_c))
        return _with(_assemble(asked.exchanged(), turned, (matrix, x, y)), swapped=True)
    return None


def _folded(asked: _Product, batch: Batch, views: Views) -> tuple[Batch, Views]:
    """See a batch that shares B as one product of all its rows, where these follow each other.

    B would be read again for each product.
    """
    (of_a, of_b, of_c), (a, b, c) = batch.strides, views
    plain = asked.a.quant is None and asked.a.ready is None and asked.b.ready is None
    if not batch.shape or batch.shape[-1] < 2 or of_b[-1] != 0 or not plain:
        return batch, views
    rows, steps = a.shape[0], (of_a[-1], of_c[-1])
    if rows != 1:
        if steps != (rows * a.strides[0], rows * c.strides[0]):
            return batch, views
        steps = a.strides[0], c.strides[0]
    rows *= batch.shape[-1]
    a = View((rows, a.shape[1]), (steps[0], a.strides[1]))
    c = View((rows, c.shape[1]), (steps[1], c.strides[1]))
    return Batch(batch.shape[:-1], (of_a[:-1], of_b[:-1], of_c[:-1])), (a, b, c)


def _vector_first(a: Form, b: Form, out: Form | None, options: Options) -> Call:
    if len(b.shape) == 1:  # the inner product: a matrix of one row
        if a.shape != b.shape:
            raise ValueError(
                f"matmul: vectors of {a.shape[0]} and {b.shape[0]} elements; "
                "they must be equally long."
            )
        row = a._replace(shape=(1, *a.shape), strides=(max(a.shape[0], 1), *a.strides))
        call = canonical("matvec", row, b, None, options)
        return Call("matmul", call.problem, call.a, call.b, call.out, ())
    return canonical("vecmat", a, b, out, options)


def _quantized_second(a: Form, b: Form, shape: Ints, out: Form | None, options: Options) -> Call:
    """See ``A Q`` as ``(Q^T A^T)^T``: the quantised matrix is always the first operand."""
    matrix = b._replace(shape=_swap_last(b.shape), quant=_flip(b.quant))
    plain = a._replace(ready=None)  # no product of codes reads a packed form
    call = canonical("matvec", matrix, plain, out, replace(options, literal=False))
    return Call("matmul", call.problem, call.a, call.b, call.out, shape, call.outer, True, True)


def _flip(spec: QuantSpec | None) -> QuantSpec | None:
    return None if spec is None else replace(spec, transposed=not spec.transposed)


def _result(a: Form, b: Form, out_dtype: str | None) -> str:
    """Return the result's dtype; a quantised matrix takes the dtype of what it multiplies."""
    if a.quant is None:
        return result_dtype(a.dtype, b.dtype, out_dtype)
    if b.quant is not None:
        raise TypeError(
            f"both operands are quantised, {a.shape} and {b.shape}; a quantised matrix multiplies "
            "an array of floats. Pass .dequantize() of one of them."
        )
    if b.dtype not in FLOATS:
        raise TypeError(
            f"a quantised matrix multiplies {', '.join(FLOATS)}; the other operand is {b.dtype}. "
            "Convert it first."
        )
    return result_dtype(b.dtype, b.dtype, out_dtype)


def _assemble(asked: _Product, batch: Batch, seen: Views) -> Call:
    _, a, b, out, options, dtype, _ = asked
    a_view, b_view, out_view = seen
    outer, count = (batch.shape[:-1], batch.shape[-1]) if batch.shape else ((), 1)
    is_matvec = len(out_view.shape) == 1
    spec = a.quant
    if spec is not None and options.activations != "float":
        spec = replace(spec, activations=options.activations)
    exact = options.exact or options.precision == "ieee" or options.batch_invariant
    if spec is not None and exact:
        spec = replace(spec, exact=True)
    aligned = min(
        vector_alignment(form, view, steps)
        for view, steps, form in zip(seen, batch.strides, (a, b, out), strict=True)
        if form is not None
    )
    if options.batch_invariant:  # of one vector as of the rows of a C-ordered batch of them
        for count_of, name in ((a_view.shape[1], b.dtype), (a_view.shape[0], dtype)):
            aligned = min(aligned, power_of_two(count_of * ITEMSIZE[name]))
    problem = Problem(
        op="matvec" if is_matvec else "matmul",
        m=a_view.shape[0],
        n=a_view.shape[1] if is_matvec else b_view.shape[1],
        k=1 if is_matvec else a_view.shape[1],
        batch=count,
        a=a.dtype,
        b=b.dtype,
        out=dtype,
        layout_a=layout_of(a_view.shape, a_view.strides) if spec is None else "row",
        layout_b="row" if is_matvec else layout_of(b_view.shape, b_view.strides),
        layout_out="row" if is_matvec else layout_of(out_view.shape, out_view.strides),
        alignment=aligned,
        shared_a=count > 1 and batch.strides[0][-1] == 0,
        shared_b=count > 1 and batch.strides[1][-1] == 0,
        precision=options.precision,
        accumulate=options.accumulate,
        batch_invariant=options.batch_invariant,
        quant=spec,
    )
    views = [
        View((*batch.shape, *view.shape), (*steps, *view.strides))
        for view, steps in zip(seen, batch.strides, strict=True)
    ]
    seen, ready = (views[0], views[1], views[2]), (a.ready, b.ready)
    return Call(asked.op, check_problem(problem), *seen, asked.shape, outer, ready=ready)
