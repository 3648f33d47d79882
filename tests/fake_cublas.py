"""A cublasLt without a GPU: functions of C that check what they are told and multiply from it.

The functions are real C function pointers over Python ones, with prototypes of their own, so what
arrives here went through ctypes as it does on the way to the library. The product is computed from
the descriptors alone: what they leave out, or tell wrongly, is missing or wrong in the result.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from gemmule.backends.cuda.library import cublas
from gemmule.core.problem import numpy_dtype

P, INT, N = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
LONG, STEP = ctypes.c_uint64, ctypes.c_int64
C_TYPES = {
    0: "float32",
    1: "float64",
    2: "float16",
    4: "complex64",
    5: "complex128",
    14: "bfloat16",
}
SCALES = {68: (0, 4), 77: (0, 4), 70: (1, 5)}  # the types of scalars that go with each type of sums
FIRST = 77  # what the opaque algorithm of rank 0 holds
FUNCTIONS: dict[int, Any] = {  # of epilogues but for their bias
    0: None,
    1: None,
    2: lambda v: np.maximum(v, 0),
    32: lambda v: v * (1 + np.tanh((2 / np.pi) ** 0.5 * (v + 0.044715 * v**3))) / 2,
}
SUCCESS, INVALID, UNSUPPORTED = 0, 7, 15


def _number(address: int, dtype: np.dtype[Any]) -> Any:
    memory = (ctypes.c_uint8 * dtype.itemsize).from_address(address)
    return np.frombuffer(memory, dtype)[0].item()


@dataclass
class Layout:
    dtype: str
    rows: int
    columns: int
    step: int
    count: int = 1
    batch_step: int = 0

    def view(self, address: int) -> np.ndarray[Any, Any]:
        """Return the matrices at an address, one after the other, by rows and columns."""
        dtype = numpy_dtype(self.dtype)
        reach = (self.count - 1) * self.batch_step + (self.columns - 1) * self.step + self.rows
        memory = (ctypes.c_uint8 * (reach * dtype.itemsize)).from_address(address)
        flat = np.frombuffer(memory, dtype)
        strides = (self.batch_step, 1, self.step)
        shape = (self.count, self.rows, self.columns)
        bytes_apart = tuple(one * dtype.itemsize for one in strides)
        return np.lib.stride_tricks.as_strided(flat, shape, bytes_apart, writeable=True)


@dataclass
class Product:
    compute: int
    scale: int
    turned: dict[int, int] = field(default_factory=lambda: {3: 0, 4: 0})
    epilogue: int = 1
    bias: int = 0


class FakeCublas:
    """Stands for what `gemmule.backends.cuda.library.cublas.library` returns.

    `calls`: of each product the stream and the workspace's address; `used`: its algorithm.
    `answers`: what a function is to return instead. `known`: how many algorithms the heuristic has;
    each wants `workspace` bytes.
    """

    def __init__(self, known: int = 4, workspace: int = 0) -> None:
        self.known, self.workspace = known, workspace
        self.answers: dict[str, int] = {}
        self.calls: list[tuple[int, int]] = []
        self.used: list[int] = []
        self.asked: list[dict[int, int]] = []
        self.handles: list[int] = []
        self.things: dict[int, Any] = {}
        self.products: list[Product] = []
        self._next = 0x1000
        prototypes: dict[str, tuple[Any, ...]] = {
            "cublasLtCreate": (P,),
            "cublasLtMatmulDescCreate": (P, INT, INT),
            "cublasLtMatmulDescSetAttribute": (P, INT, P, N),
            "cublasLtMatmulDescDestroy": (P,),
            "cublasLtMatrixLayoutCreate": (P, INT, LONG, LONG, STEP),
            "cublasLtMatrixLayoutSetAttribute": (P, INT, P, N),
            "cublasLtMatrixLayoutDestroy": (P,),
            "cublasLtMatmulPreferenceCreate": (P,),
            "cublasLtMatmulPreferenceSetAttribute": (P, INT, P, N),
            "cublasLtMatmulPreferenceDestroy": (P,),
            "cublasLtMatmulAlgoGetHeuristic": (P, P, P, P, P, P, P, INT, P, P),
            "cublasLtMatmul": (P, P, P, P, P, P, P, P, P, P, P, P, P, P, N, P),
        }
        for name, types in prototypes.items():
            made = ctypes.CFUNCTYPE(INT, *types)(self._guarded(name))
            made.argtypes = cublas.PROTOTYPES[name]
            setattr(self, name, made)
        self.cublasLtGetVersion = ctypes.CFUNCTYPE(N)(lambda: 130_102)
        self.faults: list[BaseException] = []

    def _guarded(self, name: str) -> Any:
        body = getattr(self, "_" + name.removeprefix("cublasLt"))

        def call(*values: Any) -> int:
            if name in self.answers:
                return self.answers[name]
            try:
                return int(body(*(0 if value is None else value for value in values)) or SUCCESS)
            except Exception as error:  # nothing can be raised through C
                self.faults.append(error)
                return INVALID

        return call

    def _new(self, target: int, thing: Any) -> None:
        self._next += 16
        self.things[self._next] = thing
        ctypes.c_void_p.from_address(target).value = self._next

    def _Create(self, target: int) -> None:
        self._new(target, "handle")
        self.handles.append(self._next)

    def _MatmulDescCreate(self, target: int, compute: int, scale: int) -> int:
        self._new(target, Product(compute, scale))
        return SUCCESS if scale in SCALES[compute] else INVALID

    def _MatmulDescSetAttribute(self, product: int, which: int, value: int, size: int) -> int:
        if (which, size) == (8, 8):
            self.things[product].bias = ctypes.c_uint64.from_address(value).value
            return SUCCESS
        if (which, size) == (7, 4):
            self.things[product].epilogue = ctypes.c_int32.from_address(value).value
            return SUCCESS
        self.things[product].turned[which] = ctypes.c_int32.from_address(value).value
        return SUCCESS if size == 4 and which in (3, 4) else INVALID

    def _MatrixLayoutCreate(
        self, target: int, dtype: int, rows: int, columns: int, step: int
    ) -> int:
        self._new(target, Layout(C_TYPES[dtype], rows, columns, step))
        return SUCCESS if step >= rows >= 1 <= columns else INVALID

    def _MatrixLayoutSetAttribute(self, layout: int, which: int, value: int, size: int) -> int:
        if (which, size) == (5, 4):
            self.things[layout].count = ctypes.c_int32.from_address(value).value
        elif (which, size) == (6, 8):
            self.things[layout].batch_step = ctypes.c_int64.from_address(value).value
        else:
            return INVALID
        return SUCCESS

    def _MatmulPreferenceCreate(self, target: int) -> None:
        self._new(target, {})

    def _MatmulPreferenceSetAttribute(self, made: int, which: int, value: int, size: int) -> int:
        kind = {8: ctypes.c_uint64, 4: ctypes.c_uint32}[size]
        self.things[made][which] = kind.from_address(value).value
        return SUCCESS if size == (8 if which == 1 else 4) else INVALID

    def _destroy(self, thing: int) -> None:
        del self.things[thing]

    _MatmulDescDestroy = _MatrixLayoutDestroy = _MatmulPreferenceDestroy = _destroy

    def _MatmulAlgoGetHeuristic(self, *values: int) -> int:
        opened, product, *layouts, preference, most, found, count = values
        assert self.things[opened] == "handle"
        self._checked(product, layouts)
        self.asked.append(dict(self.things[preference]))
        results = (cublas.HeuristicResult * most).from_address(found)
        many = min(most, self.known)
        for rank in range(many):
            results[rank].algorithm[0] = FIRST + rank
            results[rank].workspace_bytes = self.workspace
        ctypes.c_int.from_address(count).value = many
        return SUCCESS if many else UNSUPPORTED

    def _checked(self, product: int, layouts: Any) -> list[Layout]:
        """Return the layouts of a product whose sizes fit together."""
        made: list[Layout] = [self.things[layout] for layout in layouts]
        turned = self.things[product].turned
        (m, k), (also_k, n) = (
            (one.columns, one.rows) if turned[which] else (one.rows, one.columns)
            for one, which in zip(made[:2], (3, 4), strict=True)
        )
        assert k == also_k
        assert all((one.rows, one.columns) == (m, n) for one in made[2:])
        assert len({one.count for one in made}) == 1
        return made

    def _Matmul(self, *values: int) -> None:
        (opened, product, scale_at, first, of_first, second, of_second, keep_at, old, of_old,
         result, of_result, algorithm, work, size, stream) = values  # fmt: skip
        assert opened in self.handles
        told = self.things[product]
        self.products.append(told)
        left, right, before, out = self._checked(product, (of_first, of_second, of_old, of_result))
        rank = ctypes.c_uint64.from_address(algorithm).value - FIRST
        assert 0 <= rank < self.known
        self.used.append(rank)
        assert size == self.workspace
        assert (work != 0) == (size != 0)
        ctypes.memset(work, 0xFF, size)  # what is not its own is spoilt
        assert told.epilogue != 1 or told.bias or old != result or before == out
        assert (told.scale in (4, 5)) == left.dtype.startswith("complex")
        scalar = numpy_dtype(C_TYPES[told.scale])
        scale, keep = (_number(at, scalar) for at in (scale_at, keep_at))
        wide = np.complex128 if scalar.kind == "c" else np.float64
        a, b = (one.view(at).astype(wide) for one, at in ((left, first), (right, second)))
        a = a.swapaxes(1, 2) if told.turned[3] else a
        b = b.swapaxes(1, 2) if told.turned[4] else b
        target = out.view(result)
        with np.errstate(all="ignore"):
            value = scale * (a @ b)
            if keep != 0:
                value = value + keep * before.view(old).astype(wide)
            if told.epilogue & 4:  # along the library's columns
                lines = Layout(out.dtype, out.rows, 1, out.rows)
                value = value + lines.view(told.bias).astype(wide)
            function = FUNCTIONS[told.epilogue & ~4]
            value = value if function is None else function(value)
            target[...] = value.astype(target.dtype)
        self.calls.append((stream, work))


@contextlib.contextmanager
def installed(fake: FakeCublas | None) -> Iterator[FakeCublas | None]:
    """Give the CUDA back end this library, or none, and its own again afterwards."""

    def absent() -> Any:
        raise cublas.DeviceError("cuBLAS was not found: a test left it out.")

    library = absent if fake is None else lambda: fake
    cublas._handle_of.cache_clear()
    try:
        with mock.patch.object(cublas, "library", library):
            yield fake
    finally:
        cublas._handle_of.cache_clear()
