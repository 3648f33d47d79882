"""Print the plans of an H200, which follow from the proofs and margins of the evidence."""

from __future__ import annotations

from gemmule.choose import choose
from gemmule.core.canonical import Options, canonical
from gemmule.core.operand import Form
from gemmule.core.rung import Machine

MACHINE = Machine("cuda", "NVIDIA H200", "sm_90a", 132, 4.5e12, 60 * 2**20, 227 * 1024, 1.8e-6)
DTYPES = ("float64", "float32", "float16", "bfloat16")
for dtype in DTYPES:
    for m, k, n in ((4096, 4096, 0), (4096, 4096, 4), (2048, 8192, 64), (1024, 1024, 1024)):
        shape = (k, n) if n else (k,)
        right = Form(shape, (n, 1) if n else (1,), dtype, 16)
        op = "matmul" if n else "matvec"
        call = canonical(op, Form((m, k), (k, 1), dtype, 16), right, None, Options())
        found = choose(call, MACHINE)
        print(op, dtype, m, k, n, found.rung.name, dict(found.params), found.reason)
