"""What kernels are compiled for: Numba's variables are obeyed, and AVX2 alone is met everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import gemmule as gm
from gemmule import lookup, settings
from gemmule.backends.cpu import jit, target
from gemmule.backends.cpu.jit import unavailable
from gemmule.core.registry import all_rungs

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="needs Numba")

HOST = frozenset(
    ("sse4.2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vnni")
)
AVX2 = "+sse4.2,+avx,+avx2,+fma,+f16c"
VARIABLES = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX")


@pytest.fixture(autouse=True)
def _read_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    target._features.cache_clear()
    yield
    monkeypatch.undo()
    target._features.cache_clear()


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
    given: dict[str, str], width: int, lacks_vnni: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "_host_features", lambda: HOST)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
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


# Forms that kernels have for AVX2 alone: what decodes and multiplies codes along and across rows,
# halves read ahead, and the packed products' tile. Each takes a second to compile.
PRODUCTS = """
import numpy as np, gemmule as gm
from gemmule.backends.cpu import jit, target
from products import exact, small
from test_quantized_cpu import activations, check, make_matrix, rung_called
assert target.vector_bytes() == 32 and target.missing_features("avx512f") is not None
for name, bits, group, zeros in (
    ("vector_decode", 4, 64, "integer"),
    ("vector_decode", 4, 8, "fraction"),
    ("int8_activations", 4, 64, "integer"),
    ("vector_panels", 8, 64, "integer"),
):
    Q = make_matrix(9, 300, bits, group, "float32", zeros)
    Q = Q.T if name == "vector_panels" else Q
    check(rung_called(name), Q, activations((Q.shape[1],), "float32"))
rng = np.random.default_rng(0)
A, B = small(rng, (37, 53), "float16"), small(rng, (53, 40), "float16")
for op, b, rung in ("matmul", B, "packed"), ("matvec", B[:, 0].copy(), "prefetched_rows"):
    found = getattr(gm, op)(A, b, rung=rung)
    assert np.array_equal(found.astype(np.float64), exact(op, A, b)), rung
print("all right")
"""


@pytest.mark.skipif(
    target.missing_vectors() is not None or not target.has_wide_vectors(),
    reason="all tests meet this CPU's own registers",
)
def test_products_by_avx2_alone() -> None:
    """As on a CPU without AVX-512, which most have: a process whose target has none."""
    child(PRODUCTS, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=AVX2)


def child(program: str, **variables: str) -> None:
    """Run a program that says in the end that all is right."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent / "src"), str(here)])
    environment = os.environ | {"PYTHONPATH": path, "GEMMULE_DEVICE": "cpu"} | variables
    run = [sys.executable, "-c", program]
    done = subprocess.run(
        run, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["all right"], done.stderr[-2000:]


def test_functions_that_convert_halves_are_known_before_kernels_are() -> None:
    from llvmlite import binding

    jit._numba()
    assert binding.address_of_symbol("__extendhfsf2")
    assert binding.address_of_symbol("__truncsfhf2")


@pytest.mark.soak
def test_halves_without_conversions_of_the_processor(tmp_path: Path) -> None:
    """LLVM ended the process at the first product of halves, as it did on a virtual CPU."""
    program = """
import numpy as np, gemmule as gm
A = np.arange(12, dtype=np.float16).reshape(3, 4)
assert gm.matvec(A, A[0], rung="scalar_loop").tolist() == [14, 38, 62]
print("all right")
"""
    for _ in "compiled", "read again":
        child(program, NUMBA_CPU_NAME="generic", GEMMULE_CACHE=str(tmp_path))


def test_what_numba_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("0", "-3", " 0 "):
        monkeypatch.setenv("NUMBA_NUM_THREADS", given)
        with pytest.raises(ValueError, match=r"NUMBA_NUM_THREADS is '-?\d'; it must be 1 or more"):
            settings.numba_threads()
    for given, threads in (("", None), ("many", None), ("+3", 3)):
        monkeypatch.setenv("NUMBA_NUM_THREADS", given)
        assert settings.numba_threads() == threads
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    Q = gm.quantize(np.ones((3, 8)), bits=4, group_size=8)
    lookup.forget_plans()
    with pytest.raises(TypeError, match="NUMBA_DISABLE_JIT is set; unset it"):
        gm.plan("matvec", Q, np.ones(8))
    lookup.forget_plans()
