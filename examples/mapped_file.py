"""A matrix that lies in a file, multiplied where it lies."""

import tempfile
from pathlib import Path

import numpy as np

import gemmule as gm

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "A.npy"
    A = np.lib.format.open_memmap(path, "w+", np.float32, (4000, 1000))
    for first in range(0, 4000, 1000):  # as it would be written, piece by piece
        A[first : first + 1000] = np.random.default_rng(first).standard_normal((1000, 1000))
    A.flush()
    del A

    mapped = np.load(path, mmap_mode="r")  # nothing is read yet
    x = np.ones(1000, np.float32)
    y = gm.matvec(mapped, x)  # pages come as the product reaches them
    z = gm.vecmat(y, mapped)
    print(f"{path.stat().st_size / 1e6:.0f} MB in the file; y {y.shape}, z {z.shape}")
    np.testing.assert_allclose(y, np.asarray(mapped) @ x, rtol=1e-4, atol=1e-2)

    # On a GPU, in pieces where its memory is too small:  gm.matvec(mapped, x, device="cuda")
    del mapped
