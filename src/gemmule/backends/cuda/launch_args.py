"""The structs of args.cuh, packed: one bytes object per launch, the fields in the same order."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from gemmule.core.canonical import Call
from gemmule.core.epilogue import OPERANDS
from gemmule.core.operand import Ints, View
from gemmule.core.problem import ITEMSIZE, Problem, QuantSpec

Fields = tuple[tuple[str, str], ...]


def _fields(addresses: str, numbers: str) -> Fields:
    """Return (name, struct code) of each field of a struct; tests compare them with args.cuh."""
    words = [(name, "Q") for name in addresses.split()]
    return (*words, *((name, "q") for name in numbers.split()), ("alpha", "d"), ("beta", "d"))


GEMV_FIELDS = _fields("a x y work", "m n batch a_row a_col a_batch x_step x_batch y_step y_batch")
GEMM_FIELDS = _fields(
    "a b c work",
    "m n k batch a_row a_col a_batch b_row b_col b_batch c_row c_col c_batch",
)
QUANT_FIELDS = _fields(
    "codes scales zeros perm x y work",
    "m n columns code_row_bytes group_size groups scale_row x_step x_col y_step y_col",
)

GEMV = struct.Struct("<" + "".join(code for _, code in GEMV_FIELDS))
GEMM = struct.Struct("<" + "".join(code for _, code in GEMM_FIELDS))
QUANT = struct.Struct("<" + "".join(code for _, code in QUANT_FIELDS))
SCALARS = struct.Struct("<dd")
_MATRIX = struct.Struct("<4Q")
SCALES = struct.Struct("<2Q2q")  # behind a GemmArgs whose kernels are compiled with SCALES
BLOCK_SCALES = struct.Struct("<2Q5q")  # the same, of a rung that takes them `by_blocks`
EPILOGUE = struct.Struct("<4Q11qd")  # behind one whose kernels are compiled with EPILOGUE
BIAS = struct.Struct("<Q")  # behind a QuantArgs whose kernels are compiled with BIAS


def epilogue(places: Mapping[str, tuple[int, Ints]], floor: float) -> tuple[float, ...]:
    """Return the fields of an Epilogue (epilogue.cuh).

    places: of its operands by their names, the address and the steps from one batch entry, row and
    column to the next. floor: what a result is at least, before gate and residual.
    """
    found = [places.get(name, (0, (0, 0, 0))) for name in OPERANDS]
    steps = [
        (row, col) if name == "bias" else (row, col, batch)
        for name, (_, (batch, row, col)) in zip(OPERANDS, found, strict=True)
    ]
    return (*(address for address, _ in found), *itertools.chain(*steps), floor)


def addresses_of(q: Any) -> tuple[int, int, int, int]:
    """Return the addresses of a quantised matrix's codes, scales, zero points and permutation."""
    zeros = 0 if q.zeros is None else q.zeros.pointer
    perm = 0 if q.perm is None else q.perm.pointer
    return q.codes.pointer, q.scales.pointer, zeros, perm


def packed_addresses(q: Any) -> bytes:
    """Return the addresses of a quantised matrix as its struct begins with them."""
    return _MATRIX.pack(*addresses_of(q))


def scales_of(by_blocks: bool) -> struct.Struct:
    """Return what ends the struct of kernels that scale."""
    return BLOCK_SCALES if by_blocks else SCALES


def block_steps(of_a: tuple[Ints, Ints], of_b: tuple[Ints, Ints], rows: int) -> Ints:
    """Return what kernels are told of scales by blocks: their steps, and 2^ how many rows share.

    of_a: shape and strides, in elements, of scales of rows (or of 128 rows each, or of all) by 128
    steps each (or all); of_b: of 128 steps by 128 columns each, or of all.
    """
    row, along_a = (step if size > 1 else 0 for size, step in zip(*of_a, strict=True))
    along_b, column = (step if size > 1 else 0 for size, step in zip(*of_b, strict=True))
    return row, column, along_a, along_b, 0 if of_a[0][0] == rows else 7


def place(packed: Any, addresses: Sequence[int]) -> None:
    """Write the addresses that a struct begins with, the workspace's last."""
    struct.pack_into(f"<{len(addresses)}Q", packed, 0, *addresses)


def addresses(packed: bytes, count: int) -> tuple[int, ...]:
    """Return the first `count` addresses of a struct."""
    found: tuple[int, ...] = struct.unpack_from(f"<{count}Q", packed)
    return found


def operands(packed: bytes, *, coded: bool) -> tuple[int, ...]:
    """Return the addresses of a struct in the order of `starter`: operands, then the workspace.

    Of a quantised matrix that of its codes.
    """
    found = addresses(packed, 7 if coded else 4)
    return (found[0], *found[4:]) if coded else found


def changed(packed: bytes, given: Mapping[str, int]) -> bytes:
    """Return a matmul's struct with other values of some fields."""
    fields = dict(zip((name for name, _ in GEMM_FIELDS), GEMM.unpack(packed), strict=True))
    return GEMM.pack(*{**fields, **given}.values())


def without_rows(packed: bytes, operand: str) -> bytes:
    """Return a matmul's struct in which A has no rows, or B no columns."""
    return changed(packed, {"m" if operand == "a" else "n": 0})


def pack(problem: Problem, call: Call) -> bytes:
    """Return the struct of a canonical call with null pointers, alpha 1 and beta 0.

    It begins with the addresses of A (of a quantised matrix four), of x or B, of the result and of
    the workspace; alpha and beta are the last two. A grouped product has the ends of its groups in
    the place of a workspace.
    """
    if problem.quant is not None:
        return _pack_quantized(problem, call, problem.quant)
    steps: list[Ints] = [view.strides[len(call.outer) :] for view in (call.a, call.b, call.out)]
    if problem.op == "grouped":
        steps = [(*steps[0], 0), (*steps[1][1:], steps[1][0]), (*steps[2], 0)]
    elif problem.batch > 1:  # the batch axis comes first, in the struct behind an operand's others
        steps = [(*step[1:], step[0]) for step in steps]
    else:
        steps = [(*step, 0) for step in steps]
    numbers = problem.batch, *itertools.chain(*steps), 1.0, 0.0
    if problem.op == "matvec":
        return GEMV.pack(0, 0, 0, 0, problem.m, problem.n, *numbers)
    return GEMM.pack(0, 0, 0, 0, problem.m, problem.n, problem.k, *numbers)


def _pack_quantized(problem: Problem, call: Call, spec: QuantSpec) -> bytes:
    """Return the QuantArgs struct, whose m and n are the sizes of the stored matrix."""
    if problem.op == "grouped":  # of one expert's; groups.cuh says what stands in which field
        row_bytes, size, groups, _ = stored_numbers(spec, problem.k)
        numbers = problem.n, problem.k, problem.m, row_bytes, size, groups, problem.batch
        steps = [*call.a.strides[::-1], *call.out.strides[::-1]]
        return QUANT.pack(*[0] * 7, *numbers, *steps, 1.0, 0.0)
    m, n = (problem.reduction, problem.m) if spec.transposed else (problem.m, problem.reduction)
    if problem.op == "matvec":
        columns, steps = 1, [call.b.strides[-1], 0, call.out.strides[-1], 0]
    else:
        columns, steps = problem.n, [*call.b.strides[-2:], *call.out.strides[-2:]]
    return QUANT.pack(*[0] * 7, m, n, columns, *stored_numbers(spec, n), *steps, 1.0, 0.0)


def stored_numbers(spec: QuantSpec, n: int) -> tuple[int, int, int, int]:
    """Return what kernels are told of stored rows of n codes.

    The bytes of a row, the size of a group, the groups of a row, and the scales from row to row.
    """
    size = max(n, 1) if spec.group_size in (None, -1) else int(spec.group_size or 1)
    groups = -(-n // size)
    return -(-n * spec.bits // 8), size, groups, 0 if spec.group_size is None else groups


def offsets(
    walked: Ints, views: Sequence[View], dtypes: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """Return how many bytes behind the first each entry's operands begin, of batch axes to walk."""
    itemsizes = [ITEMSIZE.get(dtype, 1) for dtype in dtypes]  # of codes none: nobody moves in them
    return tuple(
        tuple(
            itemsize * sum(i * step for i, step in zip(index, view.strides, strict=False))
            for itemsize, view in zip(itemsizes, views, strict=True)
        )
        for index in itertools.product(*map(range, walked))
    )
