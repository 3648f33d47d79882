"""Grouped products inside `jax.jit`, `jax.vmap` and `jax.grad`.

Rows that are sorted by expert go to XLA's call; what surrounds them where they are not, or where
they are weighted and gated, is JAX's own. Rows behind the last end are zeros, in gradients too.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.custom_batching import sequential_vmap

from gemmule.core.canonical import Options
from gemmule.core.grouped import Routing, grouped, routed
from gemmule.core.operand import Form
from gemmule.core.problem import check_dtype, numpy_dtype
from gemmule.frameworks.jax import check_arrays, ffi_call, traced
from gemmule.frameworks.xla import GROUPED, OUTER, TURNED


def wanted(a: Any, w: Any, ends: Any, routing: Routing | None) -> bool:
    """Whether a transformation of JAX's is looking at a product of these."""
    around = () if routing is None else (routing.indices, routing.weights)
    return traced(a, w, ends, *around)


def through(
    a: Any, w: Any, ends: Any, out: Any, options: Options, routing: Routing | None = None
) -> Any:
    """Return the traced product; TypeError for what a trace cannot hold."""
    named = {"A": a, "W": w, "offsets": ends}
    if routing is not None:
        named |= {"indices": routing.indices, "weights": routing.weights}
    given = {name: one for name, one in named.items() if one is not None}
    check_arrays(out, **given)
    forms = {
        name: Form.packed(one.shape, check_dtype(one.dtype.name, name))
        for name, one in given.items()
    }
    if routing is None:
        return _product(GROUPED, options, a, w, ends)
    around = forms.get("indices"), forms.get("weights"), forms.get("offsets")
    about = routed(forms["A"], forms["W"], around, routing.epilogue, options)
    sums = Options(out_dtype=about.sums)
    target = numpy_dtype(about.out)
    if routing.indices is None:
        return _through_gate(_product(GROUPED, sums, a, w, ends), routing.epilogue).astype(target)
    flat = routing.indices.reshape(-1)
    named_one = (flat >= 0) & (flat < about.experts)
    keys = jnp.where(named_one, flat, about.experts)
    order = jnp.argsort(keys, stable=True)
    numbers = jnp.arange(about.experts, dtype=keys.dtype)
    ends = jnp.searchsorted(keys[order], numbers, side="right").astype(jnp.int32)
    rows = a.reshape(-1, about.k)[order] if a.ndim == 3 else a[order // max(about.top_k, 1)]
    found = _through_gate(_product(GROUPED, sums, rows, w, ends), routing.epilogue)
    found = jnp.zeros_like(found).at[order].set(found, unique_indices=True)
    found = found.reshape(*routing.indices.shape, about.columns)
    if routing.weights is None:
        return found.astype(target)
    shares = jnp.where(named_one.reshape(routing.indices.shape), routing.weights, 0)
    return (found * shares.astype(about.sums)[..., None]).sum(1).astype(target)


def _through_gate(sums: Any, epilogue: str | None) -> Any:
    if epilogue is None:
        return sums
    gates, ups = jnp.split(sums, 2, -1)
    return jax.nn.silu(gates) * ups


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(op: str, options: Options, a: Any, b: Any, ends: Any) -> Any:
    return _batchable(op, options)(a, b, ends)


def _forward(op: str, options: Options, a: Any, b: Any, ends: Any) -> Any:
    return _product(op, options, a, b, ends), (a, b, ends)


def _backward(op: str, options: Options, kept: Any, grad: Any) -> tuple[Any, Any, Any]:
    """Each of the three products has the other two for its gradients."""
    a, b, ends = kept
    plain = Options()
    grad = grad.astype(a.dtype)
    if op == GROUPED:  # a b
        of_a, of_b = (TURNED, grad, b), (OUTER, a, grad)
    elif op == TURNED:  # a b^T
        of_a, of_b = (GROUPED, grad, b), (OUTER, grad, a)
    else:  # a^T b, of each group
        of_a, of_b = (TURNED, b, grad), (GROUPED, a, grad)
    found = (_product(kind, plain, *pair, ends) for kind, *pair in (of_a, of_b))
    return *found, np.zeros(ends.shape, jax.dtypes.float0)


_product.defvjp(_forward, _backward)


@functools.cache
def _batchable(op: str, options: Options) -> Any:
    """Return the product with its rule for `jax.vmap`: one entry after the other."""
    return sequential_vmap(lambda a, b, ends: _called(op, options, a, b, ends))


def _called(op: str, options: Options, a: Any, b: Any, ends: Any) -> Any:
    """Return the call of a program of XLA's; shapes and dtypes are checked here."""
    if op == OUTER:
        result = jax.ShapeDtypeStruct((len(ends), a.shape[1], b.shape[1]), a.dtype)
        has_rows = jnp.diff(ends, prepend=0) > 0
        found = ffi_call(op, options, result, a, b, ends)
        return jnp.where(has_rows[:, None, None], found, 0)
    shape = (b.shape[0], b.shape[2], b.shape[1]) if op == TURNED else b.shape
    left, right = Form.packed(a.shape, a.dtype.name), Form.packed(shape, b.dtype.name)
    call = grouped(left, right, Form.packed(ends.shape, ends.dtype.name), None, options)
    result = jax.ShapeDtypeStruct(call.out_shape, numpy_dtype(call.problem.out))
    found = ffi_call(op, options, result, a, b, ends)
    last = ends[-1] if len(ends) else 0
    return jnp.where(jnp.arange(len(a))[:, None] < last, found, 0)
