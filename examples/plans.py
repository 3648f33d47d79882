"""Choose once, call many times; what a plan explains; any kernel by name."""

import numpy as np

import gemmule as gm

A, x = np.ones((1000, 768), np.float16), np.ones(768, np.float16)

plan = gm.plan("matvec", A, x)
print(plan.explain())
y = plan(A, x)
assert plan(2 * A, x, out=y) is y  # the same shapes, dtypes and layouts

try:
    plan(A[:, ::2], x[::2])
except ValueError as error:
    print(f"\nanother shape: {error}")

print("\nevery kernel of the ladder:")
for rung in gm.ladder("matvec", "cpu").steps:
    result = gm.matvec(A, x, rung=rung.name)
    print(f"  {rung.name:16} {rung.title}")
    np.testing.assert_array_equal(result, y / 2)
