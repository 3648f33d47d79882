"""Activations rounded to 8 bits, products summed in integers by VPDPBUSD.

Only where the caller permits it. One instruction multiplies 64 codes with 64 activations.
"""

from __future__ import annotations

from dataclasses import replace

from gemmule.rungs.quantized.cpu import vector_decode
from gemmule.rungs.quantized.cpu._operands import read_time, rounded_arithmetic
from gemmule.rungs.quantized.cpu.vector.rows import bind_vector, job_of_vector

RUNG = replace(
    vector_decode.RUNG,
    title="8-bit activations",
    idea="Each 32 activations become signed bytes with one scale, max|x| / 127. One instruction "
    "then multiplies 64 codes with 64 activations and adds them in fours, exactly; zero points go "
    "off through the sum of the activations, in integers. Of 4-bit codes, 512 columns' sums are "
    "joined to one vector of 16 before they are converted and scaled. An x that holds NaN or "
    "infinity is not rounded but multiplied as it is.",
    source="VNNI (VPDPBUSD); blocks of 32 activations as in llama.cpp's Q8_0",
    arithmetic=rounded_arithmetic,
    after="vector_decode",
    branch="x rounded to 8 bits, where the caller permits it",
    suggest=read_time(0.95),
    bind=bind_vector(integers=True),
    job=job_of_vector(integers=True),
)
