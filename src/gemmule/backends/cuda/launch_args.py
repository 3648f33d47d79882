"""The structs of args.cuh, packed: one bytes object per launch, the fields in the same order."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from gemmule.core.canonical import Call
from gemmule.core.problem import Problem

# (name, struct code) of each field; tests compare the order with args.cuh.
GEMV_FIELDS = (
    ("a", "Q"), ("x", "Q"), ("y", "Q"), ("work", "Q"),
    ("m", "q"), ("n", "q"), ("batch", "q"),
    ("a_row", "q"), ("a_col", "q"), ("a_batch", "q"),
    ("x_step", "q"), ("x_batch", "q"), ("y_step", "q"), ("y_batch", "q"),
    ("alpha", "d"), ("beta", "d"),
)  # fmt: skip
GEMM_FIELDS = (
    ("a", "Q"), ("b", "Q"), ("c", "Q"), ("work", "Q"),
    ("m", "q"), ("n", "q"), ("k", "q"), ("batch", "q"),
    ("a_row", "q"), ("a_col", "q"), ("a_batch", "q"),
    ("b_row", "q"), ("b_col", "q"), ("b_batch", "q"),
    ("c_row", "q"), ("c_col", "q"), ("c_batch", "q"),
    ("alpha", "d"), ("beta", "d"),
)  # fmt: skip
QUANT_FIELDS = (
    ("codes", "Q"), ("scales", "Q"), ("zeros", "Q"), ("perm", "Q"),
    ("x", "Q"), ("y", "Q"), ("work", "Q"),
    ("m", "q"), ("n", "q"), ("columns", "q"),
    ("code_row_bytes", "q"), ("group_size", "q"), ("groups", "q"), ("scale_row", "q"),
    ("x_step", "q"), ("x_col", "q"), ("y_step", "q"), ("y_col", "q"),
    ("alpha", "d"), ("beta", "d"),
)  # fmt: skip

GEMV = struct.Struct("<" + "".join(code for _, code in GEMV_FIELDS))
GEMM = struct.Struct("<" + "".join(code for _, code in GEMM_FIELDS))
QUANT = struct.Struct("<" + "".join(code for _, code in QUANT_FIELDS))
SCALARS = struct.Struct("<dd")
BIAS = struct.Struct("<Q")  # behind a QuantArgs whose kernels are compiled with BIAS


def place(packed: Any, addresses: Sequence[int]) -> None:
    """Write the addresses that a struct begins with, the workspace's last."""
    struct.pack_into(f"<{len(addresses)}Q", packed, 0, *addresses)


def addresses(packed: bytes, count: int) -> tuple[int, ...]:
    """Return the first `count` addresses of a struct."""
    found: tuple[int, ...] = struct.unpack_from(f"<{count}Q", packed)
    return found


def without_rows(packed: bytes, operand: str) -> bytes:
    """Return a matmul's struct in which A has no rows, or B no columns."""
    names = [name for name, _ in GEMM_FIELDS]
    fields = list(GEMM.unpack(packed))
    fields[names.index("m" if operand == "a" else "n")] = 0
    return GEMM.pack(*fields)


def pack(problem: Problem, call: Call) -> bytes:
    """Return the struct of a canonical call with null pointers, alpha 1 and beta 0.

    The first three words are the addresses of A, of x or B, and of the result; the fourth is the
    workspace's; alpha and beta are the last two.
    """
    steps = [view.strides[len(call.outer) :] for view in (call.a, call.b, call.out)]
    batch_steps = [s[0] if problem.batch > 1 else 0 for s in steps]
    cores = [s[1:] if problem.batch > 1 else s for s in steps]
    if problem.op == "matvec":
        (a_row, a_col), (x_step,), (y_step,) = cores
        return GEMV.pack(
            0,
            0,
            0,
            0,
            problem.m,
            problem.n,
            problem.batch,
            a_row,
            a_col,
            batch_steps[0],
            x_step,
            batch_steps[1],
            y_step,
            batch_steps[2],
            1.0,
            0.0,
        )
    (a_row, a_col), (b_row, b_col), (c_row, c_col) = cores
    return GEMM.pack(
        0,
        0,
        0,
        0,
        problem.m,
        problem.n,
        problem.k,
        problem.batch,
        a_row,
        a_col,
        batch_steps[0],
        b_row,
        b_col,
        batch_steps[1],
        c_row,
        c_col,
        batch_steps[2],
        1.0,
        0.0,
    )


def pack_quantized(problem: Problem, call: Call) -> bytes:
    """Return the QuantArgs struct of a canonical call, its seven addresses null.

    m and n are the sizes of the stored matrix, whichever way the product runs over it.
    """
    spec = problem.quant
    if spec is None:
        raise TypeError("pack_quantized takes a quantised problem; use pack for the others.")
    rows, inner = problem.m, problem.reduction
    m, n = (inner, rows) if spec.transposed else (rows, inner)
    if problem.op == "matvec":
        columns, x_col, y_col = 1, 0, 0
        (x_step,), (y_step,) = call.b.strides[-1:], call.out.strides[-1:]
    else:
        columns = problem.n
        (x_step, x_col), (y_step, y_col) = call.b.strides[-2:], call.out.strides[-2:]
    size = {None: max(n, 1), -1: max(n, 1)}.get(spec.group_size, spec.group_size)
    groups = -(-n // (size or 1))
    scale_row = 0 if spec.group_size is None else groups
    return QUANT.pack(
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        m,
        n,
        columns,
        -(-n * spec.bits // 8),
        size,
        groups,
        scale_row,
        x_step,
        x_col,
        y_step,
        y_col,
        1.0,
        0.0,
    )
