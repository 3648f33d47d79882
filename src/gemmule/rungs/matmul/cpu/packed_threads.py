"""Packed blocks on every core: a thread owns whole blocks of C and packs what they need."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.jit import Kernel, kernel, prange, thread_count, unavailable
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs.matmul.cpu.packed import (
    block_kernel,
    block_kernel_names,
    block_size,
    pack_addresses,
)


@functools.cache
def parallel_kernel(working: str, narrow: bool, whole_rows: bool) -> Kernel:
    """Return `block_kernel` with the blocks spread over `parts` shares."""
    blocks = block_kernel(working, narrow, whole_rows)

    @kernel(parallel=True)
    def parallel_blocks(
        pack_a: int,
        pack_b: int,
        unpack: int,
        A: int,
        A_row: int,
        A_col: int,
        B: int,
        B_row: int,
        B_col: int,
        C: int,
        C_row: int,
        m: int,
        n: int,
        k: int,
        rows: int,
        columns: int,
        count: int,
        parts: int,
        c_item: int,
    ) -> None:
        for part in prange(parts):
            first, last = part * count // parts, (part + 1) * count // parts
            blocks(
                pack_a,
                pack_b,
                unpack,
                A,
                A_row,
                A_col,
                B,
                B_row,
                B_col,
                C,
                C_row,
                m,
                n,
                k,
                rows,
                columns,
                first,
                last,
                c_item,
            )

    return parallel_blocks


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, B, C)``; the serial form runs where only one thread may."""
    names = block_kernel_names(problem)
    serial, parallel, packing = (
        block_kernel(*names),
        parallel_kernel(*names),
        pack_addresses(problem),
    )
    m, n, k = problem.m, problem.n, problem.k

    def run(A: np.ndarray[Any, Any], B: np.ndarray[Any, Any], C: np.ndarray[Any, Any]) -> None:
        operands = (
            *packing,
            _cpu.address(A),
            *A.strides,
            _cpu.address(B),
            *B.strides,
            _cpu.address(C),
            C.strides[0],
            m,
            n,
            k,
        )
        threads = thread_count()
        rows, columns = block_size(m, n, names[0], params["columns"], threads)
        count = -(-m // rows) * -(-n // columns)
        if threads == 1 or count == 1:
            serial(*operands, rows, columns, 0, count, C.itemsize)
        else:
            parallel(*operands, rows, columns, count, min(threads, count), C.itemsize)

    return run


def suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Expect the rate of a core times the cores."""
    calls = problem.batch * _cpu.PARALLEL_CALL_S
    return Suggestion({}, calls + _cpu.packed_s(problem, machine.units))


RUNG = CpuRung(
    title="Packed blocks, threads",
    idea="Blocks of C are independent: every thread computes its own, with its own packed copies.",
    source="BLIS, parallel in the loops over blocks of C",
    op="matmul",
    signatures=(*_cpu.SIGNATURES, *_cpu.FLOAT8_SIGNATURES),
    layouts=("row", "col", "strided"),
    layouts_b=("row", "col", "strided"),
    arithmetic=_cpu.summed(_cpu.whole_reduction),
    after="packed",
    params={"columns": (1024, 512, 2048)},
    suggest=suggest,
    bind=bind,
    available=unavailable,
)
