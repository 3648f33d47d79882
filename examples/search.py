"""The nearest of many embeddings in 8 and 4 bits, the best hundred ranked again in floats."""

import numpy as np

import gemmule as gm

rng = np.random.default_rng(0)
base = rng.standard_normal((20_000, 128), np.float32)
base /= np.linalg.norm(base, axis=1, keepdims=True)
queries = base[:50] + 0.08 * rng.standard_normal((50, 128), np.float32)

print("stored as    MB  found")
for name, stored in (
    ("float32", base),
    ("float16", base.astype(np.float16)),
    ("int8", gm.quantize(base, bits=8, group_size=128)),
    ("int4", gm.quantize(base, bits=4, group_size=32)),
):
    scores = gm.matmul(stored, np.ascontiguousarray(queries.T).astype(np.float32))
    hundred = np.argpartition(-scores, 100, axis=0)[:100]
    best = [
        rows[gm.matvec(base[rows], query).argmax()]
        for rows, query in zip(hundred.T, queries, strict=True)
    ]
    found = np.mean(np.array(best) == np.arange(50))
    print(f"{name:10} {stored.nbytes / 1e6:4.1f} {found:6.0%}")
    assert found > 0.9
