"""16-lane vectors in kernels: the LLVM code of single steps.

A *word vector* holds 64 bytes of codes as 16 words of 32 bits, one per lane: 8 nibbles or 4 bytes
a lane. So lane d of block b holds columns ``16 D b + D d .. + D - 1``, D = `codes_per_lane`, and
step k takes code k of every lane. Activations are arranged to match
(`quantized.cpu.vector.activations`), at the cost of a pass over the vector instead of a shuffle
for every weight.

Kernels handle four rows at a time, or two: most operations take and return tuples of as many
vectors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from gemmule.backends.cpu import ir
from gemmule.backends.cpu.intrinsics import declare, llvm_type, stack_room
from gemmule.backends.cpu.target import has_wide_vectors

LANES = 16
ROWS = 4
BLOCK_BYTES = 64

Value = Any  # an llvmlite value


def codes_per_lane(bits: int) -> int:
    """Return how many codes of a row one 32-bit lane holds."""
    return 32 // bits


def block_columns(bits: int) -> int:
    """Return how many columns of a row one block of 64 bytes holds."""
    return LANES * codes_per_lane(bits)


def vector_type(dtype: str, lanes: int = LANES) -> Any:
    """Return LLVM's type of a register of `dtype`."""
    return ir.VectorType(llvm_type(dtype), lanes)


@functools.cache
def bfloat16_vector() -> Any:
    """Return LLVM's type of a register of bfloat16, which llvmlite has no name for."""
    base = ir.Type

    class BFloat(base):  # type: ignore[misc, valid-type]
        def _to_string(self) -> str:
            return "bfloat"

    return ir.VectorType(BFloat(), 2 * LANES)


# Emitters: LLVM code for one vector.


def constant(value: float, dtype: str = "float32", lanes: int = LANES) -> Value:
    """Return a vector constant with `value` in every lane."""
    return vector_type(dtype, lanes)([value] * lanes)


def called(builder: Any, name: str, result: Any, *arguments: Value) -> Value:
    """Emit a call of the LLVM function `name`, which returns a value of type `result`."""
    kind = ir.FunctionType(result, [one.type for one in arguments])
    return builder.call(declare(builder, name, kind), arguments)


def shuffled(builder: Any, one: Value, other: Value, lanes: Sequence[int]) -> Value:
    """Emit the vector of these lanes of two, of which the second's count on from the first's."""
    return builder.shuffle_vector(one, other, vector_type("int32", len(lanes))(list(lanes)))


def unseen(builder: Any, value: Value) -> Value:
    """Emit a value as one that LLVM knows nothing of: what it knows, it takes apart or keeps."""
    kept_in = "r" if isinstance(value.type, ir.IntType) else "x"
    form = ir.FunctionType(value.type, [value.type])
    return builder.asm(form, "", f"={kept_in},0", [value], False)


def load_number(builder: Any, address: Value, dtype: str, bytes_on: int = 0) -> Value:
    """Emit a load of one number at address + bytes_on."""
    place = builder.add(address, address.type(bytes_on))
    return builder.load(builder.inttoptr(place, llvm_type(dtype).as_pointer()), align=1)


def spread(
    builder: Any, address: Value, bytes_on: int = 0, dtype: str = "float32", lanes: int = LANES
) -> Value:
    """Emit the number at an address in every lane; LLVM folds it into the next instruction."""
    return splat(builder, load_number(builder, address, dtype, bytes_on), lanes)


def splat(builder: Any, scalar: Value, lanes: int = LANES) -> Value:
    """Emit the vector that holds a scalar in every lane."""
    kind, order = ir.VectorType(scalar.type, lanes), ir.VectorType(ir.IntType(32), lanes)
    first = builder.insert_element(kind(ir.Undefined), scalar, ir.IntType(32)(0))
    return builder.shuffle_vector(first, kind(ir.Undefined), order(None))


def load_vector(
    builder: Any, address: Value, dtype: str, bytes_on: int = 0, lanes: int = LANES
) -> Value:
    """Emit a load of 16 elements, or another number of them, at address + bytes_on."""
    place = builder.add(address, address.type(bytes_on))
    return builder.load(builder.inttoptr(place, vector_type(dtype, lanes).as_pointer()), align=1)


def store_vector(builder: Any, vector: Value, address: Value, bytes_on: int) -> None:
    """Store a register `bytes_on` behind an address, whatever its alignment."""
    place = builder.add(address, address.type(bytes_on))
    builder.store(vector, builder.inttoptr(place, vector.type.as_pointer()), align=1)


def fused(builder: Any, left: Value, right: Value, total: Value) -> Value:
    """Emit ``left * right + total``, rounded once."""
    return called(builder, f"llvm.fma.v{left.type.count}f32", left.type, left, right, total)


def lookup(builder: Any, table: Value, index: Value) -> Value:
    """Emit ``table[index % 16]`` lane by lane: one VPERMPS, which reads the low 4 bits.

    In two registers: the halves of the table are asked by 3 bits, and the fourth bit chooses.
    """
    if not has_wide_vectors():
        return _lookup_in_halves(builder, table, index)
    return called(builder, "llvm.x86.avx512.permvar.sf.512", table.type, table, index)


def joined(builder: Any, low: Value, high: Value) -> Value:
    """Emit the vector of 16 lanes whose halves are given."""
    return shuffled(builder, low, high, range(LANES))


def halves(builder: Any, vector: Value) -> tuple[Value, Value]:
    """Emit the two halves of a vector of 16 lanes."""
    half = LANES // 2
    low, high = (shuffled(builder, vector, vector, range(at, at + half)) for at in (0, half))
    return low, high


def _lookup_in_halves(builder: Any, table: Value, index: Value) -> Value:
    tables, found = halves(builder, table), []
    for part in halves(builder, index):
        name = "llvm.x86.avx2.permps"
        low, high = (called(builder, name, one.type, one, part) for one in tables)
        fourth = builder.shl(part, part.type([28] * (LANES // 2)))
        above = builder.icmp_signed("<", fourth, part.type([0] * (LANES // 2)))
        found.append(builder.select(above, high, low))
    return joined(builder, *found)


@contextlib.contextmanager
def counted(builder: Any, count: Value) -> Iterator[Value]:
    """Emit a loop of `count` turns around what is emitted inside; gives the turn's number."""
    before = builder.block
    head, body, after = (builder.append_basic_block(f"turn {n}") for n in ("head", "body", "end"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(count.type)
    index.add_incoming(count.type(0), before)
    builder.cbranch(builder.icmp_signed("<", index, count), body, after)
    builder.position_at_end(body)
    yield index
    index.add_incoming(builder.add(index, count.type(1), flags=["nsw"]), builder.block)
    builder.branch(head)
    builder.position_at_end(after)


PAGE_BYTES = 4096  # memory is readable by whole pages


def _partial_load(builder: Any, address: Value, kind: Any, count: Value) -> Value:
    """Emit `masked_load` by a whole load, cut, where that stays in the page, else by elements."""
    pointer = builder.inttoptr(address, kind.as_pointer())
    room = stack_room(builder, kind)
    whole = builder.icmp_signed(">=", count, count.type(kind.count))
    begin = builder.and_(address, address.type(PAGE_BYTES - 1))
    latest = address.type(PAGE_BYTES - kind.count * kind.element.width // 8)
    inside = builder.icmp_signed("<=", begin, latest)
    # The address of no elements may lie in the next page, which need not be readable.
    inside = builder.and_(inside, builder.icmp_signed(">", count, count.type(0)))
    with builder.if_else(builder.or_(whole, inside)) as (then, otherwise):
        with then:
            lanes = ir.Constant(kind, list(range(kind.count)))
            wanted = builder.select(whole, count.type(kind.count), count)
            least = splat(builder, builder.trunc(wanted, kind.element), kind.count)
            loaded = builder.load(pointer, align=1)
            cut = builder.select(builder.icmp_signed("<", lanes, least), loaded, kind(None))
            every, from_every = cut, builder.block
        with otherwise:
            builder.store(kind(None), room)
            source = builder.bitcast(pointer, kind.element.as_pointer())
            target = builder.bitcast(room, kind.element.as_pointer())
            with counted(builder, count) as index:
                place = builder.gep(source, [index], source_etype=kind.element)
                to = builder.gep(target, [index], source_etype=kind.element)
                builder.store(builder.load(place, align=1, typ=kind.element), to, align=1)
            some, from_some = builder.load(room, typ=kind), builder.block
    result = builder.phi(kind)
    for value, block in ((every, from_every), (some, from_some)):
        result.add_incoming(value, block)
    return result


def masked_load(builder: Any, address: Value, element: Any, lanes: int, count: Value) -> Value:
    """Emit a load of the first `count` of `lanes` elements; the others are 0 and untouched."""
    if not has_wide_vectors():
        return _partial_load(builder, address, ir.VectorType(element, lanes), count)
    bits = ir.IntType(lanes)
    kind = ir.VectorType(element, lanes)
    every = builder.icmp_signed(">=", count, count.type(lanes))
    width = count if lanes == 64 else builder.trunc(count, bits)
    some = builder.sub(builder.shl(bits(1), width), bits(1))
    mask = builder.bitcast(
        builder.select(every, bits(-1), some), ir.VectorType(ir.IntType(1), lanes)
    )
    pointer = builder.inttoptr(address, kind.as_pointer())
    form = ir.FunctionType(kind, [pointer.type, ir.IntType(32), mask.type, kind])
    function = declare(builder, f"llvm.masked.load.v{lanes}i{element.width}.p0", form)
    return builder.call(function, [pointer, ir.IntType(32)(1), mask, kind([0] * lanes)])


def code_k(builder: Any, word: Value, k: int, bits: int) -> Value:
    """Emit code k of every lane as a word; nibbles keep the garbage above their 4 bits."""
    shifted = builder.lshr(word, constant(bits * k, "int32"))
    if bits == 4 or k == codes_per_lane(bits) - 1:
        return shifted
    return builder.and_(shifted, constant(2**bits - 1, "int32"))


def code_as_float(builder: Any, word: Value, k: int, bits: int) -> Value:
    """Emit code k of every lane as a float: a look-up for nibbles, a conversion for bytes."""
    code = code_k(builder, word, k, bits)
    if bits == 4 and has_wide_vectors():
        return lookup(builder, counting(), code)
    if bits == 4:
        code = builder.and_(code, constant(15, "int32"))
    return builder.sitofp(code, vector_type("float32"))


def counting() -> Value:
    """Return the register 0.0, 1.0, 2.0, ..."""
    return vector_type("float32")([float(i) for i in range(LANES)])


def row_addresses(builder: Any, address: Value, step: Value, count: int = ROWS) -> list[Value]:
    """Return the addresses of `count` rows, `step` bytes apart."""
    rows = [address]
    for _ in range(count - 1):
        rows.append(builder.add(rows[-1], step))
    return rows
