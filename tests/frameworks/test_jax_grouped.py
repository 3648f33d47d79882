"""Grouped products inside JAX's transformations, beside `jax.lax.ragged_dot`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmule as gm

jax = pytest.importorskip("jax")
jnp = jax.numpy

EDGES = {"ragged": [3, 3, 9, 11], "one group": [0, 0, 12, 12], "none": [0, 0, 0, 0]}


@pytest.fixture(autouse=True)
def wide() -> Any:
    with jax.enable_x64(True):
        yield


def operands(dtype: str = "float64") -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(s)).astype(dtype) for s in ((12, 8), (4, 8, 6)))  # type: ignore[return-value]


def peer(a: Any, w: Any, ends: Any) -> Any:
    return jax.lax.ragged_dot(a, w, jnp.diff(ends, prepend=0))


def dense(a: Any, w: Any, ends: Any) -> Any:
    """Every row by every matrix, of which its own is kept: JAX transforms it as often as asked."""
    rows = jnp.arange(len(a))[:, None]
    own = (rows < ends) & (rows >= jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]]))
    return jnp.einsum("tk,ekn,te->tn", a, w, own.astype(a.dtype))


def close(mine: Any, theirs: Any) -> None:
    np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("edges", EDGES)
def test_a_compiled_product_and_its_gradients(edges: str) -> None:
    (a, w), ends = operands(), jnp.asarray(EDGES[edges], jnp.int32)
    close(jax.jit(gm.grouped_matmul)(a, w, ends), peer(a, w, ends))

    def slope(f: Any) -> Any:
        return jax.jit(jax.grad(lambda a, w: jnp.sin(f(a, w, ends)).sum(), (0, 1)))

    for mine, theirs in zip(slope(gm.grouped_matmul)(a, w), slope(peer)(a, w), strict=True):
        close(mine, theirs)


def test_second_derivatives() -> None:
    (a, w), ends = operands(), jnp.asarray(EDGES["ragged"], jnp.int32)

    def steepness(f: Any) -> Any:
        slope = jax.grad(lambda a, w: jnp.sin(f(a, w, ends)).sum(), (0, 1))
        return jax.grad(lambda a, w: sum(jnp.cos(one).sum() for one in slope(a, w)), (0, 1))(a, w)

    for mine, theirs in zip(steepness(gm.grouped_matmul), steepness(dense), strict=True):
        close(mine, theirs)


def test_batches() -> None:
    (a, w), ends = operands(), jnp.asarray(EDGES["ragged"], jnp.int32)
    both = jnp.stack([ends, jnp.asarray(EDGES["none"], jnp.int32)])
    found = jax.vmap(gm.grouped_matmul, (None, None, 0))(a, w, both)
    close(found, jnp.stack([peer(a, w, one) for one in both]))
    slopes = [
        jax.vmap(jax.grad(lambda a, f=f: f(a, w, ends).sum()))(jnp.stack([a, -a]))
        for f in (gm.grouped_matmul, dense)
    ]
    close(*slopes)


def test_by_indices_with_weights_and_a_gate() -> None:
    a, w = operands()
    a, indices = a[:5], jnp.asarray([[0, 3], [3, 1], [-1, 3], [4, 0], [3, 3]])
    weights = jnp.asarray(np.random.default_rng(1).random((5, 2)))

    def loop(a: Any, w: Any, weights: Any) -> Any:
        named = (indices >= 0) & (indices < 4)
        sums = jnp.einsum("tk,tjkn->tjn", a, w[jnp.where(named, indices, 0)])
        gates, ups = jnp.split(sums, 2, -1)
        shares = jnp.where(named, weights, 0)
        return (jax.nn.silu(gates) * ups * shares[..., None]).sum(1)

    def ours(a: Any, w: Any, weights: Any) -> Any:
        options = {"weights": weights, "epilogue": "silu_gate"}
        return gm.grouped_matmul(a, w, indices=indices, **options)

    close(ours(a, w, weights), loop(a, w, weights))
    close(jax.jit(ours)(a, w, weights), loop(a, w, weights))
    slopes = [
        jax.jit(jax.grad(lambda *given, f=f: jnp.sin(f(*given)).sum(), (0, 1, 2)))(a, w, weights)
        for f in (ours, loop)
    ]
    for mine, theirs in zip(*slopes, strict=True):
        close(mine, theirs)
    rows = jnp.stack([a, 2 * a], 1)  # a row for each slot
    found = jax.jit(lambda rows: gm.grouped_matmul(rows, w, indices=indices))(rows)
    close(found, gm.grouped_matmul(rows, w, indices=indices))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(dtype: str) -> None:
    (a, w), ends = operands(dtype), jnp.asarray(EDGES["ragged"], jnp.int32)
    found = jax.jit(gm.grouped_matmul)(a, w, ends)
    assert found.dtype == dtype
    of_w = jax.grad(lambda w: gm.grouped_matmul(a, w, ends).astype("float32").sum())(w)
    assert of_w.dtype == dtype
    wanted = peer(a.astype("float64"), w.astype("float64"), ends)
    off = np.linalg.norm(np.asarray(found, "float64") - wanted) / np.linalg.norm(wanted)
    assert off < {"bfloat16": 1e-2, "float16": 1e-3, "float32": 1e-6}[dtype]


def test_mistakes_are_told() -> None:
    (a, w), ends = operands(), jnp.asarray(EDGES["ragged"], jnp.int32)
    stack = gm.quantize_experts(np.ones((4, 64, 6), np.float32), bits=8, group_size=32)
    with pytest.raises(TypeError, match="W is a QuantizedStack beside a JAX tracer"):
        jax.jit(lambda a: gm.grouped_matmul(a, stack, ends))(a)
    with pytest.raises(TypeError, match="out was given with a JAX tracer"):
        jax.jit(lambda a: gm.grouped_matmul(a, w, ends, out=a))(a)
    with pytest.raises(ValueError, match="8 columns and each matrix of W 6 rows"):
        jax.jit(gm.grouped_matmul)(a, w.mT, ends)
    with pytest.raises(Exception, match=r"offsets are .* they must be the ends"):
        jax.block_until_ready(jax.jit(gm.grouped_matmul)(a, w, ends[::-1]))
