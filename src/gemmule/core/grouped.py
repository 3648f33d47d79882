"""The canonical form of a grouped product: each row of A, sorted by expert, meets one matrix."""

from __future__ import annotations

from gemmule.core.canonical import Call, Options
from gemmule.core.operand import Form, Ints, View, vector_alignment
from gemmule.core.problem import FLOATS, Problem, layout_of, result_dtype

NAMES = ("A", "W", "offsets")  # of the operands


def grouped(a: Form, w: Form, ends: Form, out: Form | None, options: Options) -> Call:
    """Return the canonical call of a grouped product of operands of these forms.

    a: (tokens, k); w: (experts, k, n); ends: int32 (experts,), where each expert's rows of A end;
    out: the form of the user's out, or None for a fresh C-ordered array. Raises as the public
    function does.
    """
    check_shapes(a.shape, w.shape, ends.shape)
    if ends.shape[0] > 1 and ends.strides[0] != 1:
        raise ValueError(
            f"offsets has a stride of {ends.strides[0]} elements; it must be contiguous. Copy it."
        )
    dtype = dtype_of(a.dtype, w.dtype, ends.dtype, options.out_dtype, coded=w.quant is not None)
    (m, k), (experts, _, n) = a.shape, w.shape
    given = Form.packed((m, n), dtype) if out is None or out.shape != (m, n) else out
    views = View(a.shape, a.strides), View(w.shape, w.strides), View(given.shape, given.strides)
    columns = View(w.shape[1:], w.strides[1:])
    apart = w.strides[:1] if experts > 1 else ()
    aligned = min(
        vector_alignment(form, view, steps)  # 16 for codes
        for form, view, steps in ((a, views[0], ()), (w, columns, apart), (given, views[2], ()))
    )
    coded = w.quant is not None
    problem = Problem(
        op="grouped",
        m=m,
        n=n,
        k=k,
        batch=experts,
        a=a.dtype,
        b=w.dtype,
        out=dtype,
        layout_a=layout_of((m, k), (a.strides[0], a.strides[1])),
        layout_b="row" if coded else layout_of((k, n), (w.strides[1], w.strides[2])),
        layout_out=layout_of((m, n), (given.strides[0], given.strides[1])),
        alignment=aligned,
        quant=w.quant,
    )
    return Call("grouped", problem, *views, (m, n))


def check_shapes(a: Ints, w: Ints, ends: Ints) -> None:
    """Raise ValueError unless operands of these shapes fit together."""
    if len(a) != 2 or len(w) != 3 or len(ends) != 1:
        raise ValueError(
            "grouped_matmul takes A (tokens, k), W (experts, k, n) and offsets (experts,); got "
            f"shapes {a}, {w} and {ends}."
        )
    if a[1] != w[1]:
        raise ValueError(
            f"grouped_matmul: A has {a[1]} columns and each matrix of W {w[1]} rows (shapes {a} "
            f"and {w}); they must be equal. Weights kept as (experts, n, k) are passed transposed, "
            "which costs nothing."
        )
    if ends[0] != w[0]:
        raise ValueError(
            f"grouped_matmul: W holds {w[0]} experts and offsets {ends[0]} ends; it must be one "
            "end for each, where its rows of A end."
        )


def dtype_of(a: str, w: str, ends: str, out_dtype: str | None, *, coded: bool = False) -> str:
    """Return the result's dtype; TypeError for operands that have no grouped product."""
    if ends != "int32":
        raise TypeError(f"offsets has dtype {ends}; it must be int32. Convert it first.")
    if a not in FLOATS or (a != w and not coded):
        raise TypeError(
            f"grouped_matmul takes A and W of one dtype of {', '.join(FLOATS)}; got {a} and {w}. "
            "Convert one of them first."
        )
    return result_dtype(a, a, out_dtype)
