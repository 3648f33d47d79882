"""The kernels of primitives.cu with inputs and the outputs that NumPy expects.

A case runs on the emulator (`run_on_emulator`) and, unchanged, on a device: its kernel takes one
struct, `pack_args`, and every output must equal `expected` bit for bit.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cuemu.build import Module, compile_cu, tensor_map, to_device
from cuemu.layouts import (
    Array,
    fragment_a,
    fragment_b,
    fragment_d,
    operand_image,
    swizzled_image,
    warpgroup_d,
)

SOURCE = Path(__file__).with_name("primitives.cu")


@dataclass(frozen=True)
class Map:
    """A tensor map of an input ("in") or output ("out"): box outermost first."""

    side: str
    index: int
    box: tuple[int, ...]
    swizzle: str = "none"


@dataclass(frozen=True)
class Case:
    """One launch. Outputs are zero before it and have the shapes and dtypes of `expected`."""

    name: str
    kernel: str  # a name expression
    inputs: tuple[Array, ...]
    expected: tuple[Array, ...]
    block: int = 32
    grid: int = 1
    cluster: int = 1
    smem: int = 0
    n: tuple[int, ...] = ()
    maps: tuple[Map, ...] = ()
    arch: str = "sm_80"  # the first architecture that has it


def pack_args(
    maps: Sequence[bytes], inputs: Sequence[int], outputs: Sequence[int], n: Sequence[int]
) -> bytes:
    """Return the bytes of struct Args: two tensor maps, four inputs, two outputs, four ints."""
    both = b"".join(m.ljust(128, b"\0") for m in maps).ljust(256, b"\0")
    pointers = [*inputs, 0, 0, 0, 0][:4] + [*outputs, 0, 0][:2]
    return (both + struct.pack("<6Q4i", *pointers, *[*n, 0, 0, 0, 0][:4])).ljust(320, b"\0")


@functools.cache
def _module(source: Path, kernels: tuple[str, ...]) -> Module:
    return compile_cu(source, kernels)


def run_on_emulator(case: Case, seed: int = 0, source: Path = SOURCE) -> list[Array]:
    """Run a case on the CPU and return its outputs; another `source` is built for it alone."""
    inputs = [to_device(a) for a in case.inputs]
    outputs = [to_device(np.zeros_like(a)) for a in case.expected]
    sides = {"in": inputs, "out": outputs}
    maps = [tensor_map(sides[m.side][m.index], m.box, m.swizzle) for m in case.maps]
    args = pack_args(
        maps, [a.ctypes.data for a in inputs], [a.ctypes.data for a in outputs], case.n
    )
    wide = case.kernel.startswith("warpgroup")
    kernels = [c.kernel for c in CASES if c.kernel.startswith("warpgroup") == wide]
    if source != SOURCE:
        kernels = [case.kernel]
    _module(source, tuple(dict.fromkeys(kernels))).launch(
        case.kernel,
        grid=(case.grid,),
        block=(case.block,),
        cluster=(case.cluster,),
        smem=case.smem,
        args=[args],
        seed=seed,
    )
    return outputs


# ---- the table -----------------------------------------------------------------------------------
_rng = np.random.default_rng(20260101)


def _u32(*shape: int) -> Array:
    return _rng.integers(0, 1 << 32, shape, dtype=np.uint32)


def _ints(shape: tuple[int, ...], dtype: object, low: int = -4, high: int = 5) -> Array:
    return np.asarray(_rng.integers(low, high, shape).astype(dtype))  # type: ignore[call-overload]


def _loads() -> Case:
    data = _u32(32, 4)
    raw = data.reshape(-1)
    u16, u8 = raw.view(np.uint16), raw.view(np.uint8)
    narrow = raw[:32] + 3 * u16[:32].astype(np.uint32) + 5 * u8[:32].astype(np.uint32)
    lane = np.arange(32)
    picked = u16[8 * lane + lane % 8].astype(np.uint32)
    return Case("loads", "loads", (data,), (np.tile(data, (5, 1)), np.r_[raw[:64], narrow, picked]))


def _loads_if() -> Case:
    data = _u32(32, 4)
    raw, odd = data.reshape(-1), np.arange(32) % 2 == 1
    u16, u8 = raw.view(np.uint16)[:32], raw.view(np.uint8)[:32]
    narrow = raw[:32] + 3 * u16.astype(np.uint32) + 5 * u8.astype(np.uint32)
    vectors, pairs = (
        np.where(odd[:, None], data, 0),
        np.where(odd[:, None], raw[:64].reshape(32, 2), 0),
    )
    out = np.tile(vectors, (4, 1)), np.r_[pairs.reshape(-1), np.where(odd, narrow, 0)]
    return Case("loads_if", "loads_if", (data,), tuple(o.astype(np.uint32) for o in out))


def _words() -> Case:
    rng = np.random.default_rng(2)
    wide = rng.integers(0, 1 << 63, 32, np.uint64)
    total = np.array([wide.sum(dtype=np.uint64)]) + np.uint64(32)
    return Case("words", "words", (wide,), (wide[::-1] + np.uint64(1), total))


def _flags() -> Case:
    data = _u32(17)
    total = data.sum(dtype=np.uint32)
    return Case("flags", "flags", (data,), (np.array([total, 17, total], np.uint32),), grid=17)


def _copies() -> Case:
    data = _rng.integers(0, 256, 512, dtype=np.uint8)
    out = np.ones((3, 32, 16), np.uint8)
    lane = np.arange(32)[:, None]
    out[0] = np.where(np.arange(16) < lane % 17, data.reshape(32, 16), 0)
    out[1, :, :8] = data[:256].reshape(32, 8)
    out[2, :, :4] = np.where(lane % 2, data[:128].reshape(32, 4), 0)
    return Case("cp_async", "copies", (data,), (out,))


def _matrices() -> Case:
    data = _rng.integers(0, 1 << 16, (32, 8), dtype=np.uint16)
    tiles = data[np.arange(32) * 5 % 32].reshape(4, 8, 8)
    plain = np.ascontiguousarray(tiles).view(np.uint32).reshape(4, 32)
    trans = np.ascontiguousarray(tiles.transpose(0, 2, 1)).view(np.uint32).reshape(4, 32)
    order = [plain[:1], plain[:2], plain, trans[:1], trans[:2], trans, trans[1:2]]
    return Case("ldmatrix", "matrices", (data,), (np.concatenate(order),))


def _matrices_back() -> Case:
    data = _rng.integers(0, 1 << 16, (32, 8), dtype=np.uint16)
    held = np.ascontiguousarray(data.reshape(4, 8, 8)).view(np.uint32).reshape(4, 32)
    stored = np.zeros_like(data)
    stored[np.arange(32) * 5 % 32] = data
    two = data[:16].reshape(2, 8, 8)
    expected = np.concatenate((stored, *two, *two.transpose(0, 2, 1)))
    return Case("stmatrix", "matrices_back", (held,), (expected,), arch="sm_90a")


def _shared_floats() -> Case:
    data = _rng.standard_normal(64, dtype=np.float32)
    lying = np.zeros((32, 2), np.float32)
    lying[np.arange(32) * 7 % 32] = data.reshape(32, 2)
    expected = lying.reshape(-1)
    return Case("shared floats", "shared_floats", (data,), (expected,), arch="sm_90a")


def _signals() -> Case:
    expected = np.tile(np.arange(1, 33, dtype=np.uint32), 2)
    return Case("signals", "signals", (), (expected,), grid=2, cluster=2, arch="sm_90a")


def _mma(name: str, dtype_a: object, dtype_b: object, k: int, integer: bool) -> Case:
    low = 0 if np.dtype(dtype_a) == np.uint8 else -4  # type: ignore[call-overload]
    a = _ints((16, k), dtype_a, low)
    b = _ints((k, 8), dtype_b, 0 if dtype_b is np.uint8 else -4)
    acc = np.int32 if integer else np.float32
    c = _ints((16, 8), acc, -100, 100)
    d = (c.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)).astype(acc)
    arch = "sm_89" if "e4m3" in name else "sm_80"
    inputs = (fragment_a(a), fragment_b(b), fragment_d(c))
    return Case(name, f"k_{name}", inputs, (fragment_d(d),), arch=arch)


def _mma_f64() -> Case:
    a, b, c = (_ints(s, np.float64) for s in ((8, 4), (4, 8), (8, 8)))
    lane, i = np.ogrid[:32, :2]
    place = (lane // 4, 2 * (lane % 4) + i)
    lanes = np.arange(32)
    inputs = (a[lanes // 4, lanes % 4], b[lanes % 4, lanes // 4], np.ascontiguousarray(c[place]))
    return Case("mma_f64", "k_mma_f64", inputs, (np.ascontiguousarray((c + a @ b)[place]),))


def _mma_f64_k8() -> Case:
    a, b, c = (_ints(s, np.float64) for s in ((16, 8), (8, 8), (16, 8)))
    lane, i = np.ogrid[:32, :4]
    g, t = lane // 4, lane % 4
    place = (g + 8 * (i // 2), 2 * t + i % 2)
    inputs = (a[g + 8 * (i % 2), t + 4 * (i // 2)], b[t + 4 * i[:, :2], g], c[place])
    held = tuple(map(np.ascontiguousarray, inputs))
    return Case("mma_f64_k8", "k_mma_f64_k8", held, (np.ascontiguousarray((c + a @ b)[place]),))


def _half2(f: Callable[..., Array], *words: Array) -> Array:
    """Apply a float64 function to packed halves and round once."""
    pairs = [w.view(np.float16).astype(np.float64) for w in words]
    return np.ascontiguousarray(f(*pairs).astype(np.float16)).view(np.uint32)


def _arithmetic() -> Case:
    count = 128
    words = _u32(count, 3)
    a, b, c = words.T
    floats = _rng.standard_normal(count).astype(np.float32)
    h2, h3 = (
        np.ascontiguousarray(_rng.standard_normal(2 * count).astype(np.float16)).view(np.uint32)
        for _ in range(2)
    )
    s8 = [np.ascontiguousarray(x).view(np.int8).reshape(-1, 4).astype(np.int64) for x in (a, b)]
    u8 = [np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4).astype(np.int64) for x in (a, b)]
    both = np.concatenate([u8[0], u8[1]], axis=1)
    pick = np.stack([c >> (4 * i) & 7 for i in range(4)], axis=1).astype(np.intp)
    perm = np.take_along_axis(both, pick, axis=1).astype(np.uint8)
    bits = floats.view(np.uint32)
    wide = b.astype(np.uint64) << np.uint64(32) | a
    columns = [
        (a & b) | c,
        a ^ b ^ c,
        _lut(0x1B, a, b, c),
        ((s8[0] * s8[1]).sum(1) + c).astype(np.uint32),
        ((u8[0] * u8[1]).sum(1) + c).astype(np.uint32),
        ((u8[0] * s8[1]).sum(1) + c).astype(np.uint32),
        np.ascontiguousarray(perm).view(np.uint32)[:, 0],
        (bits + 0x1000) & 0xFFFFE000,
        _half2(lambda x, y: x - y, h2, h3),
        _half2(lambda x, y: x * y + x, h2, h3),
        (wide >> (c & 31).astype(np.uint64)).astype(np.uint32),
        np.bitwise_count(a) + 100 * _clz(b) + 10000 * _ffs(c),
    ]
    out = np.stack([np.asarray(x).astype(np.uint32) for x in columns], axis=1)
    return Case("arithmetic", "arithmetic", (words, floats, h2, h3), (out,), block=64, grid=2)


def _lut(table: int, a: Array, b: Array, c: Array) -> Array:
    out = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            terms = [x if i & m else ~x for x, m in ((a, 4), (b, 2), (c, 1))]
            out |= terms[0] & terms[1] & terms[2]
    return out


def _clz(v: Array) -> Array:
    return np.array([32 - int(x).bit_length() for x in v], np.uint32)


def _ffs(v: Array) -> Array:
    return np.array([(int(x) & -int(x)).bit_length() for x in v], np.uint32)


def _conversions() -> Case:
    q = _u32(32)
    nibbles = np.stack([q >> (4 * i) & 15 for i in range(8)], axis=1)
    pairs = nibbles[:, [0, 4, 1, 5, 2, 6, 3, 7]]
    parts = [
        pairs.astype(np.float16),
        pairs.astype(ml_dtypes.bfloat16),
        q.view(np.uint8).reshape(32, 4).astype(np.float16),
        q.view(np.int8).reshape(32, 4).astype(np.float16),
    ]
    out = [np.ascontiguousarray(p).view(np.uint32).reshape(32, -1) for p in parts]
    return Case("conversions", "conversions", (q,), (np.concatenate(out, axis=1),))


def _float8() -> Case:
    """Every code but NaN, whose bits as a half no one promises."""
    codes = np.arange(256, dtype=np.uint8)
    codes[codes % 128 > 124] = 0  # of e5m2 three are NaN
    kinds = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    halves = [codes.view(kind).astype(np.float16).view(np.uint32).reshape(64, 2) for kind in kinds]
    out = np.concatenate(halves, axis=1)
    return Case("float8", "float8", (codes.view(np.uint32),), (out,), block=64)


def _warp_intrinsics() -> Case:
    v = _u32(32) % np.uint32(1000)
    lane = np.arange(32)
    up = np.where(lane % 8 >= 3, lane - 3, lane)
    down = np.where(lane % 16 + 5 < 16, lane + 5, lane)
    ballot = int((2 ** lane[v % 2 == 1].astype(np.int64)).sum())
    match = [int((2 ** lane[v % 4 == x % 4].astype(np.int64)).sum()) for x in v]
    half = np.where(lane < 16, v[np.where(lane % 16 < 8, lane + 8, lane) % 32], 0)
    ones = np.ones(32, np.uint32)
    columns = [
        v[lane // 16 * 16 + lane * 7 % 16],
        v[up],
        v[down],
        v[lane ^ 9],
        v[lane ^ 17],
        ones * np.uint32(ballot),
        ones * np.uint32(int((v == 7).any()) + 2 * int((v != 7).all())),
        np.array(match, np.uint32),
        ones * v.sum(dtype=np.uint32),
        ones * v.min(),
        ones * (v.max() ^ np.bitwise_xor.reduce(v)),
        half,
    ]
    out = np.stack([c.astype(np.uint32) for c in columns], axis=1)
    return Case("warp_intrinsics", "warp_intrinsics", (v,), (out,))


def _clusters() -> Case:
    data = _u32(8, 32)
    groups = data.reshape(2, 4, 32)
    before = np.roll(groups, 1, axis=1)
    ranks = np.arange(4, dtype=np.uint32)[None, :, None] << np.uint32(24)
    expected = ((before ^ ranks).reshape(8, 32), before.reshape(8, 32))
    return Case("clusters", "clusters", (data,), expected, grid=8, cluster=4, arch="sm_90")


def _bulk() -> Case:
    size, rounds = 272, 5
    a, b = (_rng.integers(0, 256, (rounds, size), dtype=np.uint8) for _ in range(2))
    add = np.arange(rounds, dtype=np.uint8)[:, None]
    last = (np.arange(size) * 3).astype(np.uint8)
    expected = (np.concatenate([a, b], axis=1) + add, last)
    return Case("bulk", "bulk", (a, b), expected, smem=2 * size, n=(size, rounds), arch="sm_90")


def _multicast() -> Case:
    size = 160
    data = _rng.integers(0, 256, 2 * size, dtype=np.uint8)
    tile = _ints((16, 64), ml_dtypes.bfloat16)
    cube = _ints((2, 8, 64), ml_dtypes.bfloat16)
    halves = [tile[:8], tile[8:], cube[0], cube[1]]
    one = np.concatenate([*(swizzled_image(h.tobytes(), "128B") for h in halves), data])
    return Case(
        "multicast",
        "multicast",
        (data, tile, cube),
        (np.stack([one, one]),),
        grid=2,
        cluster=2,
        smem=4096 + 2 * size,
        n=(size,),
        maps=(Map("in", 1, (8, 64), "128B"), Map("in", 2, (1, 8, 64), "128B")),
        arch="sm_90",
    )


def _tensor(
    shape: tuple[int, ...], box: tuple[int, ...], at: tuple[int, ...], swizzle: str, dtype: object
) -> Case:
    """Load a box that hangs over the edges, and store it again; no store begins before the edge."""
    array = _ints(shape, dtype, 1, 100)
    padded = np.zeros(box, array.dtype)
    stored = np.zeros_like(array)
    begin = [max(a, 0) for a in at]
    inside = [(f, max(f, min(a + b, s))) for f, a, b, s in zip(begin, at, box, shape, strict=True)]
    source = tuple(slice(lo, hi) for lo, hi in inside)
    target = tuple(slice(lo - a, hi - a) for (lo, hi), a in zip(inside, at, strict=True))
    padded[target] = array[source]
    again = tuple(slice(first, first + b) for first, b in zip(begin, box, strict=True))
    seen = stored[again]
    seen[...] = padded[tuple(slice(0, size) for size in seen.shape)]
    size = padded.nbytes
    return Case(
        f"tensor_{len(shape)}d_{swizzle}_{array.dtype}_{'_'.join(map(str, at))}",
        f"tensor<{len(shape)}>",
        (array,),
        (swizzled_image(padded.tobytes(), swizzle), stored),
        smem=size,
        n=(size, *reversed(at)),
        maps=(Map("in", 0, box, swizzle), Map("out", 1, box, swizzle)),
        arch="sm_90",
    )


_E4M3, _E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
_KINDS: dict[str, tuple[Any, Any, bool]] = {  # the dtypes of a and b; whether a is in registers
    "kF16": (np.float16, np.float16, False),
    "kBf16": (ml_dtypes.bfloat16, ml_dtypes.bfloat16, False),
    "kTf32": (np.float32, np.float32, False),
    "kE4m3": (_E4M3, _E4M3, False),
    "kE5m2": (_E5M2, _E5M2, False),
    "kE4m3E5m2": (_E4M3, _E5M2, False),
    "kE5m2E4m3": (_E5M2, _E4M3, False),
    "kS8": (np.int8, np.int8, False),
    "kU8": (np.uint8, np.uint8, False),
    "kS8U8": (np.int8, np.uint8, False),
    "kU8S8": (np.uint8, np.int8, False),
    "kF16Ra": (np.float16, np.float16, True),
    "kBf16Ra": (ml_dtypes.bfloat16, ml_dtypes.bfloat16, True),
}


def _warpgroup(
    kind: str, n: int, swizzle: str, trans_a: bool = False, trans_b: bool = False
) -> Case:
    dtype_a, dtype_b, in_registers = _KINDS[kind]
    size = np.dtype(dtype_a).itemsize
    if swizzle == "none":
        k = 32 // size
    else:
        k = 32 if trans_a or trans_b else {"128B": 128, "64B": 64, "32B": 32}[swizzle] // size
    steps = k * size // 32
    a, b = (
        _ints((rows, k), dtype, 0 if dtype is np.uint8 else -4)
        for rows, dtype in ((64, dtype_a), (n, dtype_b))
    )
    d = (a.astype(np.float64) @ b.astype(np.float64).T).astype(
        np.int32 if np.issubdtype(dtype_a, np.integer) else np.float32
    )
    image_b, lead_b, stride_b, step_b = operand_image(b, swizzle, not trans_b)
    if in_registers:
        per_warp = a.reshape(4, 16, steps, 16).transpose(2, 0, 1, 3)
        first: Array = np.stack([[fragment_a(w) for w in step] for step in per_warp])
        bytes_a = lead_a = stride_a = step_a = 0
    else:
        first, lead_a, stride_a, step_a = operand_image(a, swizzle, not trans_a)
        bytes_a = first.size
    layout = {"none": 0, "128B": 1, "64B": 2, "32B": 3}[swizzle]
    numbers = (layout, lead_a, stride_a, lead_b, stride_b, int(trans_a), int(trans_b))
    major = f"{'m' if trans_a else 'k'}{'n' if trans_b else 'k'}"
    return Case(
        f"wgmma_{kind[1:].lower()}_n{n}_{swizzle}_{major}",
        f"warpgroup<{kind}, {n}, {', '.join(map(str, numbers))}>",
        (first, image_b),
        (warpgroup_d(d),),
        block=128,
        smem=-(-bytes_a // 1024) * 1024 + image_b.size,
        n=(bytes_a, steps | image_b.size << 8, step_a >> 4, step_b >> 4),
        arch="sm_90a",
    )


def _simple() -> list[Case]:
    produced, traded = _u32(64), _u32(384)
    added = np.where(np.arange(384) < 128, 1, 2).astype(np.uint32)
    return [
        Case("named_barriers", "named_barriers", (produced,), (produced[::-1].copy(),), block=128),
        Case("registers", "registers", (traded,), (traded + added,), block=384, arch="sm_90a"),
    ]


bf16, f16, e4m3 = ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn
CASES: tuple[Case, ...] = (
    _loads(),
    _loads_if(),
    _flags(),
    _words(),
    _copies(),
    _matrices(),
    _matrices_back(),
    _shared_floats(),
    _signals(),
    _mma("mma_f16", f16, f16, 16, integer=False),
    _mma("mma_bf16", bf16, bf16, 16, integer=False),
    _mma("mma_tf32", np.float32, np.float32, 8, integer=False),
    _mma("mma_e4m3", e4m3, e4m3, 32, integer=False),
    _mma("mma_s8", np.int8, np.int8, 32, integer=True),
    _mma("mma_u8", np.uint8, np.uint8, 32, integer=True),
    _mma("mma_u8s8", np.uint8, np.int8, 32, integer=True),
    _mma_f64(),
    _mma_f64_k8(),
    _arithmetic(),
    _conversions(),
    _float8(),
    _warp_intrinsics(),
    *_simple(),
    _clusters(),
    _bulk(),
    _multicast(),
    _tensor((20, 72), (16, 32), (9, 48), "none", bf16),
    _tensor((20, 72), (8, 64), (-3, 24), "128B", bf16),
    _tensor((20, 80), (16, 32), (4, -8), "64B", f16),
    _tensor((33, 40), (8, 8), (28, 36), "32B", np.float32),
    _tensor((33, 40), (8, 8), (40, 8), "32B", np.float32),
    _tensor((20, 256), (16, 128), (4, 128), "128B", np.uint8),
    _tensor((3, 20, 72), (2, 8, 64), (2, 15, -8), "128B", bf16),
    _warpgroup("kF16", 64, "128B"),
    _warpgroup("kBf16", 128, "128B"),
    _warpgroup("kBf16", 256, "128B"),
    _warpgroup("kBf16", 8, "64B"),
    _warpgroup("kF16", 32, "32B"),
    _warpgroup("kF16", 64, "none"),
    _warpgroup("kBf16", 128, "128B", trans_a=True, trans_b=True),
    _warpgroup("kF16", 64, "64B", trans_a=True, trans_b=True),
    _warpgroup("kF16", 64, "none", trans_a=True, trans_b=True),
    _warpgroup("kTf32", 96, "128B"),
    _warpgroup("kE4m3", 64, "128B"),
    _warpgroup("kE5m2", 128, "128B"),
    _warpgroup("kE4m3E5m2", 64, "128B"),
    _warpgroup("kE5m2E4m3", 128, "128B"),
    _warpgroup("kS8U8", 64, "128B"),
    _warpgroup("kU8S8", 256, "128B"),
    _warpgroup("kS8", 128, "128B"),
    _warpgroup("kU8", 64, "128B"),
    _warpgroup("kF16Ra", 64, "128B"),
    _warpgroup("kBf16Ra", 128, "128B", trans_b=True),
)
