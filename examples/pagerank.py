"""The stationary distribution of a random walk with restarts: products from the left."""

import numpy as np

import gemmule as gm

rng = np.random.default_rng(0)
pages, damping = 500, 0.85
links = (rng.random((pages, pages)) < 0.02).astype(np.float32)
links[links.sum(1) == 0] = 1
steps = links / links.sum(1, keepdims=True)  # row i: where a walk goes from page i

rank = np.full(pages, 1 / pages, np.float32)
count, change = 0, 1.0
while change > 1e-6:
    # vecmat reads the rows of the matrix as they lie; nothing is transposed.
    new = damping * gm.vecmat(rank, steps) + (1 - damping) / pages
    change = np.abs(new - rank).sum()
    rank, count = new, count + 1

print(f"{count} products; the first five pages: {np.argsort(-rank)[:5].tolist()}")
assert abs(rank.sum() - 1) < 1e-4
