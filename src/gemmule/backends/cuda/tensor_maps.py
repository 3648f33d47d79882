"""Tensor maps (CUtensorMap): what a kernel that loads by TMA is given for each operand.

A step declares its maps (`gemmule.core.packing`); here they become the driver's 128 opaque
bytes, from the sizes and strides in the packed struct and the operand's address. Kernels take them
as parameters behind the struct. Encoding is host work of the driver alone; a launcher keeps what it
encoded by address, so that a repeated call copies 128 bytes a map.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gemmule.backends.cuda import driver, launch_args
from gemmule.core.packing import HalvesMap, LinesMap, SumsMap, TensorMap
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Step

MAP_BYTES, MAP_ALIGNMENT = 128, 64
WORKSPACE = 3  # its place among what a starter is given: the operands, then the workspace
MOST_KEPT = 256  # encoded maps of one operand; a process that meets more addresses begins anew
# CUtensorMapDataType by size: unsigned integers, for nothing is done with the elements but moving.
_TYPES = {1: 0, 2: 1, 4: 2, 8: 4}
_SWIZZLE_128 = 3  # CUtensorMapSwizzle; a wgmma descriptor counts the other way round
_L2_PROMOTION_256 = 3


class Shape(NamedTuple):
    """A tensor map without its address: three dimensions, the contiguous one first.

    word: which operand it belongs to, of the three and the workspace in the order of `starter`; it
    lies `offset` bytes behind that. Sizes and the box count elements, strides (of dimensions 1 and
    2) bytes. A shared operand has one plane.
    """

    word: int
    itemsize: int
    sizes: tuple[int, int, int]
    strides: tuple[int, int]
    box: tuple[int, int, int]
    offset: int = 0


def declared(steps: Sequence[Step], problem: Problem, packed: Any) -> tuple[Shape, ...]:
    """Return the maps that the steps declare, their sizes and strides read from a packed struct.

    All steps that declare maps declare the same ones: they are parameters of the launch, which a
    kernel without them does not look at.
    """
    maps = tuple(dict.fromkeys(step.maps for step in steps if step.maps))
    if not maps:
        return ()
    coded = problem.quant is not None
    if len(maps) > 1 or problem.op == "matvec":
        raise ValueError(
            f"the steps of a launch declare {len(maps)} lists of tensor maps for "
            f"{problem.describe()}; required is one list for all, of matrices."
        )
    kind = "QUANT" if coded else "GEMM"
    names = (name for name, _ in getattr(launch_args, f"{kind}_FIELDS"))
    fields = dict(zip(names, getattr(launch_args, kind).unpack_from(packed), strict=True))
    if coded:
        return tuple(_beside_codes(one, problem, fields) for one in maps[0])
    return tuple(_shape(one, problem, fields) for one in maps[0])


def _shape(one: TensorMap, problem: Problem, fields: dict[str, Any]) -> Shape:
    rows, cols = {"a": ("m", "k"), "b": ("k", "n"), "c": ("m", "n")}[one.operand]
    layout = getattr(problem, "layout_out" if one.operand == "c" else f"layout_{one.operand}")
    item = ITEMSIZE[problem.out if one.operand == "c" else getattr(problem, one.operand)]
    lead = "row" if layout == "row" else "col"
    inner, outer = (cols, rows) if layout == "row" else (rows, cols)
    sizes = fields[inner], fields[outer]
    plane = fields[f"{one.operand}_batch"]
    planes = fields["batch"] if plane else 1
    if isinstance(one, LinesMap):
        sizes = fields["k"], fields[cols if rows == "k" else rows]
    if isinstance(one, HalvesMap):
        return _halves(one, (fields["k"], fields[cols if rows == "k" else rows]), planes)
    if isinstance(one, SumsMap):
        row_bytes = _up(sizes[0] * 4)
        strides = (row_bytes, row_bytes * sizes[1])
        box, at = (*one.box, 1), one.packed_at or 0
        return Shape(WORKSPACE, 4, (*sizes, one.planes), strides, box, at)
    # The stride of a dimension of one element may be anything, and the encoder is particular.
    row_bytes = fields[f"{one.operand}_{lead}"] * item if sizes[1] > 1 else _up(sizes[0] * item)
    plane_bytes = plane * item if planes > 1 else row_bytes
    word = "abc".index(one.operand)
    if one.operand == "c":  # rows of a fresh C that end elsewhere are not stored by TMA
        row_bytes, plane_bytes = _up(row_bytes), _up(plane_bytes)
    if one.packed_at is not None:
        word, row_bytes = WORKSPACE, _up(sizes[0] * item)
        plane_bytes = row_bytes * sizes[1]
    strides = (row_bytes, plane_bytes)
    return Shape(word, item, (*sizes, planes), strides, (*one.box, 1), one.packed_at or 0)


def _beside_codes(one: TensorMap, problem: Problem, fields: dict[str, Any]) -> Shape:
    """Return the map of B, or of the tokens, or of all experts' rows of codes, in bytes.

    Beside a matmul's A in fragment order, it is of tiles: lines of 128 bytes, four a tile, by rows
    of tiles; the box counts lines and rows.
    """
    if problem.quant is not None and problem.op == "matmul":
        if one.operand == "a":
            lines = -(-fields["n"] * problem.quant.bits // 256) * 4
            sizes, strides = (32, lines, -(-fields["m"] // 16)), (128, 128 * lines)
            return Shape(0, 4, sizes, strides, (32, *one.box))
        terms = fields["m" if problem.quant.transposed else "n"]
        dense = {"k": terms, "n": fields["columns"], "b_col": fields["x_col"], "b_batch": 0}
        return _shape(one, problem, dense)._replace(word=1)
    if one.operand == "b":
        sizes = fields["code_row_bytes"], fields["m"] * fields["scale_row"], 1
        return Shape(0, 1, sizes, (sizes[0], sizes[0]), (*one.box, 1))
    dense = {"m": fields["columns"], "k": fields["n"], "a_row": fields["x_col"], "a_batch": 0}
    return _shape(one, problem, dense)._replace(word=1)


def _halves(one: HalvesMap, sizes: tuple[int, int], planes: int) -> Shape:
    """Return the map of high and low halves of an operand, planes of each entry in turn."""
    row_bytes = _up(sizes[0] * 2)
    strides = (row_bytes, row_bytes * sizes[1])
    return Shape(WORKSPACE, 2, (*sizes, 2 * planes), strides, (*one.box, 1), one.packed_at or 0)


def _up(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def encode(address: int, shape: Shape) -> bytes:
    """Return the driver's encoding; DeviceError when it refuses (TMA wants multiples of 16 bytes).

    Boxes lie in shared memory with the 128-byte swizzle.
    """
    call = _encoder()
    memory, target = aligned_memory(1)
    code = call(
        target,
        _TYPES[shape.itemsize],
        3,
        address,
        (ctypes.c_uint64 * 3)(*shape.sizes),
        (ctypes.c_uint64 * 2)(*shape.strides),
        (ctypes.c_uint32 * 3)(*shape.box),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        0,  # not interleaved
        _SWIZZLE_128,
        _L2_PROMOTION_256,
        0,  # zeros outside
    )
    if code:
        result = driver.bindings().CUresult(code)
        raise driver.error_of(result, f"encoding a tensor map of {shape} at 0x{address:x}")
    encoded = ctypes.string_at(target, MAP_BYTES)
    del memory  # was needed until here
    return encoded


@functools.cache
def _encoder() -> Callable[..., int]:
    call = ctypes.PyDLL("libcuda.so.1").cuTensorMapEncodeTiled  # too short to drop the GIL
    pointer, number = ctypes.c_void_p, ctypes.c_int
    call.argtypes = (pointer, number, ctypes.c_uint32, pointer, *(pointer,) * 4, *(number,) * 4)
    call.restype = ctypes.c_int
    return call


def aligned_memory(count: int) -> tuple[Any, int]:
    """Return memory for some maps, and the address in it where the first belongs."""
    memory = ctypes.create_string_buffer(count * MAP_BYTES + MAP_ALIGNMENT)
    return memory, -(-ctypes.addressof(memory) // MAP_ALIGNMENT) * MAP_ALIGNMENT


class Maps:
    """The tensor maps of one launcher: their shapes, and what was encoded for each address."""

    def __init__(self, shapes: tuple[Shape, ...]) -> None:
        self.shapes = shapes
        self.kept: tuple[dict[int, bytes], ...] = tuple({} for _ in shapes)

    def of(self, addresses: Sequence[Any]) -> list[bytes]:
        """Return each map's bytes, given the addresses that the struct begins with."""
        found = []
        for shape, kept in zip(self.shapes, self.kept, strict=True):
            begin = addresses[shape.word]
            if isinstance(begin, bytes):  # the four of a quantised matrix, its codes' first
                begin = int.from_bytes(begin[:8], "little")
            address = begin + shape.offset
            encoded = kept.get(address)
            if encoded is None:
                if len(kept) >= MOST_KEPT:
                    kept.clear()
                encoded = kept[address] = encode(address, shape)
            found.append(encoded)
        return found
