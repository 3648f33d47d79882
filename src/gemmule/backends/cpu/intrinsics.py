"""Operations that CPU kernels are made of, given as LLVM code.

Memory is addressed by ``(address, index)``: an integer address and an index in elements, so no
index is checked or wrapped and LLVM sees plain pointer arithmetic. No alignment is assumed.
Halves live in memory only: a load widens them to float32, a store rounds them to nearest even.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from gemmule.backends.cpu import ir
from gemmule.backends.cpu.jit import Intrinsic, intrinsic, operation
from gemmule.core.problem import FLOAT8, ITEMSIZE

FAST = ("reassoc", "contract")


def llvm_type(dtype: str) -> Any:
    """Return the LLVM type of a dtype as it lies in memory; halves and float8 are integers."""
    if dtype == "float64":
        return ir.DoubleType()
    if dtype == "float32":
        return ir.FloatType()
    return ir.IntType(8 * ITEMSIZE[dtype])


@functools.cache
def load(stored: str, working: str) -> Intrinsic:
    """Return ``f(address, index)``: the element of dtype `stored` as a number of dtype `working`.

    `working` is float32 or float64 for floats, int32 or int64 for integers (unsigned values are
    widened with zeros; 64-bit ones keep their bits).
    """

    def emit(builder: Any, address: Any, index: Any) -> Any:
        pointer = element_pointer(builder, address, index, stored)
        return widen(builder, builder.load(pointer, align=1), stored, working)

    return operation(f"load {stored} {working}", emit)


@functools.cache
def store(stored: str, working: str) -> Intrinsic:
    """Return ``f(address, index, value)``: write `value` of dtype `working` as dtype `stored`.

    float32 rounds to float16 and bfloat16 to nearest even, NaN stays NaN; integers keep their low
    bits, or are widened with their sign.
    """

    def emit(builder: Any, address: Any, index: Any, value: Any) -> None:
        from gemmule.backends.cpu.arithmetic import converted

        number = converted(builder, value, llvm_type(working))
        pointer = element_pointer(builder, address, index, stored)
        builder.store(narrow(builder, number, stored, working), pointer, align=1)

    return Intrinsic(emit, f"store {stored} {working}", raw=True)


def element_pointer(builder: Any, address: Any, index: Any, dtype: str) -> Any:
    """Emit the pointer to element `index` of the array of `dtype` at `address`."""
    element = llvm_type(dtype)
    base = builder.inttoptr(address, element.as_pointer())
    return builder.gep(base, [index], inbounds=True, source_etype=element)


def widen(builder: Any, value: Any, stored: str, working: str) -> Any:
    """Emit the conversion of a loaded element (or vector of them) to the working dtype."""
    if stored == working:
        return value
    lanes = getattr(value.type, "count", None)
    target = _shaped(llvm_type(working), lanes)
    if stored == "float16":
        return builder.fpext(builder.bitcast(value, _shaped(ir.HalfType(), lanes)), target)
    if stored == "bfloat16":  # a bfloat16 is the upper half of a float32
        bits = builder.zext(value, _shaped(ir.IntType(32), lanes))
        return builder.bitcast(builder.shl(bits, _splat(16, bits.type)), target)
    if stored == "float8_e8m0fnu":  # the exponent of a float32, whose least is subnormal
        bits = builder.zext(value, _shaped(ir.IntType(32), lanes))
        placed, least = builder.shl(bits, _splat(23, bits.type)), _splat(1 << 22, bits.type)
        tiny = builder.icmp_unsigned("<", placed, least)
        return builder.bitcast(builder.select(tiny, least, placed), target)
    if stored in FLOAT8:
        return _widen_float8(builder, value, stored, target, lanes)
    if stored == "float32":
        return builder.fpext(value, target)
    if ITEMSIZE[stored] == ITEMSIZE[working]:
        return value
    grow = builder.zext if stored.startswith("u") else builder.sext
    return grow(value, target)


def _widen_float8(builder: Any, value: Any, stored: str, target: Any, lanes: int | None) -> Any:
    """Emit float8 to float32, through float16, which holds every float8 value exactly.

    e5m2 is the upper byte of a float16. e4m3fn has one exponent bit less: its bits, moved to their
    places in a float16, are the value divided by 2^8; all ones are NaN.
    """
    half = _shaped(ir.HalfType(), lanes)
    bits = builder.zext(value, _shaped(ir.IntType(16), lanes))
    if stored == "float8_e5m2":
        shifted = builder.shl(bits, _splat(8, bits.type))
        return builder.fpext(builder.bitcast(shifted, half), target)
    magnitude = builder.and_(bits, _splat(0x7F, bits.type))
    sign = builder.shl(builder.and_(bits, _splat(0x80, bits.type)), _splat(8, bits.type))
    placed = builder.or_(sign, builder.shl(magnitude, _splat(7, bits.type)))
    scaled = builder.fmul(
        builder.fpext(builder.bitcast(placed, half), target), _splat(256.0, target)
    )
    is_nan = builder.icmp_unsigned("==", magnitude, _splat(0x7F, bits.type))
    return builder.select(is_nan, _splat(float("nan"), target), scaled)


def narrow(builder: Any, value: Any, stored: str, working: str) -> Any:
    """Emit the conversion of a number (or vector of them) to the dtype it is stored in."""
    if stored == working:
        return value
    lanes = getattr(value.type, "count", None)
    target = _shaped(llvm_type(stored), lanes)
    if stored == "float16":
        return builder.bitcast(builder.fptrunc(value, _shaped(ir.HalfType(), lanes)), target)
    if stored == "bfloat16":
        return _round_to_bfloat16(builder, value)
    if stored == "float32":
        return builder.fptrunc(value, target)
    if ITEMSIZE[stored] == ITEMSIZE[working]:
        return value
    if ITEMSIZE[stored] > ITEMSIZE[working]:
        return builder.sext(value, target)
    return builder.trunc(value, target)


def _round_to_bfloat16(builder: Any, value: Any) -> Any:
    """Emit round to nearest even: add 0x7FFF plus the lowest kept bit; a NaN becomes quiet."""
    lanes = getattr(value.type, "count", None)
    word, half = _shaped(ir.IntType(32), lanes), _shaped(ir.IntType(16), lanes)
    bits = builder.bitcast(value, word)
    upper = builder.lshr(bits, _splat(16, word))
    carry = builder.add(builder.and_(upper, _splat(1, word)), _splat(0x7FFF, word))
    rounded = builder.lshr(builder.add(bits, carry), _splat(16, word))
    is_nan = builder.fcmp_unordered("uno", value, value)
    chosen = builder.select(is_nan, builder.or_(upper, _splat(0x40, word)), rounded)
    return builder.trunc(chosen, half)


def _shaped(element: Any, lanes: int | None) -> Any:
    return element if lanes is None else ir.VectorType(element, lanes)


def _splat(number: float, kind: Any) -> Any:
    lanes = getattr(kind, "count", None)
    return kind(number) if lanes is None else kind([number] * lanes)


def _multiply_add(builder: Any, total: Any, left: Any, right: Any) -> Any:
    from gemmule.backends.cpu.arithmetic import converted

    same = (converted(builder, one, total.type) for one in (left, right))
    return emit_multiply_add(builder, total, *same)


# ``f(total, left, right)``: ``total + left * right`` in the type of `total`, fused where the CPU
# can; integers wrap.
multiply_add = Intrinsic(_multiply_add, f"{__name__}.multiply_add", raw=True)


def emit_multiply_add(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Emit ``total + left * right`` for scalars or vectors of one type."""
    element = getattr(total.type, "element", total.type)
    if isinstance(element, ir.IntType):
        return builder.add(total, builder.mul(left, right))
    return builder.fadd(total, builder.fmul(left, right, flags=FAST), flags=FAST)


@intrinsic
def call_c(builder: Any, function: Any, words: Any) -> Any:
    """``f(function, words)``: call the C function at an address with a tuple of int64.

    Named tuples among them are passed one number after the other. Returns the word that it leaves,
    of no use where it returns nothing, as `Kernel.address` has it.
    """
    given = list(_flat(words))
    kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * len(given))
    return builder.call(builder.inttoptr(function, kind.as_pointer()), given)


def _flat(values: Any) -> Iterator[Any]:
    for one in values:
        if isinstance(one, tuple):
            yield from _flat(one)
        else:
            yield one


# A kernel by its entry (see `Kernel.entry`) is a C function too.
enter = call_c


def emit_prefetch(builder: Any, address: Any, near: int = 3) -> None:
    """Emit a prefetch of the cache line at any address; near: LLVM's word for which cache."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    function = declare(builder, "llvm.prefetch.p0", kind)
    builder.call(function, [builder.inttoptr(address, byte), word(0), word(near), word(1)])


prefetch = operation("prefetch", emit_prefetch)
"""``f(address)``: prefetch the cache line at any address, to be read once."""


def declare(builder: Any, name: str, kind: Any) -> Any:
    """Return the LLVM function `name` of type `kind`, declared in the module once."""
    known = builder.module.globals.get(name)
    return known if known is not None else ir.Function(builder.module, kind, name)


def stack_room(builder: Any, kind: Any) -> Any:
    """Return a pointer to room for a value on the stack, made once however often it is passed."""
    with builder.goto_entry_block():
        return builder.alloca(kind)
