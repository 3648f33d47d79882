"""Peers for plain arrays on the CPU: NumPy, PyTorch, SciPy's BLAS."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmule.core.problem import FLOAT8, Problem, numpy_dtype
from gemmule_lab.peers.peer import Peer, Prepared, module_missing

TORCH_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "complex64", "complex128")
BLAS_PREFIX = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}


def result_shape(problem: Problem) -> tuple[int, ...]:
    """Return the shape of one result."""
    return (problem.m,) if problem.op == "matvec" else (problem.m, problem.n)


def _one_plain_dtype(problem: Problem) -> str | None:
    if problem.quant is not None:
        return "it takes no quantised matrix"
    if problem.batch != 1:
        return "batches are not given to it"
    if not problem.a == problem.b == problem.out:
        return f"it does not mix {problem.a}, {problem.b} and {problem.out}"
    return None


def _numpy_refuses(problem: Problem) -> str | None:
    if problem.a == "bfloat16" or problem.a in FLOAT8:
        return f"it has no {problem.a} product"
    if problem.quant is None and problem.a in ("int8", "uint8"):
        return "its 8-bit product wraps around"
    return _one_plain_dtype(problem)


def _numpy_prepare(problem: Problem, a: np.ndarray, b: np.ndarray) -> Prepared:
    out = np.empty(result_shape(problem), numpy_dtype(problem.out))
    return Prepared(lambda: np.matmul(a, b, out=out), lambda: out)


def blas_words() -> str:
    """Return BLAS library, version and threads as threadpoolctl sees them."""
    import threadpoolctl

    found = [i for i in threadpoolctl.threadpool_info() if i["user_api"] == "blas"]
    words = [f"{i['internal_api']} {i['version']}, {i['num_threads']} threads" for i in found]
    return "; ".join(dict.fromkeys(words)) or "no BLAS seen"


def _numpy_mode() -> str:
    return f"NumPy {np.__version__}, IEEE arithmetic of the dtype, {blas_words()}"


def _torch_refuses(problem: Problem) -> str | None:
    if problem.quant is None and problem.a not in TORCH_DTYPES:
        return f"it is not timed in {problem.a}"
    return _one_plain_dtype(problem)


def to_torch(array: np.ndarray) -> Any:
    """Return the tensor that shares a NumPy array's memory, bfloat16 too."""
    import torch

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


def _scipy_refuses(problem: Problem) -> str | None:
    if problem.quant is None and problem.a not in BLAS_PREFIX:
        return f"BLAS has no {problem.a} product"
    if "strided" in (problem.layout_a, problem.layout_b):
        return "BLAS needs a unit stride"
    return _one_plain_dtype(problem)


def _scipy_prepare(problem: Problem, a: np.ndarray, b: np.ndarray) -> Prepared:
    """Hand BLAS, which is column-major, each operand as it lies, by its transpose flag."""
    from scipy.linalg import blas

    prefix = BLAS_PREFIX[problem.a]
    if problem.op == "matvec":
        y = np.empty(problem.m, a.dtype)
        gemv = getattr(blas, f"{prefix}gemv")
        lying, flag = (a, 0) if a.flags.f_contiguous else (a.T, 1)
        return Prepared(
            lambda: gemv(1.0, lying, b, beta=0.0, y=y, overwrite_y=1, trans=flag), lambda: y
        )
    gemm = getattr(blas, f"{prefix}gemm")
    c = np.empty((problem.n, problem.m), a.dtype, order="F")  # the transpose of a row-major C
    left, flag_left = (b.T, 0) if b.T.flags.f_contiguous else (b, 1)
    right, flag_right = (a.T, 0) if a.T.flags.f_contiguous else (a, 1)
    return Prepared(
        lambda: gemm(
            1.0, left, right, beta=0.0, c=c, overwrite_c=1, trans_a=flag_left, trans_b=flag_right
        ),
        lambda: c.T,
    )


def _scipy_mode() -> str:
    import scipy

    return f"SciPy {scipy.__version__}, IEEE arithmetic of the dtype, {blas_words()}"


PEERS = (
    Peer("numpy", "cpu", lambda: None, _numpy_refuses, _numpy_prepare, _numpy_mode),
    Peer(
        "torch", "cpu", lambda: module_missing("torch"), _torch_refuses, _torch_prepare, torch_mode
    ),
    Peer(
        "scipy.blas",
        "cpu",
        lambda: module_missing("scipy"),
        _scipy_refuses,
        _scipy_prepare,
        _scipy_mode,
    ),
)
