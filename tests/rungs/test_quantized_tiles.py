"""Quantised products on tile registers: edges, the system's permission, planted bugs."""

from __future__ import annotations

import dataclasses
import itertools
import platform
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gemmule.backends.cpu import amx
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.rungs.quantized.cpu import _operands, tile_registers
from gemmule.rungs.quantized.cpu.amx import floats, int8
from quantized_products import (
    KINDS,
    NAMES,
    activations,
    bound_of,
    check,
    make_matrix,
    run,
    rung_called,
    takes,
)

TILE_NAMES = [n for n in NAMES if n.startswith("tile_registers")]


@pytest.mark.parametrize("name", [*TILE_NAMES, "sixteen_rows", "sixteen_rows_int8"])
@pytest.mark.parametrize(("m", "n", "columns"), [(49, 130, 17), (95, 385, 33), (2, 70, 16)])
def test_tiles_with_rows_columns_and_panels_left_over(
    name: str, m: int, n: int, columns: int
) -> None:
    rung = rung_called(name)
    for (bits, scale, zeros), group in itertools.product(KINDS, (16, 32, 64, 128, -1, None)):
        Q = make_matrix(m, n, bits, group, scale, zeros)
        if takes(rung, Q, columns, "float32", "float32"):
            check(rung, Q, activations((n, columns), "float32"))


@pytest.mark.parametrize("name", TILE_NAMES)
def test_tiles_in_several_tasks(name: str) -> None:
    """More work than one thread is given, in tasks that end within a block of rows."""
    rung = rung_called(name)
    for bits in (4, 8):
        Q = make_matrix(1500, 4096, bits, 128, "float32", "integer")
        if takes(rung, Q, 16, "float32", "float32"):
            check(rung, Q, activations((4096, 16), "float32"))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tiles_of_many_activations_keep_nothing_of_the_product_before(dtype: str) -> None:
    """Large x is arranged in memory that is kept, and 16-bit ones are widened by a kernel."""
    rung = rung_called("tile_registers")
    for bits in (4, 8):
        Q = make_matrix(49, 4100, bits, 128, "float32", "fraction")
        for columns in (40, 33, 40):
            if takes(rung, Q, columns, dtype, dtype):
                check(rung, Q, activations((4100, columns), dtype), dtype)


def test_tiles_hold_activations_of_every_size() -> None:
    """Tiles flush what is subnormal, and three bfloat16 must make up every float32 exactly."""
    rung = rung_called("tile_registers")
    Q = make_matrix(48, 256, 8, 64, "float32", "fraction")
    if not takes(rung, Q, 3, "float32", "float32"):
        pytest.skip("no tile registers")
    for exponents in ([-149, -126], [-149, 40], [0, 60], [-60, 100], [-149, 120], [120, 127]):
        rng = np.random.default_rng(5)
        size = 2.0 ** rng.uniform(*exponents, (256, 3))
        x = (size * rng.choice([-1, 1], (256, 3))).astype(np.float32)
        x[::7] = 0
        with np.errstate(over="ignore"):
            y = run(rung, Q, x).astype(np.float64)
        truth = Q.dequantize("float64") @ x.astype(np.float64)
        limit = bound_of(rung, Q, x, "float32") + 256 * 2.0**-149
        large = np.abs(Q.dequantize("float64")) @ np.abs(x.astype(np.float64)) > 2.0**126
        assert ((np.abs(y - truth) <= limit) | large).all(), exponents


def test_zeros_are_no_least_activation() -> None:
    """Else no x that holds one would go by tiles."""
    x, found = np.array([0, -3, 0.5, 0], np.float32), np.empty(2, np.int64)
    floats.magnitudes(0, 1, x.ctypes.data, x.size, found.ctypes.data)
    assert found.astype(np.int32).view(np.float32).tolist() == [3, 0.5]


def test_tiles_refuse_without_the_system_s_permission(fault: Callable[..., Any]) -> None:
    fault(amx, "missing_features", lambda sound, *wanted: None)
    fault(amx, "refusal", lambda sound: "the system does not permit tile registers")
    for name in ("tile_registers", "tile_registers_int8"):
        assert "permit" in (rung_called(name).available() or "")


def test_the_system_is_asked_for_tiles_once_and_its_answer_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    class Library:
        def syscall(self, *arguments: Any) -> int:
            asked.append([a.value for a in arguments])
            return -1

    monkeypatch.setattr("ctypes.CDLL", lambda *a, **k: Library())
    amx.refusal.cache_clear()
    try:
        reasons = {amx.refusal() for _ in range(2)}
    finally:
        amx.refusal.cache_clear()
    if sys.platform == "linux" and platform.machine() == "x86_64":
        assert asked == [[158, 0x1023, 18]]
        assert "does not permit" in (reasons.pop() or "")


def the_identity(bits: int, n: int) -> QuantizedMatrix:
    codes = np.full((n, n), 2 ** (bits - 1), np.uint8) + np.eye(n, dtype=np.uint8)
    if bits == 4:
        codes = codes[:, ::2] | (codes[:, 1::2] << 4)
    one = np.ones((1, 1), np.float32)
    return QuantizedMatrix.from_parts(codes, one, shape=(n, n), bits=bits, group_size=None)


def test_three_pieces_are_a_float32(fault: Callable[..., Any]) -> None:
    """The identity gives every activation back; with a piece less it cannot."""
    rung = rung_called("tile_registers")
    x = activations((256, 16), "float32")
    for bits in (4, 8):
        Q = the_identity(bits, 256)
        if not takes(rung, Q, 16, "float32", "float32"):
            pytest.skip("no tile registers")
        np.testing.assert_array_equal(run(rung, Q, x), x)
    fault(tile_registers, "_pieces", lambda sound, problem: 2)
    assert not np.array_equal(run(rung, Q, x), x)


@pytest.mark.parametrize("bug", ["rest", "panel", "sum"])
def test_the_checks_catch_bugs_planted_in_tiles(bug: str, fault: Callable[..., Any]) -> None:
    """Half a zero point, a panel of x taken twice, a wrong first sum: all must show."""
    name = "tile_registers_int8" if bug == "sum" else "tile_registers"
    rung = rung_called(name)
    Q = make_matrix(50, 256, 8, 64, "float32", "none" if bug == "sum" else "fraction")
    if not takes(rung, Q, 20, "float32", "float32"):
        pytest.skip("no tile registers")
    x = activations((256, 20), "float32")
    check(rung, Q, x)

    def whole(sound: Any, matrix: QuantizedMatrix) -> _operands.Stored:
        parts = sound(matrix)
        assert parts.zeros is not None
        return dataclasses.replace(parts, zeros=np.rint(parts.zeros))

    if bug == "rest":
        fault(_operands, "stored", whole)
    elif bug == "panel":
        Q = make_matrix(50, 256, 8, 64, "float32", "fraction")  # it keeps what was derived
        fault(
            floats,
            "product_of",
            lambda sound, parts, **rest: sound(parts, **(rest | {"x_step": 0})),
        )
    else:
        Q = make_matrix(50, 256, 8, 64, "float32", "none")
        fault(int8, "rounded_records", lambda sound, b, z: sound(b, True))
    with pytest.raises(AssertionError, match="beyond by"):
        check(rung, Q, x)
