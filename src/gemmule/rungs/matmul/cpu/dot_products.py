"""bfloat16 by VDPBF16PS: two terms of sixteen sums an instruction, where there are no tiles.

What tile registers multiply (`tile_products`), in vector registers: a row of A's tile gives two
terms at a time to sixteen columns of B's, and sixteen rows' sums stay in registers. Twice the
multiply-adds of float32 an instruction, and half the bytes. It takes subnormal numbers for zeros
as tiles do.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from gemmule.backends.cpu import features
from gemmule.backends.cpu.target import missing_features
from gemmule.core.packing import HostPacking
from gemmule.core.problem import Problem
from gemmule.core.rung import Machine, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs.matmul.cpu import tile_products

bind = functools.partial(tile_products.bind, by="bfloat16")


# Multiply-adds for each fused float32 one of a core. Intel's take two cycles: 64 to 512 a side 0.6
# of the float32 products of `packed` (Xeon with AMX, 2026-11). Of other makers' nothing is measured
# yet, so plans leave them alone there; by name they run.
_PER_FMA = {"GenuineIntel": 0.6}


def suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Expect the rate of such instructions on every core; none where it is not known."""
    per_fma = _PER_FMA.get(features.processor_vendor())
    return None if per_fma is None else tile_products.expected(problem, machine, per_fma)


RUNG = replace(
    tile_products.RUNG,
    title="Dot products",
    idea="One instruction of AVX512_BF16 adds two terms to sixteen sums.",
    source="AVX512_BF16 (VDPBF16PS)",
    signatures=tuple(("bfloat16", "bfloat16", out) for out in ("bfloat16", "float32")),
    arithmetic=_cpu.summed(_cpu.whole_reduction),
    branch="bfloat16 on processors with AVX512_BF16",
    suggest=suggest,
    bind=bind,
    job=functools.partial(tile_products.job, by="bfloat16"),
    available=lambda: missing_features("avx512f", "avx512bw", "avx512bf16"),
    packing=HostPacking(tile_products.pack, bind),
)
