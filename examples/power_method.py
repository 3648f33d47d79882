"""The largest eigenvalue of a symmetric matrix, which is stored in halves."""

import numpy as np

import gemmule as gm

rng = np.random.default_rng(0)
n = 400
factors = rng.standard_normal((n, n))
S = (factors @ factors.T / n).astype(np.float32)
S += np.outer(*[np.linspace(0, 0.2, n, dtype=np.float32)] * 2)
half, v = S.astype(np.float16), np.ones(n, np.float32)
plan = gm.plan("matvec", half, v)

for step in range(1, 101):
    w = plan(half, v)
    value = float(v @ w)
    v = w / np.linalg.norm(w)
    if step % 25 == 0:
        print(f"step {step:3}: {value:.5f}")

exact = np.linalg.eigvalsh(S.astype(np.float64))[-1]
print(f"exact:    {exact:.5f}")
assert abs(value - exact) < 2e-3 * exact
