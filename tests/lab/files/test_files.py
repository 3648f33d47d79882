"""Matrix files: every format read right, every hostile file refused by name, output atomic."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import scipy.io
import scipy.sparse

from gemmule_lab.files.matrices import SUFFIXES, list_matrices, read_matrix
from gemmule_lab.files.sources import Source, parse_source

MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)


class Bomb:
    """Unpickling this writes a file: the test looks for it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


# --- reading what is sound ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8", "uint64", "complex64"])
def test_npy_is_mapped_with_its_order(tmp_path: Path, dtype: str) -> None:
    for order in ("C", "F"):
        expected = np.asarray(MATRIX.astype(dtype), order=order)
        np.save(tmp_path / "a.npy", expected)
        actual = read_matrix(str(tmp_path / "a.npy"))
        np.testing.assert_array_equal(actual, expected)
        assert actual.strides == expected.strides
        assert not actual.flags.writeable
        assert isinstance(actual.base, np.memmap)


def test_suffixes_are_read_in_capitals_too(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", MATRIX)
    np.savez(tmp_path / "b.npz", A=MATRIX)
    safetensors.numpy.save_file({"A": MATRIX}, tmp_path / "c.safetensors")
    scipy.io.savemat(tmp_path / "d.mat", {"A": MATRIX})
    scipy.io.mmwrite(tmp_path / "e.mtx", MATRIX.astype(np.float64))
    found = sorted(tmp_path.iterdir())
    assert {path.suffix for path in found} == set(SUFFIXES)
    for path in found:
        loud = path.rename(path.with_suffix(path.suffix.upper()))
        np.testing.assert_array_equal(read_matrix(str(loud)), MATRIX)


def test_npy_of_foreign_byte_order_is_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", MATRIX.astype(">f4"))
    np.testing.assert_array_equal(read_matrix(str(tmp_path / "a.npy")), MATRIX)


def test_empty_npy(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.empty((0, 5), np.float32))
    assert read_matrix(str(tmp_path / "a.npy")).shape == (0, 5)


def test_safetensors_by_name_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    halves = MATRIX.astype(ml_dtypes.bfloat16)
    safetensors.numpy.save_file({"fc.w": halves, "b": MATRIX[0].copy()}, path)
    actual = read_matrix(f"{path}:fc.w")
    assert actual.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(actual, halves)
    assert list_matrices(path) == {"fc.w": (3, 4), "b": (4,)}
    with pytest.raises(ValueError, match=r"say which tensor.*It holds 2: .*fc\.w"):
        read_matrix(str(path))
    with pytest.raises(ValueError, match=r"no tensor called 'nope'.*fc\.w"):
        read_matrix(f"{path}:nope")
    safetensors.numpy.save_file({"only": MATRIX}, path)
    np.testing.assert_array_equal(read_matrix(str(path)), MATRIX)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path: Path, save: Any) -> None:
    path = tmp_path / "m.npz"
    save(path, A=MATRIX, x=np.asfortranarray(MATRIX))
    np.testing.assert_array_equal(read_matrix(f"{path}:A"), MATRIX)
    assert read_matrix(f"{path}:x").flags.f_contiguous
    with pytest.raises(ValueError, match="say which array"):
        read_matrix(str(path))


def test_mat_keeps_column_major(tmp_path: Path) -> None:
    path = tmp_path / "m.mat"
    scipy.io.savemat(path, {"K": MATRIX, "name": "words", "S": scipy.sparse.eye(3)})
    actual = read_matrix(f"{path}:K")
    np.testing.assert_array_equal(actual, MATRIX)
    assert actual.flags.f_contiguous
    for other in ("name", "S"):
        with pytest.raises(TypeError, match="full numeric matrix"):
            read_matrix(f"{path}:{other}")


def test_mtx_dense_and_sparse(tmp_path: Path) -> None:
    scipy.io.mmwrite(tmp_path / "d.mtx", MATRIX.astype(np.float64))
    scipy.io.mmwrite(tmp_path / "s.mtx", scipy.sparse.coo_matrix(MATRIX))
    np.testing.assert_array_equal(read_matrix(str(tmp_path / "d.mtx")), MATRIX)
    np.testing.assert_array_equal(read_matrix(str(tmp_path / "s.mtx")), MATRIX)


def test_source_of_a_file_with_a_colon_in_its_name(tmp_path: Path) -> None:
    path = tmp_path / "x.npz:part"
    path.touch()
    assert parse_source(str(path)) == Source(path)
    assert parse_source("x.NPZ:part") == Source(Path("x.NPZ"), "part")
    assert parse_source("a:b.npy") == Source(Path("a:b.npy"))


# --- refusing what is not -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [object, [("x", "f8"), ("y", object)], [("y", object, 1)]])
def test_pickles_are_never_run(tmp_path: Path, dtype: Any) -> None:
    flag = tmp_path / "ran"
    objects = np.zeros(1, dtype)
    objects[() if dtype is object else "y"] = Bomb(flag)
    np.save(tmp_path / "a.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "a.npz", A=objects)
    (tmp_path / "raw.npy").write_bytes(pickle.dumps(Bomb(flag)))
    for name in ("a.npy", "a.npz"):
        with pytest.raises(TypeError, match="Python objects"):
            read_matrix(str(tmp_path / name))
    with pytest.raises(ValueError, match="not a readable"):
        read_matrix(str(tmp_path / "raw.npy"))
    assert not flag.exists()
    pickle.loads((tmp_path / "raw.npy").read_bytes())
    assert flag.exists(), "the bomb is a dud, so the test above proves nothing"


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.safetensors", "a.mat", "a.mtx"])
@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\x03\x04", b"\xff" * 200, b"{}" * 50])
def test_garbage_is_a_value_error(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        read_matrix(str(tmp_path / name))


def _npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


@pytest.mark.parametrize(
    "shape", ["(-1, 4)", "(1000000000000, 1000000000)", "(3.0,)", "(True, 4)", "(99, 99)"]
)
def test_npy_with_an_impossible_shape(tmp_path: Path, shape: str) -> None:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n"
    (tmp_path / "a.npy").write_bytes(_npy(header, bytes(48)))
    with pytest.raises(ValueError, match=r"a\.npy"):
        read_matrix(str(tmp_path / "a.npy"))


def peak_of(read: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_npy_header_that_claims_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x02\x00" + struct.pack("<I", 1_500_000_000))
    with path.open("r+b") as file:
        file.truncate(2_000_000_000)  # a hole

    def read() -> None:
        with pytest.raises(ValueError, match=r"its header claims 1,500,000,000 bytes"):
            read_matrix(str(path))

    assert peak_of(read) < 10 << 20


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_takes_the_memory_of_its_matrix_once(tmp_path: Path, save: Any) -> None:
    path = tmp_path / "a.npz"
    save(path, A=np.tile(MATRIX, (1000, 500)))
    assert peak_of(lambda: read_matrix(str(path))) < 1.2 * 24e6 + (4 << 20)


def test_a_tensor_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    entry = '"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
    text = f"{{{entry}, {entry}}}".encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(ValueError, match=r"a\.safetensors is not a readable"):
        read_matrix(str(path))


@pytest.mark.parametrize("cut", [0, 5, 9, 40, 120, 150])
def test_npy_cut_short(tmp_path: Path, cut: int) -> None:
    np.save(tmp_path / "a.npy", MATRIX)
    path = tmp_path / "a.npy"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"a\.npy"):
        read_matrix(str(path))


@pytest.mark.parametrize("descr", ["'<1e'", "('<f2', (1,))", "('<f2', (2, 2))"])
def test_elements_that_are_arrays_are_refused(tmp_path: Path, descr: str) -> None:
    """Mapped, they gave another shape than the header's and NumPy's."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': (3,), }}\n"
    (tmp_path / "a.npy").write_bytes(_npy(header, bytes(48)))
    with pytest.raises((TypeError, ValueError), match=r"a\.npy"):
        read_matrix(str(tmp_path / "a.npy"))


def test_npy_header_is_data_not_code(tmp_path: Path) -> None:
    flag = tmp_path / "ran"
    code = f"__import__('pathlib').Path({str(flag)!r}).touch()\n"
    (tmp_path / "a.npy").write_bytes(_npy(code))
    with pytest.raises(ValueError, match="not a readable"):
        read_matrix(str(tmp_path / "a.npy"))
    assert not flag.exists()


@pytest.mark.parametrize("dtype", ["bool", "U3", "V2", "M8[s]", [("a", "f4")], "longdouble"])
def test_dtypes_that_are_no_numbers_of_ours(tmp_path: Path, dtype: Any) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 2), dtype))
    with pytest.raises(TypeError, match="has dtype"):
        read_matrix(str(tmp_path / "a.npy"))


def test_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, A=np.zeros((512, 1024), np.float32))
    assert path.stat().st_size < 10_000
    with pytest.raises(ValueError, match=r"takes 2,097,\d+ bytes in memory"):
        read_matrix(str(path), limit_bytes=1 << 20)
    read_matrix(str(path), limit_bytes=4 << 20)


def test_npz_member_that_claims_more_than_it_has(tmp_path: Path) -> None:
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000), }\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("A.npy", _npy(header, bytes(16)))
    with pytest.raises(ValueError, match="claims"):
        read_matrix(str(tmp_path / "a.npz"))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_npz_that_numpy_does_not_write(method: int, tmp_path: Path) -> None:
    """LZMA takes the memory that its first bytes ask for, bzip2 raises any OSError."""
    np.save(tmp_path / "A.npy", np.ones((3, 3)))
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
        archive.write(tmp_path / "A.npy", "A.npy")
    with pytest.raises(ValueError, match=rf"a\.npz.*compressed by method {method}.*deflated"):
        read_matrix(str(tmp_path / "a.npz"))


def test_npz_with_a_damaged_member(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    rng = np.random.default_rng(0)
    np.savez_compressed(path, A=rng.normal(size=(64, 64)))
    content = bytearray(path.read_bytes())
    for start in range(200, len(content) - 200, 97):
        content[start] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"a\.npz"):
        read_matrix(str(path))


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 1600]}},
        {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [4, 20]}},
        {"a": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F31", "shape": [2, 2], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [2**62, 2**3], "data_offsets": [0, 16]}},
        {"a": [1]},
    ],
)
def test_hostile_safetensors_headers(tmp_path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    with pytest.raises(ValueError, match=r"a\.safetensors"):
        read_matrix(f"{path}:a")


def test_matlab_73_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "a.mat"
    path.write_bytes(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + b"\x89HDF\r\n\x1a\n" * 64)
    with pytest.raises(ValueError, match=r"7\.3 \(HDF5\).*-v7"):
        read_matrix(str(path))


def test_sparse_file_that_would_fill_memory(tmp_path: Path) -> None:
    text = "%%MatrixMarket matrix coordinate real general\n90000 90000 1\n1 1 1.0\n"
    (tmp_path / "a.mtx").write_text(text)
    with pytest.raises(ValueError, match="bytes in memory"):
        read_matrix(str(tmp_path / "a.mtx"), limit_bytes=1 << 30)


def test_missing_folder_and_unknown_suffix(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nope\.npy is missing"):
        read_matrix(str(tmp_path / "nope.npy"))
    (tmp_path / "folder.npy").mkdir()
    os.mkfifo(tmp_path / "pipe.npy")
    with pytest.raises(FileNotFoundError, match="is no regular file"):
        read_matrix(str(tmp_path / "pipe.npy"))
    with pytest.raises(FileNotFoundError, match="is a folder"):
        read_matrix(str(tmp_path / "folder.npy"))
    with pytest.raises(ValueError, match=r"suffix '\.csv'"):
        read_matrix(str(tmp_path / "a.csv"))


def test_every_single_flipped_byte_is_read_or_refused(tmp_path: Path) -> None:
    """Whatever one damaged header byte does, it is a ValueError, a TypeError or a matrix."""
    rng = np.random.default_rng(1)
    for suffix in (".npy", ".safetensors", ".npz"):
        path = tmp_path / f"a{suffix}"
        buffer = io.BytesIO()
        if suffix == ".npy":
            np.save(buffer, MATRIX)
        elif suffix == ".npz":
            np.savez(buffer, A=MATRIX)
        else:
            buffer.write(safetensors.numpy.save({"A": MATRIX}))
        sound = buffer.getvalue()
        refused = 0
        for position in range(min(len(sound), 130)):
            damaged = bytearray(sound)
            damaged[position] = int(rng.integers(256))
            path.write_bytes(bytes(damaged))
            try:
                read_matrix(str(path), limit_bytes=1 << 20)
            except (ValueError, TypeError):
                refused += 1
        assert refused > 20


def test_a_header_that_claims_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    claimed = 3 << 29
    with path.open("wb") as file:
        file.write(b"\x93NUMPY\x02\x00" + struct.pack("<I", claimed))
        file.truncate(12 + claimed)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="its header claims 1,610,612,736 bytes"):
            read_matrix(str(path))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_is_read_without_a_second_copy(tmp_path: Path, save: Any) -> None:
    A = np.random.default_rng(1).integers(0, 4, (1500, 2000)).astype(np.float32)
    save(tmp_path / "a.npz", A=A)
    tracemalloc.start()
    try:
        found = read_matrix(str(tmp_path / "a.npz"))
        assert tracemalloc.get_traced_memory()[1] < 1.3 * A.nbytes + (4 << 20)
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(found, A)


def test_a_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    one = '"A":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    twice = '"A":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}'
    header = f"{{{one},{twice}}}".encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ValueError, match=r"'A' is there twice|not a readable"):
        read_matrix(str(path))
    with pytest.raises(ValueError, match=r"'A' is there twice|not a readable"):
        list_matrices(path)
