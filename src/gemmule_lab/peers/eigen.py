"""Eigen as a peer, through a small C++ file that the system's g++ compiles on first use."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from gemmule.core.problem import Problem
from gemmule.errors import CompileError
from gemmule.settings import cache_folder
from gemmule_lab.peers.peer import Peer, Prepared, plain_refusal, result_shape
from gemmule_lab.records.environment import cpu_name

SOURCE = Path(__file__).with_name("eigen_peer.cpp")
HEADERS = Path("/usr/include/eigen3")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=c++17", "-DNDEBUG")
DOCUMENTS = ("-O2", "-mavx", *FLAGS[2:])  # as document 001 compiles it


def _absent() -> str | None:
    if shutil.which("g++") is None:
        return "g++ not found"
    if not (HEADERS / "Eigen" / "Dense").is_file():
        return f"Eigen's headers are not in {HEADERS}"
    return None


@functools.cache
def _library(flags: tuple[str, ...] = FLAGS) -> ctypes.CDLL:
    """Compile the C++ file, or take what the same source, compiler and CPU gave before."""
    compiler = subprocess.run(
        ["g++", "--version"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    parts = [SOURCE.read_text(), compiler, " ".join(flags), cpu_name()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = cache_folder() / "peers"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CompileError(f"{folder} can be written by others; Eigen is not loaded from it.")
    built = folder / f"eigen-{digest}.so"
    if not built.is_file():
        _compile(built, flags)
    return ctypes.CDLL(str(built))


def _compile(target: Path, flags: tuple[str, ...]) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    try:
        command = ["g++", *flags, f"-I{HEADERS}", str(SOURCE), "-o", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise CompileError("g++ could not compile the Eigen peer.", log=done.stderr)
        Path(name).replace(target)
    finally:
        Path(name).unlink(missing_ok=True)


def _prepare(
    problem: Problem, a: np.ndarray, b: np.ndarray, flags: tuple[str, ...] = FLAGS
) -> Prepared:
    out = np.empty(result_shape(problem), a.dtype)
    function = getattr(_library(flags), f"{problem.op}_{problem.a}")
    function.restype = None
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (a, b, out)]
    if problem.op == "matvec":
        sizes, orders = [problem.m, problem.n], [a.flags.c_contiguous]
    else:
        sizes = [problem.m, problem.n, problem.k]
        orders = [a.flags.c_contiguous, b.flags.c_contiguous]
    arguments: list[Any] = [
        *pointers,
        *(ctypes.c_ssize_t(s) for s in sizes),
        *(ctypes.c_int(o) for o in orders),
    ]

    def call(_keep: tuple[np.ndarray, ...] = (a, b, out)) -> None:
        function(*arguments)

    return Prepared(call, lambda: out)


def _mode(flags: tuple[str, ...] = FLAGS) -> str:
    number, threads = _library(flags).version(), _library(flags).threads()
    version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return f"Eigen {version}, IEEE float, g++ {' '.join(flags[:3])}, no BLAS, {threads} threads"


_refuses = functools.partial(plain_refusal, dtypes=("float32", "float64"))
PEERS = (Peer("eigen", "cpu", _absent, _refuses, _prepare, _mode),)
_as_001 = functools.partial(_prepare, flags=DOCUMENTS), functools.partial(_mode, DOCUMENTS)
AS_001 = Peer("eigen, -O2 -mavx", "cpu", _absent, _refuses, *_as_001)
