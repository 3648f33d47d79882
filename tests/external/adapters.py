"""NumPy's and BLAS's calling conventions on top of the public functions.

The adapters translate forms, never values: lists become arrays, results are cast to NumPy's result
dtype where ours is wider (int8 gives int32, other integers 64 bits), 0-D results become scalars,
error messages take NumPy's words. What this package refuses by its documented rules (bool,
longdouble, object, mixed kinds, an `out` that overlaps or needs a cast) must be refused, which is
asserted here; the adapter then converts as the message says, or leaves the call to NumPy. Every
call that the package answers is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import gemmule as gm
from gemmule.core.problem import DTYPES

Array = np.ndarray[Any, Any]


class Driver:
    """The adapted functions and the number of products that the package answered.

    `products` maps names to the functions under test, so that a wrong one can be planted.
    """

    def __init__(self, products: dict[str, Callable[..., Any]] | None = None) -> None:
        self.answered = 0
        self.products = products or {
            "matmul": gm.matmul,
            "matvec": gm.matvec,
            "vecmat": gm.vecmat,
            "gemv": gm.gemv,
            "gemm": gm.gemm,
        }

    def _ours(self, name: str, *operands: Any, **options: Any) -> Any:
        self.answered += 1  # a refusal is an answer
        return self.products[name](*operands, **options)

    def _numpy_like(self, name: str, a: Any, b: Any, out: Any, **other: Any) -> Any:
        reference = getattr(np, name)
        if isinstance(out, tuple):
            (out,) = out
        a, b = np.asanyarray(a), np.asanyarray(b)
        if other:
            return reference(a, b, out=out, **other)
        if not (_known(a.dtype) and _known(b.dtype)):
            _must_refuse(TypeError, name, a, b)
            return reference(a, b, out=out)
        if (a.dtype.kind in "iu") != (b.dtype.kind in "iu"):
            _must_refuse(TypeError, name, a, b)
            common = np.result_type(a, b)  # convert, as the message says
            a, b = a.astype(common), b.astype(common)
        if name == "vecmat" and a.dtype.kind == "c":
            a = a.conj()  # NumPy's vecmat conjugates the vector
        dtype = np.result_type(a, b)
        if out is None:
            result = self._ours(name, a, b).astype(dtype)
            return result[()] if result.ndim == 0 else result
        return self._into(name, a, b, out, dtype)

    def _into(self, name: str, a: Array, b: Array, out: Array, dtype: np.dtype[Any]) -> Array:
        fresh = self._ours(name, a, b)
        if out.shape != fresh.shape:
            error = _must_refuse(ValueError, name, a, b, out=out)
            raise ValueError(f"non-broadcastable output operand: {error}")
        if not np.can_cast(dtype, out.dtype, "same_kind"):
            error = _must_refuse(TypeError, name, a, b, out=out)
            raise TypeError(f"Cannot cast ufunc '{name}' output: {error}")
        if out.dtype != fresh.dtype:
            _must_refuse(TypeError, name, a, b, out=out)
        elif np.shares_memory(out, a) or np.shares_memory(out, b):
            _must_refuse(ValueError, name, a, b, out=out)
        else:
            assert self._ours(name, a, b, out=out) is out
            return out
        np.copyto(out, fresh, casting="same_kind")
        return out

    def matmul(self, a: Any, b: Any, out: Any = None, **other: Any) -> Any:
        return self._numpy_like("matmul", a, b, out, **other)

    def matvec(self, a: Any, b: Any, out: Any = None, **other: Any) -> Any:
        return self._numpy_like("matvec", a, b, out, **other)

    def vecmat(self, a: Any, b: Any, out: Any = None, **other: Any) -> Any:
        return self._numpy_like("vecmat", a, b, out, **other)

    def dot(self, a: Any, b: Any, out: Any = None) -> Any:
        """``numpy.dot`` of at most two dimensions; its out must have the exact dtype and order."""
        a, b = np.asarray(a), np.asarray(b)
        if a.ndim == 0 or b.ndim == 0:
            return np.dot(a, b, out)
        if out is not None and not (out.flags.c_contiguous and out.dtype == np.result_type(a, b)):
            raise ValueError("output array is not acceptable")
        return self.matmul(a, b, out)

    def inner(self, a: Any, b: Any) -> Any:
        """``numpy.inner``: the sum over both last axes."""
        a, b = np.asarray(a), np.asarray(b)
        if a.ndim == 0 or b.ndim == 0:
            return np.inner(a, b)
        flat = [array.reshape(-1, array.shape[-1]) for array in (a, b)]
        shape = a.shape[:-1] + b.shape[:-1]
        if a.ndim <= 2 and b.ndim <= 2:
            flat = [a, b]
        return np.asarray(self.matmul(flat[0], flat[1].T)).reshape(shape)[()]

    def blas(self, name: str, dtype: type[np.generic]) -> Callable[..., Any]:
        """Return ``gemv(alpha, a, x, beta, y)`` or ``gemm(alpha, a, b, beta, c)`` of one dtype."""
        second = 1 if name == "gemv" else 2

        def call(alpha: Any, a: Any, b: Any, beta: Any = 0, c: Any = None) -> Array:
            left, right = _matrix(a, 2, dtype), _matrix(b, second, dtype)
            target = None if c is None else _matrix(c, second, dtype).copy()
            result = self._ours(name, left, right, target, alpha=alpha, beta=beta)
            assert target is None or result is target
            return result if c is None else result.reshape(np.shape(c))

        return call


def _matrix(values: Any, ndim: int, dtype: type[np.generic]) -> Array:
    """Return values as f2py reads them: a vector where a matrix is due is one column."""
    array = np.asarray(values, dtype)
    return array[:, None] if array.ndim < ndim else array


def _known(dtype: np.dtype[Any]) -> bool:
    return dtype.name in DTYPES


def _must_refuse(error: type[Exception], name: str, a: Any, b: Any, **options: Any) -> Exception:
    """Return the error with which the package refuses; fail if it does not."""
    try:
        getattr(gm, name)(a, b, **options)
    except (ValueError, error) as refusal:  # wrong shapes may be told before wrong dtypes
        return refusal
    raise AssertionError(f"{name} of {a.dtype} and {b.dtype} with {options} was not refused")


class Patched:
    """A module's namespace with some names replaced, for a test module's ``np``."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(vars(module))
        self.__dict__.update(names)


# Wrong products that any suite worth driving must notice.


def last_element_off(product: Callable[..., Any]) -> Callable[..., Any]:
    """Return a product whose last element is too large by one."""

    def wrong(*operands: Any, **options: Any) -> Any:
        result = product(*operands, **options)
        if result.size:
            result[(-1,) * result.ndim] += 1
        return result

    return wrong


def all_zeros(product: Callable[..., Any]) -> Callable[..., Any]:
    """Return a product that is zero everywhere."""

    def wrong(*operands: Any, **options: Any) -> Any:
        result = product(*operands, **options)
        result[...] = 0
        return result

    return wrong


PLANTED = {"last_element_off": last_element_off, "all_zeros": all_zeros}
