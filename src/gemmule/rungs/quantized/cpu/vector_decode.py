"""Decode codes in vector registers: a 16-entry table look-up a nibble, a conversion a byte.

A register holds the sixteen weights of a group, scale and zero point included: a shift, a look-up
and a multiply-add for sixteen products. The two rows at work lie half a share apart, so memory is
read in order, each line asked for 3 KiB before its use, which is worth as much as the look-up.
"""

from __future__ import annotations

from gemmule.backends.cpu.target import missing_vectors
from gemmule.core.rung import CpuRung
from gemmule.rungs.quantized.cpu import _operands as operands
from gemmule.rungs.quantized.cpu.vector.rows import bind_vector, job_of_vector

RUNG = CpuRung(
    title="Decode in vector registers",
    idea="The 16 weights of a group are a vector register, and a permutation by the nibbles looks "
    "16 of them up at once: 3 instructions for 16 products. Activations come in the order of "
    "the lanes, so no weight is shuffled. Two rows, half a share apart, are read in order.",
    source="a register as look-up table, as in PyTorch's int4 kernel for CPUs; layout our own",
    op="matvec",
    signatures=operands.VECTOR_SIGNATURES,
    arithmetic=operands.float_arithmetic(operands.in_lanes),
    after="threads",
    params={"shares_per_thread": operands.SHARES_PER_THREAD},
    accepts_quant=operands.takes_lanes_along,
    suggest=operands.read_time(0.90),
    bind=bind_vector(integers=False),
    job=job_of_vector(integers=False),
    available=missing_vectors,
)
