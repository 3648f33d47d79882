"""Weights for the oracle's quantised matrices: ordinary groups, and groups at the extremes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.core.problem import FLOAT4, QuantSpec
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.quantize import quantize

LARGEST_SCALE = {"float16": 2.0**10} | dict.fromkeys(("float32", "bfloat16", *FLOAT4), 2.0**60)
METHODS = ("rtn", "mse", "hqq", "hqq")


def quantized_weights(
    rng: np.random.Generator, spec: QuantSpec, rows: int, columns: int, beside: str
) -> QuantizedMatrix:
    """Return random weights as `gemmule.quantize` makes a matrix of them, in layout ``row``.

    beside: the dtype of what they meet, and whose range they have: some kernels round them to it.
    """
    method = METHODS[int(rng.integers(4 if spec.has_zeros else 2))]
    perm = rng.permutation(columns).astype(np.int32) if spec.has_perm else None
    form = FLOAT4.get(spec.scale_dtype)
    if form is not None:
        weights = extreme_groups(rng, rows, columns, spec, beside)
        return quantize(weights, method=method, perm=perm, format=form)  # type: ignore[arg-type]
    return quantize(
        extreme_groups(rng, rows, columns, spec, beside),
        4 if spec.bits == 4 else 8,
        spec.group_size,
        not spec.has_zeros,
        spec.scale_dtype,  # type: ignore[arg-type]
        method=method,  # type: ignore[arg-type]
        perm=perm,
    )


def extreme_groups(
    rng: np.random.Generator, rows: int, columns: int, spec: QuantSpec, beside: str
) -> NDArray[np.float32]:
    """Return normal weights, some groups of which are of another kind.

    These kinds: of one sign; all alike, exactly or nearly; zeros; tiny; subnormal; huge for the
    dtype of the scales.
    """
    size = max(columns, 1) if spec.group_size in (None, -1) else int(spec.group_size or 1)
    groups = 1 if spec.group_size is None else -(-columns // size)
    shape = (rows if spec.group_size is not None else 1, max(groups, 1))
    narrow = "float16" in (spec.scale_dtype, beside)
    top = np.log2(LARGEST_SCALE["float16" if narrow else spec.scale_dtype])
    least = 100 if spec.transposed else 126  # then scales meet x in halves, of a shorter range
    kinds = rng.integers(0, 10, shape)
    level = rng.standard_normal(shape)
    chosen: list[tuple[Any, Any]] = [  # middle and spread of a group
        (0.0, 0.0),
        (level, 0.0),
        (level, np.exp2(-rng.integers(4, 24, shape))),
        (0.0, np.exp2(-rng.integers(40, least, shape))),
        (0.0, np.exp2(-rng.integers(least - 10, least + 24 * (least == 126), shape))),
        (0.0, np.exp2(rng.integers(4, top, shape))),
    ]
    middle = np.select([kinds == i for i in range(6)], [pair[0] for pair in chosen], 0.0)
    spread = np.select([kinds == i for i in range(6)], [pair[1] for pair in chosen], 1.0)
    weights = rng.standard_normal((rows, columns))
    middle, spread, one_sign = (
        np.broadcast_to(np.repeat(part, size, axis=1)[:, :columns], weights.shape)
        for part in (middle, spread, kinds == 6)
    )
    weights = np.where(one_sign, np.abs(weights) + 1.0, weights)
    return (middle + spread * weights).astype(np.float32)
