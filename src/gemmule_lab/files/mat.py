"""MATLAB files (``.mat``) of versions 4 to 7, read by SciPy in a child process with limits.

Full numeric matrices only, column-major, as they lie in the file. What a file claims is checked
before memory is taken; a file that ends SciPy's process, or takes more memory or time than its
shape explains, is an error like any other. Version 7.3 and the formats of Octave's own are named
and refused with the way out.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import math
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.errors import INSTALL
from gemmule_lab.files.sources import Source, check_shape, check_size, pick

Matrix = NDArray[Any]

DTYPES = {"double": "f8", "single": "f4"} | {
    f"{sign}int{8 * size}": f"{sign or 'i'}{size}" for sign in ("", "u") for size in (1, 2, 4, 8)
}
_CHILD = Path(__file__).with_name("scipy_child.py")
_FOREIGN = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"Octave-1-", "a binary file of Octave"),
    (b"# Created by Octave", "a text file of Octave"),
    (b"# name:", "a text file of Octave"),
    (b"\x1f\x8b", "a file compressed as a whole"),
)
# Of the child beyond what it begins with: for itself, and for each element of the matrix, which is
# complex and stored in another type at worst.
_SPARE_BYTES, _ELEMENT_BYTES = 64 << 20, 48
_BYTES_PER_S = 20_000_000  # that are read or inflated at the very least
_PATIENCE = 30  # times as long as its processor time a child may take, of a busy machine
_FRESH_S = 20  # after its last answer; it ends by itself somewhat later
_MOST_JSON = 1 << 24
_ONE_AT_A_TIME = threading.Lock()


def read_mat(source: Source, limit: int) -> Matrix:
    """Return one variable of a MATLAB file (up to version 7), column-major as it lies there."""
    _check_head(source)
    if importlib.util.find_spec("scipy") is None:
        raise ImportError(f"{source} is read by SciPy: {INSTALL['io']}")
    listed = _answer(source, None, 0)[0]["variables"]
    known: dict[str, tuple[list[int], str]] = {}
    for name, shape, kind in listed:
        if name in known:
            raise ValueError(f"{source.path} holds {name!r} twice.")
        known[name] = shape, kind
    name = pick(source, known, "variable")
    shape, kind = known[name]
    if kind not in DTYPES:
        raise TypeError(f"{source} is a MATLAB {kind}; a full numeric matrix is needed.")
    check_shape(source, shape)
    # What the child holds and what is made of it are alive together.
    check_size(source, 2 * math.prod(shape) * np.dtype(DTYPES[kind]).itemsize, limit)
    found, matrix = _answer(source, name, math.prod(shape), DTYPES[kind])
    if found["shape"] != shape:
        raise ValueError(f"{source} is not readable: its shape is {shape} and {found['shape']}.")
    return matrix


def _check_head(source: Source) -> None:
    """Raise ValueError for a file that is no MATLAB file, with what to do where it is known."""
    with source.path.open("rb") as file:
        head = file.read(128)
    for start, what in _FOREIGN:
        if head.startswith(start):
            raise ValueError(
                f"{source.path} is {what}, which is not read. Save it as version 7 (in Octave "
                "'save -v7 FILE A', in MATLAB save('FILE', 'A', '-v7')), or the matrix as .npy."
            )
    major = head[125:126] if head[126:] == b"IM" else head[124:125] if head[126:] == b"MI" else b""
    if major == b"\2":
        raise ValueError(
            f"{source.path} is a MATLAB 7.3 (HDF5) file, which is not read. Save it in MATLAB "
            "with save(..., '-v7'), or the matrix as .npy."
        )
    if major != b"\1" and not (len(head) >= 20 and 0 in head[:4]):
        raise ValueError(
            f"{source.path} is not a readable .mat file: it begins with no known head."
        )


def _answer(
    source: Source, name: str | None, elements: int, dtype: str = ""
) -> tuple[dict[str, Any], Matrix]:
    """Return what the child says, and the numbers of the variable that is asked for by name."""
    size = source.path.stat().st_size
    request = {
        "path": str(source.path.absolute()),
        "name": name,
        "dtype": dtype,
        "bytes": _SPARE_BYTES + size * (name is not None) + elements * _ELEMENT_BYTES,
        "seconds": 1 + (size + 16 * elements) // _BYTES_PER_S,
    }
    with _ONE_AT_A_TIME:
        if _reader(os.getpid()).is_stale():
            _reader.cache_clear()
        reader = _reader(os.getpid())
        try:
            found, matrix = reader.ask(request)
        except EOFError as error:
            _reader.cache_clear()
            raise ValueError(f"{source} is not readable: {error}.") from None
        except BaseException:
            reader.close()
            _reader.cache_clear()
            raise
    if "error" in found:
        raise ValueError(f"{source} is not readable: {found['error']}.")
    return found, matrix


class _Reader:
    """SciPy in a process of its own, which forks for every request."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C comes to us, who end it with all that it forked
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # whose buffers fill address space
        )
        self._owner = os.getpid()
        self._used = time.monotonic()
        atexit.register(self.close)

    def is_stale(self) -> bool:
        """Tell whether the process may have ended because nobody asked it; it is closed then."""
        stale = time.monotonic() - self._used > _FRESH_S
        if stale:
            self.close()
        self._used = time.monotonic()
        return stale

    def close(self) -> None:
        """End the process and those that it forked."""
        atexit.unregister(self.close)
        if os.getpid() == self._owner:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], Matrix]:
        """Return the answer to a request; EOFError, with the reason, where there comes none."""
        deadline = time.monotonic() + _PATIENCE * (1 + request["seconds"])
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")  # type: ignore[union-attr]
        (length,) = struct.unpack("<I", self._receive(np.empty(4, "u1"), deadline).data)
        if length > _MOST_JSON:
            raise self._ended("it holds too many variables")
        found = json.loads(self._receive(np.empty(length, "u1"), deadline).tobytes())
        matrix = np.empty(found.get("shape", 0), found.get("dtype", "f8"), order="F")
        self._receive(matrix.reshape(-1, order="A").view("u1"), deadline)
        return found, matrix

    def _receive(self, into: Matrix, deadline: float) -> Matrix:
        """Fill an array of bytes."""
        pipe, rest = self._process.stdout, into.data
        assert pipe is not None  # noqa: S101  # by the arguments above
        while rest:
            if not select.select([pipe], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise self._ended("SciPy took too long to read it")
            count = pipe.readinto(rest)  # type: ignore[attr-defined]  # it is raw
            if not count:
                raise self._ended("SciPy's process ended in the middle of its answer")
            rest = rest[count:]
        return into

    def _ended(self, why: str) -> EOFError:
        self.close()
        return EOFError(why)


@functools.cache
def _reader(pid: int) -> _Reader:
    """Return the reader of this process; a process that was forked has none yet."""
    return _Reader()
