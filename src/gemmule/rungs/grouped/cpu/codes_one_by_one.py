"""Codes one by one: the experts with tokens in turn, by the quantised product for their size."""

from __future__ import annotations

from dataclasses import replace

from gemmule.core.problem import FLOAT4_DTYPE
from gemmule.rungs.grouped.cpu import one_by_one

RUNG = replace(
    one_by_one.RUNG,
    title="Codes one by one",
    idea="Each expert's rows meet its codes in a product of their own.",
    signatures=tuple(
        (t, codes, out)
        for codes in ("uint4", "uint8", FLOAT4_DTYPE)
        for t in ("float32", "float16", "bfloat16")
        for out in ((t,) if t == "float32" else (t, "float32"))
    ),
    after="one_by_one",
    branch="matrices of codes",
    quantized=True,
)
