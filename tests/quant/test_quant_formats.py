"""GPTQ, AWQ, HQQ and GGUF weights, code by code against their own arithmetic written out."""

from __future__ import annotations

import json
import struct
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file

from gemmule.quant import formats as quant_formats
from gemmule.quant import gguf as quant_gguf
from gemmule.quant.formats import from_awq, from_compressed, from_gptq, from_hqq, read_layer
from gemmule.quant.gguf import from_gguf, read_gguf
from gemmule.quant.layouts import row_codes
from gemmule.quant.matrix import QuantizedMatrix

rng = np.random.default_rng(16)


def codes_of(Q: QuantizedMatrix) -> np.ndarray:
    """The codes in the matrix's own column order."""
    m, n = Q.stored_shape
    codes = np.empty((m, n), np.uint8)
    codes[:, slice(None) if Q.perm is None else Q.perm] = row_codes(Q.codes, slice(0, m), n, Q.bits)
    return codes


def packed(codes: np.ndarray, bits: int, order: Any = None) -> np.ndarray:
    """Codes of each row into int32 words by Python integers; `order[i]` is nibble i's column."""
    per = 32 // bits
    order = range(per) if order is None else order
    words = [
        [
            sum(int(row[w + order[i]]) << bits * i for i in range(per))
            for w in range(0, len(row), per)
        ]
        for row in codes
    ]
    return np.array(words, np.uint32).view(np.int32)


def layer(m: int, n: int, size: int, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    codes = rng.integers(0, 2**bits, (m, n), np.uint8)
    zeros = rng.integers(0, 2**bits, (m, -(-n // size)), np.uint8)
    return codes, zeros, rng.random(zeros.shape).astype(np.float16)


def weights(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray) -> Any:
    steps = codes.astype(np.float64) - zeros.astype(np.float64)[:, g_idx]
    return scales.astype(np.float64)[:, g_idx] * steps


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("stored_zero", [0, 1])
@pytest.mark.parametrize(("n", "size"), [(64, 16), (64, 64), (40, 16)])
def test_gptq(bits: int, act_order: bool, stored_zero: int, n: int, size: int) -> None:
    codes, zeros, scales = layer(16, n, size, bits)
    g_idx = (np.arange(n) // size).astype(np.int32)
    if act_order:
        rng.shuffle(g_idx)
    stored = (zeros.astype(int) - stored_zero) % 2**bits
    Q = from_gptq(
        packed(codes, bits).T.copy(),
        packed(stored.T, bits),
        scales.T.copy(),
        g_idx,
        bits=bits,
        stored_zero=stored_zero,
    )
    assert (Q.shape, Q.bits, Q.group_size, Q.scale_dtype) == ((16, n), bits, size, "float16")
    assert (Q.perm is not None) == (act_order and n > size)
    np.testing.assert_array_equal(codes_of(Q), codes)
    np.testing.assert_array_equal(Q.dequantize("float64"), weights(codes, zeros, scales, g_idx))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("order", ["none", "sorted", "shuffled"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_compressed_tensors(bits: int, order: str, symmetric: bool) -> None:
    codes, zeros, scales = layer(24, 64, 16, bits)
    zeros = np.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
    groups = (np.arange(64) // 16).astype(np.int32)
    if order == "shuffled":
        rng.shuffle(groups)
    Q = from_compressed(
        packed(codes, bits),
        scales,
        np.array([24, 64]),
        None if symmetric else packed(zeros.T, bits).T.copy(),
        np.full(64, -1, np.int32) if order == "none" else groups,
    )
    assert (Q.bits, Q.group_size, Q.zeros is None) == (bits, 16, symmetric)
    np.testing.assert_array_equal(codes_of(Q), codes)
    np.testing.assert_array_equal(Q.dequantize("float64"), weights(codes, zeros, scales, groups))


def test_gptq_of_equal_zeros_stores_none() -> None:
    Q = from_gptq(
        np.zeros((2, 8), np.int32),
        np.full((1, 1), 0x77777777, np.int32),
        np.ones((1, 8), np.float16),
    )
    assert Q.symmetric
    assert (Q.dequantize() == -8).all()


def test_awq() -> None:
    codes, zeros, scales = layer(24, 64, 16, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    Q = from_awq(packed(codes.T, 4, order), packed(zeros.T, 4, order), scales.T.copy())
    np.testing.assert_array_equal(codes_of(Q), codes)
    g_idx = np.arange(64) // 16
    np.testing.assert_array_equal(Q.dequantize("float64"), weights(codes, zeros, scales, g_idx))


@pytest.mark.parametrize("bits", [4, 8])
def test_hqq(bits: int) -> None:
    codes, _, scales = layer(6, 64, 16, bits)
    zeros = rng.normal(8, 2, scales.shape).astype(np.float16)
    rows = codes.reshape(-1, 16)
    half = len(rows) // 2
    W_q = (rows[:half] << 4) | rows[half:] if bits == 4 else rows
    scale, zero = scales.reshape(-1, 1), zeros.reshape(-1, 1)
    Q = from_hqq(W_q, scale, zero, shape=(6, 64), bits=bits)
    np.testing.assert_array_equal(codes_of(Q), codes)
    g_idx = np.arange(64) // 16
    np.testing.assert_array_equal(Q.dequantize("float64"), weights(codes, zeros, scales, g_idx))


def test_the_codes_kill_another_order_of_awq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant_formats, "AWQ_ORDER", (0, 2, 4, 6, 1, 3, 5, 7))
    with pytest.raises(AssertionError):
        test_awq()


KINDS = {"Q4_0": 0, "Q4_1": 4, "Q8_0": 0, "Q4_K": 4, "Q6_K": 0, "MXFP4": 0}


def blocks(kind: str, m: int, n: int) -> np.ndarray:
    """Quantised by the gguf package where it can; else random blocks with finite halves."""
    if not kind.endswith("K"):
        return gguf.quantize(rng.standard_normal((m, n)).astype(np.float32), Type[kind])
    weights, nbytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    data = rng.integers(0, 256, (m * n // weights, nbytes), np.uint8)
    for at in (0, 2) if kind == "Q4_K" else (208,):
        halves = rng.standard_normal((len(data), 1)).astype(np.float16)
        data[:, at : at + 2] = halves.view(np.uint8)
    return data.reshape(m, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_blocks(kind: str) -> None:
    data = blocks(kind, 5, 512)
    truth = gguf.dequantize(data, Type[kind]).astype(np.float64)
    Q = from_gguf(data, kind, (5, 512))
    ours, width = Q.dequantize("float64"), Q.group_size or 1
    if not KINDS[kind]:
        np.testing.assert_array_equal(ours, truth)
        return
    # weight = scale * code + offset: the zero point -offset / scale is rounded once, by u of it
    scale = np.repeat(abs(Q.scales.astype(np.float64)), width, 1)
    offset = np.repeat(abs(Q.scales.astype(np.float64) * Q.zeros), width, 1)
    assert (abs(ours - truth) <= 2.0**-23 * (offset + 15 * scale)).all()
    code = np.rint(
        (truth + np.repeat(Q.scales.astype(np.float64) * Q.zeros, width, 1))
        / np.repeat(Q.scales, width, 1)
    )
    np.testing.assert_array_equal(code, codes_of(Q))


def test_gguf_kills_swapped_halves(fault: Callable[..., Any]) -> None:
    fault(quant_gguf, "_nibbles", lambda sound, p, run: sound((p << 4) | (p >> 4), run))
    for kind in ("Q4_0", "Q4_1", "Q4_K", "Q6_K", "MXFP4"):
        with pytest.raises(AssertionError):
            test_gguf_blocks(kind)


def test_a_gguf_block_without_scale_holds_its_offset() -> None:
    W = np.full((1, 64), 0.75, np.float32)
    W[:, 32:] = 0
    data = gguf.quantize(W, Type.Q4_1)
    Q = from_gguf(data, "Q4_1", (1, 64))
    np.testing.assert_array_equal(Q.dequantize(), W)
    assert Q.scales[0, 1] == 0  # products of it are exactly 0


def test_a_gguf_block_whose_scale_counts_for_nothing_has_finite_products() -> None:
    data = np.zeros((2, 20), np.uint8)
    data[:, 4:] = 0x3C
    for row, scale in enumerate((2.0**-24, 2.0**-13)):  # of them only the second reaches a bit
        data[row, :4] = np.array([scale, 60000], np.float16).view(np.uint8)
    Q = from_gguf(data, "Q4_1", (2, 32))
    assert Q.scales.tolist() == [[1.0], [2.0**-13]]
    assert Q.dequantize()[0].tolist() == [60000.0] * 32
    assert np.abs(Q.zeros).max() <= 2.0**29
    x = np.full((32, 3), 1e28, np.float32)
    np.testing.assert_allclose(Q @ x, Q.dequantize("float64") @ x, rtol=1e-6)


def test_a_gguf_file(tmp_path: Path) -> None:
    path, data = tmp_path / "m.gguf", blocks("Q4_0", 3, 64)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("a.weight", data, raw_dtype=Type.Q4_0)
    writer.add_tensor("norm", np.ones(4, np.float32))
    writer.add_tensor("plain", np.ones((4, 2), np.float32))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    np.testing.assert_array_equal(
        read_gguf(path, "a.weight").dequantize(), gguf.dequantize(data, Type.Q4_0)
    )
    for name, words in (("b", "no tensor 'b'"), ("norm", "1 dim"), ("plain", "type is F32")):
        with pytest.raises(ValueError, match=words):
            read_gguf(path, name)
    whole = path.read_bytes()
    for size in (0, 3, 20, 60, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="not a readable GGUF file"):
            read_gguf(path, "a.weight")


def test_a_gguf_file_that_claims_more_than_it_holds_is_refused_at_once(tmp_path: Path) -> None:
    def text(words: bytes) -> bytes:
        return struct.pack("<Q", len(words)) + words

    def head(tensors: int, entries: int) -> bytes:
        return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries)

    key, tensor = text(b"some.key"), text(b"a") + struct.pack("<I", 2)
    claims = {
        "claims 1099511627776 numbers": head(0, 1) + key + struct.pack("<IIQ", 9, 4, 2**40),
        "claims 1099511627776 strings": head(0, 1) + key + struct.pack("<IIQ", 9, 8, 2**40),
        "claims 1099511627776 bytes": head(0, 1) + key + struct.pack("<IQ", 8, 2**40),
        "claims 1099511627776 entries": head(0, 2**40),
        "claims 1099511627776 tensors": head(2**40, 0),
        "unknown kind 9": head(0, 1) + key + struct.pack("<IIQ", 9, 9, 1),
        "claims 5 where 4": head(1, 0) + text(b"a") + struct.pack("<I", 5) + bytes(50),
        "tensors end at": head(1, 0) + tensor + struct.pack("<QQIQ", 2**39, 2**39, 2, 0),
        "two tensors": head(2, 0) + 2 * (tensor + struct.pack("<QQIQ", 0, 0, 2, 0)) + bytes(64),
        "another byte order": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    }
    alignment = head(0, 1) + text(b"general.alignment")
    wrong = [struct.pack("<II", 4, size) for size in (0, 3, 48)]  # of 32 bits, and of other kinds
    wrong += [struct.pack("<IQ", 10, 64), struct.pack("<If", 6, 32.0), struct.pack("<IQ", 8, 0)]
    path = tmp_path / "m.gguf"
    for message, content in claims.items():
        path.write_bytes(content + bytes(33))
        with pytest.raises(ValueError, match=f"not a readable GGUF file: .*{message}"):
            read_gguf(path, "a")
    for value in wrong:
        path.write_bytes(alignment + value + bytes(33))
        with pytest.raises(ValueError, match="alignment is no power of two"):
            read_gguf(path, "a")
    many = b"".join(text(b"t%d" % i) + struct.pack("<IIQ", 0, 0, 0) for i in range(30))
    path.write_bytes(head(30, 0) + many + bytes(64))
    with pytest.raises(ValueError, match=r"it holds t0, .*t19, \.\.\.$"):
        read_gguf(path, "a")


def test_layers_of_a_file(tmp_path: Path) -> None:
    path, order = tmp_path / "m.safetensors", (0, 2, 4, 6, 1, 3, 5, 7)
    codes, zeros, scales = layer(24, 64, 16, 4)
    wide, wide_zeros, _ = layer(24, 64, 16, 8)
    layers: dict[str, dict[str, np.ndarray]] = {
        "a": {"qweight": packed(codes.T, 4, order), "qzeros": packed(zeros.T, 4, order)},
        "g": {"qweight": packed(codes, 4).T, "qzeros": packed((zeros.T - 1) & 15, 4)},
        "w": {"qweight": packed(wide, 8).T, "qzeros": packed(wide_zeros.T - 1, 8)},
    }
    tensors = {
        f"{name}.{key}": np.ascontiguousarray(value)
        for name, parts in layers.items()
        for key, value in {**parts, "scales": scales.T}.items()
    }
    rows, numbers = codes.reshape(-1, 16), {"nbits": 4, "axis": 1, "shape": [24, 64]}
    tensors |= {f"h.{key}": np.array(value, np.int32) for key, value in numbers.items()}
    tensors["h.W_q"] = (rows[: len(rows) // 2] << 4) | rows[len(rows) // 2 :]
    tensors["h.scale"] = scales.reshape(-1, 1).astype(ml_dtypes.bfloat16)
    tensors["h.zero"] = zeros.reshape(-1, 1).astype(np.float16)
    save_file(tensors, path)
    for name, expected in (("a", codes), ("g", codes), ("w", wide), ("h", codes)):
        np.testing.assert_array_equal(codes_of(read_layer(path, name)), expected)
    truth = weights(wide, wide_zeros, scales, np.arange(64) // 16)
    np.testing.assert_array_equal(read_layer(path, "w").dequantize("float64"), truth)
    assert read_layer(path, "h").scale_dtype == "bfloat16"
    with pytest.raises(ValueError, match=r"m\.safetensors, layer 'b': it has no tensor 'qweight'"):
        read_layer(path, "b")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not a readable"):
        read_layer(path, "a")


def test_wrong_parts() -> None:
    codes, zeros, scales = layer(16, 64, 16, 4)
    q, z, s = packed(codes, 4).T.copy(), packed(zeros.T, 4), scales.T.copy()
    g = (np.arange(64) // 16).astype(np.int32)
    wrong: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "list", lambda: from_gptq(q.tolist(), z, s)),
        (TypeError, "qweight has dtype int64", lambda: from_gptq(q.astype(int), z, s)),
        (ValueError, "qweight has shape", lambda: from_gptq(q[0], z, s)),
        (ValueError, "qzeros has shape", lambda: from_gptq(q, z[:, :1], s)),
        (ValueError, "scales have 15 columns", lambda: from_gptq(q, z, s[:, :15])),
        (TypeError, "scales has dtype int32", lambda: from_gptq(q, z, s.astype(np.int32))),
        (ValueError, "finite", lambda: from_gptq(q, z, s * np.float16(np.inf))),
        (ValueError, "g_idx has shape", lambda: from_gptq(q, z, s, g[:-1])),
        (ValueError, "g_idx does not share", lambda: from_gptq(q, z, s, g * 0)),
        (ValueError, r"entries in -1\.\.2", lambda: from_gptq(q, z, s, g - 1)),
        (ValueError, r"entries in 1\.\.4", lambda: from_gptq(q, z, s, g + 1)),
        (ValueError, "bits is 3", lambda: from_gptq(q, z, s, bits=3)),
        (ValueError, "do not come in 0", lambda: from_gptq(q, z[:0], s[:0])),
        (
            ValueError,
            "do not come in",
            lambda: from_gptq(q[:2], np.repeat(z, 3, 0), np.repeat(s, 3, 0)),
        ),
        (ValueError, "axis is 0", lambda: from_hqq(codes, s, s, shape=(16, 64), axis=0)),
        (ValueError, "holds 2048 codes", lambda: from_hqq(codes, s, s, shape=(16, 64))),
        (ValueError, "scale has 64", lambda: from_hqq(codes, s, s, shape=(32, 64))),
        (ValueError, "type is Q5_0", lambda: from_gguf(codes, "Q5_0", (16, 64))),
        (ValueError, "are no 16 x 64", lambda: from_gguf(codes, "Q4_0", (16, 64))),
        (ValueError, "are no 2 x 16", lambda: from_gguf(codes[0, :18], "Q4_0", (2, 16))),
    ]
    for error, words, call in wrong:
        with pytest.raises(error, match=words):
            call()


# --- parts that do not belong together, and files of others ---------------------------------------

STRANGE: tuple[Any, ...] = (
    None, "4", [[1, 2]], 1.5, True, 0, -1, 3, 2**40, 2**70, (0, 0), (-1, -32), (2,), (8.0, 32.0),
    np.int64(4), np.zeros((0, 4), np.int32), np.ones((2, 2), np.float16), np.ones(3, "c8"),
    np.array(7, np.int32), np.full((4, 16), np.nan, np.float16), np.zeros((2, 2), "S3"),
    np.ma.masked_array(np.ones((2, 2), np.int32)),
)  # fmt: skip


def parts_of(tool: str) -> tuple[Any, dict[str, Any]]:
    """Return a reader, and arguments that it takes."""
    bits = int(rng.choice([4, 8]))
    codes, zeros, scales = layer(16, 32, 8, bits)
    g_idx = rng.permutation(np.arange(32) // 8).astype(np.int32)
    if tool == "gptq":
        words, zero_words = packed(codes, bits).T, packed(zeros.T, bits)
        made = {"qweight": words, "qzeros": zero_words, "scales": scales.T, "g_idx": g_idx}
        return from_gptq, {**made, "bits": bits, "stored_zero": 1}
    if tool == "awq":
        words, zero_words = packed(codes.T & 15, 4), packed(zeros.T & 15, 4)
        return from_awq, {"qweight": words, "qzeros": zero_words, "scales": scales.T}
    if tool == "hqq":
        W_q = codes.reshape(-1, 8)[: 64 if bits == 8 else 32]
        flat = {"scale": scales.reshape(-1, 1), "zero": scales.reshape(-1, 1)}
        return from_hqq, {"W_q": W_q, **flat, "shape": (16, 32), "bits": bits, "axis": 1}
    if tool == "compressed":
        made = {"packed": packed(codes, bits), "scale": scales, "shape": np.array([16, 32])}
        zero_words = packed(zeros.T, bits).T.copy()
        return from_compressed, {**made, "zero_point": zero_words, "g_idx": g_idx}
    data = blocks(tool, 2, 512)
    return from_gguf, {"data": data, "kind": tool, "shape": (2, 512)}


def disturbed(given: Any) -> Any:
    """Return an argument cut, turned, masked, of another dtype, with other numbers, or another."""
    if not isinstance(given, np.ndarray) or rng.random() < 0.4:
        return STRANGE[rng.integers(len(STRANGE))]
    how = rng.integers(6)
    if how == 0:
        return given[:-1]
    if how == 1:
        return given.T
    if how == 2:
        with np.errstate(all="ignore"):
            return given.astype(["i8", "f4", "i4", "u1", "f2", "f8"][rng.integers(6)])
    if how == 3:
        return given[..., None]
    if how == 4:
        return np.ma.masked_array(given)
    other = given.copy()
    other.reshape(-1)[rng.integers(other.size)] = rng.choice([0, 1, 7, 100])
    return other


@pytest.mark.parametrize("tool", ["gptq", "awq", "hqq", "compressed", *KINDS])
@pytest.mark.filterwarnings("error")
def test_what_does_not_belong_together_is_said_here(tool: str) -> None:
    """Not by NumPy, in its words or by a warning, and not by an error of another kind."""
    taken, refused, strange = 0, set(), []
    for _ in range(300):
        read, parts = parts_of(tool)
        for name in rng.choice(list(parts), rng.integers(0, 3), replace=False):
            parts[name] = disturbed(parts[name])
        masked = any(isinstance(one, np.ma.MaskedArray) for one in parts.values())
        try:
            made = read(**parts)
            assert not masked, "what a mask hides was read"
            taken += isinstance(made, QuantizedMatrix)
        except (TypeError, ValueError) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            ours = "gemmule" in last.filename and "raise " in str(last.line)
            if not ours or type(error) not in (TypeError, ValueError):
                strange.append((error, parts))
            refused.add(str(error))
    assert not strange
    assert taken > 30
    assert len(refused) > 10


def test_layers_of_a_model_in_several_files(tmp_path: Path) -> None:
    """One layer may lie in two of them."""
    codes, zeros, scales = layer(24, 64, 16, 4)
    parts = {
        "qweight": np.ascontiguousarray(packed(codes, 4).T),
        "qzeros": packed((zeros.T - 1) & 15, 4),
        "scales": np.ascontiguousarray(scales.T),
    }
    names = [f"m-0000{i}-of-00002.safetensors" for i in (1, 2)]
    save_file({f"a.{key}": parts[key] for key in ("qweight", "qzeros")}, tmp_path / names[0])
    save_file({"a.scales": parts["scales"], "b.scales": parts["scales"]}, tmp_path / names[1])
    shown = {"a.qweight": names[0], "a.qzeros": names[0], "a.scales": names[1]}
    index = tmp_path / "model.safetensors.index.json"
    with pytest.raises(ValueError, match="holds 2 models; give the path"):
        read_layer(tmp_path, "a")
    index.write_text(json.dumps({"metadata": {}, "weight_map": shown}))
    for path in (tmp_path, index, str(index)):
        np.testing.assert_array_equal(codes_of(read_layer(path, "a")), codes)
    with pytest.raises(ValueError, match="layer 'c': it has no tensor 'qweight'"):
        read_layer(index, "c")
    for wrong in (
        "[]", "{", '{"weight_map": 3}', '{"weight_map": {"a.scales": 3}}', "{}",
        '{"weight_map": {"a.scales": "../m.safetensors"}}', '{"weight_map": {"a.scales": ".."}}',
        '{"weight_map": {}, "weight_map": {}}',
        '{"weight_map": {"a.scales": "/etc/passwd"}}', '{"weight_map": {"a.scales": ""}}',
    ):  # fmt: skip
        index.write_text(wrong)
        with pytest.raises(ValueError, match=r"index\.json is no index of a model's files: "):
            read_layer(index, "a")
    index.write_text(json.dumps({"weight_map": {"a.scales": "gone.safetensors"}}))
    with pytest.raises(FileNotFoundError):
        read_layer(index, "a")
    for name in names:
        (tmp_path / name).unlink()
    index.unlink()
    with pytest.raises(ValueError, match="holds 0 models"):
        read_layer(tmp_path, "a")


@pytest.mark.parametrize("tag", ["F8_E4M3", "F8_E8M0", "C64"])
def test_a_layer_of_numbers_that_none_has(tag: str, tmp_path: Path) -> None:
    path, size = tmp_path / "m.safetensors", 8 if tag == "C64" else 1
    head = {"a.scales": {"dtype": tag, "shape": [2, 4], "data_offsets": [0, 8 * size]}}
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8 * size))
    with pytest.raises(TypeError, match=rf"a\.scales has dtype {tag}, which no such layer has"):
        read_layer(path, "a")


def test_sizes_in_a_layer_of_hqq_are_whole_numbers(tmp_path: Path) -> None:
    read, parts = parts_of("hqq")
    numbers = {
        "nbits": np.array(parts["bits"]), "axis": np.array([1]), "shape": np.array([16, 32])
    }  # fmt: skip
    made = {key: parts[key] for key in ("W_q", "scale", "zero")} | numbers
    path = tmp_path / "m.safetensors"
    save_file({f"h.{key}": np.ascontiguousarray(value) for key, value in made.items()}, path)
    same = read(**parts).dequantize()
    np.testing.assert_array_equal(read_layer(path, "h").dequantize(), same)
    for key, value in (("nbits", [4, 4]), ("axis", 1.0), ("shape", [16.0, 32.0]), ("shape", [16])):
        wrong = made | {key: np.array(value)}
        save_file({f"h.{name}": np.ascontiguousarray(one) for name, one in wrong.items()}, path)
        with pytest.raises(ValueError, match=f"{key} has dtype .* whole number"):
            read_layer(path, "h")
