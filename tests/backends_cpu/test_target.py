"""What kernels are compiled for: Numba's variables are obeyed, and AVX2 alone is met everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from children import printed
from gemmule.backends.cpu import features, target
from gemmule.backends.cpu.jit import unavailable
from gemmule.core.registry import all_rungs
from gemmule.rungs.quantized.cpu import _operands
from gemmule.rungs.quantized.cpu.vector import panels, strips
from quantized_products import make_matrix

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="needs llvmlite")

HOST = frozenset(
    ("sse4.2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vnni")
)
AVX2 = "+sse4.2,+avx,+avx2,+fma,+f16c"
VARIABLES = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX")


@pytest.fixture(autouse=True)
def _read_again(setting: Callable[..., None]) -> Iterator[None]:
    setting(**dict.fromkeys(VARIABLES))
    features.target_features.cache_clear()
    yield
    features.target_features.cache_clear()


@pytest.mark.parametrize(
    ("given", "width", "lacks_vnni"),
    [
        ({}, 64, None),
        ({"NUMBA_CPU_NAME": "znver2"}, 64, None),  # Numba adds the features of this CPU
        ({"NUMBA_CPU_FEATURES": AVX2}, 32, "NUMBA_CPU_FEATURES is set"),
        ({"NUMBA_CPU_FEATURES": f"{AVX2},-avx512f"}, 32, "NUMBA_CPU_FEATURES is set"),
        ({"NUMBA_CPU_NAME": "generic"}, 16, "NUMBA_CPU_NAME is set"),
        ({"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": AVX2}, 32, "NUMBA_CPU_FEATURES"),
        ({"NUMBA_ENABLE_AVX": "0"}, 16, "NUMBA_ENABLE_AVX is set"),
        ({"NUMBA_ENABLE_AVX": "1"}, 64, None),
    ],
)
def test_the_target_is_what_numba_compiles_for(
    given: dict[str, str],
    width: int,
    lacks_vnni: str | None,
    setting: Callable[..., None],
    fault: Callable[..., Any],
) -> None:
    fault(features, "host_features", lambda sound: HOST)
    setting(**given)
    assert target.vector_bytes() == width
    reason = target.missing_features("avx512vnni")
    assert (reason is None) if lacks_vnni is None else (reason or "").startswith(lacks_vnni)
    reason = target.missing_features("avx2", "no_such_feature") or ""
    assert "no_such_feature" in reason
    assert reason.startswith("this CPU lacks")
    refused = {rung.name for rung in all_rungs("cpu") if rung.available() is not None}
    assert ("vector_decode" in refused) == (width == 16)
    assert ("sixteen_rows_int8" in refused) == (width != 64)
    assert "threads" not in refused
    if width < 64:  # what LLVM is told must not be more than what kernels know of
        compiled = features.cpu_and_features()[1].split(",")
        wide = {word[1:] for word in compiled if word.startswith("+avx")}
        assert wide <= features.target_features()[0]


# Forms that kernels have for AVX2 alone: what decodes and multiplies codes along and across rows,
# halves read ahead, and the packed products' tile. Each takes a second to compile.
PRODUCTS = """
import numpy as np, gemmule as gm
from gemmule.backends.cpu import features, target
from fences import fenced
from products import exact, small
from pytest import MonkeyPatch
from quantized_products import activations, check, check_across_rows, make_matrix, rung_called
assert target.vector_bytes() == 32 and target.missing_features("avx512f") is not None
for name, bits, group, zeros in (
    ("vector_decode", 4, 64, "integer"),
    ("vector_decode", 4, 8, "fraction"),
    ("vector_decode", 8, 64, "integer"),
    ("int8_activations", 4, 64, "integer"),
    ("int8_activations", 8, 64, "fraction"),
    ("int8_activations", 8, 32, "none"),
    ("vector_panels", 8, 32, "integer"),
    ("vector_panels", 8, 64, "integer"),
    ("vector_panels", 4, 192, "integer"),
    ("vector_panels", 4, -1, "fraction"),
):
    Q = make_matrix(45, 8300 if group == 192 else 300, bits, group, "float16", zeros)
    Q = Q.T if name == "vector_panels" else Q
    check(rung_called(name), Q, activations((Q.shape[1],), "float32"))
for bits, zeros in ((4, "integer"), (8, "fraction")):
    Q = make_matrix(45, 300, bits, 64, "float16", zeros)
    check(rung_called("packed_codes"), Q, activations((300, 40), "float32"))
for own_cache in (0, 1 << 30):
    with MonkeyPatch.context() as patch:
        check_across_rows(8, -1, own_cache, patch)
rng = np.random.default_rng(0)
A, B = small(rng, (37, 53), "float16"), small(rng, (53, 40), "float16")
for op, b, rung in ("matmul", B, "packed"), ("matvec", B[:, 0].copy(), "prefetched_rows"):
    found = getattr(gm, op)(A, b, rung=rung)
    assert np.array_equal(found.astype(np.float64), exact(op, A, b)), rung
for k in 16, 40, 53:  # of a last vector of few terms all, or half, would lie in the next page
    A, b = small(rng, (70, k), "bfloat16"), small(rng, (k, 5), "bfloat16")
    for a in A, np.asfortranarray(A):
        found = gm.matmul(fenced(a, True, 1), fenced(b, True, 1), rung="few_columns")
        assert np.array_equal(found.astype(np.float64), exact("matmul", A, b)), "few_columns"
print("all right")
"""


@pytest.mark.parametrize(
    ("zero", "fits"), [(0, True), (15, True), (16, False), (-1, False), (256, False), (2.5, False)]
)
def test_only_nibbles_of_zero_points_that_tables_have_are_looked_up(
    zero: float, fits: bool
) -> None:
    parts = _operands.stored(make_matrix(2, 64, 4, -1, "float32", "integer"))
    given = dataclasses.replace(parts, zeros=np.array([[8], [zero]], np.float32))
    assert panels.fit_tables(given) == fits
    weights = strips.nibble_tables().astype(np.uint32)
    found = ((weights[:, 0] << 16) | (weights[:, 1] << 24)).view(np.float32)
    assert np.array_equal(found, np.arange(16) - np.arange(16.0)[:, None])


@pytest.mark.skipif(
    target.missing_vectors() is not None or not target.has_wide_vectors(),
    reason="all tests meet this CPU's own registers",
)
def test_products_by_avx2_alone() -> None:
    """As on a CPU without AVX-512, which most have: a process whose target has none."""
    old = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": AVX2, "GEMMULE_DEVICE": "cpu"}
    assert printed(PRODUCTS, **old).splitlines()[-1:] == ["all right"]
