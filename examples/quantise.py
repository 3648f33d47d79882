"""A matrix in 8 and 4 bits: bytes, errors, methods, saved and loaded."""

import tempfile
from pathlib import Path

import numpy as np

import gemmule as gm

rng = np.random.default_rng(0)
W = rng.standard_normal((256, 1024), np.float32) * rng.gamma(2, 1, 1024).astype(np.float32)
X = rng.standard_normal((1024, 64), np.float32)
right = W @ X
print(f"float32           {W.nbytes / 1e3:6.0f} kB")
for bits, group, method in ((8, -1, "rtn"), (4, 128, "rtn"), (4, 32, "rtn"), (4, 32, "hqq")):
    Q = gm.quantize(W, bits, group, method=method)
    off = np.linalg.norm(Q @ X - right) / np.linalg.norm(right)
    name = f"int{bits}, {group}, {method}"
    print(
        f"{name:17} {Q.nbytes / 1e3:6.0f} kB, weights off by {Q.error:.2%}, products by {off:.2%}"
    )

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "W.safetensors"
    Q.save(path)
    loaded = gm.QuantizedMatrix.load(path)  # its codes stay in the file until they are used
    np.testing.assert_array_equal(loaded @ X, Q @ X)
    del loaded

np.testing.assert_allclose(Q @ X, Q.dequantize() @ X, rtol=1e-3, atol=1e-2)
np.testing.assert_allclose(X.T @ Q.T, (Q @ X).T, rtol=1e-3, atol=1e-2)  # the transpose is a view
