"""Results in files: whole or not at all, never replaced by accident, in every format."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import gemmule as gm
from gemmule.core.problem import numpy_dtype
from gemmule.storage.atomic import new_file, replace_text
from gemmule_lab.files import multiply as multiplying
from gemmule_lab.files.matrices import read_matrix
from gemmule_lab.files.multiply import Job, blocks, columns, multiply
from gemmule_lab.files.output import new_matrix
from planted import planted

MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)


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
    tmp_path: Path, fault: Callable[..., Any], taken: bool
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    fault(os, "link", refused)
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
    shape: tuple[int, ...], limit: Callable[..., None]
) -> None:
    limit(multiplying, FLOAT_PRODUCTS=40 * 30 * 70 * 2)
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


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul"])
def test_the_result_is_of_the_dtype_that_the_product_has(op: str, bits: Any) -> None:
    """Asked before anything is multiplied: a file of that dtype is made first."""
    dtypes = ("float64", "float32", "float16", "bfloat16", "int8")
    for matrix, other, wide in itertools.product(dtypes, dtypes, (None, "float32", "float64")):
        a = np.ones((32, 32)).astype(numpy_dtype(matrix))
        b = np.ones((32, 3) if op == "matmul" else 32).astype(numpy_dtype(other))
        left, right = (b, a) if op == "vecmat" else (a, b)
        job = Job(op, left, right, bits=bits, group_size=32, out_dtype=wide)
        coded = a if bits is None else gm.quantize(a.astype("f4"), bits, 32)
        given = (b, coded) if op == "vecmat" else (coded, b)
        try:
            wanted = getattr(gm, op)(*given, out_dtype=wide).dtype
        except (TypeError, ValueError):
            with pytest.raises((TypeError, ValueError)):
                assert job.result is None
        else:
            assert numpy_dtype(job.result) == wanted
