"""The threads of NumPy's OpenBLAS, for shares of ours: two teams would fight over the cores.

OpenBLAS's threads spin for some tens of milliseconds after each product and give way to nobody, so
that threads of our own get no core in a program that also uses NumPy. But they take work from a
queue that the library exports (``exec_blas_async``), at the price at which NumPy itself starts
them. Borrowed only where all of this holds: Linux on x86-64, NumPy's BLAS is an OpenBLAS of a
version whose queue is known, built with its own threads (not OpenMP's). `examined` says why not.

Source of the queue's layout: ``common_thread.h`` of OpenBLAS 0.3, unchanged since its first
version: routine, position, assigned, args, range_m, range_n, sa, sb, next, a mutex of 40 bytes, a
condition of 48, mode, status. A fork ends the threads, and ``exec_blas_async`` of 0.3.30 waits for
itself where it has to start them again (OpenBLAS's issue 5520): so `Team.start` is called first.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import platform
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

ENTRY_BYTES = 168
NEXT_AT = 64
_ROUTINE_AT, _ARGUMENTS_AT, _MODE_AT = 0, 24, 160
_PTHREAD = 0x4000  # the routine takes its arguments' address alone
_VERSION = re.compile(r"OpenBLAS 0\.3\.(\d+)[ .]")
_KNOWN = range(20, 35)
# Elements of a matrix from which on its product with a vector is cut among threads (gemv.c; by
# timing of 0.3.31: between 262,144 and 589,824).
_CUT, _CUT_SINCE_31 = 2304 * 4, 115200 * 4
_OWN_THREADS = 1
_PREFIXES = ("scipy_", "")
_SUFFIXES = ("64_", "")


class Team(NamedTuple):
    """Addresses in one OpenBLAS: three functions, and two int32.

    queue: queues entries. wait: waits until the threads that took so many entries are idle. start:
    starts the threads where there are none, as after a fork. running: 0 where there are none. size:
    how many threads a product may use now, the caller's counted. words: which library it is.
    """

    queue: int
    wait: int
    start: int
    running: int
    size: int
    words: str


def team() -> Team | None:
    """Return NumPy's OpenBLAS threads, or None where they cannot be borrowed."""
    found = examined()
    return found if isinstance(found, Team) else None


@functools.cache
def examined() -> Team | str:
    """Return NumPy's OpenBLAS threads, or why they cannot be borrowed, in words."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"OpenBLAS's queue is known on Linux x86_64, this is {sys.platform}"
    paths = _libraries()
    if not paths:
        return "NumPy's BLAS is no OpenBLAS that this process has loaded"
    if len(paths) > 1:
        return f"{len(paths)} OpenBLAS are loaded, and which is NumPy's cannot be told"
    return _team_of(paths[0])


def shares_vectors(m: int, n: int) -> bool:
    """Whether NumPy's OpenBLAS cuts a product of an m x n matrix with a vector among threads.

    It waits for all of them then, also for one that another process keeps from running.
    """
    if m * n < _CUT:
        return False
    version, threads = _version_and_threads()
    return threads() > 1 and m * n >= (_CUT if version < 31 else _CUT_SINCE_31)


@functools.cache
def _version_and_threads() -> tuple[int, Callable[[], int]]:
    """Return the last part of the version of NumPy's OpenBLAS, and what tells its threads."""
    config, threads = routine("openblas_get_config"), routine("openblas_get_num_threads")
    if config is None or threads is None:
        return 0, lambda: 1
    found = _VERSION.match(ctypes.CFUNCTYPE(ctypes.c_char_p)(config)().decode("ascii", "replace"))
    return 0 if found is None else int(found[1]), ctypes.CFUNCTYPE(ctypes.c_int)(threads)


def _libraries() -> list[str]:
    """Return the OpenBLAS libraries that may be NumPy's, of those that this process has loaded."""
    np.dot(np.ones(1), np.ones(1))
    try:
        return loaded_with_numpy(Path("/proc/self/maps").read_text().splitlines())
    except OSError:
        return []


def loaded_with_numpy(maps: Iterable[str]) -> list[str]:
    """Return what may be NumPy's OpenBLAS, of the lines of a process's map of memory."""
    lines = (line for line in maps if len(line.split(maxsplit=5)) == 6)
    paths = {line.split(maxsplit=5)[5] for line in lines if "openblas" in line.rsplit("/", 1)[-1]}
    # SciPy brings one of its own, whose threads are not the ones that NumPy's products start.
    ours = [path for path in sorted(paths) if "/numpy.libs/" in path or "/numpy/.libs/" in path]
    return ours or sorted(path for path in paths if not re.search(r"/scipy(/\.|\.)libs/", path))


@functools.cache
def routine(name: str) -> int | None:
    """Return the address of a routine of NumPy's OpenBLAS, or None where there is none to be sure.

    name: as in C, without what this build puts before and behind it.
    """
    paths = _libraries() if sys.platform == "linux" and platform.machine() == "x86_64" else []
    if len(paths) != 1:
        return None
    try:
        library = ctypes.CDLL(paths[0])
    except OSError:
        return None
    named = _naming(library)
    found = None if named is None else getattr(library, named(name), None)
    return None if found is None else ctypes.cast(found, ctypes.c_void_p).value


def _naming(library: ctypes.CDLL) -> Callable[[str], str] | None:
    """Return how a build names what C calls so, or None where it is no OpenBLAS."""
    for before, behind in itertools.product(_PREFIXES, _SUFFIXES):
        if hasattr(library, f"{before}openblas_get_config{behind}"):
            return functools.partial("{0}{2}{1}".format, before, behind)
    return None


def _team_of(path: str) -> Team | str:
    name = path.rsplit("/", 1)[-1]
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        return f"{name} cannot be opened: {error}"
    named = _naming(library)
    parallel = None if named is None else getattr(library, named("openblas_get_parallel"), None)
    if named is None or parallel is None:
        return f"{name} does not say which OpenBLAS it is"
    config = library[named("openblas_get_config")]
    config.restype = ctypes.c_char_p
    return team_in(library, config().decode("ascii", "replace"), parallel())


def team_in(library: ctypes.CDLL, config: str, parallel: int) -> Team | str:
    """Return the threads of an OpenBLAS that says this of itself, or why they are not borrowed."""
    found = _VERSION.match(config)
    words = " ".join(config.split()[:2]) or "OpenBLAS"
    if found is None or int(found[1]) not in _KNOWN:
        return f"the queue of {words} is not known"
    if parallel != _OWN_THREADS:
        return f"{words} was built with {'OpenMP' if parallel == 2 else 'no'} threads"
    try:
        functions = [
            library[name]
            for name in ("exec_blas_async", "exec_blas_async_wait", "blas_thread_init")
        ]
        numbers = [
            ctypes.c_int.in_dll(library, name) for name in ("blas_server_avail", "blas_cpu_number")
        ]
    except (AttributeError, ValueError) as error:
        return f"{words} does not export its queue: {error}"
    queue, wait, start = (ctypes.cast(one, ctypes.c_void_p).value or 0 for one in functions)
    running, size = (ctypes.addressof(one) for one in numbers)
    return Team(queue, wait, start, running, size, words)


def write_entries(room: memoryview, address: int, count: int, routine: int, arguments: int) -> None:
    """Fill `count` queue entries at `address`, whose memory is `room`, each linked to the next.

    Each calls the routine with an argument of one more than the entry before.
    """
    words = np.frombuffer(room, np.int64).reshape(count, ENTRY_BYTES // 8)
    words[:] = 0
    words[:, _ROUTINE_AT // 8] = routine
    words[:, _ARGUMENTS_AT // 8] = arguments + np.arange(count)
    words[:, NEXT_AT // 8] = address + ENTRY_BYTES * np.arange(1, count + 1)
    words[-1, NEXT_AT // 8] = 0
    words[:, _MODE_AT // 8] = _PTHREAD
