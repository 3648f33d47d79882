"""Numbers and tuples inside kernels: their LLVM types, conversions and arithmetic.

What a kernel computes with is either known while it is compiled (a Python or NumPy number, which
folds) or an LLVM value. LLVM's types are the language's: i1 for truth, i8 to i64, float, double,
vectors. Integers are signed, and arithmetic on them is of 64 bits and wraps; two float32 make a
float32, any other mix with a float makes a float64. A division of integers rounds down as Python's
does; by zero it gives zero.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

FAST = ("reassoc", "contract")
WORD, TRUTH, FLOAT, DOUBLE = ir.IntType(64), ir.IntType(1), ir.FloatType(), ir.DoubleType()
Value = Any  # a number known now, an LLVM value, or a tuple of such


class CompileTypeError(TypeError):
    """A kernel uses what the language of kernels does not have."""


def is_static(value: Value) -> bool:
    """Whether a value is no LLVM value: a number known now, or an object of Python."""
    return not isinstance(value, ir.Value | tuple)


def type_of(value: Value) -> Any:
    """Return the LLVM type that a number has where it is computed with."""
    if isinstance(value, ir.Value):
        return value.type
    if isinstance(value, bool | np.bool_):
        return TRUTH
    if isinstance(value, np.float32):
        return FLOAT
    if isinstance(value, float | np.floating):
        return DOUBLE
    if isinstance(value, np.integer):
        return ir.IntType(8 * value.itemsize)
    if isinstance(value, int):
        return WORD
    raise CompileTypeError(f"a {type(value).__name__} is no number")


def materialised(value: Value) -> Any:
    """Return a number as an LLVM value; tuples entry by entry."""
    if isinstance(value, ir.Value):
        return value
    if isinstance(value, tuple):
        return rebuilt(value, [materialised(one) for one in value])
    kind = type_of(value)
    if isinstance(kind, ir.IntType):
        return ir.Constant(kind, int(value) if kind.width == 1 else _wrapped(int(value)))
    return ir.Constant(kind, float(value))


def _wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def rebuilt(like: tuple[Any, ...], entries: list[Any]) -> tuple[Any, ...]:
    """Return a tuple of the same class, so that a named one keeps its names."""
    make = getattr(like, "_make", tuple)
    made: tuple[Any, ...] = make(entries)
    return made


def is_float(kind: Any) -> bool:
    """Whether a type is float or double."""
    return isinstance(kind, ir.FloatType | ir.DoubleType)


def converted(builder: Any, value: Value, kind: Any) -> Any:
    """Emit a number in another type: integers keep their low bits or widen by their sign."""
    if not isinstance(value, ir.Value):
        return _constant(value, kind)
    if value.type == kind:
        return value
    if isinstance(value.type, ir.IntType) and isinstance(kind, ir.IntType):
        if kind.width == 1:
            return builder.icmp_signed("!=", value, value.type(0))
        if kind.width < value.type.width:
            return builder.trunc(value, kind)
        widen = builder.zext if value.type.width == 1 else builder.sext
        return widen(value, kind)
    if isinstance(value.type, ir.IntType) and is_float(kind):
        from_truth = value.type.width == 1
        return builder.uitofp(value, kind) if from_truth else builder.sitofp(value, kind)
    if is_float(value.type) and isinstance(kind, ir.IntType):
        return builder.fptosi(value, kind)
    if is_float(value.type) and is_float(kind):
        widen = builder.fpext if isinstance(kind, ir.DoubleType) else builder.fptrunc
        return widen(value, kind)
    raise CompileTypeError(f"a {value.type} does not become a {kind}")


def _constant(value: Value, kind: Any) -> Any:
    if is_float(kind):
        number = np.float32(value) if isinstance(kind, ir.FloatType) else float(value)
        return ir.Constant(kind, float(number))
    if isinstance(kind, ir.IntType) and not isinstance(value, float | np.floating):
        return ir.Constant(kind, int(bool(value)) if kind.width == 1 else _wrapped(int(value)))
    raise CompileTypeError(f"{value!r} does not become a {kind}")


def common(first: Any, second: Any) -> Any:
    """Return the type that holds numbers of two types."""
    if first == second:
        return first
    if is_float(first) or is_float(second):
        return FLOAT if {str(first), str(second)} <= {"float", "i1", "i8", "i16"} else DOUBLE
    if isinstance(first, ir.IntType) and isinstance(second, ir.IntType):
        return first if first.width > second.width else second
    raise CompileTypeError(f"a {first} and a {second} have no common type")


def truth(builder: Any, value: Value) -> Any:
    """Emit whether a number is not zero; known now where the number is."""
    if is_static(value):
        return bool(value)
    if isinstance(value, ir.Value) and is_float(value.type):
        return builder.fcmp_unordered("!=", value, value.type(0.0))
    return converted(builder, value, TRUTH)


_FOLDED: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "Div": operator.truediv,
    "LShift": operator.lshift,
    "RShift": operator.rshift,
    "BitAnd": operator.and_,
    "BitOr": operator.or_,
    "BitXor": operator.xor,
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
}
_SYMBOLS = {"Eq": "==", "NotEq": "!=", "Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">="}
_OF_FLOATS = {"Add": "fadd", "Sub": "fsub", "Mult": "fmul", "Div": "fdiv"}
_OF_INTEGERS = {
    "Add": "add",
    "Sub": "sub",
    "Mult": "mul",
    "LShift": "shl",
    "RShift": "ashr",
    "BitAnd": "and_",
    "BitOr": "or_",
    "BitXor": "xor",
}


def applied(builder: Any, name: str, left: Value, right: Value) -> Value:
    """Emit an operator, by its name in ``ast``; folded where both numbers are known."""
    if is_static(left) and is_static(right):
        return _FOLDED[name](left, right)
    if isinstance(left, tuple) or isinstance(right, tuple):
        raise CompileTypeError(f"{name} is not for tuples")
    kinds = type_of(left), type_of(right)
    if is_float(kinds[0]) or is_float(kinds[1]):
        kind = common(*kinds)
        a, b = (converted(builder, one, kind) for one in (left, right))
        if name in _SYMBOLS:
            compare = builder.fcmp_unordered if name == "NotEq" else builder.fcmp_ordered
            return compare(_SYMBOLS[name], a, b)
        if name not in _OF_FLOATS:
            raise CompileTypeError(f"{name} is not for floats")
        return getattr(builder, _OF_FLOATS[name])(a, b, flags=FAST)
    if kinds == (TRUTH, TRUTH) and name in ("BitAnd", "BitOr", "BitXor"):
        return getattr(builder, _OF_INTEGERS[name])(materialised(left), materialised(right))
    a, b = (converted(builder, one, WORD) for one in (left, right))
    if name in _SYMBOLS:
        return builder.icmp_signed(_SYMBOLS[name], a, b)
    if name == "Div":
        return builder.fdiv(*(builder.sitofp(one, DOUBLE) for one in (a, b)))
    if name in ("FloorDiv", "Mod"):
        return _divided(builder, name, a, b, right)
    return getattr(builder, _OF_INTEGERS[name])(a, b)


def _divided(builder: Any, name: str, a: Any, b: Any, divisor: Value) -> Any:
    """Emit the quotient rounded down, or the remainder of the divisor's sign."""
    if is_static(divisor) and divisor > 0 and divisor & (divisor - 1) == 0:
        if name == "Mod":
            return builder.and_(a, WORD(divisor - 1))
        return builder.ashr(a, WORD(int(divisor).bit_length() - 1))
    by_zero = None if is_static(divisor) and divisor else builder.icmp_signed("==", b, WORD(0))
    if by_zero is not None:  # no trap
        b = builder.select(by_zero, WORD(1), b)
    quotient = builder.sdiv(a, b)
    rest = builder.sub(a, builder.mul(quotient, b))
    other_sign = builder.icmp_signed("<", builder.xor(rest, b), WORD(0))
    off = builder.and_(builder.icmp_signed("!=", rest, WORD(0)), other_sign)
    if name == "Mod":
        result = builder.add(rest, builder.select(off, b, WORD(0)))
    else:
        result = builder.sub(quotient, builder.zext(off, WORD))
    return result if by_zero is None else builder.select(by_zero, WORD(0), result)


def negated(builder: Any, value: Value) -> Value:
    """Emit a number with the other sign."""
    if is_static(value):
        return -value
    if is_float(value.type):
        return builder.fneg(value)
    return applied(builder, "Sub", 0, value)


def extreme(builder: Any, symbol: str, numbers: list[Value]) -> Value:
    """Emit the least (``<``) or largest (``>``) of some numbers; the first where one is NaN."""
    if all(is_static(one) for one in numbers):
        return min(numbers) if symbol == "<" else max(numbers)
    name = "Lt" if symbol == "<" else "Gt"
    best = numbers[0]
    for one in numbers[1:]:
        kind = common(type_of(best), type_of(one))
        kind = kind if is_float(kind) else WORD
        left, right = (converted(builder, number, kind) for number in (best, one))
        best = builder.select(applied(builder, name, right, left), right, left)
    return best
