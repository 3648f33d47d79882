"""The canonical form of a grouped product: each row of A, sorted by expert, meets one matrix.

`Routed` is what surrounds it where rows are not sorted, or do not leave as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from gemmule.core.canonical import Call, Options
from gemmule.core.operand import Form, Ints, View, c_strides, vector_alignment
from gemmule.core.problem import FLOATS, Problem, layout_of, result_dtype


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


INDICES = ("int32", "int64")
EPILOGUES = ("silu_gate",)


class Routing(NamedTuple):
    """How rows find their experts, if not by offsets, and what becomes of their products."""

    indices: Any = None
    weights: Any = None
    epilogue: str | None = None


class Routed(NamedTuple):
    """What surrounds a grouped product: where its rows come from, and what becomes of its sums.

    A token has `top_k` slots, each with an expert. sorts: rows are gathered by expert first; else
    they are sorted, and a slot is a row. gated: the n columns of the sums are gates, then as many
    ups. sums: the dtype that they are kept in. shape: of the result, whose rows have `columns`.
    """

    slots: int
    top_k: int
    experts: int
    k: int
    n: int
    sorts: bool
    gated: bool
    sums: str
    out: str
    shape: Ints

    @property
    def columns(self) -> int:
        """Of the result."""
        return self.shape[-1]


Around = tuple[Form | None, ...]
"""The forms of a grouped product's indices, weights and offsets, None for what is not given."""


def routed(a: Form, w: Form, around: Around, epilogue: str | None, options: Options) -> Routed:
    """Return what surrounds the product of operands of these forms; raises as the function does.

    With indices a: (tokens, k), or (tokens, top_k, k); indices and weights: (tokens, top_k).
    """
    indices, weights, ends = around
    if (indices is None) == (ends is None):
        raise ValueError("grouped_matmul takes either offsets or indices; give one of the two.")
    if epilogue is not None and epilogue not in EPILOGUES:
        raise ValueError(f"epilogue is {epilogue!r}; it must be None or {EPILOGUES[0]!r}.")
    if len(w.shape) != 3:
        raise ValueError(f"grouped_matmul takes W of (experts, k, n); got shape {w.shape}.")
    experts, k, n = w.shape
    top_k, tokens = (1, a.shape[0] if a.shape else 0) if indices is None else (0, 0)
    if indices is not None:
        _check_indices(a.shape, indices, weights)
        tokens, top_k = indices.shape
    elif weights is not None:
        raise ValueError("weights were given without indices; they belong to slots. Give both.")
    if a.shape[-1:] != (k,):
        check_shapes((tokens, *a.shape[-1:]), w.shape, (experts,))
    if epilogue is not None and n % 2:
        raise ValueError(f"W has {n} columns; {epilogue} takes gates, then as many ups.")
    out = dtype_of(a.dtype, w.dtype, "int32", options.out_dtype, coded=w.quant is not None)
    wide = "float64" if a.dtype == "float64" else "float32"
    plain = weights is None and epilogue is None
    lead = (tokens, top_k) if indices is not None and weights is None else (tokens,)
    shape = *lead, n if epilogue is None else n // 2
    gated, sums = epilogue is not None, out if plain else wide
    return Routed(
        tokens * top_k, top_k, experts, k, n, indices is not None, gated, sums, out, shape
    )


def _check_indices(a: Ints, indices: Form, weights: Form | None) -> None:
    """Raise unless indices and weights are (tokens, top_k) beside A, and contiguous."""
    if len(indices.shape) != 2 or len(a) not in (2, 3) or a[:-1] != indices.shape[: len(a) - 1]:
        raise ValueError(
            "with indices (tokens, top_k) grouped_matmul takes A (tokens, k) or (tokens, top_k, "
            f"k); got shapes {indices.shape} and {a}."
        )
    if indices.dtype not in INDICES:
        raise TypeError(f"indices has dtype {indices.dtype}; it must be {' or '.join(INDICES)}.")
    if weights is not None and weights.shape != indices.shape:
        raise ValueError(
            f"weights has shape {weights.shape} and indices {indices.shape}; they must be equal."
        )
    if weights is not None and weights.dtype not in FLOATS:
        raise TypeError(f"weights has dtype {weights.dtype}; it must be {', '.join(FLOATS)}.")
    for name, form in (("indices", indices), ("weights", weights)):
        if form is None or 0 in form.shape:
            continue
        steps = zip(form.shape, form.strides, c_strides(form.shape), strict=True)
        if any(size > 1 and step != packed for size, step, packed in steps):
            raise ValueError(
                f"{name} has strides {form.strides}; it must be contiguous. Copy it first."
            )


def groups(ends: Iterable[int]) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and its rows.

    >>> list(groups([2, 2, 5]))
    [(0, slice(0, 2, None)), (2, slice(2, 5, None))]
    """
    begin = 0
    for expert, end in enumerate(ends):
        if end > begin:
            yield expert, slice(begin, end)
        begin = max(begin, end)
