"""float16 by VFMADDPH: 32 sums of float16 an instruction, on processors with AVX512_FP16.

What `dot_products` does with bfloat16: a lane sums sixteen products in float16, two lanes make 32
terms of a sum, and these are added in float32. It is less exact than float32 all the way, so it
runs by name alone. Operands so large that such a sum could overflow go to `packed_threads`.
"""

from __future__ import annotations

import functools

from gemmule.backends.cpu.target import missing_features
from gemmule.core.packing import HostPacking
from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, CpuRung, Params
from gemmule.rungs.matmul.cpu import tile_products

bind = functools.partial(tile_products.bind, by="float16")


def _chain(problem: Problem, params: Params) -> int:
    """Count seventeen additions in float16, the last rounding, and the float32 ones by parts."""
    return 18 + -(-problem.reduction // (32 << 13))


RUNG = CpuRung(
    title="Half sums",
    idea="One instruction of AVX512_FP16 adds a term to each of 32 sums of float16.",
    source="AVX512_FP16 (VFMADDPH)",
    signatures=tuple(("float16", "float16", out) for out in ("float16", "float32")),
    layouts=tile_products.RUNG.layouts,
    layouts_b=tile_products.RUNG.layouts_b,
    arithmetic=lambda problem: Arithmetic("float16", _chain, product="float16"),
    after="dot_products",
    branch="float16 on processors with AVX512_FP16",
    params=tile_products.RUNG.params,
    bind=bind,
    job=functools.partial(tile_products.job, by="float16"),
    available=lambda: missing_features("avx512f", "avx512bw", "avx512fp16"),
    packing=HostPacking(functools.partial(tile_products.pack, by="float16"), bind),
)
