"""The four products in NumPy's shapes, in any memory order."""

import numpy as np

import gemmule as gm

rng = np.random.default_rng(0)
A = rng.standard_normal((300, 200))
B = rng.standard_normal((200, 100))
x = rng.standard_normal(200)

y = gm.matvec(A, x)  # (300,)
z = gm.vecmat(y, A)  # (200,): y A, without a transposed copy
C = gm.matmul(A, B)  # (300, 100)
gm.gemv(A, x, y, alpha=2, beta=-1)  # y = 2 A x - y, in place
np.testing.assert_allclose(y, A @ x)

# Rows, columns, transposed, every other row: operands are used where they lie.
for view in (A, np.asfortranarray(A), B.T[:, :200], A[::2]):
    np.testing.assert_allclose(gm.matvec(view, x), view @ x)

# Batches broadcast: 5 matrices by 5 vectors, and one matrix by 5 vectors.
stack, vectors = rng.standard_normal((5, 30, 20)), rng.standard_normal((5, 20))
assert gm.matvec(stack, vectors).shape == (5, 30)
assert gm.matvec(stack[0], vectors).shape == (5, 30)
print("y", y.shape, " y A", z.shape, " A B", C.shape)
