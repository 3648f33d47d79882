"""Exact integer products, and what happens where a sum could overflow."""

import numpy as np

import gemmule as gm

rng = np.random.default_rng(0)
A, x = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((100, 5000), 5000))
y = gm.matvec(A, x)
assert y.dtype == np.int32  # NumPy gives int8, modulo 256
np.testing.assert_array_equal(y, A.astype(np.int64) @ x)

long, ones = np.ones((1, 200_000), np.int8), np.ones(200_000, np.int8)
try:
    gm.matvec(long, ones)
except ValueError as error:
    print(error)
assert gm.matvec(long, ones, out_dtype="int64")[0] == 200_000

counts = rng.integers(0, 1000, (50, 60))
np.testing.assert_array_equal(gm.matmul(counts, counts.T), counts @ counts.T)
