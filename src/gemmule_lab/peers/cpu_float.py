"""Peers for plain arrays on the CPU: NumPy, PyTorch, SciPy's BLAS."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from gemmule.core.problem import DTYPES, FLOAT8, Problem, numpy_dtype
from gemmule_lab.peers.peer import (
    Peer,
    Prepared,
    module_missing,
    plain_refusal,
    release,
    result_shape,
)

TORCH_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "complex64", "complex128")
BLAS_PREFIX = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}
WRAPPING = ("int8", "uint8")  # NumPy's 8-bit product wraps around
NUMPY_DTYPES = tuple(name for name in DTYPES if name not in ("bfloat16", *FLOAT8, *WRAPPING))


def _numpy_prepare(problem: Problem, a: np.ndarray, b: np.ndarray) -> Prepared:
    out = np.empty(result_shape(problem), numpy_dtype(problem.out))
    return Prepared(lambda: np.matmul(a, b, out=out), lambda: out)


def blas_mode(package: str) -> str:
    """Return a package's version, and its BLAS with version and threads as threadpoolctl says."""
    import threadpoolctl

    found = [i for i in threadpoolctl.threadpool_info() if i["user_api"] == "blas"]
    words = [f"{i['internal_api']} {i['version']}, {i['num_threads']} threads" for i in found]
    library = "; ".join(dict.fromkeys(words)) or "no BLAS seen"
    return f"{package} {release(package.lower())}, IEEE arithmetic of the dtype, {library}"


def to_torch(array: np.ndarray) -> Any:
    """Return the tensor that shares a NumPy array's memory, bfloat16 and float8 too."""
    import torch

    if array.dtype.name in FLOAT8:
        return torch.from_numpy(array.view(np.uint8)).view(getattr(torch, array.dtype.name))
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: Any) -> np.ndarray:
    """Return a tensor's values, wherever it lies, as a NumPy array; bfloat16 widened to float32."""
    import torch

    wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    values: np.ndarray = wide.detach().cpu().numpy()
    return values


def _torch_prepare(problem: Problem, a: np.ndarray, b: np.ndarray) -> Prepared:
    import torch

    left, right = to_torch(a), to_torch(b)
    out = torch.empty(result_shape(problem), dtype=left.dtype)
    multiply = torch.mv if problem.op == "matvec" else torch.matmul

    def call() -> None:
        with torch.inference_mode():
            multiply(left, right, out=out)

    return Prepared(call, lambda: to_numpy(out))


def torch_mode() -> str:
    """Return PyTorch's version, float32 mode and threads."""
    import torch

    words = f"float32 precision {torch.get_float32_matmul_precision()}"
    return f"PyTorch {torch.__version__}, {words}, {torch.get_num_threads()} threads"


def _scipy_prepare(problem: Problem, a: np.ndarray, b: np.ndarray) -> Prepared:
    """Hand BLAS, which is column-major, each operand as it lies, by its transpose flag."""
    from scipy.linalg import blas

    prefix = BLAS_PREFIX[problem.a]
    if problem.op == "matvec":
        y = np.empty(problem.m, a.dtype)
        gemv = getattr(blas, f"{prefix}gemv")
        lying, flag = (a, 0) if a.flags.f_contiguous else (a.T, 1)
        given = {"beta": 0.0, "y": y, "overwrite_y": 1, "trans": flag}
        return Prepared(partial(gemv, 1.0, lying, b, **given), lambda: y)
    gemm = getattr(blas, f"{prefix}gemm")
    c = np.empty((problem.n, problem.m), a.dtype, order="F")  # the transpose of a row-major C
    left, flag_left = (b.T, 0) if b.T.flags.f_contiguous else (b, 1)
    right, flag_right = (a.T, 0) if a.T.flags.f_contiguous else (a, 1)
    given = {"beta": 0.0, "c": c, "overwrite_c": 1, "trans_a": flag_left, "trans_b": flag_right}
    return Prepared(partial(gemm, 1.0, left, right, **given), lambda: c.T)


PEERS = (
    Peer(
        "numpy", "cpu", lambda: None, partial(plain_refusal, dtypes=NUMPY_DTYPES, strided=True),
        _numpy_prepare, partial(blas_mode, "NumPy"),
    ),
    Peer(
        "torch", "cpu", partial(module_missing, "torch"),
        partial(plain_refusal, dtypes=TORCH_DTYPES, strided=True), _torch_prepare, torch_mode,
    ),
    Peer(
        "scipy.blas", "cpu", partial(module_missing, "scipy"),
        partial(plain_refusal, dtypes=tuple(BLAS_PREFIX)), _scipy_prepare,
        partial(blas_mode, "SciPy"),
    ),
)  # fmt: skip
