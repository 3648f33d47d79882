"""The integer half of the vector operations: 8-bit activations and VPDPBUSD.

An activation record holds what one block of 64 weight bytes meets in one column: one (8-bit
weights) or two (4-bit weights: even columns, odd columns) planes of 64 signed bytes, then for each
lane the sum of its codes (int32) and its scale (float32).
"""

from __future__ import annotations

import functools
from typing import Any

from gemmule.backends.intrinsics import declare
from gemmule.backends.jit import Intrinsic
from gemmule.rungs.quantized.cpu._simd import (
    BLOCK_BYTES,
    ROWS,
    Value,
    constant,
    floats,
    fused,
    load_vector,
    operation,
)

ACTIVATION_GROUP = 32  # columns that share one scale of the 8-bit activations


def planes(bits: int) -> int:
    """Return how many 64-byte planes of activations one block of weights meets."""
    return 8 // bits


def record_bytes(bits: int) -> int:
    """Return the size of one activation record: planes, sums and scales."""
    return BLOCK_BYTES * (planes(bits) + 2)


def dot(builder: Any, total: Value, weights: Value, activations: Value) -> Value:
    """Emit VPDPBUSD: each lane adds four products of unsigned and signed bytes, exactly."""
    from llvmlite import ir

    kind = total.type
    function = declare(builder, "llvm.x86.avx512.vpdpbusd.512", ir.FunctionType(kind, [kind] * 3))
    return builder.call(function, [total, weights, activations])


def weight_planes(builder: Any, word: Value, bits: int) -> list[Value]:
    if bits == 8:
        return [word]
    nibbles = constant(0x0F0F0F0F, "int32")
    upper = builder.lshr(word, constant(4, "int32"))
    return [builder.and_(word, nibbles), builder.and_(upper, nibbles)]


@functools.cache
def add_integer_products(bits: int, columns: int, has_zeros: bool) -> Intrinsic:
    """Return ``f(totals, scales, zeros, words, x)``, x the address of a block's records.

    The integer sum of a lane is exact. Without zeros the fixed zero point is taken off in
    integers too; with them, as floats (exact when they are integers).
    """

    def emit(
        builder: Any, totals: list[Value], scales: list[Value], zeros: list[Value],
        codes: list[Value], x: Value,
    ) -> list[Value]:  # fmt: skip
        parts = [weight_planes(builder, word, bits) for word in codes]
        count = planes(bits)
        for c in range(columns):
            at = record_bytes(bits) * c
            xs = [load_vector(builder, x, "int32", at + 64 * p) for p in range(count)]
            sums = load_vector(builder, x, "int32", at + 64 * count)
            x_scale = load_vector(builder, x, "float32", at + 64 * (count + 1))
            start = constant(0, "int32")
            if not has_zeros:
                start = builder.mul(sums, constant(-(2 ** (bits - 1)), "int32"))
            sums_as_floats = builder.sitofp(sums, x_scale.type)
            for row in range(ROWS):
                total = start
                for weights, activations in zip(parts[row], xs, strict=True):
                    total = dot(builder, total, weights, activations)
                product = builder.sitofp(total, x_scale.type)
                if has_zeros:
                    product = builder.fsub(product, builder.fmul(zeros[row], sums_as_floats))
                scale = builder.fmul(scales[row], x_scale)
                i = row * columns + c
                totals[i] = fused(builder, product, scale, totals[i])
        return totals

    name = f"add_integer_products {bits} {columns} {has_zeros}"
    return operation(name, lambda: floats(ROWS * columns), "tttti", emit)
