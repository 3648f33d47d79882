"""Matrix files: every format read right, every hostile file refused by name, output atomic."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pickle
import struct
import time
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

from gemmule.storage.atomic import new_file, replace_text
from gemmule_lab.files.matrices import list_matrices, read_matrix
from gemmule_lab.files.multiply import Job, blocks, columns, multiply
from gemmule_lab.files.output import new_matrix
from gemmule_lab.files.sources import Source, parse_source
from planted import planted

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


def test_pickles_are_never_run(tmp_path: Path) -> None:
    flag = tmp_path / "ran"
    objects = np.array([Bomb(flag)], dtype=object)
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


# --- writing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "complex128"])
def test_result_round_trip_npy(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "y.npy"
    with new_matrix(path, (3, 4), dtype) as y:
        y[:] = MATRIX
        assert not path.exists()
    np.testing.assert_array_equal(np.load(path), MATRIX.astype(dtype))
    np.testing.assert_array_equal(read_matrix(str(path)), MATRIX.astype(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32", "int64"])
def test_result_round_trip_safetensors(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "y.safetensors"
    with new_matrix(path, (3, 4), dtype) as y:
        y[:] = MATRIX.astype(y.dtype)
        expected = y.copy()
    np.testing.assert_array_equal(read_matrix(str(path)), expected)
    with safetensors.safe_open(path, "numpy") as file:  # the format's own library agrees
        assert file.get_slice("result").get_shape() == [3, 4]


@pytest.mark.parametrize("dtype", ["float64", "float32", "int8", "uint16", "int64"])
@pytest.mark.parametrize("shape", [(3, 4), (5,), (1, 1)])
def test_result_round_trip_mat(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    path = tmp_path / "y.mat"
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    with new_matrix(path, shape, dtype) as y:
        y[...] = values
        assert not path.exists()
    rows = values.reshape(shape[0], -1)
    np.testing.assert_array_equal(read_matrix(str(path)).reshape(rows.shape), rows)
    scipy_io = pytest.importorskip("scipy.io")  # another reader of the format agrees
    found = scipy_io.loadmat(path)["result"]
    assert found.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(found, rows)


def test_result_as_csv_keeps_every_digit(tmp_path: Path) -> None:
    path = tmp_path / "y.csv"
    values = np.array([[0.1, -1e-30], [np.float32(1) / 3, 65504.0]], np.float32)
    with new_matrix(path, (2, 2), "float32") as y:
        y[:] = values
    assert len(path.read_text().splitlines()) == 2
    np.testing.assert_array_equal(np.loadtxt(path, np.float32, delimiter=","), values)
    with new_matrix(tmp_path / "x.csv", (3,), "int64") as x:
        x[:] = [1, -(2**62), 3]
    assert (tmp_path / "x.csv").read_text() == f"1\n{-(2**62)}\n3\n"


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "error"),
    [
        ("y.mat", (2, 2), "float16", TypeError),
        ("y.mat", (2, 2), "complex128", TypeError),
        ("y.mat", (1 << 15, 1 << 13), "float64", ValueError),
        ("y.csv", (2, 2, 2), "float32", TypeError),
        ("y.csv", (2, 2), "complex64", TypeError),
    ],
)
def test_what_a_format_cannot_hold_is_refused_before_any_work(
    tmp_path: Path, name: str, shape: tuple[int, ...], dtype: str, error: type[Exception]
) -> None:
    with (
        pytest.raises(error, match=r"\.npy|--out-dtype"),
        new_matrix(tmp_path / name, shape, dtype),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_bfloat16_does_not_become_void_in_npy(tmp_path: Path) -> None:
    with (
        pytest.raises(TypeError, match="cannot name bfloat16"),
        new_matrix(tmp_path / "y.npy", (2,), "bfloat16"),
    ):
        pass


def test_empty_result(tmp_path: Path) -> None:
    with new_matrix(tmp_path / "y.npy", (0, 3), "float32"):
        pass
    assert np.load(tmp_path / "y.npy").shape == (0, 3)


def test_existing_results_need_force(tmp_path: Path) -> None:
    path = tmp_path / "y.npy"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="--force"), new_matrix(path, (2,), "float32"):
        pass
    assert path.read_bytes() == b"precious"
    with new_matrix(path, (2,), "float32", force=True):
        pass
    assert np.load(path).shape == (2,)


def test_a_result_has_its_blocks_before_it_is_written(
    tmp_path: Path, fault: Callable[..., Any]
) -> None:
    """On a full disk a write to the map of a file with holes would end the process."""
    with (
        planted(os, "posix_fallocate", lambda sound, *given: sound(*given)) as calls,
        new_matrix(tmp_path / "y.npy", (100, 1000), "float64"),
    ):
        ((_, start, size),) = calls
        assert start == 0
        assert size >= 800_000

    def without_room(sound: Any, descriptor: int, start: int, size: int) -> None:
        raise OSError(reason, os.strerror(reason))

    fault(os, "posix_fallocate", without_room)
    reason = errno.ENOSPC
    with (
        pytest.raises(OSError, match=r"for its 168 bytes.*z\.npy"),
        new_matrix(tmp_path / "z.npy", (5,), "float64"),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["y.npy"]
    reason = errno.EOPNOTSUPP  # by the file system: done as well as can be
    with new_matrix(tmp_path / "z.npy", (5,), "float64") as z:
        z[:] = 3
    assert (np.load(tmp_path / "z.npy") == 3).all()


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "y.npy"
    with pytest.raises(FileExistsError, match="--force"), new_matrix(path, (2,), "float32"):
        path.write_bytes(b"precious")
    assert path.read_bytes() == b"precious"
    assert [entry.name for entry in tmp_path.iterdir()] == ["y.npy"]


@pytest.mark.parametrize("taken", [True, False])
def test_a_file_system_without_hard_links_replaces_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    path = tmp_path / "y.npy"
    expected = (
        pytest.raises(FileExistsError, match="--force") if taken else contextlib.nullcontext()
    )
    with expected, new_matrix(path, (2,), "float32") as y:
        y[:] = 3
        if taken:
            path.write_bytes(b"precious")
    assert path.read_bytes() == b"precious" if taken else (np.load(path) == 3).all()
    assert [entry.name for entry in tmp_path.iterdir()] == ["y.npy"]


def test_a_text_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("before")
    path.chmod(0o640)
    replace_text(path, "after")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("after", 0o640)


@pytest.mark.parametrize(
    ("dtype", "most"), [("float32", 2**34), ("complex128", 2**32), ("int64", 2**31)]
)
@pytest.mark.parametrize("op", ["matmul", "vecmat"])
def test_blocks_are_short_so_that_ctrl_c_ends_a_product_soon(
    op: str, dtype: str, most: int
) -> None:
    size = 30_000
    big = np.broadcast_to(np.zeros((), dtype), (size, size))
    job = Job(op, big if op == "matmul" else big[0], big)
    for part in blocks(job):
        pieces = columns(job, part)
        if op == "vecmat":
            assert (part.stop - part.start) * size <= most
            continue
        for piece in pieces:
            wide = piece.stop - piece.start
            assert wide <= 64 or (part.stop - part.start) * size * wide <= most
        assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
        assert (pieces[0].start, pieces[-1].stop) == (0, size)


@pytest.mark.parametrize("shape", [(40, 30, 200), (2, 40, 30, 200), (40, 30, 64), (0, 3, 200)])
def test_pieces_of_columns_give_the_product_of_the_whole(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemmule_lab.files.multiply.FLOAT_PRODUCTS", 40 * 30 * 70 * 2)
    *batch, m, k, n = shape
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-3, 4, (*batch, *size)).astype(float) for size in ((m, k), (k, n)))
    job = Job("matmul", a, b)
    out = np.full(job.shape, np.nan)
    pieces = [len(columns(job, part)) for part in multiply(job, out, blocks(job, 4000))]
    assert (max(pieces) > 1) == (n == 200 and m > 0)
    np.testing.assert_array_equal(out, a @ b)


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    old = tmp_path / "old.txt"
    old.write_text("before")

    def fail(path: Path, force: bool) -> None:
        with new_file(path, replace=force, taken="") as file:
            file.write(b"half")
            raise RuntimeError("stopped")

    for path, force in ((tmp_path / "new.txt", False), (old, True)):
        with pytest.raises(RuntimeError):
            fail(path, force)
    assert old.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["old.txt"]


def test_missing_output_folder_and_wrong_suffix(tmp_path: Path) -> None:
    for name, error in (("none/y.npy", "does not exist"), ("y.txt", "suffix")):
        with (
            pytest.raises((ValueError, OSError), match=error),
            new_matrix(tmp_path / name, (2,), "float32"),
        ):
            pass


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


def test_what_killed_writers_left_is_removed_by_the_next(tmp_path: Path) -> None:
    def left(name: str, age: float = 3600) -> Path:
        path = tmp_path / name
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
        return path

    gone = left(".y.npy.0123456789abcdef.tmp")
    kept = [
        left(".y.npy.0123456789abcdee.tmp", 0),  # of a writer that only began
        left(".x.npy.0123456789abcdef.tmp"),
        left("y.npy.0123456789abcdef.tmp"),
        left(".y.npy.01.tmp"),
    ]
    with new_matrix(tmp_path / "y.npy", (3,), "float32", force=True) as first:
        first[:] = 1
        (mine,) = {*tmp_path.glob(".y.npy.*.tmp")} - {*kept}
        os.utime(mine, (0, 0))
        with new_matrix(tmp_path / "y.npy", (3,), "float32") as second:  # beside one that lives
            second[:] = 2
            assert mine.exists()
        with pytest.raises(FileExistsError), new_file(tmp_path / "y.npy", replace=False, taken=""):
            pass
    assert not gone.exists()
    assert all(path.exists() for path in kept)
