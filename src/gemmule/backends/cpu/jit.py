"""Numba, tamed: lazily compiled CPU kernels, a private disk cache, and safe parallel launches.

A rung writes ``@kernel`` above a plain function and calls the result. Importing the rung imports no
Numba; the first call does. Inside a kernel, other kernels, `Intrinsic` objects and `prange` are
used by their names and become Numba's own objects when the kernel is built.

Kernels take addresses, strides and sizes (integers), so that one compilation serves every array
order, alignment and read-only flag; elements are read and written through
`gemmule.backends.cpu.intrinsics`. ``fastmath`` is ``{"reassoc", "contract"}``: sums may be
reordered and fused, NaN and Inf keep their meaning. No kernel holds the GIL.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any, Literal, cast, overload

import numpy as np

from gemmule.core import fork

_LAUNCH_LOCK = threading.Lock()
_IMPORT_PID = os.getpid()

_OPTIONS = {
    "nopython": True,
    "nogil": True,
    "boundscheck": False,
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract"},
}

# Numba compiles up to three functions of a kernel: what kernels call, and unless it is told not to,
# what Python calls and what C calls. Each caller has a form without what only the others need.
Caller = Literal["python", "c", "kernel"]
_LEFT_OUT: dict[Caller, tuple[str, ...]] = {
    "python": ("no_cfunc_wrapper",),
    "c": ("no_cpython_wrapper",),
    "kernel": ("no_cfunc_wrapper", "no_cpython_wrapper"),
}
# Numba's dispatchers by key and caller, for the life of the process. Two threads that ask a cached
# factory at once are given two kernels of one key, of which one is soon forgotten: with a
# dispatcher of its own its code would be freed, whose address a product may hold by then, and whose
# symbols, equal to the other's, other code may have been linked to.
_BUILT: dict[tuple[str, Caller], Any] = {}


def unavailable() -> str | None:
    """Return why no kernel can be compiled here, or None; imports nothing."""
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed; pip install numba"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "NUMBA_DISABLE_JIT is set; unset it"
    return None


class _ParallelRange:
    """Stands for ``numba.prange`` until a kernel is built; outside of one it is ``range``."""

    def __call__(self, *bounds: int) -> range:
        return range(*bounds)


prange = _ParallelRange()


class Intrinsic:
    """An operation given as LLVM code; see `intrinsic`."""

    def __init__(self, define: Callable[..., Any], name: str) -> None:
        self.key = name
        self._define = define
        self._made: Any = None

    @property
    def compiled(self) -> Any:
        """Numba's own object for the operation, made on first use."""
        with fork.WHOLE:
            if self._made is None:
                self._made = _numba().extending.intrinsic(self._define)
            return self._made

    def __call__(self, *arguments: Any) -> Any:
        """Refuse: an intrinsic exists inside kernels only."""
        raise TypeError(f"intrinsic {self.key} can only be used inside a kernel.")


def intrinsic(define: Callable[..., Any]) -> Intrinsic:
    """Declare an operation by its LLVM code, importing no Numba yet.

    `define(typing_context, *argument_types)` returns ``(signature, generate)`` as
    ``numba.extending.intrinsic`` wants it; it imports ``numba`` and ``llvmlite`` in its body.
    """
    return Intrinsic(define, f"{define.__module__}.{define.__qualname__}")


def operation(
    name: str,
    result: str | Callable[[], Any],
    arguments: Sequence[str],
    emit: Callable[..., Any],
) -> Intrinsic:
    """Return an intrinsic from what emits its LLVM code.

    result: the name of Numba's type, or what makes the type. arguments: for each ``i``, an int64,
    ``t``, a tuple as it is given, or the name of Numba's type. ``emit(builder, *values)`` gets
    tuples as lists, and returns a value, a list of a tuple's, or None.
    """

    def define(typing_context: Any, *kinds: Any) -> Any:
        types = _numba().types
        outcome = getattr(types, result) if isinstance(result, str) else result()
        named = {"i": "int64"}
        taken = [
            kind if one == "t" else getattr(types, named.get(one, one))
            for one, kind in zip(arguments, kinds, strict=True)
        ]

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            unpacked = [
                [builder.extract_value(v, i) for i in range(len(k))] if one == "t" else v
                for one, k, v in zip(arguments, signature.args, values, strict=True)
            ]
            found = emit(builder, *unpacked)
            if isinstance(found, list):
                return context.make_tuple(builder, signature.return_type, found)
            return context.get_dummy_value() if found is None else found

        return outcome(*taken), generate

    names = ["typing_context", *(f"argument_{i}" for i in range(len(arguments)))]
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD  # Numba asks how many there are
    shown = inspect.Signature([inspect.Parameter(one, positional) for one in names])
    define.__signature__ = shown  # type: ignore[attr-defined]
    return Intrinsic(define, name)


class Kernel:
    """A function compiled on its first call, from the disk cache where it holds it.

    Calls are thread-safe. A parallel kernel must not be called in a forked child (see
    `thread_count`); the module that owns it calls its serial form there.
    """

    def __init__(self, function: FunctionType, *, parallel: bool) -> None:
        self.function = function
        self.parallel = parallel
        self.__doc__ = function.__doc__
        self._for_python: Any = None
        self._launch_freely = not parallel

    @functools.cached_property
    def key(self) -> str:
        """Name of the kernel on disk: module, function, line, form, and what its closure holds."""
        code = self.function.__code__
        place = f"{self.function.__module__}.{self.function.__qualname__}:{code.co_firstlineno}"
        cells = self.function.__closure__ or ()
        # One function may be compiled both ways, and neither may be taken for the other.
        form = ["parallel"] if self.parallel else []
        return " ".join([place, *form, *(_describe(cell.cell_contents) for cell in cells)])

    @property
    def compiled(self) -> Any:
        """Numba's dispatcher of this kernel for calls from Python, made on first use."""
        if self._for_python is None:
            self._for_python = self.compiled_for("python")
        return self._for_python

    @property
    def dispatchers(self) -> tuple[Any, ...]:
        """Numba's dispatchers of this kernel made so far, one for each kind of caller."""
        return tuple(_BUILT[self.key, one] for one in _LEFT_OUT if (self.key, one) in _BUILT)

    def compiled_for(self, caller: Caller) -> Any:
        """Return Numba's dispatcher of this kernel for calls from one side, made on first use."""
        with fork.WHOLE:
            if (self.key, caller) not in _BUILT:
                _BUILT[self.key, caller] = self._build(caller)
            return _BUILT[self.key, caller]

    def __call__(self, *arguments: Any) -> Any:
        """Run the kernel; arguments are Python integers, NumPy scalars or arrays."""
        if self._launch_freely:
            return self.compiled(*arguments)
        with _LAUNCH_LOCK:
            result = self.compiled(*arguments)
            self._launch_freely = _layer_is_thread_safe()
        return result

    def address(self, arguments: int, *, returns: bool = False) -> int:
        """Return the address of the kernel as a C function of so many int64, compiling it.

        returns: it returns an int64, else nothing. Another kernel calls it through
        `gemmule.backends.cpu.intrinsics.call`: one compiled caller then serves many callees. The
        function lives as long as the process.
        """
        with fork.WHOLE, fork.uninterrupted():
            int64, void = _numba().int64, _numba().void
            made = self.compiled_for("c")
            result = made.get_compile_result((int64 if returns else void)(*[int64] * arguments))
            name = result.fndesc.llvm_cfunc_wrapper_name
            return int(result.library.get_pointer_to_function(name))

    def entry(self, *parameters: type) -> int:
        """Return the address of the kernel as other kernels call it, compiling it.

        parameters: ``int``, an int64, or a NamedTuple of such. Where many kernels have one caller,
        that takes their addresses (`gemmule.backends.cpu.intrinsics.enter`) and is compiled once;
        called by name, a kernel is compiled into each of its callers. It lives as long as the
        process.
        """
        with fork.WHOLE, fork.uninterrupted():
            types = _numba().types
            word = types.int64
            kinds = (
                word if one is int else types.NamedUniTuple(word, len(one._fields), one)
                for one in cast("tuple[Any, ...]", parameters)
            )
            made = self.compiled_for("kernel").get_compile_result(types.void(*kinds))
            return int(made.library.get_pointer_to_function(made.fndesc.llvm_func_name))

    def _build(self, caller: Caller) -> Any:
        made = _dispatcher_class()  # imports Numba, before the next line does
        from gemmule.backends.cpu.jit_cache import KernelCache, kernel_folder

        options = dict(_OPTIONS, parallel=self.parallel, **dict.fromkeys(_LEFT_OUT[caller], True))
        key = f"{self.key} for {caller}"
        function = _with_resolved_names(self.function)
        # Symbols are unique within a process only by a counter; code from the disk cache was
        # compiled in others, so what tells closures of one source apart goes into the name.
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        function.__qualname__ = f"{self.function.__qualname__}_{digest}"
        dispatcher = made(function, targetoptions=options)
        folder = kernel_folder()
        if folder is not None:
            # The dispatcher's own switch would take Numba's global cache settings.
            dispatcher._cache = KernelCache(folder, key)
        return dispatcher


@overload
def kernel(function: Callable[..., Any]) -> Kernel: ...
@overload
def kernel(*, parallel: bool) -> Callable[[Callable[..., Any]], Kernel]: ...
def kernel(
    function: Callable[..., Any] | None = None, *, parallel: bool = False
) -> Kernel | Callable[[Callable[..., Any]], Kernel]:
    """Make a lazily compiled kernel of a function.

    A closure may hold kernels, intrinsics, numbers, strings and NumPy scalar types: that is how one
    source serves several dtypes (a cached factory returns the kernel of each).

    Example::

        @kernel
        def add(a: int, b: int) -> int:
            return a + b

        add(1, 2)  # 3, compiled now
    """
    if function is None:
        return lambda f: Kernel(cast("FunctionType", f), parallel=parallel)
    return Kernel(cast("FunctionType", function), parallel=parallel)


def thread_count() -> int:
    """Return how many threads a parallel kernel may use now; 1 after ``os.fork``.

    Respects ``numba.set_num_threads`` of the calling thread. A forked child gets 1: GNU OpenMP
    kills a child that goes parallel, so parallel forms are for more than one thread only.
    """
    if os.getpid() != _IMPORT_PID:
        return 1
    return int(_started_threads()())


@functools.cache
def _started_threads() -> Callable[[], int]:
    """Start Numba's threads and return what tells how many a call may use."""
    with fork.WHOLE, fork.uninterrupted():
        numba = _numba()
        numba.get_num_threads()
    return cast("Callable[[], int]", numba.get_num_threads)


def _layer_is_thread_safe() -> bool:
    """Whether Numba's threading layer, known after the first launch, takes concurrent calls."""
    return bool(_numba().threading_layer() != "workqueue")


def _with_resolved_names(function: FunctionType) -> FunctionType:
    """Return `function` with Numba's objects in place of ours in its globals and closure."""
    names = set(_names(function.__code__))
    scope = {n: _resolve(v) for n, v in function.__globals__.items() if n in names}
    scope["__name__"] = function.__module__
    cells = tuple(CellType(_resolve(c.cell_contents)) for c in function.__closure__ or ())
    copy = FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, cells or None
    )
    copy.__qualname__ = function.__qualname__
    return copy


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _resolve(value: Any) -> Any:
    if isinstance(value, Kernel):
        return value.compiled_for("kernel")
    if isinstance(value, Intrinsic):
        return value.compiled
    if isinstance(value, _ParallelRange):
        return _numba().prange
    return value


@functools.cache
def _numba() -> Any:
    """Import Numba; from now on a fork waits for its compiler, and for LLVM."""
    with fork.WHOLE, fork.uninterrupted():
        import numba.extending
        from llvmlite.binding import ffi
        from numba.core.compiler_lock import global_compiler_lock

        fork.hold("numba", global_compiler_lock)
        # LLVM's objects are also freed outside of a compilation, by whichever thread lets them go.
        held = getattr(ffi.lib, "_lock", None)
        lock = getattr(held, "_lock", None)
        if lock is not None:
            fork.hold("llvm", lock)
        return numba


@functools.cache
def _dispatcher_class() -> Any:
    """Return Numba's dispatcher, but that Ctrl-C waits for what it compiles."""
    _numba()
    from numba.core.registry import CPUDispatcher

    class Dispatcher(CPUDispatcher):  # type: ignore[misc]
        def compile(self, sig: Any) -> Any:
            with fork.uninterrupted():
                return super().compile(sig)

    return Dispatcher


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
