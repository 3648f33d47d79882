"""Packed blocks on every core: a thread owns whole blocks of C and packs what they need."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.jit import kernel, unavailable
from gemmule.backends.cpu.pool import Pooled, in_pool
from gemmule.backends.cpu.threads import thread_count
from gemmule.core.packing import HostPacking
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs.matmul.cpu._packed_operands import pack
from gemmule.rungs.matmul.cpu.packed import (
    NEITHER,
    Sides,
    block_kernel,
    block_kernel_names,
    block_size,
    operand_words,
    pack_addresses,
)


@functools.cache
def pooled_blocks(working: str, narrow: bool, whole_rows: bool) -> Pooled:
    """Return `block_kernel` with a share for each of the blocks."""
    blocks = block_kernel(working, narrow, whole_rows)

    @kernel
    def block(
        number: int,
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
            number,
            number + 1,
            c_item,
        )

    return in_pool(block, 17)


def bind(problem: Problem, params: Params, ready: Sides = NEITHER) -> Callable[..., None]:
    """Return ``run(A, B, C)``; `ready` operands come packed."""
    names = block_kernel_names(problem, ready)
    pooled, packing = pooled_blocks(*names), pack_addresses(problem, ready)
    words = operand_words(problem, ready)
    m, n, k = problem.m, problem.n, problem.k

    def run(A: Any, B: Any, C: np.ndarray[Any, Any]) -> None:
        rows, columns = block_size(m, n, names[0], params["columns"], thread_count())
        pooled(
            -(-m // rows) * -(-n // columns),
            *packing,
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
