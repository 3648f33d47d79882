"""float16 and bfloat16: half of the bytes, products and sums in float32."""

import ml_dtypes
import numpy as np

import gemmule as gm

rng = np.random.default_rng(0)
A, x = rng.standard_normal((512, 2048)), rng.standard_normal(2048)
exact = A @ x
print("dtype     MB   largest error of y, over |y|")
for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
    small, vector = A.astype(dtype), x.astype(np.float32)
    y = gm.matvec(small, vector)  # mixed floats promote: the result is float32
    assert y.dtype == np.float32
    error = np.abs(y - exact).max() / np.abs(exact).max()
    print(f"{np.dtype(dtype).name:9} {small.nbytes / 1e6:4.1f} {error:9.1e}")

# The error is that of storing A in few bits; sums add next to nothing to it.
stored = A.astype(np.float16).astype(np.float64) @ x.astype(np.float32)
y = gm.matvec(A.astype(np.float16), x.astype(np.float32))
assert np.abs(y - stored).max() < 1e-4
