"""What a type checker finds in a program of a user."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api")

PROGRAM = """
import numpy as np
import torch
import gemmule as gm

A, x, t = np.ones((3, 3), np.float32), np.ones(3), torch.ones(3, 3)
Q = gm.quantize(A, bits=8)
D = gm.asarray(A, device="cuda")
reveal_type(gm.matvec(A, x))  # ndarray
reveal_type(gm.vecmat(x, Q, activations="int8"))  # ndarray
reveal_type(gm.matmul(Q, A))  # ndarray
reveal_type(gm.matmul(A, Q))  # ndarray
reveal_type(gm.matvec(t, t[0]))  # Tensor
reveal_type(gm.matmul(t, Q))  # Tensor
gm.gemv(A, x, alpha=2, beta=np.float32(0))
gm.matvec(A, x, precision="hgih")  # error
gm.matvec(A, x, accumulate="float64")  # error
gm.vecmat(x, A, activations="int4")  # error
gm.matmul(A, A, batch_invariant="yes")  # error
gm.matvec([[1.0]], x)  # error
gm.quantize(A, bits=5)  # error
gm.quantize(A, method="gptq")  # error
gm.plan("matvec", A, x, precision="half")  # error
"""


TORCH = """
class Tensor:
    def __getitem__(self, index: int) -> Tensor: ...

def ones(*shape: int) -> Tensor: ...
"""


def test_a_checker_knows_results_and_finds_words_that_mean_nothing(
    tmp_path: Path, setting: Callable[..., None]
) -> None:
    program, stub = tmp_path / "program.py", tmp_path / "stubs" / "torch" / "__init__.pyi"
    program.write_text(PROGRAM)
    stub.parent.mkdir(parents=True)
    stub.write_text(TORCH)  # the real one takes a checker half a minute to read
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
