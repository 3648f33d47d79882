"""Products inside JAX's transformations: compiled, batched, differentiated."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from checkout import ROOT
from gemmule import general
from gemmule.core.canonical import Options
from gemmule.core.problem import result_dtype
from gemmule.core.registry import all_rungs
from products import OURS, THEIRS

jax = pytest.importorskip("jax")
jnp = jax.numpy

from gemmule.frameworks import xla  # noqa: E402

CASES = [
    *[("matvec", *s) for s in (((3, 5), (5,)), ((2, 3, 5), (5,)), ((3, 5), (2, 5)))],
    *[("vecmat", *s) for s in (((3,), (3, 5)), ((4, 3), (3, 5)), ((3,), (2, 3, 5)))],
    *[
        ("matmul", *s)
        for s in (
            ((3, 4), (4, 5)), ((4,), (4,)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 3, 4), (4, 5)),
            ((3, 4), (2, 4, 5)), ((4,), (2, 4, 5)), ((2, 1, 3, 4), (6, 4, 5)), ((0, 4), (4, 5)),
            ((1, 1, 3, 4), (2, 5, 4, 6)),
        )
    ],
]  # fmt: skip


TILE = next(r for r in all_rungs("cpu") if r.name == "cache_blocks").defaults()


@pytest.fixture(autouse=True)
def wide() -> Any:
    with jax.enable_x64(True):
        yield


def sample(shape: tuple[int, ...], seed: int, dtype: str = "float64") -> Any:
    low = 0 if dtype.startswith("u") else -4
    values = np.random.default_rng(seed).integers(low, 5, shape)
    return jnp.asarray(values).astype(dtype)


def close(mine: Any, theirs: Any) -> None:
    np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("op", "left", "right"), CASES)
def test_a_compiled_product_and_its_gradients(op: str, left: Any, right: Any) -> None:
    a, b = sample(left, 1), sample(right, 2)
    close(jax.jit(OURS[op])(a, b), THEIRS[op](a, b))

    def slope(f: Any) -> Any:
        return jax.jit(jax.grad(lambda a, b: jnp.sin(f(a, b)).sum(), (0, 1)))

    for mine, theirs in zip(slope(OURS[op])(a, b), slope(THEIRS[op])(a, b), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize(("op", "left", "right"), [CASES[i] for i in (0, 2, 3, 7, 8, 11)])
def test_a_batch_is_one_product(op: str, left: Any, right: Any) -> None:
    for places in ((None, 0), (0, None), (1, -1)):
        a, b = (
            sample(shape, 3) if place is None else jnp.moveaxis(sample((6, *shape), 3), 0, place)
            for shape, place in zip((left, right), places, strict=True)
        )
        close(jax.vmap(OURS[op], places)(a, b), jax.vmap(THEIRS[op], places)(a, b))
    slopes = [
        jax.vmap(jax.grad(lambda a, b, f=f: jnp.sin(f(a, b)).sum(), (0, 1)), (0, None))(
            sample((6, *left), 4), sample(right, 5)
        )
        for f in (OURS[op], THEIRS[op])
    ]
    for mine, theirs in zip(*slopes, strict=True):
        close(mine, theirs)
    program = str(
        jax.make_jaxpr(jax.vmap(OURS[op], (0, 0)))(*(sample((6, *s), 1) for s in (left, right)))
    )
    assert program.count("ffi_call[") == 1


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "int8", "int32", "uint64", "complex64"]
)
def test_dtypes(dtype: str) -> None:
    a, b = sample((7, 19), 1, dtype), sample((19, 3), 2, dtype)
    result = jax.jit(gm.matmul)(a, b)
    assert result.dtype.name == result_dtype(dtype, dtype)
    np.testing.assert_array_equal(
        np.asarray(result).astype("complex128"),
        np.asarray(a).astype("complex128") @ np.asarray(b).astype("complex128"),
    )


def test_second_derivatives_loops_and_options() -> None:
    A, x = sample((4, 4), 1), sample((4,), 2)

    def energy(f: Any) -> Any:
        return lambda x: jnp.sin(f(A, x)).sum()

    mine, theirs = (jax.jacrev(jax.grad(energy(f["matvec"])))(x) for f in (OURS, THEIRS))
    close(mine, theirs)

    def loop(f: Any) -> Any:
        return jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda i, x: f(A, x) / 9, x))(x)

    close(loop(gm.matvec), loop(THEIRS["matvec"]))
    named = jax.jit(lambda A, x: gm.matvec(A, x, rung="scalar_loop", precision="ieee"))
    close(named(A, x), A @ x)
    tiled = jax.jit(lambda A, B: gm.matmul(A, B, rung="cache_blocks", params=TILE))
    close(tiled(A, A), A @ A)
    assert (
        jax.jit(lambda A, x: gm.matvec(A, x, out_dtype="float64"))(
            A.astype("float32"), x.astype("float32")
        ).dtype
        == "float64"
    )


def test_compiled_products_and_gradients_are_asked_for_as_the_caller_does(
    fault: Callable[..., Any],
) -> None:
    calls = fault(general, "product", lambda sound, *given: sound(*given))
    A, X = sample((3, 5), 1), sample((7, 5), 2)
    options = {"batch_invariant": True, "precision": "ieee"}
    jax.jit(jax.grad(lambda X: gm.matvec(A, X, **options).sum()))(X).block_until_ready()
    halved = jax.jit(lambda X: gm.matvec(A, X, accumulate="float16", **options))
    halved(X).block_until_ready()
    *gradient, product = [(call[0], call[4]) for call in calls]
    assert ("vecmat", Options(**options)) in gradient
    assert product == ("matvec", Options(accumulate="float16", **options))


def test_a_result_lies_where_its_operands_do() -> None:
    """The second processor of a process that was told it has two."""
    code = (
        "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'\n"
        "import jax, gemmule as gm\n"
        "at = jax.devices('cpu')[1]; A = jax.device_put(jax.numpy.ones((3, 3)), at)\n"
        "assert gm.matvec(A, A[0]).devices() == {at} == jax.jit(gm.matvec)(A, A[0]).devices()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_mistakes_are_told() -> None:
    A, x = jnp.eye(3), jnp.ones(3)
    with pytest.raises(ValueError, match="3 elements along the summed axis"):
        jax.jit(gm.matvec)(A, jnp.ones(4))
    with pytest.raises(TypeError, match="x is a ndarray beside a JAX tracer"):
        jax.jit(lambda A: gm.matvec(A, np.ones(3)))(A)
    with pytest.raises(TypeError, match="A is a QuantizedMatrix beside a JAX tracer"):
        jax.jit(lambda x: gm.matvec(gm.quantize(np.eye(3)), x))(x)
    with pytest.raises(TypeError, match="immutable"):
        jax.jit(lambda A: gm.matvec(A, x, out=x))(A)
    with pytest.raises(TypeError, match=r"A is a JAX tracer.*without device="):
        jax.jit(lambda A: gm.matvec(A, x, device="cpu"))(A)
    with jax.enable_x64(False), pytest.raises(TypeError, match="int64, which JAX holds only"):
        jax.jit(gm.matmul)(jnp.eye(3, dtype="int32"), jnp.eye(3, dtype="int32"))
    with pytest.raises(Exception, match="no cpu rung is called 'magic'"):
        jax.block_until_ready(jax.jit(lambda A, x: gm.matvec(A, x, rung="magic"))(A, x))


def test_the_page_runs() -> None:
    page = (ROOT / "docs" / "jax.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    with jax.enable_x64(False):
        exec(compile(block, "jax.md", "exec"), {})


def test_a_product_of_device_memory_is_launched_on_the_programs_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The frame that XLA hands over on a GPU, made by hand: what is launched, and where."""
    calls: list[Any] = []

    def product(op: str, a: Any, b: Any, out: Any, options: Any) -> None:
        stream = xla.device_arrays.current_stream(xla.device_arrays.from_own(out), 0)
        calls.append((op, a.pointer, a.shape, b.dtype, out.pointer, options.rung, stream))

    monkeypatch.setattr(xla.general, "product", product)
    monkeypatch.setattr(xla.device_arrays, "ordinal_at", lambda pointer: 0)
    keep: list[Any] = []

    def buffer(code: int, address: int, *dims: int) -> int:
        sizes = (ctypes.c_int64 * len(dims))(*dims)
        made = xla.Buffer(ctypes.sizeof(xla.Buffer), None, code, address, len(dims), sizes)
        keep.extend((sizes, made))
        return ctypes.addressof(made)

    def values(kind: Any, *addresses: int) -> Any:
        array = (ctypes.c_void_p * len(addresses))(*addresses)
        keep.append(array)
        return kind(struct_size=ctypes.sizeof(kind), size=len(addresses), values=array)

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(xla.StreamArguments))
    def stream_get(given: Any) -> None:
        assert given.contents.context == 77
        given.contents.stream = 4321

    api = xla.Api(stream_get=ctypes.cast(stream_get, ctypes.c_void_p).value)

    def called(op: str, rung: str | None, result: int, *operands: int) -> None:
        said = {"op": op, "rung": rung, "params": None, "out_dtype": None}
        text = ctypes.create_string_buffer(json.dumps(said).encode())
        span = xla.Span(ctypes.addressof(text), len(text) - 1)
        frame = xla.Frame(
            api=ctypes.pointer(api),
            context=77,
            arguments=values(xla.Values, *operands),
            results=values(xla.Values, result),
            attributes=values(xla.Attributes, ctypes.addressof(span)),
        )
        assert xla.on_device(ctypes.pointer(frame)) is None

    called(
        "matvec", "streamed_rows", buffer(11, 3000, 3), buffer(16, 1000, 3, 5), buffer(11, 2000, 5)
    )
    assert calls == [("matvec", 1000, (3, 5), "float32", 3000, "streamed_rows", 4321)]
    calls.clear()
    ends = np.array([1, 4], np.int32)  # are read behind what the stream has to write yet

    def copy(target: int, source: int, nbytes: int, ordinal: int, stream: int) -> None:
        calls.append((source, nbytes, ordinal, stream))
        ctypes.memmove(target, ends.ctypes.data, nbytes)

    monkeypatch.setattr(xla.driver, "copy", copy)
    rows = buffer(11, 1000, 4, 3), buffer(11, 2000, 4, 2), buffer(4, 5000, 2)
    called(xla.OUTER, None, buffer(11, 3000, 2, 3, 2), *rows)
    assert calls == [
        (5000, 8, 0, 4321),
        ("matmul", 1000, (3, 1), "float32", 3000, None, 4321),
        ("matmul", 1012, (3, 3), "float32", 3024, None, 4321),
    ]
