"""What a type checker finds in a program of a user."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api")

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
reveal_type(gm.matvec(A, x, out_dtype="float64"))  # numpy.dtype[Any]
reveal_type(gm.matmul(codes, codes))  # numpy.dtype[Any]
reveal_type(gm.matvec(t, t[0]))  # torch.Tensor
reveal_type(gm.matmul(t, Q))  # torch.Tensor
reveal_type(gm.matmul(j, j))  # jax.Array
reveal_type(Q @ x)  # _32Bit
reveal_type(Q @ t)  # torch.Tensor
reveal_type(j @ Q)  # jax.Array
reveal_type(P)  # PreparedMatrix
reveal_type(gm.prepare(Q))  # QuantizedMatrix
reveal_type(gm.matmul(A, P))  # _32Bit
reveal_type(p(A, x))  # numpy.dtype[Any]
reveal_type(p(t, t[0]))  # torch.Tensor
reveal_type(p(A, x, out=x))  # _32Bit
reveal_type(gm.gemv(A, x))  # _32Bit
reveal_type(gm.gemm(t, t))  # torch.Tensor
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


def test_a_checker_knows_results_and_finds_words_that_mean_nothing(
    tmp_path: Path, setting: Callable[..., None]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for name, text in STUBS.items():
        stub = tmp_path / "stubs" / name / "__init__.pyi"
        stub.parent.mkdir(parents=True)
        stub.write_text(text)
    setting(MYPYPATH=tmp_path / "stubs")
    said, complaint, _ = api.run(["--strict", "--config-file=", str(program)])
    assert not complaint
    lines = PROGRAM.splitlines()
    found: dict[int, str] = {}
    for line in said.splitlines():
        if (match := re.search(r"program\.py:(\d+): (error|note): (.*)", line)) is not None:
            number, kind, text = int(match[1]), match[2], match[3]
            if kind == "error" or text.startswith("Revealed"):
                found[number] = "error" if kind == "error" else text
    for number, line in enumerate(lines, 1):
        wanted = line.partition("  # ")[2]
        if wanted:
            assert wanted in found.pop(number, "nothing"), (line, said)
    assert not found, said
