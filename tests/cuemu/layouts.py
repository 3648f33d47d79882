"""Where the elements of tensor-core operands lie, in NumPy, apart from the emulator's twins."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Index = npt.NDArray[np.intp]

SWIZZLE_WIDTH = {"none": 16, "128B": 128, "64B": 64, "32B": 32}


def swizzle_offsets(offsets: Index, swizzle: str) -> Index:
    """Return byte offsets with the 16-byte chunk index XORed by the index of the 128-byte row."""
    mask = {"none": 0, "32B": 1, "64B": 3, "128B": 7}[swizzle]
    return np.asarray(offsets ^ (((offsets >> 7) & mask) << 4))


def swizzled_image(data: bytes, swizzle: str) -> npt.NDArray[np.uint8]:
    """Return a box as TMA lays it down in shared memory that starts at a pattern boundary."""
    image = np.zeros(len(data), np.uint8)
    image[swizzle_offsets(np.arange(len(data)), swizzle)] = np.frombuffer(data, np.uint8)
    return image


def fragment_a(a: Array) -> npt.NDArray[np.uint32]:
    """Return the (32 lanes, 4) registers of a 16-row mma operand."""
    e = 4 // a.itemsize
    lane, reg, i = np.ogrid[:32, :4, :e]
    rows, columns = lane // 4 + 8 * (reg % 2), e * (lane % 4) + i + 4 * e * (reg // 2)
    return np.ascontiguousarray(a[rows, columns]).view(np.uint32)[..., 0]


def fragment_b(b: Array) -> npt.NDArray[np.uint32]:
    """Return the (32 lanes, 2) registers of a k x 8 mma operand."""
    e = 4 // b.itemsize
    lane, reg, i = np.ogrid[:32, :2, :e]
    rows, columns = e * (lane % 4) + i + 4 * e * reg, lane // 4
    return np.ascontiguousarray(b[rows, columns]).view(np.uint32)[..., 0]


def fragment_d(d: Array) -> Array:
    """Return the (32 lanes, 4) accumulators of a 16 x 8 mma result."""
    lane, reg = np.ogrid[:32, :4]
    return np.ascontiguousarray(d[lane // 4 + 8 * (reg // 2), 2 * (lane % 4) + reg % 2])


def warpgroup_d(d: Array) -> Array:
    """Return the (128 threads, n / 2) accumulators of a 64 x n wgmma result."""
    t, i = np.ogrid[:128, : d.shape[1] // 2]
    rows = t // 32 * 16 + t % 32 // 4 + 8 * (i % 4 // 2)
    return np.ascontiguousarray(d[rows, i // 4 * 8 + 2 * (t % 4) + i % 2])


def operand_image(
    x: Array, swizzle: str, k_major: bool
) -> tuple[npt.NDArray[np.uint8], int, int, int]:
    """Return shared memory that holds a (rows, k) operand, and leading, stride and step bytes.

    step is the distance from one wgmma's 32 bytes of k to the next.
    """
    size, width = x.itemsize, SWIZZLE_WIDTH[swizzle]
    row, k = np.ogrid[: x.shape[0], : x.shape[1]]
    per = width // size  # elements of one swizzle-wide line
    if k_major and swizzle == "none":
        leading, stride, step = 128, 256, 0
        offset = row // 8 * stride + k * size // 16 * leading + row % 8 * 16 + k * size % 16
    elif k_major:
        leading, stride, step = 16, 8 * width, 32
        offset = row // 8 * stride + row % 8 * width + k * size
    elif swizzle == "none":
        leading, stride, step = 128, 256, 0
        offset = row // 8 * stride + k // 8 * leading + k % 8 * 16 + row % 8 * size
    else:
        stride, step = 8 * width, 16 * width
        leading = x.shape[1] // 8 * stride
        offset = row // per * leading + k // 8 * stride + k % 8 * width + row % per * size
    offset = np.broadcast_to(offset, x.shape)
    image = np.zeros(x.size * size, np.uint8)
    raw = np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape, size)
    for byte in range(size):
        image[swizzle_offsets(offset + byte, swizzle)] = raw[..., byte]
    return image, leading, stride, step
