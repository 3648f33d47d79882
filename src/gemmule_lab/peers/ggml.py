"""The peer ggml: the kernels of llama.cpp, from the libraries that llama-cpp-python brings.

Its C API is called through ctypes: a graph of one ``ggml_mul_mat`` over weights in its block
formats. Our codes are written into blocks of 32 unchanged (Q4_0 and Q8_0; Q4_1 where a 4-bit matrix
has zero points); scales, and zero points times scales, are rounded to float16, which is all its
formats hold. It rounds activations to 8 bits, in blocks of 32 with a float16 scale. Weights lie
in the order of the file: llama.cpp itself may repack them for products with many columns.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gemmule.core.problem import Problem
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.timing.machine import usable_cpus
from gemmule_lab.peers.cpu_quantized import plain_quant, rows_of, shaped
from gemmule_lab.peers.peer import Prepared, grouped_parts, module_missing, packing, release

BLOCK = 32
F32, Q4_0, Q4_1, Q8_0 = 0, 2, 3, 8  # enum ggml_type, fixed by the file format
LIBRARIES = ("libggml-base", "libggml-cpu", "libggml")
SLACK_BYTES = 1 << 20  # tensor headers, the graph, alignment


class _InitParams(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


class _Plan(ctypes.Structure):
    """``struct ggml_cplan``; `reserve` is room for fields that later versions append."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("reserve", ctypes.c_uint8 * 64),
    )


_POINTER, _INT, _LONG, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[Any, Sequence[Any]]] = {
    "ggml_cpu_init": (None, ()),
    "ggml_init": (_POINTER, (_InitParams,)),
    "ggml_free": (None, (_POINTER,)),
    "ggml_row_size": (_SIZE, (_INT, _LONG)),
    "ggml_new_tensor_2d": (_POINTER, (_POINTER, _INT, _LONG, _LONG)),
    "ggml_get_data": (_POINTER, (_POINTER,)),
    "ggml_mul_mat": (_POINTER, (_POINTER, _POINTER, _POINTER)),
    "ggml_graph_overhead": (_SIZE, ()),
    "ggml_new_graph": (_POINTER, (_POINTER,)),
    "ggml_build_forward_expand": (None, (_POINTER, _POINTER)),
    "ggml_graph_plan": (_Plan, (_POINTER, _INT, _POINTER)),
    "ggml_graph_compute": (_INT, (_POINTER, ctypes.POINTER(_Plan))),
}


def _folder() -> Path | None:
    spec = importlib.util.find_spec("llama_cpp")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) / "lib" if places else None


@functools.cache
def _absent() -> str | None:
    missing = module_missing("llama_cpp")
    if missing is not None:
        return "llama-cpp-python not installed"
    try:
        _library()
    except (OSError, AttributeError) as error:
        return f"the ggml of llama-cpp-python cannot be used: {str(error)[:200]}"
    return None


@functools.cache
def _library() -> dict[str, Any]:
    """Return the functions; OSError or AttributeError where the libraries lack something."""
    folder = _folder()
    loaded = []
    for name in LIBRARIES:
        path = (folder or Path()) / f"{name}.so"
        if path.is_file():
            loaded.append(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL))
    if not loaded:
        raise OSError(f"no {LIBRARIES[0]}.so in {folder}")
    functions = {}
    for name, (result, arguments) in _FUNCTIONS.items():
        owner = next((one for one in loaded if hasattr(one, name)), None)
        if owner is None:
            raise AttributeError(f"no library there has {name}")
        function = getattr(owner, name)
        function.restype, function.argtypes = result, list(arguments)
        functions[name] = function
    functions["ggml_cpu_init"]()
    return functions


def _refuses(problem: Problem) -> str | None:
    spec = plain_quant(problem, ("float32",))
    if isinstance(spec, str):
        return spec
    if spec.bits == 8 and spec.has_zeros:
        return "its 8-bit format has no zero points"
    size = problem.reduction if spec.group_size in (None, -1) else int(spec.group_size or 1)
    if problem.reduction % BLOCK or size % BLOCK:
        return "it needs whole blocks of 32 columns"
    return None


def blocks(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, bits: int) -> Any:
    """Return the rows of a matrix in ggml's blocks, as bytes.

    codes: of every element, (m, k); scales, zeros: of every block, (m, k / 32). A 4-bit block holds
    columns j and j + 16 in one byte, the first in the lower half.
    """
    rows, k = codes.shape
    parts = codes.reshape(rows, k // BLOCK, BLOCK)
    scale = scales[:, :, None].astype(np.float32)
    head = [scale.astype(np.float16).view(np.uint8)]
    if bits == 8:
        body = parts ^ np.uint8(0x80)  # codes less 128, as signed bytes
    else:
        body = parts[:, :, : BLOCK // 2] | (parts[:, :, BLOCK // 2 :] << 4)
        if zeros is not None:
            offset = -zeros[:, :, None].astype(np.float32) * scale
            head.append(offset.astype(np.float16).view(np.uint8))
    return np.ascontiguousarray(np.concatenate([*head, body], axis=2))


def _copies(problem: Problem, a: QuantizedMatrix, b: np.ndarray) -> Callable[[], Prepared]:
    """Convert the weights once; every call of what is returned puts them where none lay before."""
    x = rows_of(problem, b)
    codes, scales, zeros = grouped_parts(a)
    with_zeros = a.zeros is not None
    size = problem.reduction if a.group_size in (None, -1) else int(a.group_size or 1)

    def of_blocks(values: np.ndarray) -> np.ndarray:
        spread = np.repeat(values, size // BLOCK, axis=1)[:, : codes.shape[1] // BLOCK]
        return np.broadcast_to(spread, (len(codes), spread.shape[1]))

    stored = blocks(codes, of_blocks(scales), of_blocks(zeros) if with_zeros else None, a.bits)
    kind = Q8_0 if a.bits == 8 else (Q4_1 if with_zeros else Q4_0)

    def make() -> Prepared:
        product = _Product(kind, stored, x, problem.m)
        return Prepared(product.compute, lambda: shaped(problem, product.values()))

    return make


class _Product:
    """One graph with its weights and activations, in a context that is freed with it."""

    def __init__(self, kind: int, stored: np.ndarray, x: np.ndarray, m: int) -> None:
        library = _library()
        columns, k = x.shape
        expected = m * library["ggml_row_size"](kind, k)
        if stored.nbytes != expected:
            raise ValueError(f"{stored.nbytes} bytes of blocks; its format has {expected}.")
        size = stored.nbytes + x.nbytes + 4 * m * columns + library["ggml_graph_overhead"]()
        context = library["ggml_init"](_InitParams(size + SLACK_BYTES, None, False))
        if not context:
            raise MemoryError("ggml_init gave no context")
        self._release = weakref.finalize(self, library["ggml_free"], context)
        weights = library["ggml_new_tensor_2d"](context, kind, k, m)
        activations = library["ggml_new_tensor_2d"](context, F32, k, columns)
        ctypes.memmove(library["ggml_get_data"](weights), stored.ctypes.data, stored.nbytes)
        ctypes.memmove(library["ggml_get_data"](activations), x.ctypes.data, x.nbytes)
        outcome = library["ggml_mul_mat"](context, weights, activations)
        self._graph = library["ggml_new_graph"](context)
        library["ggml_build_forward_expand"](self._graph, outcome)
        self._plan = library["ggml_graph_plan"](self._graph, len(usable_cpus()), None)
        self._work = np.empty(max(1, self._plan.work_size), np.uint8)
        self._plan.work_data = self._work.ctypes.data
        self._compute = library["ggml_graph_compute"]
        self._place, self._shape = library["ggml_get_data"](outcome), (columns, m)

    def compute(self) -> None:
        """Run the graph; RuntimeError when ggml reports a failure."""
        status = self._compute(self._graph, ctypes.byref(self._plan))
        if status != 0:
            raise RuntimeError(f"ggml_graph_compute returned {status}")

    def values(self) -> np.ndarray:
        """Return a copy of the result, (columns, m)."""
        count = self._shape[0] * self._shape[1]
        buffer = (ctypes.c_float * count).from_address(self._place)
        return np.frombuffer(buffer, np.float32).reshape(self._shape).copy()


def _mode() -> str:
    words = f"8-bit activations, {len(usable_cpus())} threads"
    return f"ggml of llama-cpp-python {release('llama-cpp-python')}, {words}"


PEERS = (packing("ggml", _copies, absent=_absent, refuses=_refuses, mode=_mode, activation_bits=8),)
