"""Kernels: plain Python functions compiled to machine code on their first call.

A rung writes ``@kernel`` above a plain function and calls the result. Nothing is compiled on
import, and nothing at all where object code is at hand: in the user's cache, or in the package
(`gemmule.backends.cpu.jit_cache`). Else the function becomes LLVM code
(`gemmule.backends.cpu.language`), with all that it calls, and that object code; neither the
compiler nor LLVM is imported before.

Kernels take addresses, strides and sizes (integers), so that one compilation serves every array
order, alignment and read-only flag; elements are read and written through
`gemmule.backends.cpu.intrinsics`. Sums of floats may be reordered and fused; NaN and Inf keep their
meaning. No kernel holds the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, cast

import numpy as np

from gemmule.backends.cpu.calls import functions
from gemmule.core import fork

_WORD = ctypes.c_int64
# Addresses of compiled kernels by key and parameters, for the life of the process: two threads that
# ask a cached factory at once are given two kernels of one key.
_LOADED: dict[tuple[str, tuple[Any, ...], bool], int] = {}


@functools.cache  # a search through all folders of modules, of which each new plan makes several
def unavailable() -> str | None:
    """Return why no kernel can run here, or None; imports nothing."""
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed; pip install llvmlite"
    return None


class Intrinsic:
    """An operation given as LLVM code: ``emit(builder, *arguments)``, called while compiling.

    Arguments are LLVM values, and tuples of such; integers come as i64 unless `raw`. It returns a
    value, a list or tuple of values, or None.
    """

    def __init__(self, emit: Callable[..., Any], name: str, *, raw: bool = False) -> None:
        self.emit, self.key, self.raw = emit, name, raw

    def __call__(self, *arguments: Any) -> Any:
        """Refuse: an intrinsic exists inside kernels only."""
        raise TypeError(f"intrinsic {self.key} can only be used inside a kernel.")


def intrinsic(emit: Callable[..., Any]) -> Intrinsic:
    """Declare an operation by the function that emits its LLVM code."""
    return Intrinsic(emit, f"{emit.__module__}.{emit.__qualname__}")


def operation(name: str, emit: Callable[..., Any]) -> Intrinsic:
    """Return an intrinsic from what emits its LLVM code, which gets tuples as lists."""

    def emit_listed(builder: Any, *values: Any) -> Any:
        return emit(builder, *(list(v) if isinstance(v, tuple) else v for v in values))

    return Intrinsic(emit_listed, name)


class Kernel:
    """A function compiled on its first call, from the disk cache where it holds it; thread-safe."""

    def __init__(self, function: FunctionType, *, apart: bool = False) -> None:
        self.function, self.apart = function, apart
        self.__doc__ = function.__doc__
        self._calls: dict[int, Callable[..., int]] = {}

    @functools.cached_property
    def key(self) -> str:
        """Name of the kernel on disk: module, function, line, and what its closure holds.

        And digits of its file, where a change of that is no change of the folder's name.
        """
        from gemmule.backends.cpu.jit_cache import digest_beside

        code = self.function.__code__
        place = f"{self.function.__module__}.{self.function.__qualname__}:{code.co_firstlineno}"
        cells = self.function.__closure__ or ()
        beside = digest_beside(code.co_filename)
        return " ".join([place, *beside, *(_describe(cell.cell_contents) for cell in cells)])

    def __call__(self, *arguments: Any) -> Any:
        """Run the kernel on integers; returns an integer, 0 where the kernel returns nothing.

        A named tuple of integers stands where the kernel takes one.
        """
        call = self._calls.get(len(arguments)) or self._call_of(arguments)
        return call(*arguments)

    def _call_of(self, arguments: tuple[Any, ...]) -> Callable[..., int]:
        forms = tuple(type(one) if isinstance(one, tuple) else int for one in arguments)
        count = sum(len(one) if isinstance(one, tuple) else 1 for one in arguments)
        call: Callable[..., int]
        if functions.takes_objects():
            made = functions.method(b"kernel", self.entry(*forms, for_python=True))
            call = functions.builtin_function(made, None)
        else:
            call = ctypes.CFUNCTYPE(_WORD, *[_WORD] * count)(self.entry(*forms))
        if set(forms) - {int}:
            flat, call = call, lambda *given: flat(*_words_of(given))
        self._calls[len(arguments)] = call
        return call

    def address(self, arguments: int) -> int:
        """Return the address of the kernel as a C function of so many int64, compiling it.

        It returns an int64. Other kernels call it through
        `gemmule.backends.cpu.intrinsics.enter`: one compiled caller then serves many callees. It
        lives as long as the process.
        """
        return self.entry(*[int] * arguments)

    def entry(self, *parameters: type, for_python: bool = False) -> int:
        """Return the address of the kernel as a C function, compiling it; see `address`.

        parameters: ``int``, an int64, or a NamedTuple of such, passed one after the other.
        for_python: as `gemmule.backends.cpu.calls.functions` makes builtin functions of.
        """
        form = (self.key, parameters, for_python)
        known = _LOADED.get(form)
        if known is not None:
            return known
        with fork.WHOLE, fork.uninterrupted():
            if form not in _LOADED:
                from gemmule.backends.cpu.jit_cache import loaded

                _LOADED[form] = loaded(self, parameters, for_python=for_python)
            return _LOADED[form]


def kernel(function: Callable[..., Any]) -> Kernel:
    """Make a lazily compiled kernel of a function.

    A closure may hold kernels, intrinsics, numbers, strings and NumPy scalar types: that is how one
    source serves several dtypes (a cached factory returns the kernel of each).

    Example::

        @kernel
        def add(a: int, b: int) -> int:
            return a + b

        add(1, 2)  # 3, compiled now
    """
    return Kernel(cast("FunctionType", function))


def apart(function: Callable[..., Any]) -> Kernel:
    """Make a kernel that stays a function, where LLVM would put its code into the one caller.

    A long stretch without loops is compiled in half the time if no loops of a caller surround it.
    """
    return Kernel(cast("FunctionType", function), apart=True)


def _words_of(given: tuple[Any, ...]) -> Iterator[int]:
    for one in given:
        yield from one if isinstance(one, tuple) else (one,)


def _describe(value: Any) -> str:
    """Return a text that is equal in every process for what a closure may hold."""
    if isinstance(value, Kernel | Intrinsic):
        return f"({value.key})"
    if isinstance(value, bool | int | float | str | np.generic | type):
        return repr(value)
    raise TypeError(
        f"a kernel's closure holds a {type(value).__name__}; it may hold kernels, intrinsics, "
        "numbers, strings and NumPy scalar types."
    )
