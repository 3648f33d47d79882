"""Products that Python calls as builtin functions: checked, launched and returned by a kernel.

What a call of a small product costs is Python: a dozen functions, each a tenth of a microsecond
where everything is cached, and ten times that after a pause, when nothing is. A builtin function
made of a kernel compares its two operands with those it was bound for, allocates the result, or
looks at the one it is given, lets other threads run, multiplies, and returns: nothing of Python is
touched in between. It returns None, with nothing done, for operands of other forms, after a fork,
and where somebody has started Numba's threads and may have told them how many to be: that is for
the ordinary way. So is a given result unless it and all arrays own their memory: they share none.

A job without helpers has no pool, and does not ask for Numba's threads.

What it relies on is the binary interface of CPython with its lock (an object's type is its second
word; ``METH_FASTCALL``) and that of NumPy 2 (the fields of an array, ``PyArray_Empty`` in place 184
of its table). `unusable` says where they are not so.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gemmule.backends.cpu.atomics import read
from gemmule.backends.cpu.calls.functions import Method, builtin_function, method, of_python
from gemmule.backends.cpu.intrinsics import call_c, load
from gemmule.backends.cpu.jit import kernel
from gemmule.backends.cpu.shares import GONE
from gemmule.core import fork
from gemmule.core.interpreter import is_free_threaded

log = logging.getLogger("gemmule")
Call = Callable[..., Any | None]
_int32 = load("int32", "int64")

# Fields of an object, of an array, in bytes, and the flag of an array whose elements are aligned.
_TYPE, _DATA, _DIMENSIONS, _SHAPE, _STRIDES, _DTYPE, _FLAGS = 8, 16, 24, 32, 40, 56, 64
_ALIGNED, _OWNS, _FIT_FOR_RESULT = 0x100, 0x4, 0x505  # by rows, its own, aligned, to be written
_EMPTY, _VERSION, _NUMPY_2 = 184, 0, 0x2000000
# Words of a bound call: functions and objects; two forms; the result; what the job is told.
_SAVE, _RESTORE, _INCREF, _DECREF, _NONE, _ARRAY = 0, 8, 16, 24, 32, 40
_LOOK_UP, _NAMES_OF, _MODULES, _PARALLEL, _STARTED, _FALSE = 48, 56, 64, 72, 80, 88
_POOL, _JOB, _FIRST = 96, 104, 112
_NEW, _OUT_DIMENSIONS, _OUT_DTYPE, _OUT_SHAPE = 120, 128, 136, 144
_FORMS, _FORM, _WORDS = 160, 48, 256
_NO_FORM = (0,) * 6
# The module of Numba's threads, which the user may have imported, and what it knows of them.
_PARALLEL_NAME = sys.intern("numba.np.ufunc.parallel")
_STARTED_NAME = sys.intern("_is_initialized")


class Job(NamedTuple):
    """A product bound to what does not change between calls.

    address: of the C function f(words, A, x, y), all int64, or (words, A, B, C), which returns not
    0 where it did nothing. words: what it finds there. pool: that of its helpers, or 0. kept: what
    words point to.
    """

    address: int
    words: tuple[int, ...]
    pool: int = 0
    kept: Any = None


@functools.cache
def unusable() -> str | None:
    """Return why no builtin function can be made of a kernel here, or None."""
    if sys.implementation.name != "cpython" or platform.machine() != "x86_64":
        return "the binary interface is known for CPython on x86_64"
    if is_free_threaded() or hasattr(sys, "gettotalrefcount"):
        return "this CPython has objects of another layout"
    table = _numpy_table()
    version = ctypes.CFUNCTYPE(ctypes.c_uint)(table[_VERSION] or 0)()
    if version != _NUMPY_2:
        return f"the binary interface of NumPy is {version:#x}, known is {_NUMPY_2:#x}"
    for array in (np.arange(6.0).reshape(2, 3), np.zeros(5, np.float32)):
        if _seen(array) != (id(np.ndarray), array.ctypes.data, array.ndim, id(array.dtype)):
            return "an array's fields are not where they were"
    return None


def _seen(array: np.ndarray[Any, Any]) -> tuple[int, int, int, int]:
    """Return an array's type, data, number of dimensions and dtype as they lie in memory."""
    words = (ctypes.c_int64 * 9).from_address(id(array))
    return words[_TYPE // 8], words[_DATA // 8], words[_DIMENSIONS // 8] & 2**32 - 1, words[7]


def _numpy_table() -> Any:
    from numpy._core import _multiarray_umath  # type: ignore[attr-defined]

    unwrap = of_python("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    table = unwrap(_multiarray_umath._ARRAY_API, None)
    return ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))


@kernel
def _fits(operand: int, form: int, array: int) -> bool:
    """Whether an operand is an aligned array of a form; that of no array fits everything."""
    dtype = read(form)
    if dtype == 0:
        return True
    count = read(form + 8)
    if read(operand + _TYPE) != array or read(operand + _DTYPE) != dtype:
        return False
    if _int32(operand + _DIMENSIONS, 0) != count or _int32(operand + _FLAGS, 0) & _ALIGNED == 0:
        return False
    shape, strides = read(operand + _SHAPE), read(operand + _STRIDES)
    for i in range(count):
        if read(shape + 8 * i) != read(form + 16 + 8 * i):
            return False
        if read(strides + 8 * i) != read(form + 32 + 8 * i):
            return False
    return True


@kernel
def _takes_result(out: int, at: int, first: int, second: int, array: int) -> bool:
    """Whether an object is an array like the result that shares no memory with the operands."""
    if read(out + _TYPE) != array or read(out + _DTYPE) != read(at + _OUT_DTYPE):
        return False
    count, shape = read(at + _OUT_DIMENSIONS), read(out + _SHAPE)
    if _int32(out + _DIMENSIONS, 0) != count:
        return False
    if _int32(out + _FLAGS, 0) & _FIT_FOR_RESULT != _FIT_FOR_RESULT:
        return False
    for i in range(count):
        if read(shape + 8 * i) != read(at + _OUT_SHAPE + 8 * i):
            return False
    for k in range(2):
        operand = second if k == 1 else first
        if read(at + _FORMS + k * _FORM) == 0:  # a matrix of codes: nobody writes to it
            continue
        if operand == out or _int32(operand + _FLAGS, 0) & _OWNS == 0:
            return False
    return True


@kernel
def _numba_rests(at: int) -> int:
    """Return 0 where somebody has started Numba's threads, else 1."""
    module = call_c(read(at + _LOOK_UP), (read(at + _MODULES), read(at + _PARALLEL)))
    if module == 0:
        return 1
    names = call_c(read(at + _NAMES_OF), (module,))
    started = call_c(read(at + _LOOK_UP), (names, read(at + _STARTED)))
    return 1 if started == read(at + _FALSE) else 0


@kernel
def _enter(this: int, given: int, count: int) -> Any:
    """Answer a call of a bound product: (words' array, operands, how many) -> an object.

    A third operand is the result's array.
    """
    at = read(this + _DATA)
    none, array, pool = read(at + _NONE), read(at + _ARRAY), read(at + _POOL)
    fits = 2 <= count <= 3 and (pool == 0 or read(pool + GONE) == 0)
    if fits:
        first, second = read(given), read(given + 8)
        fits = _fits(first, at + _FORMS, array) and _fits(second, at + _FORMS + _FORM, array)
    if fits and count == 3:
        fits = _takes_result(read(given + 16), at, first, second, array)
    if fits and pool != 0:
        fits = _numba_rests(at) != 0
    if not fits:
        call_c(read(at + _INCREF), (none,))
        return none
    if count == 3:
        out = read(given + 16)
        call_c(read(at + _INCREF), (out,))
    else:
        dtype, shape = read(at + _OUT_DTYPE), at + _OUT_SHAPE
        call_c(read(at + _INCREF), (dtype,))  # the new array takes it
        out = call_c(read(at + _NEW), (read(at + _OUT_DIMENSIONS), shape, dtype, 0))
        if out == 0:
            return 0
    A, x = read(first + _DATA), read(second + _DATA)
    if read(at + _FIRST) != 0:
        A, x = x, A
    thread = call_c(read(at + _SAVE), (0,))
    undone = call_c(read(at + _JOB), (at + _WORDS, A, x, read(out + _DATA)))
    call_c(read(at + _RESTORE), (thread,))
    if undone == 0:
        return out
    call_c(read(at + _DECREF), (out,))
    call_c(read(at + _INCREF), (none,))
    return none


_METHOD: list[Method] = []


def way_in() -> Method:
    """Return how CPython calls `_enter`.

    It is never freed: builtin functions that caches hold may be the last to go when the interpreter
    ends, after the names of this module, and each looks at it then.
    """
    with fork.WHOLE:
        if not _METHOD:
            _METHOD.append(method(b"product", _enter.address(3)))
        return _METHOD[0]


@functools.cache
def _interpreter() -> tuple[int, ...]:
    """Return the first words of every bound call: functions, objects and names of others."""
    names = ("PyEval_SaveThread", "PyEval_RestoreThread", "Py_IncRef", "Py_DecRef")
    functions = [_address(name) for name in names]
    look_up = _address("PyDict_GetItem"), _address("PyModule_GetDict")
    objects = (id(sys.modules), id(_PARALLEL_NAME), id(_STARTED_NAME), id(False))
    return *functions, id(None), id(np.ndarray), *look_up, *objects


def _address(name: str) -> int:
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0


def form(array: Any) -> tuple[int, ...]:
    """Return the words by which an array of at most two dimensions is known again."""
    shape, strides = (*array.shape, 0, 0)[:2], (*array.strides, 0, 0)[:2]
    return id(array.dtype), array.ndim, *shape, *strides


def bound(
    job: Job,
    operands: tuple[Any, Any],
    out: np.ndarray[Any, Any],
    *,
    swapped: bool,
) -> Call | None:
    """Return ``call(a, b)`` and ``call(a, b, out)`` for operands like these; None where unusable.

    That is also where a builtin function cannot be made: the ordinary way needs none. A call
    returns the product, or None. operands: what is no array of at most two dimensions is not
    looked at: the caller knows it. out: an array like the result. swapped: the vector comes first.
    """
    try:
        return _bound(job, operands, out, swapped)
    except Exception:  # such as what another release of Numba or NumPy has no more
        log.debug("no product is bound as a builtin function", exc_info=True)
        return None


def _bound(
    job: Job, operands: tuple[Any, Any], out: np.ndarray[Any, Any], swapped: bool
) -> Call | None:
    if unusable() is not None:
        return None
    forms = [form(one) if type(one) is np.ndarray else _NO_FORM for one in operands]
    new = _numpy_table()[_EMPTY] or 0
    dtypes = [one.dtype for one in (*operands, out) if isinstance(one, np.ndarray)]
    result = new, out.ndim, id(out.dtype), *(*out.shape, 0)[:2]
    head = *_interpreter(), job.pool, job.address, int(swapped), *result, *forms[0], *forms[1]
    words = _Words(np.array((*head, *job.words), np.int64), (job, dtypes))
    return builtin_function(way_in(), words)


class _Words(np.ndarray[Any, Any]):
    """The words of a call, and what they point to."""

    kept: Any

    def __new__(cls, words: np.ndarray[Any, Any], kept: Any) -> _Words:
        array = words.view(cls)
        array.kept = kept
        return array
