"""cuBLAS through the C interface of cublasLt: which library, its handles, and prepared products.

The library is the one that the process has loaded already (PyTorch's, CuPy's), else that of the
``nvidia-cublas`` wheel, else the system's; where there is none, `missing` says so and nothing here
is needed. cuBLAS lays matrices out by columns, so a `Gemm` describes a product that way; what is
given by rows goes in as its transpose (`gemmule.rungs.matmul.cuda.cublas`).

A handle belongs to a device and serves every thread of the process, as the library promises.
Prepared products are read-only after they were made, and each call brings its own scalars, so they
do too. The algorithm is the choice of the library's own heuristic, asked once; partial sums are
only ever kept in the type of the sum (`REDUCTION`), never in that of the result. With the same
library on the same kind of device a prepared product gives the same bits at each run.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gemmule.backends.cuda import driver
from gemmule.backends.cuda.library import entry
from gemmule.core import fork
from gemmule.core.problem import ITEMSIZE
from gemmule.errors import DeviceError

SONAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
WHEELS = ("cu13/lib", "cublas/lib")  # below the folder of the package `nvidia`
INSTALL = "pip install nvidia-cublas, or import PyTorch or CuPy first"

# Numbers of cublasLt.h, cublas_api.h and library_types.h.
DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14} | {
    "complex64": 4,
    "complex128": 5,
}
COMPUTE_TYPES = {"float32": 68, "tf32": 77, "float64": 70, "complex64": 68, "complex128": 70}
NO_TRANSPOSE, TRANSPOSE = 0, 1
DESC_TRANSA, DESC_TRANSB = 3, 4
DESC_EPILOGUE, DESC_BIAS = 7, 8
LAYOUT_BATCH_COUNT, LAYOUT_BATCH_STEP = 5, 6
PREF_WORKSPACE, PREF_REDUCTION, PREF_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
REDUCTION = 2  # partial sums of a divided reduction lie in the workspace, in the sum's type
NOT_SUPPORTED = 15
STATUS = {
    1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE", 8: "ARCH_MISMATCH",
    11: "MAPPING_ERROR", 13: "EXECUTION_FAILED", 14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED",
}  # fmt: skip
# cuBLAS's own recommendation: 32 MiB from compute capability 9.0 on, 4 MiB before.
WORKSPACE_BYTES = {True: 32 << 20, False: 4 << 20}
MOST_ALGORITHMS = 8

# What a product is called by: first what varies (stream, both operands, C, the result, workspace),
# then the handle, the product, alpha, layouts of the operands, beta, layouts of C and the result,
# the algorithm, the workspace's size, and the function's address.
_CALL, _VARY, _LAST = struct.Struct("<17Q"), struct.Struct("<6Q").pack_into, 16
_PLACES = (6, 7, 8, 1, 9, 2, 10, 11, 3, 12, 4, 13, 14, 5, 15, 0)

_P, _I, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_ROWS, _STEP = ctypes.c_uint64, ctypes.c_int64
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (_P,),
    "cublasLtMatmulDescCreate": (_P, _I, _I),
    "cublasLtMatmulDescSetAttribute": (_P, _I, _P, _SIZE),
    "cublasLtMatmulDescDestroy": (_P,),
    "cublasLtMatrixLayoutCreate": (_P, _I, _ROWS, _ROWS, _STEP),
    "cublasLtMatrixLayoutSetAttribute": (_P, _I, _P, _SIZE),
    "cublasLtMatrixLayoutDestroy": (_P,),
    "cublasLtMatmulPreferenceCreate": (_P,),
    "cublasLtMatmulPreferenceSetAttribute": (_P, _I, _P, _SIZE),
    "cublasLtMatmulPreferenceDestroy": (_P,),
    "cublasLtMatmulAlgoGetHeuristic": (*(_P,) * 7, _I, _P, _P),
    # handle, product, alpha, A, its layout, B, its layout, beta, C, its layout, D, its layout,
    # algorithm, workspace, its size, stream
    "cublasLtMatmul": (*(_P,) * 14, _SIZE, _P),
}


class HeuristicResult(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``: one algorithm, opaque, and what it needs."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix by columns: `rows` elements each, `step` elements from one to the next."""

    dtype: str
    rows: int
    columns: int
    step: int
    batch_step: int = 0


@dataclass(frozen=True, slots=True)
class Gemm:
    """``result = alpha op(first) op(second) + beta result``, all by columns.

    `transposed` says of `first` and `second` whether op transposes them. `compute` names the type
    of products and sums; `alignment` divides every address and batch step, in bytes.
    """

    first: Matrix
    second: Matrix
    result: Matrix
    transposed: tuple[bool, bool]
    batch: int
    compute: str
    alignment: int

    @property
    def scalar(self) -> str:
        """The dtype of alpha and beta."""
        return "float32" if self.compute == "tf32" else self.compute


@functools.cache
def library() -> Any:
    """Return cublasLt, loaded, its functions typed; DeviceError where there is none."""
    with fork.WHOLE:
        for name, mode in _places():
            try:
                loaded = ctypes.CDLL(name, mode=mode)
                for function, types in PROTOTYPES.items():
                    getattr(loaded, function).argtypes = types
            except (OSError, AttributeError):
                continue
            return loaded
    raise DeviceError(f"cuBLAS ({' or '.join(SONAMES)}) was not found. {INSTALL}.")


def _places() -> Iterator[tuple[str, int]]:
    """Yield what to open and how: what is loaded, the wheel's, the system's."""
    for name in SONAMES:
        yield name, os.RTLD_NOLOAD | os.RTLD_NOW
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for below, name in zip(WHEELS, SONAMES, strict=True):
            path = Path(folder) / below / name
            if path.is_file():
                yield str(path), os.RTLD_NOW
    for name in SONAMES:
        yield name, os.RTLD_NOW


def missing() -> str | None:
    """Return why cuBLAS cannot be used here, or None where it can."""
    try:
        library()
    except DeviceError as error:
        return str(error)
    return None


def version() -> str:
    """Return the library's version, such as ``13.1.0``; DeviceError where there is none."""
    get = library().cublasLtGetVersion
    get.argtypes, get.restype = (), ctypes.c_size_t
    number = int(get())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def check(status: int, doing: str) -> None:
    """Raise DeviceError unless a call's status is success."""
    if status:
        name = STATUS.get(status, str(status))
        raise DeviceError(f"{doing}: cuBLAS answered {name}. Name another rung with rung=.")


_opening = threading.Lock()


@functools.cache
def _handle_of(ordinal: int, process: int) -> int:
    handle = ctypes.c_void_p()
    with driver.on_device(ordinal):
        check(library().cublasLtCreate(ctypes.byref(handle)), f"opening cuBLAS on cuda:{ordinal}")
    return int(handle.value or 0)


def handle(ordinal: int) -> int:
    """Return this process's handle for a device, opened once."""
    with _opening:
        return _handle_of(ordinal, os.getpid())


class Prepared:
    """A product on one device: what the library was told of it, and the algorithm it chose.

    `rank`: 0 for the algorithm that the heuristic thinks best, 1 for the next, and so on to the
    last that it knows. `workspace_bytes` are to be given to each call. finish: an epilogue by the
    library's number, the address of its bias or 0, and the steps of the C that it adds, from line
    to line and from one product of a batch to the next.
    """

    def __init__(
        self,
        gemm: Gemm,
        ordinal: int,
        rank: int = 0,
        finish: tuple[int, int, int, int] | None = None,
    ) -> None:
        self._handle, self._call = handle(ordinal), library().cublasLtMatmul
        self._words, made = f"{gemm.first} x {gemm.second}", _Made()
        weakref.finalize(self, made.destroy).atexit = False
        self._product = made.product(gemm)
        self._layouts = [made.layout(m, gemm.batch) for m in (gemm.first, gemm.second, gemm.result)]
        self._layouts.insert(2, self._layouts[2])
        if finish is not None:
            made.finish(self._product, *finish[:2])
            added = replace(gemm.result, step=finish[2], batch_step=finish[3])
            self._layouts[2] = made.layout(added, gemm.batch)
        with driver.on_device(ordinal):
            self._chosen = self._choose(made.preference(gemm, ordinal), rank)
        self._algorithm = ctypes.addressof(self._chosen)  # which it begins with
        self.workspace_bytes = int(self._chosen.workspace_bytes)
        self._scalar = gemm.scalar
        self._one, self._zero = _scalar(1.0, self._scalar), _scalar(0.0, self._scalar)

    def _choose(self, preference: int, rank: int) -> HeuristicResult:
        found = (HeuristicResult * MOST_ALGORITHMS)()
        count = ctypes.c_int()
        asked = self._handle, self._product, *self._layouts, preference, rank + 1
        told = ctypes.byref(found), ctypes.byref(count)
        status = library().cublasLtMatmulAlgoGetHeuristic(*asked, *told)
        if status not in (0, NOT_SUPPORTED):
            check(status, f"asking how to multiply {self._words}")
        good = [one for one in found[: count.value] if one.state == 0]
        if not good:
            check(NOT_SUPPORTED, f"asking how to multiply {self._words}")
        return good[min(rank, len(good) - 1)]

    def starter(self, alpha: complex, beta: complex, old: int | None = None) -> Any:
        """Return ``start(stream, first, second, result, workspace)``, which raises where it fails.

        Addresses all; `workspace` of `workspace_bytes` bytes. Nothing waits for the product. old:
        where C lies, which beta scales; by default where the result will.
        """
        plain = alpha == 1 and beta == 0
        scale = self._one if plain else _scalar(alpha, self._scalar)
        keep = self._zero if plain else _scalar(beta, self._scalar)
        of_first, of_second, of_old, of_result = self._layouts
        fixed = _CALL.pack(
            0,
            0,
            0,
            0,
            0,
            0,
            self._handle,
            self._product,
            ctypes.addressof(scale),
            of_first,
            of_second,
            ctypes.addressof(keep),
            of_old,
            of_result,
            self._algorithm,
            self.workspace_bytes,
            0,
        )
        function, local, kept = self._call, threading.local(), (scale, keep)

        def start(stream: int, first: int, second: int, result: int, workspace: int) -> None:
            try:
                block, call = local.memory
            except AttributeError:
                block = ctypes.create_string_buffer(fixed, _CALL.size)
                local.memory = block, call = block, entry.caller(function, block, _PLACES, _LAST)
            _VARY(block, 0, stream, first, second, old or result, result, workspace)
            status = call()
            if status:
                check(status, f"multiplying {self._words} with {[one[0] for one in kept]}")

        return start


def _scalar(value: complex, dtype: str) -> Any:
    """Return a number in memory as the library reads it: of a real dtype its first part alone."""
    part = ctypes.c_double if dtype in ("float64", "complex128") else ctypes.c_float
    return (part * 2)(value.real, value.imag)


class _Made:
    """What one product had the library make, each to be given back to it."""

    def __init__(self) -> None:
        self._lib = library()
        self._made: list[tuple[str, int]] = []

    def destroy(self) -> None:
        """Give everything back."""
        while self._made:
            kind, pointer = self._made.pop()
            getattr(self._lib, f"{kind}Destroy")(pointer)

    def _create(self, kind: str, *values: int) -> int:
        pointer = ctypes.c_void_p()
        check(getattr(self._lib, f"{kind}Create")(ctypes.byref(pointer), *values), f"making {kind}")
        self._made.append((kind, int(pointer.value or 0)))
        return self._made[-1][1]

    def _set(self, kind: str, pointer: int, attribute: int, value: Any) -> None:
        given = (pointer, attribute, ctypes.byref(value), ctypes.sizeof(value))
        check(getattr(self._lib, f"{kind}SetAttribute")(*given), f"setting {kind} {attribute}")

    def product(self, gemm: Gemm) -> int:
        """Describe types and transposes."""
        types = COMPUTE_TYPES[gemm.compute], DATA_TYPES[gemm.scalar]
        made = self._create("cublasLtMatmulDesc", *types)
        for attribute, turned in zip((DESC_TRANSA, DESC_TRANSB), gemm.transposed, strict=True):
            value = ctypes.c_int32(TRANSPOSE if turned else NO_TRANSPOSE)
            self._set("cublasLtMatmulDesc", made, attribute, value)
        return made

    def finish(self, product: int, function: int, bias: int) -> None:
        """Describe an epilogue, with a bias where its address is not 0."""
        self._set("cublasLtMatmulDesc", product, DESC_EPILOGUE, ctypes.c_int32(function))
        if bias:
            self._set("cublasLtMatmulDesc", product, DESC_BIAS, ctypes.c_void_p(bias))

    def layout(self, matrix: Matrix, batch: int) -> int:
        """Describe a matrix."""
        shape = (DATA_TYPES[matrix.dtype], matrix.rows, matrix.columns, matrix.step)
        made = self._create("cublasLtMatrixLayout", *shape)
        if batch > 1:
            self._set("cublasLtMatrixLayout", made, LAYOUT_BATCH_COUNT, ctypes.c_int32(batch))
            step = ctypes.c_int64(matrix.batch_step)
            self._set("cublasLtMatrixLayout", made, LAYOUT_BATCH_STEP, step)
        return made

    def preference(self, gemm: Gemm, ordinal: int) -> int:
        """Describe what algorithms may use."""
        made = self._create("cublasLtMatmulPreference")
        most = WORKSPACE_BYTES[driver.device_info(ordinal).capability >= (9, 0)]
        self._set("cublasLtMatmulPreference", made, PREF_WORKSPACE, ctypes.c_uint64(most))
        self._set("cublasLtMatmulPreference", made, PREF_REDUCTION, ctypes.c_uint32(REDUCTION))
        matrices = (gemm.first, gemm.second, gemm.result, gemm.result)
        for attribute, matrix in zip(PREF_ALIGNMENTS, matrices, strict=True):
            aligned = ctypes.c_uint32(max(gemm.alignment, ITEMSIZE[matrix.dtype]))
            self._set("cublasLtMatmulPreference", made, attribute, aligned)
        return made
