"""Whether bfloat16 holds all weights of codes, which decides what multiplies them in tiles."""

from __future__ import annotations

import numpy as np
import pytest

import gemmule as gm
from gemmule.rungs.quantized.cpu._operands import stored
from gemmule.rungs.quantized.cpu.blocks import rounded


def test_the_least_weight_and_those_that_are_no_numbers() -> None:
    def least(zeros: float | None, scale: float) -> int:
        point = None if zeros is None else np.full((1, 1), zeros, np.float32)
        codes, scales = np.zeros((1, 8), np.uint8), np.full((1, 1), scale, np.float32)
        Q = gm.QuantizedMatrix.from_parts(
            codes, scales, point, shape=(1, 8), bits=8, group_size=None
        )
        return rounded.exponents(stored(Q))[0]

    assert least(None, 1.0) == 127
    assert least(3.0, 2.0**-10) == 117
    assert least(3.25, 1.0) == 125
    assert least(None, 2.0**-140) == 0
    assert least(None, 2.0**121) == 0


@pytest.mark.parametrize("seed", range(30))
def test_the_least_weight_is_no_greater_than_any_and_all_are_numbers(seed: int) -> None:
    """Groups of any scale and zero point, one-sided, far beside the codes, huge and tiny."""
    rng = np.random.default_rng(seed)
    bits = (4, 8)[seed % 2]
    top, shape = 2**bits - 1, (3, 2)
    power = rng.choice((-145, -130, -60, 0, 60, 116, 121, 124, 126))
    scales = (rng.uniform(0.5, 1, shape) * 2.0**power).astype(np.float32)
    spread = rng.choice((0.0, 1.0, top / 2, top, 3.0 * top))
    zeros = rng.uniform(-0.1, 1, shape) * spread
    zeros = np.where(rng.random(shape) < 0.5, np.rint(zeros), zeros).astype(np.float32)
    codes = np.zeros((3, 32 if bits == 4 else 64), np.uint8)
    Q = gm.QuantizedMatrix.from_parts(codes, scales, zeros, shape=(3, 64), bits=bits, group_size=32)
    least = rounded.exponents(stored(Q))[0]
    steps = np.arange(top + 1.0)[:, None, None] - zeros.astype(np.float64)
    weights = np.abs(scales.astype(np.float64) * steps)
    smallest = weights[weights > 0].min()
    if least:
        assert weights.max() < 2.0**127
        assert 2.0 ** (least - 127) <= smallest
        assert least >= 1
    else:  # only where some weight is near an end of bfloat16's range
        assert weights.max() >= 2.0**126 or smallest < 2.0**-118
