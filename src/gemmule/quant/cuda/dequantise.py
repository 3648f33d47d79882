"""Dequantising on the device: whole matrices, and pieces of them for products.

Each weight is ``scale * (code - zero)`` in float32, of 4-bit floats code times scale times factor,
rounded once to the dtype that is asked for, bit for bit as `QuantizedMatrix.dequantize` computes it
on the host.
"""

from __future__ import annotations

import functools
import hashlib
import re
import struct
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from gemmule.backends.cuda import driver, starter
from gemmule.backends.cuda.convert import CTYPE
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.backends.cuda.launch_args import addresses_of, stored_numbers
from gemmule.core.problem import FLOAT4, ITEMSIZE, QuantSpec
from gemmule.core.rung import Step
from gemmule.errors import DeviceError
from gemmule.quant.cuda.fragment_order import LAYOUT

SOURCE = Path(__file__).with_suffix(".cu")
OF_FLOATS = SOURCE.with_stem("dequantise_float4")
ARGS = struct.Struct("<QQQQQ6q5q")
DTYPES = ("float32", "float16", "bfloat16")
SCALE_CTYPE = {"float8_e8m0fnu": "e8m0", "float8_e4m3fn": "e4m3"}  # of codes that are floats
_THREADS, _TILE_ROWS, _TURN, _COMMENT = 256, 16, 1, re.compile(r"//[^\n]*|\s+")


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of the stored matrix, from whole tiles on; step: numbers from row to row."""

    first_row: int
    rows: int
    first_column: int
    columns: int
    step: int


def kernel(spec: QuantSpec, dtype: str, piece: Piece) -> str:
    """Return the kernel that gives codes of this kind back in a dtype."""
    whole = not spec.has_perm and piece.step == row_step(piece.columns, dtype)
    if spec.scale_dtype in FLOAT4:
        of = f"{CTYPE[dtype]}, {SCALE_CTYPE[spec.scale_dtype]}, {str(whole).lower()}"
        return f"dequantise_{spec.layout}<{of}>"
    flags = ", ".join(str(flag).lower() for flag in (spec.has_zeros, whole))
    types = f"{CTYPE[dtype]}, {CTYPE[spec.scale_dtype]}, {spec.bits}, {flags}"
    if spec.layout != LAYOUT:
        return f"dequantise_row<{types}>"
    of_lane = 64 // spec.bits
    units = spec.group_size in (None, -1) or (spec.group_size or 0) % of_lane == 0
    return f"dequantise_mma16<{types}, {str(units).lower()}>"


def step(spec: QuantSpec, dtype: str, piece: Piece) -> Step:
    """Return the launch that writes a piece."""
    if spec.layout != LAYOUT:
        blocks = -(-piece.rows * -(-piece.columns // 8) // _THREADS)
    else:
        tiles = -(-piece.rows // _TILE_ROWS) * -(-piece.columns // (256 // spec.bits * _TURN))
        blocks = -(-tiles // (_THREADS // 32))
    return Step(kernel(spec, dtype, piece), (blocks, 1, 1), (_THREADS, 1, 1))


def arguments(spec: QuantSpec, m: int, n: int, piece: Piece) -> bytes:
    """Return the kernel's struct, its five addresses null: codes, scales, zeros, perm, result."""
    return ARGS.pack(0, 0, 0, 0, 0, m, n, *stored_numbers(spec, n), *astuple(piece))


def source_of(spec: QuantSpec) -> Path:
    """Return the file of the kernels that give such codes back."""
    return OF_FLOATS if spec.scale_dtype in FLOAT4 else SOURCE


@functools.cache
def digest(source: Path) -> str:
    """Return a digest of the kernels' text without comments, for the proofs that rest on them."""
    text = _COMMENT.sub(" ", source.read_text(encoding="utf-8"))
    return hashlib.sha256(text.encode()).hexdigest()


def whole(matrix: Any, dtype: str) -> DeviceArray:
    """Return a matrix on a device as floats, before any transposition, beside its codes.

    That is in memory of the library that holds them, on its current stream; of our own memory on
    the legacy default stream, and it waits. DeviceError and CompileError as a launch raises them.
    """
    m, n = matrix.stored_shape
    kinds = (not matrix.symmetric, matrix.layout, matrix.scale_dtype, False)
    has_perm = matrix.perm is not None
    spec = QuantSpec(matrix.bits, matrix.group_size, *kinds, has_perm)
    if not isinstance(matrix.codes, DeviceArray):
        raise DeviceError(f"cannot dequantise on {matrix.device}: call .to('cpu') first")
    found = matrix.codes.beside((m, n), dtype)
    if m * n:
        piece = Piece(0, m, 0, n, n)
        addresses = struct.pack("<5Q", *addresses_of(matrix), found.pointer)
        packed = addresses + arguments(spec, m, n, piece)[len(addresses) :]
        starter.run(source_of(spec), step(spec, dtype, piece), packed, found.ordinal, found.stream)
    if found.library == "gemmule":
        driver.synchronize(found.ordinal)
    return found


def row_step(columns: int, dtype: str) -> int:
    """Return the numbers from row to row of a piece whose rows begin at whole 16 bytes."""
    each = 16 // ITEMSIZE[dtype]
    return -(-columns // each) * each
