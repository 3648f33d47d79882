"""Packed blocks on every core: a thread owns whole blocks of C and packs what they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.jit import kernel, unavailable
from gemmule.backends.cpu.pool import in_pool
from gemmule.backends.cpu.threads import thread_count
from gemmule.core.packing import HostPacking
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs.matmul.cpu._packed_operands import pack
from gemmule.rungs.matmul.cpu.packed import (
    NEITHER,
    Sides,
    block_size,
    blocks,
    chunk_entry,
    chunk_kernel_names,
    operand_words,
    pack_addresses,
)


@kernel
def _block(
    number: int,
    multiply: int,
    number_bytes: int,
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
    c_item: int,
) -> None:
    """Compute one of the blocks."""
    blocks(
        multiply,
        number_bytes,
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
        number,
        number + 1,
        c_item,
    )


_pooled_blocks = in_pool(_block, 19)


def bind(problem: Problem, params: Params, ready: Sides = NEITHER) -> Callable[..., None]:
    """Return ``run(A, B, C)``; `ready` operands come packed."""
    working = chunk_kernel_names(problem, ready)[0]
    kernels = *chunk_entry(problem, ready), *pack_addresses(problem, ready)
    words = operand_words(problem, ready)
    m, n, k = problem.m, problem.n, problem.k

    def run(A: Any, B: Any, C: np.ndarray[Any, Any]) -> None:
        rows, columns = block_size(m, n, working, params["columns"], thread_count())
        _pooled_blocks(
            -(-m // rows) * -(-n // columns),
            *kernels,
            *words(A, B),
            _cpu.address(C),
            C.strides[0],
            m,
            n,
            k,
            rows,
            columns,
            C.itemsize,
        )

    return run


def suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Expect the rate of a core times the cores."""
    calls = problem.batch * _cpu.spread_s(machine)
    return Suggestion({}, calls + _cpu.packed_s(problem, machine, machine.units))


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
    packing=HostPacking(pack, bind),
)
