"""Quantised weights as other tools store them, code by code.

GPTQ, AWQ, HQQ, compressed-tensors, and 4-bit floats as gpt-oss and ModelOpt keep them.

Each function takes one layer's arrays, which need not be trusted, and returns the `QuantizedMatrix`
``W (out features, in features)`` of the same codes. TypeError for a wrong dtype, ValueError for
shapes and values that do not belong together. `read_layer` finds the arrays in a safetensors file;
`gemmule.quant.gguf` reads GGUF's blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.core.problem import FLOAT4
from gemmule.quant import checks, float4
from gemmule.quant.checks import SCALE_DTYPES
from gemmule.quant.files import TAGS, FilePath, model_files, named_dtype, stored_tensors
from gemmule.quant.layouts import Codes, pack_nibbles
from gemmule.quant.library import is_masked
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.rounding import dtype_name
from gemmule.quant.stack import QuantizedStack

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Column j of eight lies in nibble ``AWQ_ORDER[j]`` of a word."""
KEYS = (
    "qweight", "qzeros", "scales", "g_idx", "W_q", "scale", "zero", "nbits", "axis", "shape",
    "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
    "weight", "weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale",
)  # fmt: skip
_TAGS = frozenset(["U8", "I8", "I32", "U32", "I64", "F16", "BF16", "F32", "F64", "BOOL"])
_OF_FLOAT4 = frozenset(["F8_E4M3", "F8_E8M0"])  # dtypes of scales


def from_gptq(
    qweight: NDArray[np.int32],
    qzeros: NDArray[np.int32],
    scales: NDArray[Any],
    g_idx: NDArray[np.int32] | None = None,
    *,
    bits: int = 4,
    stored_zero: int = 1,
) -> QuantizedMatrix:
    """Return the matrix of a GPTQ layer, with 4 or 8 bits, act-order too.

    - ``qweight``: int32 ``(n bits / 32, m)``: a word holds codes of consecutive rows of W^T, lowest
      bits first. ``qzeros``: int32 ``(groups, m bits / 32)``. ``scales``: ``(groups, m)``.
    - ``g_idx``: int32 ``(n,)``, the group of each input. Out of order (act-order), it becomes the
      matrix's ``perm``; each group but the last must have as many inputs. Without it, all have.
    - ``stored_zero``: what the writer subtracted from zero points: 1, in format ``gptq_v2`` 0.

    >>> words = np.array([[0x76543210], [0x7EDCBA98]], np.uint32).view(np.int32)
    >>> zero = np.zeros((1, 1), np.int32)
    >>> from_gptq(np.repeat(words, 8, 1), zero, np.ones((1, 8), np.float16)).dequantize()[0, :3]
    array([-1.,  0.,  1.], dtype=float32)
    """
    bits, stored_zero = checks.bits(bits), checks.integer("stored_zero", stored_zero)
    if stored_zero not in (0, 1):
        raise ValueError(f"stored_zero is {stored_zero}, but must be 1, or 0 for gptq_v2")
    per_word = 32 // bits
    rows, m = _shape("qweight", qweight, "int32", 2)
    n, groups = rows * per_word, _groups(scales, m)
    _expect("qzeros", qzeros, "int32", (groups, -(-m // per_word)))
    perm, size = _order(g_idx, n, groups)
    codes = _unpacked(np.ascontiguousarray(qweight.T), bits)
    zeros = (_unpacked(qzeros, bits)[:, :m].T + np.uint8(stored_zero)) & np.uint8(2**bits - 1)
    if perm is not None:
        codes = codes[:, perm]
    return _matrix(codes, scales.T, zeros, bits, size, perm)


def from_awq(
    qweight: NDArray[np.int32], qzeros: NDArray[np.int32], scales: NDArray[Any]
) -> QuantizedMatrix:
    """Return the matrix of an AWQ layer in the ``gemm`` layout: 4 bits, zero points.

    ``qweight``: int32 ``(n, m / 8)``, ``qzeros``: int32 ``(groups, m / 8)``, ``scales``:
    ``(groups, m)``. A word holds eight neighbouring outputs in the order 0 2 4 6 1 3 5 7.

    >>> word = np.array([[0x75316420]], np.uint32).view(np.int32)
    >>> Q = from_awq(word, np.zeros((1, 1), np.int32), np.ones((1, 8), np.float16))
    >>> Q.dequantize()[:, 0].tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    """
    n, words = _shape("qweight", qweight, "int32", 2)
    m = 8 * words
    groups = _groups(scales, m)
    _expect("qzeros", qzeros, "int32", (groups, words))
    size = _even_groups(n, groups)
    codes, zeros = (
        _unpacked(packed, 4).reshape(len(packed), -1, 8)[..., AWQ_ORDER].reshape(-1, m).T
        for packed in (qweight, qzeros)
    )
    return _matrix(codes, scales.T, zeros, 4, size, None)


def from_hqq(
    W_q: NDArray[np.uint8],
    scale: NDArray[Any],
    zero: NDArray[Any],
    *,
    shape: tuple[int, int],
    bits: int = 4,
    axis: int = 1,
) -> QuantizedMatrix:
    """Return the matrix of an HQQ layer with groups along its rows (``axis=1``).

    - ``W_q``: uint8; 8 bits: ``(groups, group size)``; 4 bits: half as many rows, the first half of
      the groups in the high nibbles. ``scale``, ``zero``: one a group, floats.
    - ``shape``: ``(m, n)``; n must be a multiple of the group size.

    Groups along columns (HQQ's ``axis=0``) are a ValueError: no layout here holds them.

    >>> W_q, one = np.array([[0x10, 0x32]], np.uint8), np.ones((2, 1), np.float16)
    >>> from_hqq(W_q, one, one, shape=(2, 2)).dequantize().tolist()
    [[0.0, 2.0], [-1.0, 1.0]]
    """
    if checks.integer("axis", axis) != 1:
        raise ValueError(f"axis is {axis}; groups must run along rows: quantise with axis=1")
    bits, (m, n) = checks.bits(bits), checks.shape(shape)
    size = _shape("W_q", W_q, "uint8", 2)[1]
    codes = np.concatenate((W_q >> 4, W_q & 15)) if bits == 4 else W_q
    if codes.size != m * n or size == 0 or n % size:
        raise ValueError(
            f"W_q of shape {W_q.shape} holds {codes.size} codes in groups of {size}; a "
            f"{m} x {n} matrix takes {m * n}, and whole groups in each row"
        )
    for name, values in (("scale", scale), ("zero", zero)):
        if _floats(name, values).size != len(codes):
            raise ValueError(f"{name} has {values.size} numbers, but there are {len(codes)} groups")
    zeros = zero.astype(np.float32).reshape(m, n // size)
    return _matrix(codes.reshape(m, n), scale.reshape(m, n // size), zeros, bits, size, None)


def from_compressed(
    packed: NDArray[np.int32],
    scale: NDArray[Any],
    shape: NDArray[np.int64],
    zero_point: NDArray[np.int32] | None = None,
    g_idx: NDArray[np.int32] | None = None,
) -> QuantizedMatrix:
    """Return the matrix of a compressed-tensors layer in the format ``pack-quantized``.

    - ``packed``: int32 ``(m, ceil(n bits / 32))``: codes of a row next to each other, lowest bits
      first, their middle added. Bits, 4 or 8, follow from it and from ``shape``: m and n.
    - ``scale``: ``(m, groups)``. ``zero_point``: None for the middle, else int32
      ``(ceil(m bits / 32), groups)``, packed down the columns. ``g_idx``: as `from_gptq` has it;
      entries of -1 mean none.

    >>> scale, shape = np.ones((1, 1), np.float16), np.array([1, 8])
    >>> from_compressed(np.array([[0x76543210]], np.int32), scale, shape).dequantize()[0, :3]
    array([-8., -7., -6.], dtype=float32)
    """
    m, n = checks.shape(tuple(_numbers("shape", shape, 2)))  # type: ignore[arg-type]
    words = _shape("packed", packed, "int32", 2)[1]
    bits = next((bits for bits in (4, 8) if words == -(-n * bits // 32)), 0)
    if not bits or len(packed) != m:
        raise ValueError(f"packed has shape {packed.shape}, which is no {m} x {n} of 4 or 8 bits")
    if _shape("scale", _floats("scale", scale), None, 2)[0] != m:
        raise ValueError(f"scale has shape {scale.shape}, but there are {m} rows")
    groups = scale.shape[1]
    if g_idx is not None:
        _shape("g_idx", g_idx, "int32", 1)
    ordered = g_idx is not None and g_idx.size and g_idx.min() >= 0
    perm, size = _order(g_idx if ordered else None, n, groups)
    codes = _unpacked(packed, bits)[:, :n]
    zeros = np.full((m, groups), 2 ** (bits - 1), np.uint8)
    if zero_point is not None:
        _expect("zero_point", zero_point, "int32", (-(-m * bits // 32), groups))
        zeros = _unpacked(np.ascontiguousarray(zero_point.T), bits)[:, :m].T
    return _matrix(codes if perm is None else codes[:, perm], scale, zeros, bits, size, perm)


def from_float4(
    packed: NDArray[np.uint8], scale: NDArray[Any], factor: float | None = None
) -> QuantizedMatrix:
    """Return the matrix of a layer whose codes are 4-bit floats, MXFP4 or NVFP4.

    - ``packed``: uint8 ``(m, n / 2)``, the lower half of a byte before the upper.
    - ``scale``: ``(m, n / 32)`` of uint8 or float8_e8m0fnu (MXFP4), or ``(m, n / 16)`` of
      float8_e4m3fn (NVFP4). ``factor``: of NVFP4, what all scales are multiplied by: ModelOpt's
      ``weight_scale_2``, one over compressed-tensors' ``weight_global_scale``.

    >>> codes, two = np.full((1, 16), 0xA2, np.uint8), np.array([[128]], np.uint8)
    >>> from_float4(codes, two).dequantize()[0, :2]
    array([ 2., -2.], dtype=float32)
    """
    m, half = _shape("packed", packed, "uint8", 2)
    _array("scale", scale)
    if scale.dtype == np.uint8:
        scale = scale.view(named_dtype("float8_e8m0fnu"))
    form = FLOAT4.get(scale.dtype.name)
    if form is None:
        raise TypeError(f"scale has dtype {scale.dtype}, but must be uint8 or {', '.join(FLOAT4)}")
    if (form == "nvfp4") != (factor is not None):
        raise ValueError(f"a factor belongs to NVFP4 and to nothing else; got {factor} of {form}")
    size = float4.GROUP_SIZES[form]
    _expect("scale", scale, scale.dtype.name, (m, 2 * half // size))
    return QuantizedMatrix.from_parts(
        packed,
        scale,
        None if factor is None else np.full((m, 1), factor, np.float32),
        shape=(m, 2 * half),
        bits=float4.BITS,
        group_size=size,
    )


def from_gpt_oss(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> QuantizedStack:
    """Return a projection of the experts of gpt-oss, whose codes are MXFP4.

    blocks: uint8 (experts, out, in / 32, 16). scales: uint8 (experts, out, in / 32).

    >>> from_gpt_oss(np.zeros((4, 6, 2, 16), np.uint8), np.zeros((4, 6, 2), np.uint8)).shape
    (4, 64, 6)
    """
    experts, rows, groups, nbytes = _shape("blocks", blocks, "uint8", 4)
    _expect("scales", scales, "uint8", (experts, rows, groups))
    codes = blocks.reshape(experts * rows, groups * nbytes)
    matrix = from_float4(codes, scales.reshape(experts * rows, groups))
    return QuantizedStack.from_matrix(matrix, experts)


def read_layer(path: FilePath, name: str, *, stored_zero: int = 1) -> QuantizedMatrix:
    """Return the layer `name` of a model by GPTQ, AWQ, HQQ, compressed-tensors or ModelOpt.

    path: a safetensors file, the ``.safetensors.index.json`` of a model in several, or the folder
    of either. Which tool it was, and how many bits, the tensors ``name.qweight`` or ``name.W_q``
    and those beside it tell. `stored_zero` is that of `from_gptq`: a file of format ``gptq_v2``
    needs 0. OSError as `open`; ValueError, naming the file, for a layer that is not there, and for
    tensors that do not belong together; TypeError for a wrong dtype.

    >>> import tempfile, numpy as np
    >>> from safetensors.numpy import save_file
    >>> tensors = {  # GPTQ, 4 bits: 8 inputs by 8 outputs in one group; every code 8, zeros 8
    ...     "layer.qweight": np.full((1, 8), -2004318072, np.int32),
    ...     "layer.qzeros": np.full((1, 1), 0x77777777, np.int32),
    ...     "layer.scales": np.ones((1, 8), np.float16),
    ... }
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file(tensors, f"{folder}/model.safetensors")
    ...     Q = read_layer(f"{folder}/model.safetensors", "layer")
    >>> Q.shape, Q.bits, Q.group_size, float(abs(Q.dequantize()).max())
    ((8, 8), 4, 8, 0.0)
    """
    where = model_files(path)
    keys = {f"{name}.{key}": key for key in KEYS}
    if isinstance(where, dict):
        files = dict.fromkeys(file for tensor, file in where.items() if tensor in keys)
    else:
        files = {where: None}
    tensors: dict[str, NDArray[Any]] = {}
    for file in files:
        tensors |= {keys[tensor]: array for tensor, array in _tensors_of(file, keys)}
    try:
        return of_tensors(tensors, stored_zero)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path}, layer {name!r}: {error}") from error
    except KeyError as missing:
        raise ValueError(f"{path}, layer {name!r}: it has no tensor {missing}") from None


def _tensors_of(path: Path, wanted: Iterable[str]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield those of the wanted tensors that a safetensors file has."""
    stored = stored_tensors(path)
    for name in stored.keys() & wanted:
        tag, shape, start = stored[name]
        if tag not in _TAGS and not (tag in _OF_FLOAT4 and name.endswith(".weight_scale")):
            raise TypeError(f"{path}: {name} has dtype {tag}, which no such layer has")
        values = np.fromfile(path, named_dtype(TAGS[tag]), math.prod(shape), offset=start)
        yield name, values.reshape(shape)


def of_tensors(tensors: dict[str, NDArray[Any]], stored_zero: int) -> QuantizedMatrix:
    """Return the matrix of a layer's tensors, by those of the `KEYS` that a tool gave them.

    KeyError for one that is missing beside the others, ValueError and TypeError as the readers.
    """
    packed = tensors.get("weight", tensors.get("weight_packed"))
    if packed is not None and packed.dtype == np.uint8:
        return from_float4(packed, tensors["weight_scale"], _factor_of(tensors))
    if "weight_packed" in tensors:
        needed, others = ("packed", "scale", "shape"), ("zero_point", "g_idx")
        own = {
            name: tensors[f"weight_{name}"]
            for name in (*needed, *others)
            if name in needed or f"weight_{name}" in tensors
        }
        return from_compressed(**own)
    if "W_q" in tensors:
        bits, axis = (_numbers(key, tensors[key], 1)[0] for key in ("nbits", "axis"))
        rows, columns = _numbers("shape", tensors["shape"], 2)
        codes, scale, zero = (tensors[key] for key in ("W_q", "scale", "zero"))
        return from_hqq(codes, scale, zero, shape=(rows, columns), bits=bits, axis=axis)
    parts = tensors["qweight"], tensors["qzeros"], tensors["scales"]
    names = ("qweight", "qzeros", "scales")
    words, zeros, m = (_shape(*each, None, 2)[1] for each in zip(names, parts, strict=True))
    if words != m:
        return from_awq(*parts)
    bits = 8 if 4 * zeros >= m else 4
    return from_gptq(*parts, tensors.get("g_idx"), bits=bits, stored_zero=stored_zero)


def _factor_of(tensors: dict[str, NDArray[Any]]) -> float | None:
    """Return what scales are multiplied by: ModelOpt's number, one over compressed-tensors'."""
    for key in {"weight_scale_2", "weight_global_scale"} & tensors.keys():
        one = tensors[key]
        if one.size != 1 or one.dtype != np.float32 or not np.isfinite(one).all() or not one.any():
            raise ValueError(f"{key} is {one!r}, but must be one float32 that is not 0")
        return float(one.item() if key == "weight_scale_2" else 1 / np.float64(one.item()))
    return None


def _numbers(name: str, tensor: NDArray[Any], count: int) -> list[int]:
    """Return the whole numbers that a tensor holds."""
    _array(name, tensor)
    if tensor.size != count or tensor.dtype.kind not in "iu":
        raise ValueError(
            f"{name} has dtype {tensor.dtype} and shape {tensor.shape}, but must hold {count} "
            f"whole number{'s' * (count > 1)}"
        )
    return [int(number) for number in tensor.reshape(-1)]


def _unpacked(words: NDArray[np.int32], bits: int) -> Codes:
    """Return the codes of int32 words, lowest bits first: uint8 ``(r, words * 32 / bits)``."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed
    return np.stack((packed & 15, packed >> 4), -1).reshape(len(packed), -1)


def _order(
    g_idx: NDArray[np.int32] | None, n: int, groups: int
) -> tuple[NDArray[np.int64] | None, int]:
    """Return what sorts inputs by group, None where they are sorted, and the group size."""
    if g_idx is None:
        return None, _even_groups(n, groups)
    _expect("g_idx", g_idx, "int32", (n,))
    if n and (g_idx.min() < 0 or g_idx.max() >= groups):
        raise ValueError(
            f"g_idx has entries in {g_idx.min()}..{g_idx.max()}, not in 0..{groups - 1}"
        )
    size = max(1, int(np.bincount(g_idx).max(initial=0)))
    perm = np.argsort(g_idx, kind="stable")
    if -(-n // size) != groups or not np.array_equal(g_idx[perm], np.arange(n) // size):
        raise ValueError(f"g_idx does not share {n} inputs out to {groups} groups of {size}")
    return (None if np.array_equal(perm, np.arange(n)) else perm), size


def _even_groups(n: int, groups: int) -> int:
    if not groups or not n or n % groups:
        raise ValueError(f"{n} inputs do not come in {groups} groups of one size")
    return n // groups


def _matrix(
    codes: Codes, scales: NDArray[Any], zeros: NDArray[Any], bits: int, size: int, perm: Any
) -> QuantizedMatrix:
    """Return codes ``(m, n)`` with scales and zero points ``(m, groups)`` as a checked matrix."""
    middle = bool((zeros == 2 ** (bits - 1)).all())
    return QuantizedMatrix.from_parts(
        pack_nibbles(codes) if bits == 4 else np.ascontiguousarray(codes),
        np.ascontiguousarray(_floats("scales", scales)),
        None if middle else np.ascontiguousarray(zeros, np.float32),
        shape=(codes.shape[0], codes.shape[1]),
        bits=bits,
        group_size=size,
        perm=perm,
    )


def _floats(name: str, array: NDArray[Any]) -> NDArray[Any]:
    _array(name, array)
    if dtype_name(array) not in SCALE_DTYPES:
        raise TypeError(f"{name} has dtype {array.dtype}, but must be {', '.join(SCALE_DTYPES)}")
    return array


def _groups(scales: NDArray[Any], m: int) -> int:
    groups, columns = _shape("scales", _floats("scales", scales), None, 2)
    if columns != m:
        raise ValueError(f"scales have {columns} columns, but qweight has {m} outputs")
    return int(groups)


def _shape(name: str, array: Any, dtype: str | None, ndim: int) -> Any:
    _array(name, array)
    if dtype is not None and array.dtype.name != dtype:
        raise TypeError(f"{name} has dtype {array.dtype}, but must be {dtype}")
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {array.shape}, but must have {ndim} dimensions")
    return array.shape


def _array(name: str, array: Any) -> None:
    if not isinstance(array, np.ndarray) or is_masked(array):
        kind = type(array).__name__
        how = ", of a tensor its .numpy()" if kind == "Tensor" else ""
        raise TypeError(f"{name} is a {kind}, but must be a NumPy array{how}")


def _expect(name: str, array: Any, dtype: str, shape: tuple[int, ...]) -> None:
    if _shape(name, array, dtype, len(shape)) != shape:
        raise ValueError(f"{name} has shape {array.shape}, but {shape} belongs to the others")
