"""Foreign arrays in, the same kind out: `unwrap`, `empty_like_kind`, overlap checks.

NumPy, PyTorch, CuPy, JAX and this package's own arrays are known by type; anything else comes in
through DLPack or ``__cuda_array_interface__``. A library is touched only when the caller has
already imported it, so nothing here imports one. Arrays are never copied to be read, with one
exception: host data that is misaligned or of foreign byte order.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from gemmule.arrays.prepared import PreparedMatrix
from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core import memory
from gemmule.core.operand import Form, Operand, deciding, extent
from gemmule.core.problem import (
    DTYPES,
    FLOAT4,
    FLOAT4_DTYPE,
    FLOAT8_CODES,
    QuantSpec,
    check_dtype,
    numpy_dtype,
)
from gemmule.quant.library import is_masked, refuse_without_data
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.shards import QuantizedShards
from gemmule.quant.stack import QuantizedStack

# Dtypes that PyTorch and NumPy hand to each other as their bits alone.
_BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
_OVERLAP_WORK: Any = 10_000  # candidate solutions tried before two views count as overlapping


def unwrap(obj: Any, argument: str) -> Operand:
    """Return `obj` as an `Operand`; TypeError for what is no array of a supported dtype."""
    if type(obj) is np.ndarray:
        return _from_numpy(obj, obj, "numpy", argument)
    if isinstance(obj, QuantizedMatrix):
        return _from_quantized(obj)
    if isinstance(obj, DeviceArray):
        return device_arrays.from_own(obj)
    if isinstance(obj, QuantizedStack):
        held = obj.matrix
        form = held.kept(quantized_form)._replace(shape=obj.shape, strides=(0, 0, 0))
        return Operand(obj, 0, form, held.device, "gemmule", obj)
    if isinstance(obj, PreparedMatrix):
        return obj.operand
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        return _from_torch(torch, obj, argument)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(obj, jax.Array):
        return _from_jax(jax, obj, argument)
    if isinstance(obj, QuantizedShards):
        raise TypeError(
            f"{argument} is one process's part of a quantised matrix; it multiplies DTensors of "
            "its mesh only. Make the other operand one with distribute_tensor."
        )
    if is_masked(obj):
        raise TypeError(
            f"{argument} is a masked array, and the mask would be lost. "
            "Pass .filled(0) or another plain array."
        )
    if isinstance(obj, np.ndarray):
        if isinstance(obj, np.memmap):
            memory.check_map(obj)
        return _from_numpy(_plain(obj), obj, "numpy", argument)
    if not isinstance(obj, type):  # a class has what its objects have
        if hasattr(obj, "__cuda_array_interface__"):
            return device_arrays.from_interface(obj, argument)
        if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
            return _from_dlpack(obj, argument)
    module = type(obj).__module__.replace("builtins", "")
    raise TypeError(
        f"{argument} is a {module}{module and '.'}{type(obj).__qualname__}; needed is a NumPy, "
        "PyTorch, CuPy or JAX array, or one with DLPack or __cuda_array_interface__. "
        f"{_way_in(obj)}"
    )


def _way_in(obj: Any) -> str:
    """Return what makes an array of an object that is none."""
    if hasattr(obj, "toarray"):  # a sparse matrix
        return "A sparse matrix is multiplied as a dense one: pass .toarray() of it."
    if hasattr(obj, "to_numpy"):  # a DataFrame or Series
        return "Pass .to_numpy() of it."
    return "Wrap nested lists with numpy.asarray."


def _from_numpy(array: np.ndarray[Any, Any], original: Any, library: str, argument: str) -> Operand:
    dtype = array.dtype
    name = _name_of(dtype)
    if name not in DTYPES:
        check_dtype(name, argument)
    itemsize = dtype.itemsize
    plain = dtype.isnative and array.flags.aligned
    if plain and any(step % itemsize for step in array.strides):
        array = _without_odd_steps(array)
    if not plain or any(step % itemsize for step in array.strides):
        memory.require(array.nbytes, f"copying {argument}, misaligned or of foreign byte order,")
        array = np.array(array, dtype=dtype.newbyteorder("="), order="K")
    pointer: int = array.__array_interface__["data"][0]
    strides = tuple([step // itemsize for step in array.strides])
    form = Form(array.shape, strides, name, min(itemsize, 16))
    return Operand(array, pointer, form, "cpu", library, original)


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array of a subclass as one of NumPy's own: neither runs what the subclass says."""
    return array if type(array) is np.ndarray else np.ndarray.view(array, np.ndarray)


def _without_odd_steps(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a view whose axes of one element have no step that is no multiple of an element.

    Nobody takes such a step, so an array is neither copied nor refused for it.
    """
    pairs = enumerate(zip(array.shape, array.strides, strict=True))
    odd = [axis for axis, (size, step) in pairs if size == 1 and step % array.itemsize]
    index = tuple(0 if axis in odd else slice(None) for axis in range(array.ndim))
    return np.expand_dims(array[(*index, ...)], odd)


@functools.lru_cache(maxsize=256)
def _name_of(dtype: np.dtype[Any]) -> str:
    """Return ``dtype.name``, which NumPy computes anew in a microsecond."""
    return dtype.name


def _from_quantized(matrix: QuantizedMatrix) -> Operand:
    return Operand(matrix, 0, matrix.kept(quantized_form), matrix.device, "gemmule", matrix)


def quantized_form(matrix: QuantizedMatrix) -> Form:
    """Return the form of a quantised matrix; `QuantizedMatrix.kept` computes it once."""
    spec = _spec(
        matrix.bits,
        matrix.group_size,
        not matrix.symmetric,
        matrix.layout,
        matrix.scale_dtype,
        matrix.transposed,
        matrix.perm is not None,
    )
    dtype = FLOAT4_DTYPE if matrix.scale_dtype in FLOAT4 else f"uint{matrix.bits}"
    dtype = FLOAT8_CODES if matrix.format == "float8" else dtype
    return Form(matrix.shape, (0, 0), dtype, 16, spec)


_spec = functools.lru_cache(maxsize=256)(QuantSpec)


def _from_torch(torch: Any, tensor: Any, argument: str) -> Operand:
    refuse_without_data(torch, tensor, argument)
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        check_dtype(name, argument)
    if tensor.is_cuda:
        return device_arrays.from_torch(tensor, name)
    if tensor.device.type != "cpu":
        raise TypeError(f"{argument} lies on {tensor.device}; supported are cpu and cuda devices.")
    host = array_of(torch, tensor.resolve_conj().resolve_neg(), name, argument)
    return _from_numpy(host, tensor, "torch", argument)


def array_of(torch: Any, tensor: Any, name: str, argument: str) -> np.ndarray[Any, Any]:
    """Return an array over the memory of a host tensor that has its data, of the dtype `name`."""
    plain = tensor.detach()
    try:
        if name in _BITS:
            plain = plain.view(getattr(torch, _BITS[name]))
        array: np.ndarray[Any, Any] = plain.numpy()
    except RuntimeError as error:  # of a kind of tensor that only operators of PyTorch can read
        raise device_arrays.refused(tensor, argument, "memory", error) from error
    return array.view(numpy_dtype(name)) if name in _BITS else array


def _from_jax(jax: Any, array: Any, argument: str) -> Operand:
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"{argument} is a JAX tracer: inside jit, grad and vmap gemmule has matvec, vecmat and "
            "matmul of JAX arrays, without device=. Call all else outside of transformed functions."
        )
    platform = next(iter(array.devices())).platform
    if platform == "cpu":
        return _from_numpy(np.asarray(array), array, "jax", argument)
    return device_arrays.from_dlpack(array, "jax", argument)


def _from_dlpack(obj: Any, argument: str) -> Operand:
    try:
        device_type = int(obj.__dlpack_device__()[0])
        host = np.from_dlpack(obj) if device_type == 1 else None
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # of whoever wrote the object: their kinds are many
        raise device_arrays.refused(obj, argument, "DLPack", error) from error
    if host is not None:
        return _from_numpy(host, obj, "dlpack", argument)
    if device_type == 2:
        return device_arrays.from_dlpack(obj, "dlpack", argument)
    raise TypeError(
        f"{argument} lies on DLPack device type {device_type}; supported are 1 (CPU) and 2 (CUDA)."
    )


def unwrap_all(
    a: Any, b: Any, names: tuple[str, str], out: Any = None
) -> tuple[Operand, Operand, Operand | None]:
    """Unwrap a call's operands and check that they share a library and a device."""
    left, right = unwrap(a, names[0]), unwrap(b, names[1])
    check_same_kind(left, right, names)
    if out is None:
        return left, right, None
    result = unwrap(out, "out")
    check_same_kind(deciding(left, right), result, (names[0], "out"))
    return left, right, result


def check_same_kind(left: Operand, right: Operand, names: tuple[str, str]) -> None:
    """Raise TypeError unless both operands share one library and one device."""
    if left.device == right.device and left.library == right.library:
        return
    if left.device == right.device and "gemmule" in (left.library, right.library):
        return  # a quantised or device matrix goes with arrays of any library beside it
    raise TypeError(
        f"{names[0]} is a {left.kind} and {names[1]} a {right.kind}; both must come from one "
        "library and lie on one device. Convert or move one of them first."
    )


def empty_like_kind(shape: tuple[int, ...], dtype: str, like: Operand) -> Operand:
    """Return an uninitialised C-ordered array of the kind of `like`."""
    if like.device != "cpu":
        return device_arrays.empty(shape, dtype, like)
    array = np.empty(shape, dtype=numpy_dtype(dtype))
    return _from_numpy(array, array, "numpy", "out")


def tensor_of(torch: Any, array: np.ndarray[Any, Any]) -> Any:
    """Return a tensor of PyTorch over an array's memory; a number's is its own."""
    if array.dtype.kind == "V":  # NumPy's word for those of other packages
        bits = torch.from_numpy(array.view(_BITS[array.dtype.name]))
        return bits.view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array) if array.ndim else torch.tensor(array, device="cpu")


def to_kind(out: Operand, like: Operand) -> Any:
    """Return a fresh host result as an array of the library that `like` came from."""
    if like.device != "cpu" or like.library in ("numpy", "gemmule"):
        return out.original
    array = out.array
    if like.library == "torch":
        return tensor_of(sys.modules["torch"], array)
    if like.library == "jax":
        devices = like.original.devices()
        place = next(iter(devices)) if len(devices) == 1 else None
        result = sys.modules["jax"].numpy.asarray(array, device=place)
        if result.dtype.name != out.form.dtype:
            raise TypeError(
                f"the result is {out.form.dtype}, which JAX holds only with jax_enable_x64. "
                "Enable it, or pass a 32-bit out_dtype."
            )
        return result
    namespace = getattr(like.original, "__array_namespace__", None)
    return namespace().from_dlpack(array) if namespace is not None else array


def check_result(given: tuple[int, ...], kind: str, shape: tuple[int, ...], dtype: str) -> None:
    """Raise unless the shape and the dtype that a given `out` has are the result's."""
    if given != shape:
        raise ValueError(f"out has shape {given}; the result has shape {shape}.")
    if kind != dtype:
        raise TypeError(
            f"out has dtype {kind}; the result has dtype {dtype}. "
            "Pass an out of that dtype, or out_dtype= to choose another."
        )


def check_out(out: Operand, shape: tuple[int, ...], dtype: str, inputs: list[Operand]) -> None:
    """Raise unless `out` has exactly this shape and dtype, is writable, and overlaps no input."""
    if out.form.ready is not None:
        raise TypeError("out is a prepared matrix, which is never written. Pass a plain array.")
    check_result(out.form.shape, out.form.dtype, shape, dtype)
    if out.library in ("jax",):
        raise TypeError("out is a JAX array, which is immutable. Leave out= away.")
    differentiated = out.library == "torch" and out.original.requires_grad
    if differentiated and sys.modules["torch"].is_grad_enabled():
        raise ValueError(
            "out is a tensor that requires a gradient; a result written into a given tensor "
            "has none. Leave out= away, or call it under torch.no_grad()."
        )
    if out.device == "cpu" and not out.array.flags.writeable:
        raise ValueError("out is read-only. Pass a writable array.")
    if _was_copied(out):
        raise ValueError(
            "out is misaligned, of foreign byte order, or a lazily negated or conjugated view. "
            "Pass a plain array."
        )
    if _overlaps_itself(out.form):
        raise ValueError(
            f"out has strides {out.form.strides} for shape {out.form.shape}: several elements "
            "would share one place. Pass an array whose elements are apart."
        )
    for operand in inputs:
        if memory_overlaps(out, operand):
            raise ValueError(
                "out overlaps an input: the product would overwrite what it still reads. "
                "Pass another array."
            )


def mark_written(out: Operand) -> None:
    """Tell PyTorch that a tensor was written: a gradient that needs what it held has to fail."""
    if out.library == "torch":
        sys.modules["torch"]._C._increment_version([out.original])


def _was_copied(out: Operand) -> bool:
    """Whether unwrapping had to copy `out`, so that a result written there would be lost."""
    if 0 in out.form.shape or out.array is out.original:
        return False
    if out.library == "torch":
        return bool(out.pointer != out.original.data_ptr())
    return out.device == "cpu" and bool(out.array.flags.owndata)  # what is shown owns nothing


def _overlaps_itself(form: Form) -> bool:
    """Whether two indices may name one place: exact unless strides interleave, then True."""
    reach = 1
    for step, size in sorted(zip(map(abs, form.strides), form.shape, strict=True)):
        if size > 1:
            if step < reach:
                return 0 not in form.shape
            reach += (size - 1) * step
    return False


def memory_overlaps(out: Operand, operand: Operand) -> bool:
    """Tell whether any byte of a result is one of an operand's."""
    if out.device != operand.device or 0 in out.form.shape or 0 in operand.form.shape:
        return False
    if operand.form.quant is not None:
        held = operand.original
        parts = (held.matrix if isinstance(held, QuantizedStack) else held).parts
        return any(_meets(out, part) for part in parts if part.nbytes)
    if out.device == "cpu":
        if operand.library == "torch" and operand.pointer != operand.original.data_ptr():
            return _one_storage(out.original, operand.original)
        return _meets(
            out, _plain(operand.original) if operand.library == "numpy" else operand.array
        )
    low, high = extent(out)
    other_low, other_high = extent(operand)
    return low < other_high and other_low < high


def _meets(out: Operand, given: Any) -> bool:
    """Tell whether any byte of a result is an array's, or on a device a contiguous one's."""
    if out.device != "cpu":
        low, high = extent(out)
        return bool(low < given.pointer + given.nbytes and given.pointer < high)
    if not np.may_share_memory(out.array, given):
        return False
    try:
        return np.shares_memory(out.array, given, max_work=_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True


def _one_storage(out: Any, tensor: Any) -> bool:
    """Whether two tensors share their storage: of one that was copied to be read, like any part."""
    return bool(out.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr())
