"""Quantised weights in the files of other tools: sound ones, and what such bytes mean, read slowly.

Each function returns what `corruption.Kind` is made of.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Parts = tuple[str, tuple[bytes, ...], Callable[[Path], Any], Callable[[bytes, Any], bool]]
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
M, N, SIZE = 16, 32, 16
NAME = "a"


def gguf() -> Parts:
    """Files with numbers, strings and arrays of both among their metadata."""
    import gguf as package

    from gemmule.quant.gguf import read_gguf

    rng, sound = np.random.default_rng(3), []
    for kind in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"):
        block, nbytes = package.GGML_QUANT_SIZES[package.GGMLQuantizationType[kind]]
        data = rng.integers(0, 60, (3, 64 * nbytes // block if block < 64 else nbytes), np.uint8)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "m.gguf")
            writer = package.GGUFWriter(path, "llama")
            writer.add_array("some.numbers", [1, 2, 3])
            writer.add_array("some.words", ["one", "two"])
            writer.add_float32("a.float", 0.5)
            for name in (NAME, "other"):
                writer.add_tensor(name, data, raw_dtype=package.GGMLQuantizationType[kind])
            for step in ("header", "kv_data", "tensors"):
                getattr(writer, f"write_{step}_to_file")()
            writer.close()
            sound.append(path.read_bytes())
    return ".gguf", tuple(sound), lambda path: read_gguf(path, NAME), _means_as_gguf


def _means_as_gguf(data: bytes, ours: Any) -> bool:
    """Tell whether some bytes of a file, as a type of blocks, are the numbers that we read."""
    import gguf as package

    m, n = ours.shape
    if not m * n:
        return True
    found, raw = ours.dequantize(), np.frombuffer(data, np.uint8)
    for kind in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"):
        block, nbytes = package.GGML_QUANT_SIZES[package.GGMLQuantizationType[kind]]
        size = m * n // block * nbytes
        if n % block:
            continue
        for start in range(raw.size - size + 1):
            rows = raw[start : start + size].reshape(m, -1)
            with np.errstate(all="ignore"):
                wide = package.dequantize(rows, package.GGMLQuantizationType[kind])
                near = np.abs(found - wide).max(initial=0) <= 1e-6 * np.abs(wide).max(initial=0)
            if near:
                return True
    return False


def _layer(kind: str, bits: int = 4) -> bytes:
    import safetensors.numpy

    rng, groups = np.random.default_rng(4), N // SIZE
    per = 32 // bits
    scales = rng.random((groups, M)).astype(np.float16)

    def words(*shape: int) -> Any:
        return rng.integers(-(2**31), 2**31, shape, np.int32)

    if kind == "hqq":
        rows = M * groups * bits // 8
        parts = {
            "W_q": rng.integers(0, 256, (rows, SIZE), np.uint8),
            "scale": scales.reshape(-1, 1),
            "zero": rng.normal(8, 2, (M * groups, 1)).astype(np.float16),
            "nbits": np.array(bits, np.int32),
            "axis": np.array(1, np.int32),
            "shape": np.array([M, N], np.int32),
        }
    elif kind == "awq":
        parts = {"qweight": words(N, M // 8), "qzeros": words(groups, M // 8), "scales": scales}
    else:
        shapes = (N // per, M), (groups, M // per)
        parts = {"qweight": words(*shapes[0]), "qzeros": words(*shapes[1]), "scales": scales}
        parts["g_idx"] = rng.permutation(np.repeat(np.arange(groups, dtype=np.int32), SIZE))
    return bytes(safetensors.numpy.save({f"{NAME}.{key}": part for key, part in parts.items()}))


def layers(kind: str) -> Parts:
    """One layer of GPTQ, AWQ or HQQ."""
    from gemmule.quant.formats import read_layer

    sound = [_layer(kind, bits) for bits in ((4, 8) if kind != "awq" else (4,))]
    return ".safetensors", tuple(sound), lambda path: read_layer(path, NAME), _means_as_layer


def _means_as_layer(data: bytes, ours: Any) -> bool:
    """Tell whether a file's arrays mean the weights that we read, whatever tool wrote them."""
    import ml_dtypes
    import safetensors

    tags = {"BF16": ml_dtypes.bfloat16, "BOOL": np.dtype("?")}
    t = {}
    for name, one in safetensors.deserialize(data):
        tag = one["dtype"]
        dtype = tags.get(tag) or np.dtype(f"<{tag[0].lower()}{int(tag[1:]) // 8}")
        t[name.removeprefix(f"{NAME}.")] = np.frombuffer(one["data"], dtype).reshape(one["shape"])
    meant = _hqq(t) if "W_q" in t else _words(t)
    with np.errstate(all="ignore"):
        return np.array_equal(ours.dequantize("float64"), meant)


def _hqq(t: dict[str, Any]) -> Any:
    codes = t["W_q"].astype(np.float64)
    if int(t["nbits"].item()) == 4:
        codes = np.concatenate([codes // 16, codes % 16])
    scale, zero = (t[key].reshape(-1, 1).astype(np.float64) for key in ("scale", "zero"))
    return (scale * (codes - zero)).reshape([int(size) for size in t["shape"].reshape(-1)])


def _words(t: dict[str, Any]) -> Any:
    scales, (rows, columns) = t["scales"].astype(np.float64), t["qweight"].shape
    groups, m = scales.shape
    if columns != m:
        places = [AWQ_ORDER[j % 8] * 4 for j in range(m)]
        codes, zeros = (
            np.stack([words[:, j // 8] >> place & 15 for j, place in enumerate(places)], 1)
            for words in (t["qweight"], t["qzeros"])
        )
        g_idx = np.arange(rows) // (rows // groups)
    else:
        bits = 8 if 4 * t["qzeros"].shape[1] >= m else 4
        per, mask = 32 // bits, 2**bits - 1
        n = rows * per
        codes = np.stack([t["qweight"][i // per] >> bits * (i % per) & mask for i in range(n)])
        zeros = np.stack(
            [(t["qzeros"][:, j // per] >> bits * (j % per)) + 1 & mask for j in range(m)], 1
        )
        g_idx = t.get("g_idx", np.arange(n) // (n // groups))
    return (scales[g_idx] * (codes - zeros[g_idx].astype(np.float64))).T


gptq, awq, hqq = (functools.partial(layers, kind) for kind in ("gptq", "awq", "hqq"))
