"""Builtin functions of CPython made of machine code, and the functions of CPython themselves."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

_FASTCALL = 0x80


class Method(ctypes.Structure):
    """CPython's ``PyMethodDef``."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


def method(name: bytes, address: int) -> Method:
    """Return how CPython calls the function (self, arguments, count) at an address; never freed."""
    made = Method(name, address, _FASTCALL, None)
    of_python("Py_IncRef", None, ctypes.py_object)(made)
    return made


def builtin_function(made: Method, bound_to: Any) -> Callable[..., Any]:
    """Return a builtin function, whose `self` is an object."""
    kinds = ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p
    make = of_python("PyCFunction_NewEx", ctypes.py_object, *kinds)
    function: Callable[..., Any] = make(ctypes.addressof(made), bound_to, None)
    return function


def of_python(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Return a function of CPython; `ctypes.pythonapi`'s own are everybody's, their types too."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


def takes_objects() -> bool:
    """Whether machine code may take Python's objects here: CPython and its lock are known."""
    return sys.implementation.name == "cpython"
