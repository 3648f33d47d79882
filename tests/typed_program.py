"""A program of a user, and what a type checker has to find in each of its lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

PROGRAM = """
import numpy as np
import jax
import torch
import gemmule as gm

A, x, t = np.ones((3, 3), np.float32), np.ones(3, np.float32), torch.ones(3, 3)
j, codes = jax.array(3), np.ones((3, 3), np.int8)
Q = gm.quantize(A, bits=8)
D = gm.asarray(A, device="cuda")
P, p = gm.prepare(A), gm.plan("matvec", A, x)
reveal_type(gm.matvec(A, x))  # _32Bit
reveal_type(gm.vecmat(x, Q, activations="int8"))  # _32Bit
reveal_type(gm.matmul(Q, A))  # _32Bit
reveal_type(gm.matmul(A, Q))  # _32Bit
reveal_type(gm.matvec(A, x, out_dtype="float64"))  # dtype[Any]
reveal_type(gm.matmul(codes, codes))  # dtype[Any]
reveal_type(gm.matvec(t, t[0]))  # "Tensor"
reveal_type(gm.matmul(t, Q))  # "Tensor"
reveal_type(gm.matmul(j, j))  # "Array"
reveal_type(Q @ x)  # _32Bit
reveal_type(Q @ t)  # "Tensor"
reveal_type(j @ Q)  # "Array"
reveal_type(P)  # PreparedMatrix
reveal_type(gm.prepare(Q))  # QuantizedMatrix
reveal_type(gm.matmul(A, P))  # _32Bit
reveal_type(p(A, x))  # dtype[Any]
reveal_type(p(t, t[0]))  # "Tensor"
reveal_type(p(A, x, out=x))  # _32Bit
reveal_type(gm.gemv(A, x))  # _32Bit
reveal_type(gm.gemm(t, t))  # "Tensor"
reveal_type(gm.asarray(A))  # _32Bit
gm.gemv(A, x, alpha=2, beta=np.float32(0))
gm.matvec(A, x, precision="hgih")  # error
gm.matvec(A, x, accumulate="float64")  # error
gm.vecmat(x, A, activations="int4")  # error
gm.matmul(A, A, batch_invariant="yes")  # error
gm.matvec([[1.0]], x)  # error
gm.quantize(A, bits=5)  # error
gm.quantize(A, method="awq")  # error
gm.plan("matvec", A, x, precision="half")  # error
"""


# The real ones take a checker half a minute to read, and JAX's say nothing of DLPack's device.
STUBS = {
    "torch": """
class Tensor:
    def __getitem__(self, index: int) -> Tensor: ...

def ones(*shape: int) -> Tensor: ...
""",
    "jax": """
class Array: ...

def array(value: int) -> Array: ...
""",
}


def write(folder: Path) -> None:
    """Write ``program.py`` into a folder, and what it imports into its folder ``stubs``."""
    (folder / "program.py").write_text(PROGRAM)
    for name, text in STUBS.items():
        stub = folder / "stubs" / name / "__init__.pyi"
        stub.parent.mkdir(parents=True)
        stub.write_text(text)


def check(found: Mapping[int, str]) -> None:
    """Compare what a checker says of lines, by their numbers, with the comments behind them.

    found: ``error``, or a text with the type that it was asked for.
    """
    left = {number: re.sub(r"\b(numpy|torch|jax)\.", "", said) for number, said in found.items()}
    for number, line in enumerate(PROGRAM.splitlines(), 1):
        wanted = line.partition("  # ")[2]
        if wanted:
            assert wanted in left.pop(number, "nothing"), (line, found)
    assert not left, found
