"""Products of 4-bit floats on the CPU: every rung that takes them, judged by the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmule as gm
from children import printed
from gemmule.core.problem import FLOAT4_DTYPE
from gemmule.core.rung import Rung
from gemmule.oracle.inputs import Case
from gemmule.oracle.problems import float4_spec, make_problem
from gemmule.rungs.quantized.cpu import _operands
from gemmule.rungs.quantized.cpu.vector import codes
from gemmule_lab.verify.random_products import Trial, run
from quantized_products import NAMES, rung_called

SIZES = [(1, 1), (3, 31), (33, 64), (7, 131), (18, 520), (2, 1100)]
TAKING = [n for n in NAMES if any(a == FLOAT4_DTYPE for a, *_ in rung_called(n).signatures)]


def trials(rung: Rung) -> Iterator[Trial]:
    """Products that a rung takes: sizes of whole blocks and not, both formats, values of kinds."""
    signatures = [one for one in rung.signatures if one[0] == FLOAT4_DTYPE]
    for number, (m, k) in enumerate(SIZES):
        for pick in range(2):
            for turned in (False, True):
                spec = float4_spec(pick, transposed=turned, has_perm=number % 3 == 1)
                if "int8" in rung.name:
                    spec = replace(spec, activations="int8")
                rows, inner = (k, m) if turned else (m, k)
                n = (inner, 1) if rung.op == "matvec" else (5, inner)
                signature = signatures[(number + pick) % len(signatures)]
                problem = make_problem(rung.op, rows, *n, signature, quant=spec, shared_a=True)
                if rung.refusal(problem) is None:
                    for kind in ("integers", "normal", "cancel", "scaled"):
                        odd = 2 * number + 1  # by a plan, too, where NumPy's errors are raised
                        yield Trial(rung.op, Case(problem, kind, odd), rung=rung.name)


def check(name: str) -> None:
    done = [run(trial) for trial in trials(rung_called(name))]
    assert len(done) >= 30
    for outcome in done:
        assert outcome.status == "ok", outcome.text


def test_these_take_them() -> None:
    assert {"unpack_loop", "threads", "panels", "column_loop", "dequantise_blas"} <= set(TAKING)


@pytest.mark.parametrize("name", TAKING)
def test_within_the_declared_arithmetic(name: str) -> None:
    check(name)


BUGS: dict[str, Callable[[_operands.Stored], dict[str, Any]]] = {
    "signs": lambda parts: {"codes": parts.codes ^ np.uint8(0x88)},
    "nibbles": lambda parts: {"codes": parts.codes << 4 | parts.codes >> 4},
    "exponents": lambda parts: {"scales": np.roll(parts.scales, 1, axis=1)},
    "integers": lambda parts: {"scales": parts.scales.astype(np.float32)},
    "factors": lambda parts: {"factors": None},
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_oracle_kills(bug: str, fault: Callable[..., Any]) -> None:
    def wrong(sound: Any, matrix: Any) -> Any:
        parts = sound(matrix)
        return replace(parts, **BUGS[bug](parts))

    fault(_operands, "stored", wrong)
    with pytest.raises(AssertionError):
        check("four_rows")


def test_the_tables_of_registers_hold_what_codes_stand_for() -> None:
    every = np.arange(16, dtype=np.uint8)
    truth = every.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(codes.VALUES, truth)
    assert np.array_equal(np.signbit(codes.VALUES), np.signbit(truth))


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul", "matmul of many", "x Q"])
def test_any_order_of_operands_and_halves(form: Any, op: str) -> None:
    rng = np.random.default_rng(3)
    Q = gm.quantize(rng.standard_normal((70, 300)), format=form)
    exact = Q.dequantize("float64")
    products: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], tuple[int, ...]]] = {
        "matvec": (lambda x: gm.matvec(Q, x), lambda x: exact @ x, (300,)),
        "vecmat": (lambda x: gm.vecmat(x, Q), lambda x: x @ exact, (70,)),
        "matmul": (lambda x: Q @ x, lambda x: exact @ x, (300, 6)),
        "matmul of many": (lambda x: Q @ x, lambda x: exact @ x, (300, 90)),
        "x Q": (lambda x: x @ Q, lambda x: x @ exact, (9, 70)),
    }
    ours, truth, shape = products[op]
    for dtype, u in ((np.float32, 2.0**-20), (np.float16, 2.0**-10), (ml_dtypes.bfloat16, 2.0**-7)):
        x = rng.standard_normal(shape).astype(dtype)
        found, wanted = ours(x).astype(np.float64), truth(x.astype(np.float64))
        assert ours(x).dtype == dtype
        assert (np.abs(found - wanted) <= u * np.abs(wanted).max()).all()


@pytest.mark.parametrize("name", TAKING)
def test_the_ends_of_the_exponents(name: str) -> None:
    """From 2^-127, which is no normal float32, to where the largest weight is a float32."""
    rng, rung = np.random.default_rng(4), rung_called(name)
    kinds: Any = "int8" if "int8" in name else "float"
    for exponent in (0, 1, 2, 251):
        scales = np.full((5, 4), exponent, np.uint8).view(ml_dtypes.float8_e8m0fnu)
        codes = rng.integers(0, 256, (5, 64), np.uint8)
        Q = gm.QuantizedMatrix.from_parts(codes, scales, shape=(5, 128), bits=4, group_size=32)
        A = Q.T if "panels" in name else Q
        x = np.where(np.arange(A.shape[1]) % 2, 2.0**-9, -1.0).astype(np.float32)
        x *= np.float32(2.0**-9 if exponent > 2 else 1)
        columns = x if rung.op == "matvec" else np.stack([x, -x], 1)
        multiply: Any = gm.matvec if rung.op == "matvec" else gm.matmul
        ours = multiply(A, columns, rung=name, activations=kinds)
        exact = A.dequantize("float64")
        truth, size = exact @ columns.astype(np.float64), np.abs(exact) @ np.abs(columns)
        u = 2.0**-20 if kinds == "float" else 2.0**-7
        assert (np.abs(ours - truth) <= u * size + 2.0**-146).all()


def test_x_of_infinity_and_nan_goes_through() -> None:
    for form in ("mxfp4", "nvfp4"):
        Q = gm.quantize(np.eye(64) + 1, format=form)  # type: ignore[call-overload]
        x = np.ones(64, np.float32)
        x[9] = np.inf
        assert np.isposinf(Q @ x).all()
        x[9] = np.nan
        assert np.isnan(gm.matvec(Q, x, activations="int8")).all()


@pytest.mark.skipif("vector_decode" not in NAMES, reason="this CPU has no vectors of 16 lanes")
def test_registers_of_eight_lanes(tmp_path: Any) -> None:
    """The same code for a processor that has AVX2 alone."""
    text = (
        "import numpy as np, gemmule as gm\n"
        "rng, worst = np.random.default_rng(0), 0.0\n"
        "for form in ('mxfp4', 'nvfp4'):\n"
        "    Q = gm.quantize(rng.standard_normal((37, 520)), format=form)\n"
        "    E = Q.dequantize('float64')\n"
        "    for A, D in ((Q, E), (Q.T, E.T)):\n"
        "        for c in (1, 3, 40):\n"
        "            for kind in ('float', 'int8'):\n"
        "                X = rng.standard_normal((D.shape[1], c)).astype('float32')\n"
        "                Y = gm.matmul(A, X, activations=kind)\n"
        "                scale = 1e-5 if kind == 'float' else 2e-2\n"
        "                worst = max(worst, (abs(Y - D @ X) / (abs(D) @ abs(X))).max() / scale)\n"
        "print(worst < 1)\n"
    )
    environment = {"NUMBA_CPU_NAME": "haswell", "GEMMULE_CACHE": str(tmp_path)}
    assert printed(text, **environment).strip() == "True"
