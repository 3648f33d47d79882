"""Bytes as floats in one instruction: 2^23 plus a code, less zero points that are lifted as well.

A byte under the exponent of 2^23 is that float plus the byte. The difference from 2^23 plus a zero
point is that of code and zero point, rounded once as ever, wherever the latter sum is exact: as for
all whole zero points. So a conversion less for sixteen codes, and the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu.simd import BLOCK_BYTES, Value, constant, vector_type
from gemmule.backends.cpu.target import has_wide_vectors
from gemmule.rungs.quantized.cpu._operands import Stored, address

# The lowest byte of each lane. Kernels are given it as a number: of a mask that LLVM knows it makes
# two instructions.
LOWEST_BYTES = 0x1111111111111111
LIFT = 2.0**23  # a float of this size has a code as its lowest byte


def lifted_byte(builder: Any, word: Value, k: int, lowest: Value) -> Value:
    """Emit 2^23 plus byte k of every lane as a float, exactly: one masked shuffle of bytes.

    lowest: `LOWEST_BYTES`, as a number that LLVM does not know.
    """
    from llvmlite import ir

    kind, order = (ir.VectorType(ir.IntType(n), BLOCK_BYTES) for n in (8, 32))
    mask = builder.bitcast(lowest, ir.VectorType(ir.IntType(1), BLOCK_BYTES))
    codes, lift = builder.bitcast(word, kind), builder.bitcast(constant(LIFT), kind)
    places = ir.Constant(order, [4 * (i // 4) + k for i in range(BLOCK_BYTES)])
    both = builder.select(mask, builder.shuffle_vector(codes, codes, places), lift)
    return builder.bitcast(both, vector_type("float32"))


class LiftedZeros(NamedTuple):
    """Zero points plus 2^23, and where they lie: 0 where the matrix has none."""

    zeros: NDArray[np.float32] | None
    place: int


def lifted_zeros(parts: Stored) -> LiftedZeros | None:
    """Return what bytes that are decoded as 2^23 plus a code are less, exactly.

    None where there is no such thing: for zero points that are no whole numbers, and for nibbles
    that are looked up.
    """
    if parts.bits == 4 and has_wide_vectors():
        return None
    if parts.zeros is None:
        return LiftedZeros(None, 0)
    zeros = parts.zeros + np.float32(LIFT)
    if not np.array_equal(zeros - np.float32(LIFT), parts.zeros):
        return None
    return LiftedZeros(zeros, address(zeros))
