"""Kernels of ours in Triton: what a plain kernel in that language reaches on the same problems.

Imported only where Triton and PyTorch are installed. They are opponents, not rungs: tiles are
chosen by size alone, and nothing is tuned at run time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit  # type: ignore[untyped-decorator]
def _matvec_rows(  # type: ignore[no-untyped-def]
    a, x, y, m, n, row_step, ROWS: tl.constexpr, BLOCK: tl.constexpr, SUM: tl.constexpr
):
    """Sum ROWS rows of a row-major matrix over blocks of BLOCK columns."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (rows < m)[:, None]
    total = tl.zeros((ROWS, BLOCK), SUM)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        here = columns < n
        values = tl.load(
            a + rows[:, None] * row_step + columns[None, :],
            mask=inside & here[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        vector = tl.load(x + columns, mask=here, other=0.0)
        total += values.to(SUM) * vector.to(SUM)[None, :]
    tl.store(y + rows, tl.sum(total, 1).to(y.dtype.element_ty), mask=rows < m)


@triton.jit  # type: ignore[untyped-decorator]
def _matmul_persistent(  # type: ignore[no-untyped-def]
    a,
    b,
    c,
    m,
    n,
    k,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Walk output tiles in groups of rows that share columns of B; A (m, k), B^T (n, k)."""
    tiles_m, tiles_n = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        group = tile // (GROUP * tiles_n)
        first = group * GROUP
        height = min(tiles_m - first, GROUP)
        row = first + tile % (GROUP * tiles_n) % height
        column = tile % (GROUP * tiles_n) // height
        total = tl.zeros((TILE_M, TILE_N), tl.float32)
        for step in range(tl.cdiv(k, TILE_K)):
            left = a.load([row * TILE_M, step * TILE_K])
            right = b.load([column * TILE_N, step * TILE_K])
            total = tl.dot(left, right.T, total)
        c.store([row * TILE_M, column * TILE_N], total.to(c.dtype))


@triton.jit  # type: ignore[untyped-decorator]
def _grouped_persistent(  # type: ignore[no-untyped-def]
    a,
    w,
    c,
    ends,
    experts,
    n,
    k,
    w_step,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Walk the tiles of all experts, counted from their ends; A (tokens, k), W (experts, n, k)."""
    tiles_n = tl.cdiv(n, TILE_N)
    tile, done, begin = tl.program_id(0), 0, 0
    for expert in range(experts):
        end = tl.load(ends + expert)
        count = tl.cdiv(end - begin, TILE_M) * tiles_n
        while tile < done + count:
            rows = begin + (tile - done) // tiles_n * TILE_M + tl.arange(0, TILE_M)
            columns = (tile - done) % tiles_n * TILE_N + tl.arange(0, TILE_N)
            left_at = a + rows.to(tl.int64)[:, None] * k
            right_at = w + columns.to(tl.int64)[None, :] * k
            total = tl.zeros((TILE_M, TILE_N), tl.float32)
            for start in range(0, k, TILE_K):
                inner = start + tl.arange(0, TILE_K)
                left_mask = (rows < end)[:, None] & (inner < k)[None, :]
                right_mask = (inner < k)[:, None] & (columns < n)[None, :]
                left = tl.load(left_at + inner[None, :], mask=left_mask, other=0.0)
                right = tl.load(right_at + inner[:, None], mask=right_mask, other=0.0)
                total = tl.dot(left, right, total)
            target = c + rows.to(tl.int64)[:, None] * n + columns[None, :]
            mask = (rows < end)[:, None] & (columns < n)[None, :]
            tl.store(target, total.to(c.dtype.element_ty), mask=mask)
            tile += PROGRAMS
        done += count
        begin = end
        w += w_step


def grouped(a: Any, w: Any, ends: Any) -> Any:
    """Return rows of a (tokens, k), sorted by expert, each by its expert's matrix of w.

    w: (experts, k, n), kept as (experts, n, k). Nothing waits for the ends.
    """
    (tokens, k), (experts, _, n) = a.shape, w.shape
    found = a.new_empty((tokens, n))
    units = torch.cuda.get_device_properties(a.device).multi_processor_count
    each = tokens / max(experts, 1)
    tile_m, tile_n, tile_k = (16, 64, 256) if each <= 16 else (64, 128, 64)
    if each > 64:
        tile_m = 128
    programs = (2 if tile_m < 128 else 1) * units
    _grouped_persistent[(programs,)](
        a.contiguous(),
        w,
        found,
        ends,
        experts,
        n,
        k,
        w.stride(0),
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_K=tile_k,
        PROGRAMS=programs,
        num_warps=8 if tile_m == 128 else 4,
        num_stages=3,
    )
    return found


def matvec(a: Any, x: Any, y: Any) -> None:
    """Set y = A x for a row-major tensor of (m, n) on the current stream."""
    m, n = a.shape
    block = min(2048 // a.element_size(), max(64, triton.next_power_of_2(n)))
    total = tl.float64 if y.dtype == torch.float64 else tl.float32
    rows = 4 if m >= 16_384 else 2 if m >= 4096 else 1
    _matvec_rows[(triton.cdiv(m, rows),)](
        a, x, y, m, n, a.stride(0), ROWS=rows, BLOCK=block, SUM=total, num_warps=4
    )


class Matmul:
    """C = A B for halves: A row-major, B column-major, sizes a multiple of 8 along rows."""

    def __init__(self, a: Any, b: Any, c: Any) -> None:
        (m, k), n = a.shape, b.shape[1]
        units = torch.cuda.get_device_properties(a.device).multi_processor_count
        tile_m, tile_n, tile_k = (128, 256, 64) if min(m, n) >= 512 else (64, 64, 64)
        self._operands = (
            TensorDescriptor.from_tensor(a, [tile_m, tile_k]),
            TensorDescriptor.from_tensor(b.T, [tile_n, tile_k]),
            TensorDescriptor.from_tensor(c, [tile_m, tile_n]),
        )
        self._sizes = (m, n, k)
        self._programs = min(units, triton.cdiv(m, tile_m) * triton.cdiv(n, tile_n))
        self._tiles = {"TILE_M": tile_m, "TILE_N": tile_n, "TILE_K": tile_k}

    def __call__(self) -> None:
        """Launch on the current stream."""
        _matmul_persistent[(self._programs,)](
            *self._operands,
            *self._sizes,
            **self._tiles,
            GROUP=8,
            PROGRAMS=self._programs,
            num_warps=8,
            num_stages=3,
        )
