"""GGUF's blocks as quantised matrices, code by code: Q4_0, Q4_1, Q8_0, Q4_K, Q6_K and MXFP4.

`from_gguf` takes a tensor's bytes; `read_gguf` gets them from a file (see `gguf_file`).
Layout of the blocks: https://github.com/ggml-org/ggml, ggml-common.h. A Q6_K code is kept in eight
bits, plus 96, so that its zero point 32 is the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemmule.quant import checks, gguf_file
from gemmule.quant.files import FilePath, named_dtype
from gemmule.quant.layouts import Codes, pack_nibbles
from gemmule.quant.library import is_masked
from gemmule.quant.matrix import QuantizedMatrix

Floats = NDArray[Any]
Parts = tuple[NDArray[Any], Floats, Floats | None]

_LOST = 2.0**29  # offset over scale from which code 15 is below the rounding of their quotient


class _Kind(NamedTuple):
    """A type of block: weights and bytes of one, its group size and bits here, and its reading."""

    weights: int
    nbytes: int
    group_size: int
    bits: int
    parts: Callable[[Codes], Parts]


def from_gguf(data: NDArray[np.uint8], kind: str, shape: tuple[int, int]) -> QuantizedMatrix:
    """Return the matrix ``(m, n)`` whose rows of blocks of a kind are `data`.

    kind: ``"Q4_0"``, ``"Q4_1"``, ``"Q8_0"``, ``"Q4_K"``, ``"Q6_K"`` or ``"MXFP4"``; n is a multiple
    of the block's 32 or 256 weights. Codes are GGUF's own; scales are exact, and so are weights
    without an offset; of Q4_1 and Q4_K, whose weights are ``scale * code + offset``, the zero point
    is ``-offset / scale`` rounded to float32. A block whose codes count for less than that
    rounding, such as one of scale 0, gets scale 1, code 0 and the offset; one of zeros gets scale
    0. ValueError for other kinds, sizes that disagree and numbers that are not finite.

    >>> block = np.array([[0, 0x3C] + [0x98] * 16], np.uint8)  # scale 1; codes 8, then 9
    >>> from_gguf(block, "Q4_0", (1, 32)).dequantize()[0, [0, 16]].tolist()
    [0.0, 1.0]
    """
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"GGUF type is {kind}; read are {', '.join(_KINDS)}")
    one, (m, n) = _KINDS[kind], checks.shape(shape)
    if not isinstance(data, np.ndarray) or is_masked(data):
        raise TypeError(f"data are a {type(data).__name__}, but must be a NumPy array of uint8")
    if data.dtype != np.uint8 or data.size * one.weights != m * n * one.nbytes or n % one.weights:
        raise ValueError(
            f"{data.size} bytes of dtype {data.dtype} are no {m} x {n} matrix of {kind}, which "
            f"takes {one.nbytes} bytes for each {one.weights} weights of a row"
        )
    blocks = np.ascontiguousarray(data).reshape(-1, one.nbytes)
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused below
        codes, scales, zeros = one.parts(blocks)
    codes = codes.reshape(m, n)
    return QuantizedMatrix.from_parts(
        pack_nibbles(codes) if one.bits == 4 else codes,
        scales.reshape(m, n // one.group_size),
        None if zeros is None else zeros.reshape(m, n // one.group_size),
        shape=(m, n),
        bits=one.bits,
        group_size=one.group_size,
    )


def read_gguf(path: FilePath, name: str) -> QuantizedMatrix:
    """Return the tensor `name` of a GGUF file, whose type must be one that `from_gguf` reads.

    The file need not be trusted. OSError as `open`; ValueError for a file or tensor that is not
    well-formed, an unknown name, and a tensor that is no matrix.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
    ...     try:
    ...         read_gguf(file.name, "blk.0.attn_q.weight")
    ...     except ValueError as error:
    ...         print("refused")
    refused
    """
    found = gguf_file.find(path, name)
    if len(found.sizes) != 2:
        raise ValueError(f"{path}: {name!r} has {len(found.sizes)} dimensions, but a matrix has 2")
    n, m = found.sizes
    try:
        return from_gguf(found.data, found.kind, (m, n))
    except ValueError as error:
        raise ValueError(f"{path}: {name!r}: {error}") from None


def _halves(blocks: Codes, start: int, count: int = 1) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[:, start : start + 2 * count]).view("<f2")


def _nibbles(packed: Codes, run: int) -> Codes:
    """Return the low nibbles of each `run` bytes, then their high ones: ``(blocks, -1)``."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return np.concatenate((runs & 15, runs >> 4), 2).reshape(len(packed), -1)


def _q4_0(blocks: Codes) -> Parts:
    return _nibbles(blocks[:, 2:], 16), _halves(blocks, 0), None


def _q8_0(blocks: Codes) -> Parts:
    return blocks[:, 2:] ^ np.uint8(0x80), _halves(blocks, 0), None


def _q4_1(blocks: Codes) -> Parts:
    scale, offset = _halves(blocks, 0, 2).astype(np.float32).T
    return _offset(_nibbles(blocks[:, 4:], 16), scale[:, None], offset[:, None])


def _q4_k(blocks: Codes) -> Parts:
    """Eight groups of 32; their 6-bit scales and minima lie in 12 bytes, the last four's high bits
    in the top of the first four's."""
    scale, least = _halves(blocks, 0, 2).astype(np.float32).T
    a, b, c = blocks[:, 4:16].reshape(-1, 3, 4).transpose(1, 0, 2)
    factors = np.concatenate((a & 63, (c & 15) | (a >> 2 & 48)), 1)
    minima = np.concatenate((b & 63, (c >> 4) | (b >> 2 & 48)), 1)
    codes = _nibbles(blocks[:, 16:], 32)
    return _offset(codes, scale[:, None] * factors, -(least[:, None] * minima))


def _q6_k(blocks: Codes) -> Parts:
    """Sixteen groups of 16; half a block has 64 bytes of low nibbles and 32 of high bits."""
    low = _nibbles(blocks[:, :128], 64).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    scale = _halves(blocks, 208).astype(np.float32)
    factors = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return (low | (high & 3) << 4) + np.uint8(96), scale * factors, None


def _mxfp4(blocks: Codes) -> Parts:
    scales = np.ascontiguousarray(blocks[:, :1]).view(named_dtype("float8_e8m0fnu"))
    return _nibbles(blocks[:, 1:], 16), scales, None


def _offset(codes: Codes, scales: Floats, offsets: Floats) -> Parts:
    """Return ``scale * code + offset`` as scales and zero points, one a group."""
    flat = np.abs(scales) * np.float32(_LOST) <= np.abs(offsets)
    blank = flat & (offsets == 0)
    ones = np.where(flat, np.float32(1), scales)
    groups = codes.reshape(*scales.shape, -1)
    groups = np.where(flat[..., None], np.uint8(0), groups)
    return groups, np.where(blank, np.float32(0), ones), -offsets / ones


_KINDS = {
    "Q4_0": _Kind(32, 18, 32, 4, _q4_0),
    "Q4_1": _Kind(32, 20, 32, 4, _q4_1),
    "Q8_0": _Kind(32, 34, 32, 8, _q8_0),
    "Q4_K": _Kind(256, 144, 32, 4, _q4_k),
    "Q6_K": _Kind(256, 210, 16, 8, _q6_k),
    "MXFP4": _Kind(32, 17, 32, 4, _mxfp4),
}


def kinds() -> tuple[str, ...]:
    """Return the types of blocks that `from_gguf` reads."""
    return tuple(_KINDS)
