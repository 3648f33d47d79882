"""Files of quantised matrices: exact round trips, and no trust in what is read."""

from __future__ import annotations

import json
import os
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from gemmule.quant import files
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.quantize import quantize

SCALE_DTYPES = ("float32", "float16", "bfloat16")
PARTS = ("codes", "scales", "zeros", "perm")


def matrix(
    m: int = 5, n: int = 21, bits: int = 4, group_size: int | None = 8, **options: Any
) -> QuantizedMatrix:
    W = np.random.default_rng(m + n).standard_normal((m, n))
    return quantize(W, bits, group_size, **options)


def every_kind() -> list[QuantizedMatrix]:
    perm = np.random.default_rng(0).permutation(21)
    return [
        matrix(),
        matrix(symmetric=True, scale_dtype="float16"),
        matrix(bits=8, group_size=-1, scale_dtype="bfloat16"),
        matrix(group_size=None, perm=perm).T,
        matrix(3, 7, bits=8, group_size=2, scale_dtype="bfloat16"),
        matrix(3, 21, symmetric=True, perm=perm, scale_dtype="bfloat16"),
        matrix(0, 5),
        matrix(5, 0, group_size=-1),
        matrix(5, 0, bits=8, group_size=None, symmetric=True).T,
    ]


def same(ours: QuantizedMatrix, theirs: QuantizedMatrix) -> None:
    for name in ("stored_shape", "bits", "group_size", "transposed", "layout", "scale_dtype"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in PARTS:
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert one.tobytes() == other.tobytes()
            assert one.flags.aligned


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("index", range(len(every_kind())))
def test_round_trip_is_exact(tmp_path: Path, index: int, mmap: bool) -> None:
    Q, path = every_kind()[index], tmp_path / "w.safetensors"
    Q.to(layout="mma16").save(path)
    loaded = QuantizedMatrix.load(path, mmap=mmap)
    same(loaded, Q)
    np.testing.assert_array_equal(loaded.dequantize(), Q.dequantize())
    loaded.save(str(tmp_path / "again.safetensors"))
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_float_zero_points_and_signed_scales_round_trip(tmp_path: Path) -> None:
    Q = QuantizedMatrix.from_parts(
        np.arange(6, dtype=np.uint8).reshape(2, 3),
        np.array([[-0.1], [5e-8]], np.float16),
        np.array([[2.5], [-0.0]], np.float32),
        shape=(2, 3),
        bits=8,
        group_size=-1,
    )
    Q.save(tmp_path / "w.safetensors")
    same(QuantizedMatrix.load(tmp_path / "w.safetensors"), Q)


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_the_safetensors_library_reads_what_we_write(tmp_path: Path, scale_dtype: str) -> None:
    Q = matrix(scale_dtype=scale_dtype, perm=np.arange(21)[::-1])
    Q.save(tmp_path / "w.safetensors")
    tensors = safetensors.numpy.load_file(tmp_path / "w.safetensors")
    assert tensors.keys() == set(PARTS)
    for name, tensor in tensors.items():
        assert tensor.tobytes() == getattr(Q, name).tobytes()
        assert tensor.shape == getattr(Q, name).shape


def test_we_read_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    Q = matrix()
    Q.save(tmp_path / "ours.safetensors")
    metadata = files.read_tensors(tmp_path / "ours.safetensors", mmap=False)[1]
    arrays = {name: np.array(getattr(Q, name)) for name in ("codes", "scales", "zeros")}
    safetensors.numpy.save_file(arrays, tmp_path / "theirs", {**metadata, "author": "someone"})
    same(QuantizedMatrix.load(tmp_path / "theirs"), Q)


def test_codes_start_on_a_cache_line(tmp_path: Path) -> None:
    Q = matrix(16, 32)
    Q.save(tmp_path / "w.safetensors")
    assert QuantizedMatrix.load(tmp_path / "w.safetensors").codes.ctypes.data % 64 == 0


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, fault: Callable[..., Any]) -> None:
    path = tmp_path / "w.safetensors"
    matrix().save(path)
    before = path.read_bytes()

    def full(sound: Any, descriptor: int) -> None:
        raise OSError("no space left")

    fault(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        matrix(bits=8).save(path, overwrite=True)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_saving_replaces_nothing_unless_told_to(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        matrix().save(path)
    assert path.read_bytes() == b"precious"
    matrix().save(path, overwrite=True)
    assert QuantizedMatrix.load(path).shape == matrix().shape


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path, fault: Callable[..., Any]) -> None:
    path = tmp_path / "w.safetensors"
    fault(os, "fsync", lambda sound, descriptor: path.write_bytes(b"precious"))
    with pytest.raises(FileExistsError, match="overwrite=True"):
        matrix().save(path)
    assert path.read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["w", "w.npy", "w.bin"])
def test_other_suffixes_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"saved as \.safetensors"):
        matrix().save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_saving_replaces_under_an_open_map(tmp_path: Path) -> None:
    path, Q = tmp_path / "w.safetensors", matrix()
    Q.save(path)
    mapped = QuantizedMatrix.load(path)
    matrix(7, 33, bits=8).save(path, overwrite=True)
    same(mapped, Q)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
def test_the_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        matrix().save(tmp_path / "w.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "w.safetensors").stat().st_mode) == 0o640


def test_missing_files_and_folders_are_os_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        QuantizedMatrix.load(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        QuantizedMatrix.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        matrix().save(tmp_path / "none" / "w.safetensors")


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def edited(*keys: str, value: Any) -> Callable[[bytes], bytes]:
    def edit(content: bytes) -> bytes:
        header, data = split(content)
        inner = header
        for key in keys[:-1]:
            inner = inner[key]
        if value is None:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = value
        return join(header, data)

    return edit


def metadata(key: str, value: Any) -> Callable[[bytes], bytes]:
    return edited("__metadata__", key, value=value)


def header_text(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    def edit(content: bytes) -> bytes:
        header, data = split(content)
        return join(change(json.dumps(header).encode()), data)

    return edit


def set_data(start: int, value: bytes) -> Callable[[bytes], bytes]:
    """Overwrite bytes of the data section; `matrix()` of 5 x 21 lays zeros from 60, codes last."""

    def edit(content: bytes) -> bytes:
        header, data = split(content)
        return join(header, data[:start] + value + data[start + len(value) :])

    return edit


# matrix(): scales (5, 3) float32 at 0..60, zeros at 60..120, codes (5, 11) at 120..175.
FAULTS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "empty": ("0 bytes", lambda c: b""),
    "no length": ("7 bytes", lambda c: c[:7]),
    "length zero": ("header length is 0", lambda c: bytes(8) + c[8:]),
    "length huge": ("header length is 18446744073709551615", lambda c: b"\xff" * 8 + c[8:]),
    "length past the end": ("header length", lambda c: struct.pack("<Q", len(c)) + c[8:]),
    "header too long": ("header length", header_text(lambda t: t + b" " * (1 << 16))),
    "cut in the header": ("header length", lambda c: c[:100]),
    "cut in the data": ("take 175 bytes, but the file holds 174", lambda c: c[:-1]),
    "surplus bytes": ("take 175 bytes, but the file holds 176", lambda c: c + b"x"),
    "not UTF-8": ("malformed", header_text(lambda t: t.replace(b"codes", b"c\xff\xfees"))),
    "not JSON": ("malformed", header_text(lambda t: t[:-1])),
    "leading space": ("begin with", header_text(lambda t: b" " + t)),
    "a list": ("begin with", header_text(lambda t: b"[" + t + b"]")),
    "NaN": ("NaN is not JSON", header_text(lambda t: t.replace(b'"5"', b"NaN", 1))),
    "deep nesting": ("nests too deeply", header_text(lambda t: b'{"a":' + b"[" * 60000)),
    "long number": ("malformed", header_text(lambda t: t.replace(b"[5,", b"[" + b"9" * 5000, 1))),
    "duplicate key": ("twice", header_text(lambda t: t.replace(b"zeros", b"codes"))),
    "metadata a list": ("strings to strings", edited("__metadata__", value=[1])),
    "metadata a number": ("strings to strings", metadata("bits", 4)),
    "no metadata": ("no quantised matrix", edited("__metadata__", value=None)),
    "no schema": ("no quantised matrix", metadata("gemmule_quantized_matrix", None)),
    "later schema": ("schema '3' is unknown", metadata("gemmule_quantized_matrix", "3")),
    "no codes": ("gap|bytes", edited("codes", value=None)),
    "unknown tensor": (
        r"unknown: \['bias'\]",
        edited("bias", value={"dtype": "U8", "shape": [0], "data_offsets": [175, 175]}),
    ),
    "entry a list": ("exactly dtype", edited("codes", value=[])),
    "surplus entry key": ("exactly dtype", edited("codes", "strides", value=[1])),
    "missing entry key": ("exactly dtype", edited("codes", "shape", value=None)),
    "unknown dtype": ("dtype 'I64'", edited("codes", "dtype", value="I64")),
    "dtype a list": ("dtype", edited("codes", "dtype", value=["U8"])),
    "other size of dtype": ("takes 30 bytes", edited("scales", "dtype", value="F16")),
    "other dtype, same size": ("scales have dtype int32", edited("scales", "dtype", value="I32")),
    "zeros of another dtype": ("zeros have dtype int32", edited("zeros", "dtype", value="I32")),
    "negative size": ("sizes >= 0", edited("codes", "shape", value=[-5, -11])),
    "true as a size": ("sizes >= 0", edited("codes", "shape", value=[True, 55])),
    "float size": ("sizes >= 0", edited("codes", "shape", value=[5.0, 11])),
    "three sizes": ("at most two sizes", edited("codes", "shape", value=[5, 11, 1])),
    "huge size": ("sizes", edited("codes", "shape", value=[2**62, 0])),
    "overflowing size": ("takes", edited("codes", "shape", value=[2**32 + 5, 2**32 + 11])),
    "other shape": (r"codes have shape \(11, 5\)", edited("codes", "shape", value=[11, 5])),
    "scales of another shape": ("scales have shape", edited("scales", "shape", value=[3, 5])),
    "1-D scales": ("scales have shape", edited("scales", "shape", value=[15])),
    "offsets reversed": ("takes 55", edited("codes", "data_offsets", value=[175, 120])),
    "offsets negative": ("data_offsets", edited("codes", "data_offsets", value=[-55, 0])),
    "one offset": ("data_offsets", edited("codes", "data_offsets", value=[120])),
    "overlap": ("overlaps", edited("codes", "data_offsets", value=[119, 174])),
    "gap": ("gap", edited("codes", "data_offsets", value=[121, 176])),
    "offset past the end": ("gap", edited("codes", "data_offsets", value=[10**18, 10**18 + 55])),
    "bits 16": ("bits is 16", metadata("bits", "16")),
    "bits 8": ("codes have shape", metadata("bits", "8")),
    "bits in words": ("'bits' is 'four'", metadata("bits", "four")),
    "bits in other digits": ("'bits' is", metadata("bits", "٤")),
    "group size zero": ("group_size is 0", metadata("group_size", "0")),
    "group size -2": ("'group_size' is '-2'", metadata("group_size", "-2")),
    "group size missing": ("'group_size' is None", metadata("group_size", None)),
    "other group size": ("scales have shape", metadata("group_size", "-1")),
    "group size none": ("scales have shape", metadata("group_size", "none")),
    "rows": ("codes have shape", metadata("rows", "6")),
    "rows signed": ("'rows' is", metadata("rows", "+5")),
    "rows endless": ("'rows' is", metadata("rows", "9" * 4000)),
    "columns": ("codes have shape", metadata("columns", "23")),
    "columns, same bytes": ("takes|bits set", metadata("columns", "25")),
    "transposed": ("'transposed' is 'yes'", metadata("transposed", "yes")),
    "scale NaN": (r"scales\[0, 0\] is nan", set_data(0, struct.pack("<f", np.nan))),
    "zero Inf": (r"zeros\[0, 0\] is inf", set_data(60, struct.pack("<f", np.inf))),
    "tail nibble": ("bits set where", set_data(130, b"\x10")),
}


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(tmp_path: Path, fault: str, mmap: bool) -> None:
    words, edit = FAULTS[fault]
    path = tmp_path / "w.safetensors"
    matrix().save(path)
    path.write_bytes(edit(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"(?s)^{path}: .*({words})"):
        QuantizedMatrix.load(path, mmap=mmap)


def test_perm_in_a_file_must_be_a_permutation(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    matrix(perm=np.arange(21)).save(path)
    header, data = split(path.read_bytes())
    start = header["perm"]["data_offsets"][0]
    for entry in (1, -1, 21, 2**31 - 1):
        path.write_bytes(join(header, data[:start] + struct.pack("<i", entry) + data[start + 4 :]))
        with pytest.raises(ValueError, match="perm"):
            QuantizedMatrix.load(path)


def test_a_huge_empty_matrix_costs_nothing(tmp_path: Path) -> None:
    path, rows = tmp_path / "w.safetensors", 10**12
    matrix(0, 0, group_size=2).save(path)
    header, data = split(path.read_bytes())
    header["__metadata__"]["rows"] = str(rows)
    for name in ("codes", "scales", "zeros"):
        header[name]["shape"] = [rows, 0]
    path.write_bytes(join(header, data))
    Q = QuantizedMatrix.load(path)
    assert Q.to(layout="mma16").dequantize().shape == (rows, 0)


def test_unaligned_tensors_are_read_right(tmp_path: Path) -> None:
    path, Q = tmp_path / "w.safetensors", matrix(3, 21)
    Q.save(path)
    header, data = split(path.read_bytes())
    order = ["codes", "zeros", "scales"]
    chunks = [data[slice(*header[name]["data_offsets"])] for name in order]
    position = 0
    for name, chunk in zip(order, chunks, strict=True):
        header[name]["data_offsets"] = [position, position + len(chunk)]
        position += len(chunk)
    path.write_bytes(join(header, b"".join(chunks)))
    for mmap in (False, True):
        same(QuantizedMatrix.load(path, mmap=mmap), Q)


def mutate(content: bytes, rng: np.random.Generator) -> bytes:
    """One to three random changes: bytes, cuts, growth, header numbers, copied pieces."""
    changed = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        place = int(rng.integers(0, len(changed) + 1))
        kind = rng.integers(0, 7)
        if kind == 0:
            changed[place : place + 1] = bytes([rng.integers(0, 256)])
        elif kind == 1:
            del changed[place:]
        elif kind == 2:
            changed += rng.bytes(int(rng.integers(1, 20)))
        elif kind == 3:
            changed[:8] = struct.pack("<Q", int(rng.integers(0, 2 * len(content))))
        elif kind == 4:
            del changed[place : place + int(rng.integers(1, 9))]
        elif kind == 5:
            digits = [i for i, byte in enumerate(changed) if 48 <= byte <= 57]
            if digits:
                changed[digits[rng.integers(len(digits))]] = int(rng.integers(48, 58))
        else:
            other = int(rng.integers(0, len(changed) + 1))
            changed[place : place + 8] = changed[other : other + 8]
    return bytes(changed)


def judge(path: Path, content: bytes, mmap: bool) -> bool:
    """Load mutated bytes: either ValueError, or what the safetensors library reads from them."""
    path.write_bytes(content)
    try:
        Q = QuantizedMatrix.load(path, mmap=mmap)
    except ValueError:
        return False
    theirs = dict(safetensors.deserialize(content))  # must not raise: ours is the stricter reader
    assert theirs.keys() == {name for name in PARTS if getattr(Q, name) is not None}
    for name, tensor in theirs.items():
        assert list(getattr(Q, name).shape) == tensor["shape"]
        assert getattr(Q, name).tobytes() == tensor["data"]
    with np.errstate(over="ignore"):
        assert Q.dequantize().shape == Q.shape
    return True


def fuzz(folder: Path, rounds: int) -> tuple[int, int]:
    rng = np.random.default_rng(20)
    contents = []
    for index, Q in enumerate(every_kind()):
        Q.save(folder / f"{index}.safetensors")
        contents.append((folder / f"{index}.safetensors").read_bytes())
    accepted = 0
    for index in range(rounds):
        content = mutate(contents[index % len(contents)], rng)
        accepted += judge(folder / "mutant", content, mmap=bool(index % 2))
    return accepted, rounds - accepted


def test_mutated_files_are_refused_or_read_right(tmp_path: Path) -> None:
    accepted, refused = fuzz(tmp_path, 6000)
    assert accepted > 100
    assert refused > 3000


@pytest.mark.parametrize("index", range(len(every_kind())))
def test_every_truncation_is_refused(tmp_path: Path, index: int) -> None:
    every_kind()[index].save(tmp_path / "w.safetensors")
    content = (tmp_path / "w.safetensors").read_bytes()
    for length in range(len(content)):
        assert not judge(tmp_path / "cut.safetensors", content[:length], mmap=True)


@pytest.mark.parametrize("check", ["_check_cover", "_checked_entry"])
def test_the_fuzzer_kills_a_reader_that_does_not_check(
    tmp_path: Path, check: str, fault: Callable[..., Any]
) -> None:
    def unchecked_entry(sound: Any, name: str, entry: Any) -> Any:
        dtype = files.named_dtype(files.TAGS[entry["dtype"]])
        return dtype, tuple(entry["shape"]), *entry["data_offsets"]

    mutants = {"_check_cover": lambda sound, spans, nbytes: None, "_checked_entry": unchecked_entry}
    fault(files, check, mutants[check])
    # Either the library refuses what this reader took, or the reader itself falls over.
    with pytest.raises((safetensors.SafetensorError, AssertionError, KeyError, TypeError)):
        fuzz(tmp_path, 3000)


def test_the_error_is_kept(tmp_path: Path) -> None:
    Q = quantize(np.random.default_rng(0).standard_normal((8, 64), np.float32), bits=4)
    Q.save(tmp_path / "w.safetensors")
    assert Q.error
    assert QuantizedMatrix.load(tmp_path / "w.safetensors").error == Q.error


@pytest.mark.parametrize("told", ["nan", "-1", "much"])
def test_an_error_that_is_no_size_is_refused(tmp_path: Path, told: str) -> None:
    path = tmp_path / "w.safetensors"
    quantize(np.ones((8, 64), np.float32), bits=4).save(path)
    tensors = safetensors.numpy.load_file(path)
    with safetensors.safe_open(path, "np") as file:
        known = file.metadata()
    safetensors.numpy.save_file(tensors, path, {**known, "error": told})
    with pytest.raises(ValueError, match=f"{told}"):
        QuantizedMatrix.load(path)


def test_an_error_whose_squares_overflow_is_not_known(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal((8, 64), np.float32)
    for size in (1e25, 1e30):
        Q = quantize(weights * np.float32(size), bits=4)
        assert Q.error is None
        Q.save(tmp_path / "w.safetensors", overwrite=True)
        assert QuantizedMatrix.load(tmp_path / "w.safetensors").error is None
