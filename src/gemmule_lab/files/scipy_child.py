"""The program of the child process in which SciPy reads MATLAB files; `mat` runs it.

It reads requests, a line of JSON each, and forks for every one: what a damaged file breaks ends
with that process, which has limits of memory and of processor time. An answer is its length in four
bytes, JSON, and then the numbers that were asked for, column by column. Only NumPy and SciPy are
imported, so that it begins quickly.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import struct
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io

EXACT = 2**24  # below it integers are exact in float32


def main() -> None:
    """Answer requests until there are no more, or until one ends its process."""
    warnings.simplefilter("error")
    for kind in (DeprecationWarning, PendingDeprecationWarning):
        warnings.simplefilter("ignore", kind)
    begun = mmap.mmap(-1, 1)  # shared: whether a process that died had begun to answer
    for line in sys.stdin.buffer:
        begun[0] = 0
        child = os.fork()
        if child == 0:
            answer(json.loads(line), begun)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code and begun[0]:
            os._exit(1)
        elif code == -signal.SIGXCPU:
            write({"error": "SciPy needed too much time to read it"})
        elif code:
            write({"error": f"SciPy's process died of it (exit code {code})"})


def answer(request: dict[str, Any], begun: mmap.mmap) -> None:
    """Write what a request asks for, or why there is none."""
    limit(request["bytes"], request["seconds"])
    numbers = None
    try:
        if request["name"] is None:
            found: dict[str, Any] = {"variables": variables(request["path"])}
        else:
            numbers = matrix(request["path"], request["name"], np.dtype(request["dtype"]))
            found = {"dtype": numbers.dtype.str, "shape": numbers.shape}
    except MemoryError:
        found = {"error": "it takes more memory than a matrix of its shape does"}
    except Exception as error:  # SciPy fed with damaged bytes fails in any way
        text = " ".join(str(error).split()).rstrip(".")
        found = {"error": (text or type(error).__name__)[:300]}
    begun[0] = 1
    write(found, numbers)


def write(found: dict[str, Any], numbers: np.ndarray[Any, Any] | None = None) -> None:
    """Write an answer."""
    head = json.dumps(found).encode()
    sys.stdout.buffer.write(struct.pack("<I", len(head)) + head)
    if numbers is not None:
        sys.stdout.buffer.write(numbers.reshape(-1, order="A").view("u1").data)
    sys.stdout.buffer.flush()


def limit(nbytes: int, seconds: int) -> None:
    """Let this process take so much more memory than it has, and so much processor time."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    with suppress(OSError):  # no /proc: not Linux, where the limit would not be held either
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + nbytes, taken + nbytes))


def variables(path: str) -> list[Any]:
    """Return name, shape and class of every variable but MATLAB's own, without their numbers."""
    listed = scipy.io.whosmat(path, appendmat=False)
    return [one for one in listed if one[0] not in ("", "__function_workspace__")]


def matrix(path: str, name: str, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a variable by columns, as the dtype of its class; ValueError where SciPy rounds."""
    with np.errstate(all="ignore"):  # of complex numbers that are judged below
        stored = scipy.io.loadmat(path, appendmat=False, variable_names=[name])[name]
    if not isinstance(stored, np.ndarray) or stored.dtype.kind not in "iufc":
        raise ValueError("it holds no plain numbers")
    with Path(path).open("rb") as file:
        version_4 = 0 in file.read(4)  # which has no classes but the stored types
    if version_4:
        dtype = stored.dtype.newbyteorder("=")
    elif stored.dtype.kind == "c":
        single = dtype.itemsize <= 2 or dtype == np.float32
        dtype = np.dtype("c8" if single else "c16")
        parts = np.array([stored.real, stored.imag])
        if not single and stored.dtype.itemsize == 8 and (np.abs(parts) >= EXACT).any():
            raise ValueError("SciPy rounds its complex integers; save the two parts apart")
    if version_4 and stored.dtype.kind == "c" and not np.isfinite(stored).all():
        raise ValueError("SciPy misreads infinite complex numbers of version 4; save it as 7")
    return np.asarray(exactly(stored, dtype), order="F")


def exactly(stored: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return `stored` as `dtype`, native; ValueError where a number would change.

    Writers store a variable in the fewest bytes that hold it, so nothing changes in a sound file.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        converted = stored.astype(dtype, copy=False)
        safe = np.can_cast(stored.dtype, dtype, "safe")
        if not safe and not np.array_equal(converted, stored, equal_nan=dtype.kind in "fc"):
            raise ValueError(f"it stores {stored.dtype} numbers that no {dtype} holds")
    return converted


if __name__ == "__main__":
    main()
