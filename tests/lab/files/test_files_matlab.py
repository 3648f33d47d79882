"""MATLAB files: what MATLAB and Octave write is read as it was meant, damage is refused."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io

from forks import start_fork, status_of
from gemmule_lab.files.matrices import read_matrix
from gemmule_lab.files.multiply import order
from gemmule_lab.processes import environment_of_child

DTYPES = ("f8", "f4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "c8", "c16")
LEVEL_4 = ("f8", "f4", "i4", "i2", "u2", "u1", "c16")


def saved(matrix: Any, version: str = "5", compressed: bool = False) -> bytes:
    buffer = io.BytesIO()
    scipy.io.savemat(buffer, {"A": matrix}, format=version, do_compression=compressed)
    return buffer.getvalue()


def read(folder: Path, content: bytes, limit: int = 1 << 30) -> Any:
    path = folder / "a.mat"
    path.write_bytes(content)
    return read_matrix(str(path), limit_bytes=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4), (1, 1), (0, 0), (5, 1), (2, 3, 4)])
def test_every_dtype_and_version(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    matrix = (50 * np.random.default_rng(3).standard_normal(shape)).astype(dtype)
    files = [saved(matrix), saved(matrix, compressed=True)]
    if dtype in LEVEL_4 and len(shape) == 2:
        files.append(saved(matrix, "4"))  # the copy that SciPy makes of it is row-major
    for content in files:
        actual = read(tmp_path, content)
        np.testing.assert_array_equal(actual, matrix)
        assert actual.dtype == matrix.dtype
        assert actual.flags.f_contiguous


def element(kind: int, data: bytes, order: str = "<") -> bytes:
    return struct.pack(f"{order}II", kind, len(data)) + data + bytes(-len(data) % 8)


def matlab(kind: int, flags: int, stored: tuple[int, str], values: Any, order: str = "<") -> bytes:
    """A level 5 file of one 2 x 2 matrix called A, each byte of it written here."""
    head = b"MATLAB 5.0 MAT-file".ljust(124)
    head += b"\x00\x01IM" if order == "<" else b"\x01\x00MI"
    parts = element(6, struct.pack(f"{order}II", kind | flags, 0), order)
    parts += element(5, struct.pack(f"{order}ii", 2, 2), order)
    parts += struct.pack(f"{order}I", 1 << 16 | 1) + b"A\0\0\0"
    for part in values:
        parts += element(stored[0], np.array(part, f"{order}{stored[1]}").tobytes(), order)
    return head + element(14, parts, order)


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_class_is_kept_however_few_bytes_store_it(tmp_path: Path, order: str) -> None:
    """MATLAB stores a double matrix of small integers as bytes: it is double all the same."""
    doubles = read(tmp_path, matlab(6, 0, (2, "u1"), [[1, 2, 3, 200]], order))
    assert doubles.dtype == np.float64
    assert doubles.tolist() == [[1, 3], [2, 200]]
    halves = matlab(7, 0x0800, (3, "i2"), [[1, 2, 3, 4], [-1, 0, 0, 5]], order)
    assert read(tmp_path, halves).dtype == np.complex64
    assert read(tmp_path, halves).tolist() == [[1 - 1j, 3], [2, 4 + 5j]]


def test_numbers_that_the_class_does_not_hold_are_refused(tmp_path: Path) -> None:
    for kind, stored, values in (
        (9, (3, "i2"), [1, 2, 3, 256]),
        (12, (9, "f8"), [1, 2, 3, np.nan]),
        (7, (5, "i4"), [1, 2, 3, 2**24 + 1]),
    ):
        with pytest.raises(ValueError, match="numbers that no"):
            read(tmp_path, matlab(kind, 0, stored, [values]))


def test_numbers_that_the_class_holds_are_read_whatever_they_are_stored_in(tmp_path: Path) -> None:
    special = [1, np.nan, -np.inf, 0.5]
    for kind, stored, values, dtype in (
        (7, (9, "f8"), special, "float32"),
        (6, (7, "f4"), special, "float64"),
        (12, (9, "f8"), [1, 2, -3, 4], "int32"),
        (7, (5, "i4"), [1, 2, 3, 2**24], "float32"),
    ):
        found = read(tmp_path, matlab(kind, 0, stored, [values]))
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, np.array(values).reshape(2, 2).T)


CRASHES = """
import sys
from gemmule_lab.files.matrices import read_matrix
for path in sys.argv[1:]:
    try:
        read_matrix(path)
    except ValueError as error:
        print(error)
"""


def test_damaged_element_tags_do_not_end_the_process(tmp_path: Path) -> None:
    """SciPy's parser dies of SIGSEGV of each of these, so a child reads them."""
    sound = saved(np.arange(4.0).reshape(2, 2))
    paths = []
    for tag in (0, 8, 17, 255):
        damaged = bytearray(sound)
        damaged[176:180] = struct.pack("<I", tag)
        paths.append(tmp_path / f"{tag}.mat")
        paths[-1].write_bytes(bytes(damaged))
    command = [sys.executable, "-c", CRASHES, *map(str, paths)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment_of_child()
    )
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == len(paths)


FAKE_SCIPY = """
import os, time
def whosmat(path, **options):
    name = os.path.basename(path)
    if name == "spins.mat":
        while True: pass
    if name == "eats.mat":
        bytearray(1 << 30)
    if name == "ends.mat":
        os.abort()
    return [("A", (1, 2), "double")]
def loadmat(path, **options):
    import numpy as np
    return {"A": np.array([[1.0, 2.0]])}
"""
READS = """
import sys, time
import numpy as np
from gemmule_lab.files.matrices import read_matrix
for path in sys.argv[1:]:
    try:
        print(read_matrix(path).tolist())
    except ValueError as error:
        print(str(error).rpartition("is not readable: ")[2])
"""


def test_what_a_file_does_to_scipy_is_an_error(tmp_path: Path) -> None:
    """A stand-in for SciPy does what a file may bring it to; the next file is read all the same."""
    (tmp_path / "scipy").mkdir()
    (tmp_path / "scipy" / "__init__.py").touch()
    (tmp_path / "scipy" / "io.py").write_text(FAKE_SCIPY)
    paths = [tmp_path / f"{name}.mat" for name in ("spins", "eats", "ends", "works")]
    for path in paths:
        path.write_bytes(saved(np.array([[1.0, 2.0]])))
    environment = environment_of_child()
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    command = [sys.executable, "-c", READS, *map(str, paths)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    assert done.stdout.splitlines() == [
        "SciPy needed too much time to read it.",
        "it takes more memory than a matrix of its shape does.",
        "SciPy's process died of it (exit code -6).",
        "[[1.0, 2.0]]",
    ]


def test_without_scipy_the_extra_is_named(tmp_path: Path, modules: Callable[..., None]) -> None:
    modules(scipy=None)
    with pytest.raises(ImportError, match=r"a\.mat is read by SciPy: pip install 'scipy>=1\.14'"):
        read(tmp_path, saved(np.eye(2)))


def test_a_forked_process_reads_for_itself(tmp_path: Path) -> None:
    content = saved(np.eye(2))
    read(tmp_path, content)
    child = start_fork(lambda: bool((read(tmp_path, content) == np.eye(2)).all()))
    assert status_of(child) == 0
    np.testing.assert_array_equal(read(tmp_path, content), np.eye(2))


def test_what_scipy_reads_wrong_is_refused(tmp_path: Path) -> None:
    exact = matlab(6, 0x0800, (5, "i4"), [[1, 2, 3, 2**24 - 1], [4, 5, 6, 7]])
    assert read(tmp_path, exact).tolist() == [[1 + 4j, 3 + 6j], [2 + 5j, 2**24 - 1 + 7j]]
    assert read(tmp_path, exact).dtype == np.complex128
    rounded = matlab(6, 0x0800, (5, "i4"), [[1, 2, 3, 2**24 + 1], [4, 5, 6, 7]])
    with pytest.raises(ValueError, match="SciPy rounds its complex integers"):
        read(tmp_path, rounded)
    infinite = np.array([[complex(1, np.inf)]])
    np.testing.assert_array_equal(read(tmp_path, saved(infinite)), infinite)
    with pytest.raises(ValueError, match="infinite complex numbers of version 4"):
        read(tmp_path, saved(infinite, "4"))


def test_every_truncation_and_every_size_that_lies(tmp_path: Path) -> None:
    for content in (saved(np.arange(6.0).reshape(2, 3)), saved(np.eye(3), "4")):
        for length in range(len(content)):
            with pytest.raises(ValueError, match=r"a\.mat"):
                read(tmp_path, content[:length])
    sound = bytearray(saved(np.arange(6.0).reshape(2, 3)))
    for place in range(128, len(sound) - 48, 4):  # tags, flags, sizes and name: all but numbers
        for word in (0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 8):
            damaged = sound.copy()
            damaged[place : place + 4] = struct.pack("<I", word)
            try:
                actual = read(tmp_path, bytes(damaged))
            except (ValueError, TypeError):
                continue
            assert actual.size == 6


def test_a_compressed_bomb_is_refused_before_it_is_inflated(tmp_path: Path) -> None:
    content = saved(np.zeros((2000, 1000)), compressed=True)
    assert len(content) < 100_000
    with pytest.raises(ValueError, match=r"takes 32,000,\d+ bytes in memory"):
        read(tmp_path, content, limit=1 << 20)
    liar = saved(np.zeros((1, 1)), compressed=True)
    inner = bytearray(zlib.decompress(liar[136:]))
    inner[4:8] = struct.pack("<I", len(inner) - 8 + (1 << 24))
    packed = zlib.compress(bytes(inner) + bytes(1 << 24))
    with pytest.raises(ValueError, match="not fully consume"):
        read(tmp_path, liar[:132] + struct.pack("<I", len(packed)) + packed)


def test_a_checksum_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    content = bytearray(saved(np.random.default_rng(0).standard_normal((9, 9)), compressed=True))
    content[-1] ^= 1
    with pytest.raises(ValueError, match="incorrect data check"):
        read(tmp_path, bytes(content))


@pytest.mark.parametrize(
    ("start", "what"),
    [
        (b"# Created by Octave 8.4.0, Sun Nov 22 2026\n# name: A\n# type: matrix\n", "text file"),
        (b"Octave-1-L\x00", "binary file of Octave"),
        (b"\x89HDF\r\n\x1a\n", "HDF5 file"),
        (b"\x1f\x8b\x08", "compressed as a whole"),
    ],
)
def test_octaves_own_formats_are_refused_with_the_way_out(
    tmp_path: Path, start: bytes, what: str
) -> None:
    with pytest.raises(ValueError, match=rf"{what}.*save -v7 FILE A"):
        read(tmp_path, start + bytes(300))


def test_a_name_that_stands_twice_is_ambiguous(tmp_path: Path) -> None:
    content = saved(np.eye(2))
    with pytest.raises(ValueError, match="'A' twice"):
        read(tmp_path, content + content[128:])


def test_a_column_or_a_row_is_a_vector_where_one_is_asked_for() -> None:
    A = np.ones((3, 4))
    for x in (np.ones((4, 1)), np.ones((1, 4)), np.ones(4)):
        assert order("matvec", A, x)[2].shape == (4,)
    for x in (np.ones((3, 1)), np.ones((1, 3)), np.ones(3)):
        for pair in ((x, A), (A, x)):
            op, left, right = order("vecmat", *pair)
            assert (op, left.shape, right.shape) == ("vecmat", (3,), (3, 4))
    assert order(None, A, np.ones((4, 1)))[0] == "matmul"
