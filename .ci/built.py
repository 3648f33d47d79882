"""The first product by kernels that the wheel brought: nothing is compiled or kept."""

from __future__ import annotations

import sys
import time

begin = time.perf_counter()

import numpy as np  # noqa: E402

import gemmule as gm  # noqa: E402

n = 1024
A = (np.arange(n * n) % 7 - 3).reshape(n, n).astype(np.float16)
x = (np.arange(n) % 5 - 2).astype(np.float16)
result = gm.matvec(A, x)
seconds = time.perf_counter() - begin
if not np.array_equal(result, A.astype(np.float32) @ x.astype(np.float32)):
    raise SystemExit("the product is wrong")
if "llvmlite" in sys.modules:
    raise SystemExit("a kernel was compiled that the wheel should bring")
print(f"first product of float16 after {seconds:.2f} s, nothing compiled")
