"""Checks of everything a quantised matrix is made of, from callers and from files.

Each function returns its argument in canonical form, or raises TypeError for a wrong dtype or kind
and ValueError for a wrong shape or value.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gemmule.core.problem import FLOAT4, FLOAT8_CODES
from gemmule.quant import float4
from gemmule.quant.layouts import Codes, Layout, unwoven
from gemmule.quant.library import is_known, is_masked, library_of
from gemmule.quant.rounding import dtype_name, group_count

SCALE_DTYPES = ("float32", "float16", "bfloat16")
FLOAT_DTYPES = ("float32", "float64", "float16", "bfloat16")

_MAX_SIZE = 1 << 40
_MOST_ZERO = 2.0**32
_SCHEMA, _OF_FLOATS = "1", "2"  # of 4-bit floats, which earlier versions do not read
_SCHEMA_KEY = "gemmule_quantized_matrix"
_COUNT = re.compile(r"0|[1-9][0-9]{0,12}")


def one_of(name: str, value: str, known: Collection[str]) -> str:
    """Require an option to be one of some strings."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}; known are {', '.join(known)}")
    if value not in known:
        raise ValueError(f"{name} is {value!r}; known are {', '.join(known)}")
    return value


def bits(value: int) -> int:
    """Require 4 or 8."""
    number = integer("bits", value)
    if number not in (4, 8):
        raise ValueError(f"bits is {number}, but must be 4 or 8")
    return number


def group_size(value: int | None) -> int | None:
    """Require a positive int, -1 (a row) or None (the whole matrix)."""
    if value is None:
        return None
    number = integer("group_size", value)
    if number != -1 and not 1 <= number <= _MAX_SIZE:
        raise ValueError(
            f"group_size is {number}, but must be a positive int up to 2^40, -1 for one group a "
            "row, or None for one group in all"
        )
    return number


def shape(value: tuple[int, int]) -> tuple[int, int]:
    """Require two sizes of at least 0."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"shape is {value!r}, but must be two sizes (m, n)")
    m, n = (integer("each size in shape", size) for size in value)
    if not (0 <= m <= _MAX_SIZE and 0 <= n <= _MAX_SIZE):
        raise ValueError(f"shape is {(m, n)}, but sizes must lie in 0..{_MAX_SIZE}")
    return m, n


def integer(name: str, value: object) -> int:
    """Require an int, which True is none of here."""
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be an int, got {value!r}")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None


def float_matrix(W: Any) -> None:
    """Require a 2-D NumPy, PyTorch or CuPy array of a float dtype, any byte order."""
    if is_masked(W) or not is_known(W):
        raise TypeError(
            "W must be an array of NumPy (not a masked one), PyTorch, CuPy or JAX, a DeviceArray, "
            f"or one with DLPack; got {type(W).__name__}. {_remedy(W)}"
        )
    native = W.dtype.newbyteorder("=") if isinstance(W.dtype, np.dtype) else W.dtype
    float_kind(str(getattr(native, "name", native)).removeprefix("torch."), tuple(W.shape))


def _remedy(W: Any) -> str:
    if "Tracer" in type(W).__name__:
        return "Quantise outside of jit, grad and vmap"
    if is_masked(W):
        return "Give its .filled(0): nothing heeds the mask"
    return "Give its .weight" if hasattr(W, "weight") else "Convert it with numpy.asarray"


def float_kind(dtype: str, shape: tuple[int, ...]) -> str:
    """Require the dtype and shape of a matrix that can be quantised; returns the dtype."""
    if dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"W has dtype {dtype}, but must be {', '.join(FLOAT_DTYPES)}; convert it first"
        )
    if len(shape) != 2:
        raise ValueError(f"W has shape {shape}, but must be 2-D: reshape it to (m, n)")
    return dtype


def importance(value: Any, n: int) -> NDArray[np.float64]:
    """Require n finite numbers that are not negative; returns them on the host."""
    array = _real("importance", value)
    if array.shape != (n,):
        raise ValueError(f"importance has shape {array.shape}, but must be ({n},): one a column")
    if not (np.isfinite(array) & (array >= 0)).all():
        raise ValueError("importance must be finite and not negative everywhere")
    return array


def hessian(value: Any, n: int) -> NDArray[np.float64]:
    """Require second moments (n, n): finite, symmetric, some of them positive; on the host."""
    array = _real("hessian", value)
    if array.shape != (n, n):
        raise ValueError(
            f"hessian has shape {array.shape}, but must be ({n}, {n}): X^T X of the inputs X that "
            "W's columns meet"
        )
    if not np.isfinite(array).all():
        row, column = (int(i) for i in np.argwhere(~np.isfinite(array))[0])
        raise ValueError(f"hessian[{row}, {column}] is {array[row, column]}, but must be finite")
    diagonal = np.diag(array)
    if n and (diagonal.min() < 0 or not diagonal.max() > 0):
        raise ValueError(
            "hessian must have a diagonal of squares that are not negative and not all 0; it has "
            f"{diagonal.min():.3g} to {diagonal.max():.3g}: no X^T X of inputs that were seen"
        )
    if n and np.abs(array - array.T).max() > 1e-4 * diagonal.max():
        raise ValueError("hessian must be symmetric, as X^T X is")
    return array


def _real(name: str, value: Any) -> NDArray[np.float64]:
    if is_masked(value):
        raise TypeError(f"{name} is a masked array, whose mask nothing heeds; give its .filled(0)")
    host = value.detach().cpu() if hasattr(value, "detach") else value
    if str(getattr(host, "dtype", "")) == "torch.bfloat16":
        host = host.float()
    array = np.asarray(host.get() if hasattr(host, "get") else host)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {array.dtype}, but must be real numbers")
    return array.astype(np.float64)


def _host_array(name: str, value: object) -> NDArray[Any]:
    if not isinstance(value, np.ndarray) or is_masked(value):
        raise TypeError(
            f"{name} must be a NumPy array (not a masked one), got {type(value).__name__}; "
            "convert it with numpy.asarray"
        )
    return np.asarray(value)


def codes(
    value: Codes, stored: tuple[int, int], bits: int, layout: Layout, *, floats: bool = False
) -> Codes:
    """Require uint8 storage of the layout's shape, no bit set outside the codes."""
    array = _host_array("codes", value)
    if dtype_name(array) == FLOAT8_CODES and bits == 8 and layout.name == "row":
        if np.isnan(array).any():
            raise ValueError("codes of float8 must be numbers, and some are NaN")
    elif array.dtype != np.uint8:
        raise TypeError(
            f"codes have dtype {array.dtype}, but must be uint8, or {FLOAT8_CODES} in layout row "
            "with 8 bits; make int8 codes unsigned with "
            "codes.view(numpy.uint8) ^ 0x80 and add 128 to the zero points"
        )
    m, n = stored
    expected = layout.storage_shape(m, n, bits)
    if array.shape != expected:
        raise ValueError(
            f"codes have shape {array.shape}, but a {m} x {n} matrix of {bits}-bit codes in "
            f"layout {layout.name!r} takes {expected}"
        )
    array = read_only(array)
    plain = unwoven(array) if floats and layout.name == "mma16" else array
    if not layout.padding_is_zero(plain, m, n, bits):
        raise ValueError(
            f"codes have bits set where a {m} x {n} matrix in layout {layout.name!r} has no code; "
            "padding and the tail nibble of odd rows must be 0"
        )
    return array


def scales(
    value: NDArray[Any], stored: tuple[int, int], bits: int, group_size: int | None, layout: Layout
) -> NDArray[Any]:
    """Require finite float32, float16 or bfloat16, one for each group; in the layout's order.

    Or of 8 bits, of codes that are floats in groups of the size that belongs to them.
    """
    array = _host_array("scales", value)
    name = dtype_name(array)
    if name not in (*SCALE_DTYPES, *FLOAT4):
        raise TypeError(
            f"scales have dtype {array.dtype}, but must be {', '.join(SCALE_DTYPES)}, or of codes "
            f"that are floats {', '.join(FLOAT4)}"
        )
    own = float4.GROUP_SIZES.get(FLOAT4.get(name, ""), group_size)
    if name in FLOAT4 and (bits, group_size) != (float4.BITS, own):
        raise ValueError(
            f"scales of {name} are those of {FLOAT4[name]}, with 4 bits and group_size {own}; got "
            f"{bits} bits and group_size {group_size}"
        )
    return read_only(_per_group("scales", array, stored, group_size), layout.scale_order)


def zeros(
    value: NDArray[np.float32], stored: tuple[int, int], group_size: int | None, layout: Layout
) -> NDArray[np.float32]:
    """Require float32 of at most 2^32 in size, one for each group; in the layout's order.

    Beside a larger zero point no code counts in float32, and its product with a sum of x overflows
    though the weights, of a tiny scale, are ordinary numbers.
    """
    array = _host_array("zeros", value)
    if dtype_name(array) != "float32":
        raise TypeError(
            f"zeros have dtype {array.dtype}, but must be float32: convert them with "
            "zeros.astype('float32')"
        )
    array = _per_group("zeros", array, stored, group_size)
    beyond = np.abs(array) > _MOST_ZERO
    if beyond.any():
        row, group = (int(i) for i in np.argwhere(beyond)[0])
        raise ValueError(
            f"zeros[{row}, {group}] is {array[row, group]}, but must lie within 2^32 of 0, or "
            "products overflow: quantise the weights again, or give such a group, whose weights "
            "are all alike, a scale of their size"
        )
    return read_only(array, layout.scale_order)


def zeros_or_factors(
    value: Any,
    of_scales: NDArray[Any],
    stored: tuple[int, int],
    group_size: int | None,
    layout: Layout,
) -> Any:
    """Require what lies beside scales: zero points or None, or what 4-bit floats have instead."""
    if (name := dtype_name(of_scales)) in FLOAT4:
        return factors(value, stored[0], name)
    return None if value is None else zeros(value, stored, group_size, layout)


def factors(value: NDArray[np.float32] | None, m: int, scale_dtype: str) -> Any:
    """Require what 4-bit floats have in place of zero points: of NVFP4 a float32 for each row."""
    if FLOAT4[scale_dtype] == "mxfp4":
        if value is not None:
            raise ValueError("zeros are given, but MXFP4 has no zero points: give None")
        return None
    array = _host_array("zeros", value)
    if array.shape != (m, 1) or dtype_name(array) != "float32" or not np.isfinite(array).all():
        raise ValueError(
            "zeros of NVFP4 are what each row's scales are multiplied by, finite float32 of shape "
            f"{(m, 1)}; got {array.dtype} of shape {array.shape}"
        )
    return read_only(array)


def _per_group(
    name: str, array: NDArray[Any], stored: tuple[int, int], group_size: int | None
) -> NDArray[Any]:
    m, n = stored
    expected = (1, 1) if group_size is None else (m, group_count(n, group_size))
    if array.shape != expected:
        raise ValueError(
            f"{name} have shape {array.shape}, but a {m} x {n} matrix with group_size "
            f"{group_size} takes {expected}"
        )
    finite = np.isfinite(array)
    if not finite.all():
        row, group = (int(i) for i in np.argwhere(~finite)[0])
        raise ValueError(f"{name}[{row}, {group}] is {array[row, group]}, but must be finite")
    return array


def scales_fit(scales: Any, group_size: int | None, first_row: int = 0, first: int = 0) -> None:
    """Require scales that `quantize` computed, of any library, to be finite in their dtype.

    first_row, first: row and group of the first of them.
    """
    xp = library_of(scales).xp
    finite = xp.isfinite(scales)
    if bool(finite.all()):
        return
    row, group = (int(i) for i in xp.argwhere(~finite)[0])
    place = "the matrix" if group_size is None else f"row {first_row + row}, group {first + group}"
    remedy = "scale W down" if dtype_name(scales) == "float32" else "use scale_dtype='float32'"
    raise ValueError(f"the scale of {place} overflows {dtype_name(scales)}: {remedy}")


def perm(value: NDArray[np.integer[Any]], n: int) -> NDArray[np.int32]:
    """Require a permutation of 0 .. n - 1; returns an int32 copy, so that it stays one."""
    array = _host_array("perm", value)
    if array.dtype.kind not in "iu":
        raise TypeError(f"perm has dtype {array.dtype}, but must be of integers")
    if array.shape != (n,) or n > np.iinfo(np.int32).max:
        raise ValueError(f"perm has shape {array.shape}, but must be ({n},), below 2^31 entries")
    if n and (array.min() < 0 or array.max() >= n):
        raise ValueError(f"perm has entries in {array.min()}..{array.max()}, not in 0..{n - 1}")
    order = array.astype(np.int32)
    counts = np.bincount(order, minlength=n)
    if (counts != 1).any():
        twice = int(np.argmax(counts > 1))
        raise ValueError(f"perm is no permutation: it holds {twice} {counts[twice]} times")
    return read_only(order)


def read_only(array: NDArray[Any], order: Literal["C", "F"] = "C") -> NDArray[Any]:
    """Return a contiguous, aligned, read-only view (a copy of what is not)."""
    view = np.require(array, requirements=(order, "A")).view()
    view.flags.writeable = False
    return view


def to_metadata(
    stored: tuple[int, int], bits: int, group_size: int | None, transposed: bool, *, floats: bool
) -> dict[str, str]:
    """Return what a file has to say beside its arrays."""
    return {
        _SCHEMA_KEY: _OF_FLOATS if floats else _SCHEMA,
        "rows": str(stored[0]),
        "columns": str(stored[1]),
        "bits": str(bits),
        "group_size": "none" if group_size is None else str(group_size),
        "transposed": "true" if transposed else "false",
    }


def file_parts(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `from_parts` from a file's arrays and metadata."""
    if _SCHEMA_KEY not in metadata:
        raise ValueError(f"no quantised matrix: the metadata have no {_SCHEMA_KEY!r}")
    if metadata[_SCHEMA_KEY] not in (_SCHEMA, _OF_FLOATS):
        raise ValueError(
            f"schema {metadata[_SCHEMA_KEY]!r} is unknown; this version reads schema {_SCHEMA} to "
            f"{_OF_FLOATS}: update gemmule, or save the matrix again"
        )
    missing = {"codes", "scales"} - tensors.keys()
    surplus = tensors.keys() - {"codes", "scales", "zeros", "perm"}
    if missing or surplus:
        raise ValueError(f"tensors missing: {sorted(missing)}, unknown: {sorted(surplus)}")
    group = metadata.get("group_size")
    special = {"none": None, "-1": -1}
    return {
        **tensors,
        "shape": (_count(metadata, "rows"), _count(metadata, "columns")),
        "bits": _count(metadata, "bits"),
        "group_size": special[group] if group in special else _count(metadata, "group_size"),
        "transposed": _flag(metadata, "transposed"),
    }


def file_error(metadata: Mapping[str, str]) -> float | None:
    """Return what `quantize` said of a matrix, None where a file does not tell."""
    text = metadata.get("error")
    error = None if text is None else float(text)
    if error is not None and not error >= 0:
        raise ValueError(f"metadata 'error' is {text!r}, but must be a number of at least 0")
    return error


def _count(metadata: Mapping[str, str], key: str) -> int:
    text = metadata.get(key)
    if text is None or not _COUNT.fullmatch(text):
        raise ValueError(f"metadata {key!r} is {text!r}, but must be a number")
    return int(text)


def _flag(metadata: Mapping[str, str], key: str) -> bool:
    text = metadata.get(key)
    if text not in ("true", "false"):
        raise ValueError(f"metadata {key!r} is {text!r}, but must be 'true' or 'false'")
    return text == "true"
