"""The language of kernels: a little of Python, turned into LLVM code.

A kernel is a plain function of integers, numbers and named tuples, with assignments, ``if``,
``while``, ``for ... in range``, calls of other kernels and of intrinsics, and memory that lasts as
long as the call (`np.empty`, `np.zeros`). What a closure or a module holds is known while the
kernel is compiled: of an ``if`` on such a number only the branch that is taken is looked at.

Each kernel becomes a function of the module for each form of parameters it is called with, and
LLVM decides what is inlined. Variables have one type; one that is assigned numbers of two types
gets the wider, by a second pass over the kernel. See `gemmule.backends.cpu.arithmetic` for numbers.
"""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir

from gemmule.backends.cpu import arithmetic as number
from gemmule.backends.cpu.arithmetic import TRUTH, WORD, CompileTypeError, Value

_BYTE = ir.IntType(8)
_MOST_ON_STACK = 4096  # bytes of memory whose size is known


class _WiderError(Exception):
    """A variable needs a wider type than the one it was given first."""


class Memory:
    """What `np.empty` gives a kernel: an address, and the type of its elements."""

    def __init__(self, address: Any, kind: Any, count: Value) -> None:
        self.address, self.kind, self.count = address, kind, count


class Cell:
    """A variable in memory, which LLVM turns into registers."""

    def __init__(self, place: Any) -> None:
        self.place = place


@functools.lru_cache(maxsize=256)
def _definitions(path: str) -> dict[int, ast.FunctionDef]:
    """Return the functions of a source file by their first line, decorators counted."""
    lines = linecache.getlines(path)
    if not lines and path == "<string>" and "-c" in sys.orig_argv:  # as Python 3.13 does itself
        lines = [sys.orig_argv[sys.orig_argv.index("-c") + 1]]
    tree = ast.parse("".join(lines))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {min([n.lineno, *(d.lineno for d in n.decorator_list)]): n for n in found}


def _definition(function: FunctionType) -> ast.FunctionDef:
    code = function.__code__
    node = _definitions(code.co_filename).get(code.co_firstlineno)
    if node is None:
        raise CompileTypeError(f"the source of {function.__qualname__} cannot be read")
    return node


def module_of(
    kernel: Any, parameters: tuple[Any, ...], name: str, *, for_python: bool = False
) -> ir.Module:
    """Return the LLVM module of a kernel and all it calls, whose C function is `name`.

    parameters: ``int`` or a class of named tuples of integers, for each of the kernel's; they are
    passed one after the other as int64. The C function returns an int64, 0 where the kernel returns
    nothing. for_python: it takes and returns Python's integers as a builtin function does
    (``METH_FASTCALL``), and lets other threads run meanwhile.
    """
    program = Program()
    counts = [1 if one is int else len(one._fields) for one in parameters]
    taken = [WORD] * (3 if for_python else sum(counts))
    entry = ir.Function(program.module, ir.FunctionType(WORD, taken), name)
    builder = ir.IRBuilder(entry.append_basic_block())
    words = list(entry.args)
    if for_python:
        words = program.unboxed(builder, entry.args[1], sum(counts))
        thread = program.c_function(builder, "PyEval_SaveThread", WORD)
    rest, given = iter(words), []
    for one, count in zip(parameters, counts, strict=True):
        some = [next(rest) for _ in range(count)]
        given.append(some[0] if one is int else one._make(some))
    made = program.call(builder, kernel, given)
    result = WORD(0) if made is None else number.converted(builder, made, WORD)
    if for_python:
        program.c_function(builder, "PyEval_RestoreThread", ir.VoidType(), thread)
        result = program.c_function(builder, "PyLong_FromLongLong", WORD, result)
    builder.ret(result)
    return program.module


class Program:
    """A module, and the functions that kernels have become in it."""

    def __init__(self) -> None:
        self.module = ir.Module()
        self._functions: dict[Any, tuple[Any, Any]] = {}

    def call(self, builder: Any, kernel: Any, arguments: list[Value]) -> Value:
        """Emit the call of a kernel."""
        values = [number.materialised(one) for one in arguments]
        leaves = list(_leaves(values))
        key = kernel.key, str([_shape(one) for one in values])
        if key not in self._functions:
            self._functions[key] = self._compiled(kernel, values, leaves)
        function, shape = self._functions[key]
        result = builder.call(function, leaves)
        return _unpacked(builder, result, shape)

    def c_function(self, builder: Any, name: str, result: Any, *arguments: Any) -> Any:
        """Emit the call of a function of the C library, or of Python's."""
        known = self.module.globals.get(name)
        if known is None:
            kind = ir.FunctionType(result, [one.type for one in arguments])
            known = ir.Function(self.module, kind, name)
        return builder.call(known, arguments)

    def unboxed(self, builder: Any, given: Any, count: int) -> list[Any]:
        """Emit an array of Python's integers as int64; what is none ends the function."""
        objects = builder.inttoptr(given, WORD.as_pointer())
        words = []
        for i in range(count):
            one = builder.load(builder.gep(objects, [WORD(i)]))
            words.append(self.c_function(builder, "PyLong_AsLongLong", WORD, one))
        failed = self.c_function(builder, "PyErr_Occurred", WORD)
        with builder.if_then(builder.icmp_unsigned("!=", failed, WORD(0)), likely=False):
            builder.ret(WORD(0))
        return words

    def _compiled(self, kernel: Any, values: list[Any], leaves: list[Any]) -> Any:
        function: FunctionType = kernel.function
        hints: dict[Any, Any] = {}
        while True:
            kind = ir.FunctionType(ir.VoidType(), [one.type for one in leaves])
            name = self.module.get_unique_name(function.__name__)
            made = ir.Function(self.module, kind, name)
            made.linkage = "internal"
            made.attributes.add("nounwind")
            if kernel.apart:
                made.attributes.add("noinline")
            try:
                return made, Body(self, made, function, hints).write(values)
            except _WiderError:
                del self.module.globals[name]


def _leaves(values: Any) -> Iterator[Any]:
    for one in values:
        if isinstance(one, tuple):
            yield from _leaves(one)
        else:
            yield one


def _shape(value: Any) -> Any:
    """Return the type of a value, or of each entry of a tuple, with its class."""
    if isinstance(value, tuple):
        return type(value).__qualname__, [_shape(one) for one in value]
    return str(value.type)


def _refilled(like: Any, leaves: Iterator[Any]) -> Any:
    """Return a value of the same structure made of these leaves."""
    if isinstance(like, tuple):
        return number.rebuilt(like, [_refilled(one, leaves) for one in like])
    return next(leaves)


def _unpacked(builder: Any, result: Any, like: Any) -> Value:
    if not isinstance(like, tuple):
        return None if like is None else result
    count = len(list(_leaves(like)))
    return _refilled(like, iter([builder.extract_value(result, i) for i in range(count)]))


class Body:
    """One function being written: its variables, and where the next instruction goes."""

    def __init__(self, program: Program, made: Any, function: FunctionType, hints: Any) -> None:
        self.program, self.made, self.hints = program, made, hints
        self.node = _definition(function)
        self.scope = _scope(function)
        self.names: dict[str, Any] = {}
        self.result: Any = _NOTHING_YET
        self.loops: list[tuple[Any, Any]] = []  # where continue and break go
        self.freed: list[Any] = []
        self.simple = _simple_names(self.node)
        self.start = made.append_basic_block("entry")
        self.builder = ir.IRBuilder(made.append_basic_block("body"))
        self.first = self.builder.block

    def write(self, values: list[Any]) -> Any:
        """Write the function for parameters like these; return a value of the result's form."""
        arguments = self.node.args
        taken = iter(self.made.args)
        given = [_refilled(one, taken) for one in values]
        plain = [one.arg for one in arguments.args]
        if arguments.vararg is not None:
            given[len(plain) :] = [tuple(given[len(plain) :])]
            plain.append(arguments.vararg.arg)
        if len(plain) != len(given):
            raise CompileTypeError(f"{self.made.name} takes {len(plain)}, not {len(given)}")
        for name, value in zip(plain, given, strict=True):
            self.assign(name, value)
        self.statements(self.node.body)
        if not self.builder.block.is_terminated:
            if self.result in (None, _NOTHING_YET):
                self.leave(None)
            else:
                self.builder.unreachable()
        ir.IRBuilder(self.start).branch(self.first)
        return None if self.result is _NOTHING_YET else self.result

    def statements(self, nodes: list[ast.stmt]) -> None:
        """Write statements until one ends the block."""
        for node in nodes:
            if self.builder.block.is_terminated:
                return
            try:
                write = getattr(self, f"on_{type(node).__name__.lower()}", None)
                if write is None:
                    raise CompileTypeError(f"kernels have no {type(node).__name__}")
                write(node)
            except (CompileTypeError, AttributeError) as error:
                if hasattr(error, "__notes__"):
                    raise
                error.add_note(f"in kernel {self.node.name}, line {node.lineno}")
                raise

    # Statements

    def on_pass(self, node: ast.Pass) -> None:
        """Do nothing."""

    def on_expr(self, node: ast.Expr) -> None:
        """Write a call whose result nobody takes, or a docstring."""
        if not isinstance(node.value, ast.Constant):
            self.value(node.value)

    def on_assign(self, node: ast.Assign) -> None:
        """Write an assignment, to some names at once perhaps."""
        value = self.value(node.value)
        for target in node.targets:
            self._to(target, value)

    def _to(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self.assign(target.id, value)
        elif isinstance(target, ast.Tuple):
            if not isinstance(value, tuple) or len(value) != len(target.elts):
                raise CompileTypeError(f"{ast.unparse(target)} does not fit what it is given")
            for one, part in zip(target.elts, value, strict=True):
                self._to(one, part)
        elif isinstance(target, ast.Subscript):
            self._to_memory(target, value)
        else:
            raise CompileTypeError(f"nothing is assigned to {ast.unparse(target)}")

    def on_augassign(self, node: ast.AugAssign) -> None:
        """Write ``name op= value``."""
        left = self.value(ast.Name(node.target.id, ast.Load()))  # type: ignore[union-attr]
        result = number.applied(self.builder, type(node.op).__name__, left, self.value(node.value))
        self._to(node.target, result)

    def on_return(self, node: ast.Return) -> None:
        """Write a return; the first decides what the function returns."""
        self.leave(None if node.value is None else self.value(node.value))

    def leave(self, value: Value) -> None:
        """End the function with a value."""
        value = None if value is None else number.materialised(value)
        if self.result is _NOTHING_YET:
            self.result = value
            self._set_type(value)
        for place in self.freed:
            self._c_function("free", ir.VoidType(), self.builder.load(place))
        if self.result is None:
            self.builder.ret_void()
            return
        same = [
            number.converted(self.builder, one, like.type)
            for one, like in zip(_leaves([value]), _leaves([self.result]), strict=True)
        ]
        if not isinstance(self.result, tuple):
            self.builder.ret(same[0])
            return
        whole = ir.Constant(self.made.ftype.return_type, ir.Undefined)
        for i, one in enumerate(same):
            whole = self.builder.insert_value(whole, one, i)
        self.builder.ret(whole)

    def _set_type(self, value: Any) -> None:
        """Let the function, of which no call was emitted yet, return such a value."""
        kinds = [] if value is None else [one.type for one in _leaves([value])]
        kind: Any = kinds[0] if kinds else ir.VoidType()
        if isinstance(value, tuple):
            kind = ir.LiteralStructType(kinds)
        self.made.ftype.return_type = kind
        self.made.return_value = type(self.made.return_value)(self.made, kind)

    def on_if(self, node: ast.If) -> None:
        """Write both branches, or the one that is known to be taken."""
        known = self.condition(node.test)
        if isinstance(known, bool):
            self.statements(node.body if known else node.orelse)
            return
        then, other, after = (self._block(name) for name in ("then", "else", "endif"))
        self.builder.cbranch(known, then, other)
        for block, body in ((then, node.body), (other, node.orelse)):
            self.builder.position_at_end(block)
            self.statements(body)
            self._go(after)
        self._continue_at(after)

    def on_while(self, node: ast.While) -> None:
        """Write a loop with its condition at its head."""
        head, body, after = (self._block(name) for name in ("head", "while", "done"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        known = self.condition(node.test)
        if known is True:
            self.builder.branch(body)
        else:
            self.builder.cbranch(number.materialised(known), body, after)
        self.builder.position_at_end(body)
        self._in_loop(head, after, node.body)
        self._go(head)
        self._continue_at(after)

    def on_for(self, node: ast.For) -> None:
        """Write a loop over a range, or over a numbered one."""
        call, counted = node.iter, False
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "enumerate":
            call, counted = call.args[0], True
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "range":
            raise CompileTypeError("a loop is over a range")
        bounds = [self.value(one) for one in call.args]
        start, stop, step = {1: [0, *bounds, 1], 2: [*bounds, 1]}.get(len(bounds), bounds)
        builder, before = self.builder, self.builder.block
        start, stop = (number.converted(builder, one, WORD) for one in (start, stop))
        down = number.is_static(step) and step < 0
        step = number.converted(builder, step, WORD)
        head, body, latch, after = (
            self._block(f"for {n}") for n in ("head", "body", "next", "end")
        )
        builder.branch(head)
        builder.position_at_end(head)
        index, turn = builder.phi(WORD), builder.phi(WORD) if counted else None
        builder.cbranch(builder.icmp_signed(">" if down else "<", index, stop), body, after)
        builder.position_at_end(body)
        self._to(node.target, index if turn is None else (turn, index))
        self._in_loop(latch, after, node.body)
        self._go(latch)
        builder.position_at_end(latch)
        index.add_incoming(start, before)
        index.add_incoming(builder.add(index, step, flags=["nsw"]), latch)
        if turn is not None:
            turn.add_incoming(WORD(0), before)
            turn.add_incoming(builder.add(turn, WORD(1), flags=["nsw"]), latch)
        builder.branch(head)
        self._continue_at(after)

    def _in_loop(self, on: Any, out: Any, body: list[ast.stmt]) -> None:
        self.loops.append((on, out))
        self.statements(body)
        self.loops.pop()

    def on_break(self, node: ast.Break) -> None:
        """Leave the loop."""
        self.builder.branch(self.loops[-1][1])

    def on_continue(self, node: ast.Continue) -> None:
        """Go to the loop's next turn."""
        self.builder.branch(self.loops[-1][0])

    def _block(self, name: str) -> Any:
        return self.made.append_basic_block(name)

    def _go(self, block: Any) -> None:
        if not self.builder.block.is_terminated:
            self.builder.branch(block)

    def _continue_at(self, block: Any) -> None:
        self.builder.position_at_end(block)
        if not any(block in _targets(one) for one in self.made.blocks):
            self.builder.unreachable()

    # Variables

    def assign(self, name: str, value: Value) -> None:
        """Give a variable a value: itself where it has no other, else by way of memory."""
        if name in self.simple or not _is_number(value):
            self.names[name] = value
            return
        value = number.materialised(value)
        leaves = list(_leaves([value]))
        if name not in self.names:
            kinds = self.hints.get(name, [one.type for one in leaves])
            cells = iter([Cell(self._alloca(kind)) for kind in kinds])
            self.names[name] = _refilled(value, cells)
        cells = _leaves([self.names[name]])
        places = [cell.place for cell in cells]
        for i, (one, place) in enumerate(zip(leaves, places, strict=True)):
            kind = place.type.pointee
            wide = one.type if one.type == kind else number.common(one.type, kind)
            if wide != kind:
                kinds = [p.type.pointee for p in places]
                kinds[i] = wide
                self.hints[name] = kinds
                raise _WiderError
            self.builder.store(number.converted(self.builder, one, kind), place)

    def _alloca(self, kind: Any) -> Any:
        return ir.IRBuilder(self.start).alloca(kind)

    def _loaded(self, held: Any) -> Value:
        if isinstance(held, tuple):
            return number.rebuilt(held, [self._loaded(one) for one in held])
        return self.builder.load(held.place) if isinstance(held, Cell) else held

    # Expressions

    def value(self, node: ast.expr) -> Value:
        """Write an expression and return its value."""
        write = getattr(self, f"of_{type(node).__name__.lower()}", None)
        if write is None:
            raise CompileTypeError(f"kernels have no {type(node).__name__}")
        result: Value = write(node)
        return result

    def of_constant(self, node: ast.Constant) -> Value:
        """Return a literal."""
        return node.value

    def of_name(self, node: ast.Name) -> Value:
        """Return a variable's value, or what the closure or module holds."""
        if node.id in self.names:
            return self._loaded(self.names[node.id])
        try:
            return self.scope[node.id]
        except KeyError:
            raise CompileTypeError(f"{node.id} is not known") from None

    def of_tuple(self, node: ast.Tuple) -> Value:
        """Return a tuple."""
        return tuple(self._many(node.elts))

    def _many(self, nodes: list[ast.expr]) -> list[Value]:
        values: list[Value] = []
        for one in nodes:
            if isinstance(one, ast.Starred):
                values.extend(self.value(one.value))
            else:
                values.append(self.value(one))
        return values

    def of_attribute(self, node: ast.Attribute) -> Value:
        """Return a field of a named tuple, the address of memory, or what a module holds."""
        text = ast.unparse(node)
        if text.endswith(".ctypes.data"):
            return self.value(node.value.value).address  # type: ignore[attr-defined]
        return getattr(self.value(node.value), node.attr)

    def of_subscript(self, node: ast.Subscript) -> Value:
        """Return an entry of a tuple, or of memory."""
        held, index = self.value(node.value), self.value(node.slice)
        if isinstance(held, Memory):
            return self.builder.load(self._element(held, index))
        return held[index]

    def of_binop(self, node: ast.BinOp) -> Value:
        """Write an operator."""
        left, right = self.value(node.left), self.value(node.right)
        return number.applied(self.builder, type(node.op).__name__, left, right)

    def of_unaryop(self, node: ast.UnaryOp) -> Value:
        """Write a sign or a negation."""
        value = self.value(node.operand)
        if isinstance(node.op, ast.USub):
            return number.negated(self.builder, value)
        if isinstance(node.op, ast.Not):
            known = number.truth(self.builder, value)
            return not known if isinstance(known, bool) else self.builder.not_(known)
        raise CompileTypeError(f"kernels have no {type(node.op).__name__}")

    def of_compare(self, node: ast.Compare) -> Value:
        """Write a comparison, or a chain of them."""
        values = [self.value(one) for one in (node.left, *node.comparators)]
        result: Value = True
        for op, left, right in zip(node.ops, values, values[1:], strict=False):
            if isinstance(op, ast.Is | ast.IsNot):
                one: Value = (left is right) == isinstance(op, ast.Is)
            else:
                one = number.applied(self.builder, type(op).__name__, left, right)
            if result is True:
                result = one
            elif one is not True:
                result = number.applied(self.builder, "BitAnd", result, one)
        return result

    def of_boolop(self, node: ast.BoolOp) -> Value:
        """Write ``and`` or ``or`` of truths; of numbers where the first one is known."""
        first, *rest = node.values
        if isinstance(first, ast.Name | ast.Constant):
            value = self.value(first)
            if number.is_static(value):
                if bool(value) == isinstance(node.op, ast.Or):
                    return value
                return self.value(rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
        return self.condition(node, of_truths=True)

    def condition(self, node: ast.expr, *, of_truths: bool = False) -> Any:
        """Write an expression as a truth: a bool where it is known, else an i1.

        Of several truths, later ones are asked only where it counts. of_truths: refuse numbers.
        """
        if not isinstance(node, ast.BoolOp):
            value = self.value(node)
            if of_truths and number.type_of(value) != TRUTH:
                raise CompileTypeError(f"{ast.unparse(node)} is no truth")
            return number.truth(self.builder, value)
        ends = isinstance(node.op, ast.Or)  # what one part must be to decide
        after, found = self._block("decided"), []
        for i, part in enumerate(node.values):
            known = self.condition(part, of_truths=of_truths)
            last = i == len(node.values) - 1
            if isinstance(known, bool) and known != ends and not last:
                continue
            found.append((number.materialised(known), self.builder.block))
            if last or isinstance(known, bool):
                self.builder.branch(after)
                break
            more = self._block("more")
            branches = (after, more) if ends else (more, after)
            self.builder.cbranch(known, *branches)
            self.builder.position_at_end(more)
        self.builder.position_at_end(after)
        if len(found) == 1:
            value, _ = found[0]
            return bool(value.constant) if isinstance(value, ir.Constant) else value
        decided = self.builder.phi(TRUTH)
        for value, block in found:
            decided.add_incoming(value, block)
        return decided

    def of_ifexp(self, node: ast.IfExp) -> Value:
        """Write ``a if condition else b``, of which only one is computed."""
        known = self.condition(node.test)
        if isinstance(known, bool):
            return self.value(node.body if known else node.orelse)
        then, other, after = (self._block(name) for name in ("then", "else", "either"))
        self.builder.cbranch(known, then, other)
        ends, found = [], []
        for block, part in ((then, node.body), (other, node.orelse)):
            self.builder.position_at_end(block)
            found.append(number.materialised(self.value(part)))
            ends.append(self.builder.block)
        leaves = [list(_leaves([one])) for one in found]
        kinds = [number.common(a.type, b.type) for a, b in zip(*leaves, strict=True)]
        for end, values in zip(ends, leaves, strict=True):
            self.builder.position_at_end(end)
            pairs = zip(values, kinds, strict=True)
            values[:] = [number.converted(self.builder, one, kind) for one, kind in pairs]
            self.builder.branch(after)
        self.builder.position_at_end(after)
        merged = []
        for kind, *values in zip(kinds, *leaves, strict=True):
            phi = self.builder.phi(kind)
            for value, end in zip(values, ends, strict=True):
                phi.add_incoming(value, end)
            merged.append(phi)
        return _refilled(found[0], iter(merged))

    def of_call(self, node: ast.Call) -> Value:
        """Write the call of a kernel, an intrinsic, or of one of the functions of the language."""
        called = self.value(node.func)
        if node.keywords:
            raise CompileTypeError("arguments are given by their places")
        arguments = self._many(node.args)
        if hasattr(called, "function"):
            return self.program.call(self.builder, called, arguments)
        if hasattr(called, "emit"):
            values = [_for_intrinsic(self.builder, one, called.raw) for one in arguments]
            return _from_intrinsic(called.emit(self.builder, *values))
        if isinstance(called, type) and issubclass(called, tuple):
            return called(*arguments)
        write = _FUNCTIONS.get(called)
        if write is None:
            raise CompileTypeError(f"kernels do not call {ast.unparse(node.func)}")
        return write(self, *arguments)

    # Memory

    def memory(self, count: Value, dtype: Any, *, zeros: bool) -> Memory:
        """Write the allocation of elements that live until the function returns."""
        kind = number.type_of(np.dtype(dtype).type(0))
        size = np.dtype(dtype).itemsize
        if number.is_static(count) and count * size <= _MOST_ON_STACK:
            cell = self._alloca(ir.ArrayType(kind, int(count)))
            cell.align = 64
            pointer = self.builder.bitcast(cell, _BYTE.as_pointer())
        else:
            nbytes = number.applied(self.builder, "Mult", count, size)
            place = self._alloca(_BYTE.as_pointer())
            ir.IRBuilder(self.start).store(_BYTE.as_pointer()(None), place)
            wanted = number.converted(self.builder, nbytes, WORD)
            self._c_function("free", ir.VoidType(), self.builder.load(place))  # a loop's last turn
            pointer = self._c_function("malloc", _BYTE.as_pointer(), wanted)
            self.builder.store(pointer, place)
            self.freed.append(place)
        made = Memory(self.builder.ptrtoint(pointer, WORD), kind, count)
        if zeros:
            self._fill(made, 0)
        return made

    def _c_function(self, name: str, result: Any, *arguments: Any) -> Any:
        return self.program.c_function(self.builder, name, result, *arguments)

    def _element(self, held: Memory, index: Value) -> Any:
        base = self.builder.inttoptr(held.address, held.kind.as_pointer())
        return self.builder.gep(base, [number.converted(self.builder, index, WORD)])

    def _to_memory(self, target: ast.Subscript, value: Value) -> None:
        held = self.value(target.value)
        if isinstance(target.slice, ast.Slice):
            self._fill(held, value)
            return
        stored = number.converted(self.builder, value, held.kind)
        self.builder.store(stored, self._element(held, self.value(target.slice)))

    def _fill(self, held: Memory, value: Value) -> None:
        """Write zeros everywhere."""
        if value != 0:
            raise CompileTypeError("memory is filled with zeros only")
        size = held.kind.width // 8 if isinstance(held.kind, ir.IntType) else None
        size = size or (4 if held.kind == number.FLOAT else 8)
        nbytes = number.applied(self.builder, "Mult", held.count, size)
        pointer = self.builder.inttoptr(held.address, _BYTE.as_pointer())
        nbytes = number.converted(self.builder, nbytes, WORD)
        self._c_function("memset", _BYTE.as_pointer(), pointer, ir.IntType(32)(0), nbytes)


_NOTHING_YET = object()


def _is_number(value: Value) -> bool:
    if isinstance(value, tuple):
        return all(_is_number(one) for one in value)
    return isinstance(value, ir.Value | int | float | np.generic)


def _targets(block: Any) -> tuple[Any, ...]:
    """Return the blocks that a block's end leads to."""
    end = block.terminator
    return () if end is None else tuple(getattr(end, "operands", ()))


def _scope(function: FunctionType) -> dict[str, Any]:
    """Return what the names of a function stand for outside of it."""
    cells = function.__closure__ or ()
    held = (cell.cell_contents for cell in cells)
    closure = dict(zip(function.__code__.co_freevars, held, strict=True))
    return _Scope(function.__globals__, closure)


class _Scope(dict[str, Any]):
    def __init__(self, outer: dict[str, Any], closure: dict[str, Any]) -> None:
        super().__init__(closure)
        self._outer = outer

    def __missing__(self, name: str) -> Any:
        if name in self._outer:
            return self._outer[name]
        return vars(builtins)[name]


def _simple_names(node: ast.FunctionDef) -> set[str]:
    """Return the variables assigned in one place that comes before all uses, in its own block."""
    stored: dict[str, list[ast.Name]] = {}
    loaded: dict[str, list[ast.Name]] = {}
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            kept = stored if isinstance(one.ctx, ast.Store) else loaded
            kept.setdefault(one.id, []).append(one)
    changed = {one.target.id for one in ast.walk(node) if isinstance(one, ast.AugAssign)}  # type: ignore[union-attr]
    simple = {a.arg for a in (*node.args.args, *filter(None, [node.args.vararg]))} - set(stored)

    def visit(body: list[ast.stmt], end: tuple[int, int]) -> None:
        for statement in body:
            if isinstance(statement, ast.Assign):
                mark([*statement.targets], _end_of(statement), end)
            elif isinstance(statement, ast.For):
                inner = _end_of(statement.body[-1])
                mark([statement.target], _start_of(statement.body[0]), inner)
            for part in ("body", "orelse"):
                nested = getattr(statement, part, None)
                if nested:
                    visit(nested, _end_of(nested[-1]))

    def mark(targets: list[ast.expr], start: tuple[int, int], end: tuple[int, int]) -> None:
        for name in (n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)):
            uses = [_start_of(use) for use in loaded.get(name.id, [])]
            if not isinstance(name.ctx, ast.Store) or len(stored[name.id]) != 1:
                continue
            if name.id not in changed and all(start <= use <= end for use in uses):
                simple.add(name.id)

    visit(node.body, _end_of(node))
    return simple - changed


def _start_of(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end_of(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset


def _for_intrinsic(builder: Any, value: Value, raw: bool) -> Any:
    """Return an argument as intrinsics take it: integers as i64, unless they want them as is."""
    if isinstance(value, tuple):
        return number.rebuilt(value, [_for_intrinsic(builder, one, raw) for one in value])
    made = number.materialised(value)
    if not raw and isinstance(made.type, ir.IntType):
        return number.converted(builder, made, WORD)
    return made


def _from_intrinsic(result: Any) -> Value:
    return tuple(result) if isinstance(result, list) else result


def _as(kind: Any) -> Callable[..., Value]:
    def write(body: Body, value: Value) -> Value:
        if number.is_static(value):
            made = np.float32 if kind == number.FLOAT else float if kind == number.DOUBLE else int
            return made(value)
        return number.converted(body.builder, value, kind)

    return write


def _floor(body: Body, value: Value) -> Value:
    name = f"llvm.floor.f{32 if value.type == number.FLOAT else 64}"
    return body._c_function(name, value.type, value)


_FUNCTIONS: dict[Any, Callable[..., Value]] = {
    min: lambda body, *values: number.extreme(body.builder, "<", list(values)),
    max: lambda body, *values: number.extreme(body.builder, ">", list(values)),
    int: _as(WORD),
    float: _as(number.DOUBLE),
    bool: lambda body, value: number.truth(body.builder, value),
    np.float32: _as(number.FLOAT),
    np.float64: _as(number.DOUBLE),
    np.int32: _as(ir.IntType(32)),
    np.int64: _as(WORD),
    np.floor: _floor,
    len: lambda body, value: len(value),
    np.empty: lambda body, count, dtype: body.memory(count, dtype, zeros=False),
    np.zeros: lambda body, count, dtype: body.memory(count, dtype, zeros=True),
}
