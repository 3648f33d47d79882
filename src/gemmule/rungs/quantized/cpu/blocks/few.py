"""Products of up to sixteen columns of bfloat16 by tile registers, from x to y by addresses.

x becomes tiles as it lies, times a power of two by which neither its products with small codes are
subnormal nor its sums infinite; the micro-kernel of 48 rows is that of `amx.floats`, and its totals
go to y as y lies. An x that such a power does not serve is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from gemmule.backends.cpu.amx import TILE_ROWS, configured, released
from gemmule.backends.cpu.atomics import unpacked_as
from gemmule.backends.cpu.calls.builtin import Job
from gemmule.backends.cpu.intrinsics import call_c, enter, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.pool import share_count
from gemmule.backends.cpu.simd import LANES, block_columns
from gemmule.backends.cpu.steps import A, Place, Step, Steps, X, Y, buffer, per_team
from gemmule.backends.cpu.threads import thread_count
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Params
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.rungs._cpu import address
from gemmule.rungs._cpu_workspace import claimed, release, workspace
from gemmule.rungs.matmul.cpu._tile import unpack_kernel
from gemmule.rungs.matmul.cpu._tile_steps import least_and_most
from gemmule.rungs.quantized.cpu import _product
from gemmule.rungs.quantized.cpu._operands import SERIAL_BYTES, Stored, scale_dtype_of, stored
from gemmule.rungs.quantized.cpu._product import Product, load_product, product_of
from gemmule.rungs.quantized.cpu.amx import bfloat16 as ops
from gemmule.rungs.quantized.cpu.amx.bfloat16 import BLOCK_ROWS
from gemmule.rungs.quantized.cpu.amx.floats import TOTALS_BYTES, rows_kernel, window, work_bytes
from gemmule.rungs.quantized.cpu.blocks.columns import turn_kernel
from gemmule.rungs.quantized.cpu.blocks.halves import EXTREMES_BYTES, pack_kernel, scale_chunk

# By bits the power of two that x is multiplied by, and the least and the largest that it may have
# then: of 128 products with codes the sum stays below 2^128, and what the last bit of x (2^-7)
# gives with the smallest code (8 bits: 2^-112) is no less than 2^-126.
_POWERS = {4: (46, -119, 110), 8: (100, -7, 126)}
_PACK_SHARE_BYTES = 16 << 10
Strides = tuple[int, int]


class Few(NamedTuple):
    """What shares know beside their product: kernels' addresses, x as it lies, y, sizes.

    parts: in how many shares x is packed, each of which notes its extremes at `noted`. unit: rows
    that a share does not split, of which there are `shares`. k, n: of x.
    """

    pack: int
    unpack: int
    add_rows: int
    B: int | Place
    B_row: int
    B_column: int
    noted: int | Place
    refused: int | Place
    C: int | Place
    C_row: int
    C_step: int
    k: int
    n: int
    parts: int
    unit: int
    shares: int
    workspace: int


_load_few, _AT = unpacked_as(Few), 8 * _product.SIZE
_put = store("int64", "int64")


@functools.cache
def _pack_share(bits: int) -> Kernel:
    """Return ``f(words, number)``: some chunks of x as tiles."""
    width, nbytes = block_columns(bits), ops.x_bytes(bits, 1)
    scale = scale_chunk(bits, _POWERS[bits][0])

    @kernel
    def pack_share(at: int, number: int) -> None:
        few, packed = _load_few(at + _AT), load_product(at).x
        noted, chunks = few.noted + EXTREMES_BYTES * number, (few.k + width - 1) // width
        for i in range(EXTREMES_BYTES // 8):
            _put(noted, i, -1 if i < EXTREMES_BYTES // 16 else 0)
        for chunk in range(chunks * number // few.parts, chunks * (number + 1) // few.parts):
            to, low = packed + chunk * nbytes, chunk * width
            source, terms = few.B + low * few.B_row, min(width, few.k - low)
            call_c(few.pack, (source, few.B_column, few.B_row, few.n, terms, to))
            scale(to, noted)

    return pack_share


@functools.cache
def _rows_share(bits: int) -> Kernel:
    """Return ``f(words, number)``: the results of some rows."""
    configure, forget, nbytes = configured(*ops.SHAPES), released(), work_bytes(bits)
    power, low, high = _POWERS[bits]
    least_size, sizes_end = max(1, 127 + low - power) << 7, (127 + high - power) << 7

    @kernel
    def rows_share(at: int, number: int) -> None:
        product, few = load_product(at), _load_few(at + _AT)
        for i in range(few.parts):
            least, most = least_and_most(few.noted + EXTREMES_BYTES * i)
            if least + 1 < least_size or most >= sizes_end:
                _put(few.refused, 0, 1)
                return
        units, work = (product.m + few.unit - 1) // few.unit, claimed(few.workspace)
        first = units * number // few.shares * few.unit
        end = min(units * (number + 1) // few.shares * few.unit, product.m)
        sums = work + nbytes
        configure()
        for top in range(first, end, few.unit):
            for i in range(few.unit * TILE_ROWS // 2):
                _put(sums, i, 0)
            for row in range(top, min(top + few.unit, end), BLOCK_ROWS):
                last = min(BLOCK_ROWS, end - row) - 1
                to = sums + (row - top) // BLOCK_ROWS * TOTALS_BYTES
                enter(few.add_rows, (product, work, row, last, to))
            some = min(few.unit, end - top)
            call_c(few.unpack, (sums, LANES, few.C + top * few.C_row, few.C_step, some, few.n))
        forget()
        release(few.workspace, work)

    return rows_share


class _Ready(NamedTuple):
    """What all products of a matrix have in common; kept: what the product points to."""

    product: Product
    bits: int
    nbytes: int
    add_rows: int
    kept: Any


def _products(parts: Stored) -> Callable[..., Steps]:
    """Return what makes the products of a matrix, the last ones kept."""
    bits, codes = parts.bits, window()
    factor = (127 + ops.shrunk_by(bits) - _POWERS[bits][0]) << 23
    product = product_of(parts, lanes=address(codes), columns=LANES, factor=factor)
    rows = rows_kernel(bits, 1, scale_dtype_of(parts), parts.zeros is not None)
    add_rows = rows.entry(Product, *[int] * 4)
    ready = _Ready(product, bits, parts.codes.nbytes, add_rows, codes)
    return per_team(functools.partial(_steps, ready))


def _steps(ready: _Ready, dtype: str, n: int, of_B: Strides, of_C: Strides) -> Steps:
    """Return the product with n columns of bfloat16, whose terms lie side by side."""
    product, bits, threads = ready.product, ready.bits, thread_count()
    k, m = product.n, product.m
    packed_bytes = -(-k // block_columns(bits)) * ops.x_bytes(bits, 1)
    if ready.nbytes * n < LANES * SERIAL_BYTES:
        threads = 1
    unit = 2 * BLOCK_ROWS if m >= 8 * BLOCK_ROWS * threads else BLOCK_ROWS
    shares = min(-(-m // unit), 4 * threads) if threads > 1 else 1
    pieces = -(-packed_bytes // _PACK_SHARE_BYTES)
    packs = share_count(packed_bytes, pieces, 1) if threads > 1 else 1
    turned = of_C[1] != ITEMSIZE[dtype]
    unpack = turn_kernel(dtype) if turned else unpack_kernel(dtype, "float32")
    few = Few(
        pack=pack_kernel(bits, "depth", words=True).address(6),
        unpack=unpack.address(6),
        add_rows=ready.add_rows,
        B=X,
        B_row=of_B[0],
        B_column=of_B[1],
        noted=buffer(packed_bytes),
        refused=A,
        C=Y,
        C_row=of_C[0],
        C_step=of_C[1] if turned else of_C[0],
        k=k,
        n=n,
        parts=packs,
        unit=unit,
        shares=shares,
        workspace=workspace(work_bytes(bits) + 4 * LANES * unit),
    )
    tasks = [
        Step(_pack_share(bits).address(2), packs, alone=threads == 1),
        Step(_rows_share(bits).address(2), shares, alone=threads == 1),
    ]
    words = (*(product._asdict() | {"x": buffer()}).values(), *few)
    return Steps(tasks, words, buffer_bytes=packed_bytes + EXTREMES_BYTES * packs, kept=ready.kept)


def job(problem: Problem, params: Params, matrix: QuantizedMatrix, B: Any) -> Job | None:
    """Return the product with columns like B's of bfloat16, whose terms lie side by side.

    A: where a 1 is written if x is refused.
    """
    parts, m, n = matrix.kept(stored), problem.m, problem.n
    plain = matrix.perm is None and parts.factors is None and problem.layout_b == "col"
    if not plain or problem.b != "bfloat16" or n > LANES:
        return None
    item = ITEMSIZE[problem.out]
    of_C = (item * n, item) if problem.layout_out == "row" else (item, item * m)
    return parts.kept(_products)(problem.out, n, B.strides, of_C).job()
