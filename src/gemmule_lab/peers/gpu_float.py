"""Peers for plain arrays on a GPU: cuBLAS through PyTorch and CuPy, nvmath, and Triton.

Operands may be host arrays, which are copied to the first GPU outside the timed call, or arrays of
any library that lie there already. Every call goes to the current stream, so that it can be
captured into a graph; libraries that launch elsewhere are named and not timed.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from gemmule.backends.cuda import driver
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.errors import DeviceError
from gemmule_lab.peers.cpu_float import result_shape, to_numpy, to_torch
from gemmule_lab.peers.peer import Peer, Prepared, module_missing

TORCH_DTYPES = ("float64", "float32", "float16", "bfloat16")
CUPY_DTYPES = ("float64", "float32", "float16")
HALVES = ("float16", "bfloat16")
TENSOR_ALIGNMENT = 16  # bytes that leading strides of tensor descriptors are a multiple of


def gpu_missing() -> str | None:
    """Return why no GPU can be used here, or None."""
    try:
        count = driver.device_count()
    except DeviceError as error:
        return str(error).split(" (")[0]
    return None if count else "no CUDA device"


def torch_missing() -> str | None:
    """Return why PyTorch cannot run on a GPU here, or None."""
    reason = module_missing("torch") or gpu_missing()
    if reason is not None:
        return reason
    import torch

    return None if torch.cuda.is_available() else "this PyTorch is built without CUDA"


def to_cuda(array: Any) -> Any:
    """Return an array as a CUDA tensor that keeps its strides; one on the GPU is not copied."""
    import torch

    if isinstance(array, torch.Tensor):
        return array
    if isinstance(array, np.ndarray):
        return to_torch(array).cuda()
    return torch.from_dlpack(array)


def _refuses(dtypes: tuple[str, ...], problem: Problem) -> str | None:
    if problem.quant is not None:
        return "it takes no quantised matrix"
    if not problem.a == problem.b == problem.out:
        return f"it does not mix {problem.a}, {problem.b} and {problem.out}"
    if problem.a not in dtypes:
        return f"it is not timed in {problem.a}"
    if "strided" in (problem.layout_a, problem.layout_b):
        return "cuBLAS needs a unit stride"
    if problem.batch != 1 and (problem.op != "matmul" or problem.shared_a or problem.shared_b):
        return "of batches only whole ones of matrices are given to it"
    return None


def _batched_shape(problem: Problem) -> tuple[int, ...]:
    shape = result_shape(problem)
    return shape if problem.batch == 1 else (problem.batch, *shape)


def _torch_prepare(tf32: bool, problem: Problem, a: Any, b: Any) -> Prepared:
    import torch

    left, right = to_cuda(a), to_cuda(b)
    out = torch.empty(_batched_shape(problem), dtype=left.dtype, device=left.device)
    multiply = torch.mv if left.ndim == 2 and right.ndim == 1 else torch.matmul
    if left.ndim == 3:
        multiply = torch.bmm
    mode = torch.backends.cuda.matmul

    def call() -> None:
        before, mode.allow_tf32 = mode.allow_tf32, tf32
        try:
            with torch.inference_mode():
                multiply(left, right, out=out)
        finally:
            mode.allow_tf32 = before

    return Prepared(call, lambda: to_numpy(out))


def _torch_mode(tf32: bool) -> str:
    import torch

    words = "float32 rounded to TF32" if tf32 else "float32 in IEEE arithmetic"
    return f"PyTorch {torch.__version__}, cuBLAS {_cublas_version()}, {words}"


def _cublas_version() -> str:
    import importlib.metadata

    for package in ("nvidia-cublas", "nvidia-cublas-cu12"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def _tf32_refuses(problem: Problem) -> str | None:
    if problem.a != "float32" or problem.op != "matmul":
        return "TF32 is a mode of float32 matrix products"
    return _refuses(TORCH_DTYPES, problem)


def _cupy_prepare(problem: Problem, a: Any, b: Any) -> Prepared:
    import cupy

    left, right = (_to_cupy(cupy, operand) for operand in (a, b))
    out = cupy.empty(_batched_shape(problem), dtype=left.dtype)
    return Prepared(lambda: cupy.matmul(left, right, out=out), lambda: cupy.asnumpy(out))


def _to_cupy(cupy: Any, array: Any) -> Any:
    if isinstance(array, np.ndarray):
        flipped = array.ndim == 2 and not array.flags.c_contiguous
        return cupy.asarray(array, order="F" if flipped else "C")
    return cupy.from_dlpack(array)


def _cupy_mode() -> str:
    import cupy

    return f"CuPy {cupy.__version__}, cuBLAS {cupy.cuda.cublas.getVersion(0) or 'unknown'}"


def _triton_refuses(problem: Problem) -> str | None:
    reason = _refuses(TORCH_DTYPES, problem)
    if reason is not None or problem.batch != 1:
        return reason or "batches are not given to it"
    if problem.op == "matvec":
        return None if problem.layout_a == "row" else "our Triton matvec reads rows"
    if problem.a not in HALVES:
        return "our Triton matmul multiplies halves"
    if problem.layout_a != "row" or problem.layout_b != "col":
        return "our Triton matmul takes A by rows and B by columns"
    lanes = TENSOR_ALIGNMENT // ITEMSIZE[problem.a]
    if problem.k % lanes or problem.n % lanes:
        return f"our Triton matmul needs rows of a multiple of {lanes} elements"
    return None


def _triton_prepare(problem: Problem, a: Any, b: Any) -> Prepared:
    import torch

    from gemmule_lab.peers import triton_kernels

    left, right = to_cuda(a), to_cuda(b)
    out = torch.empty(result_shape(problem), dtype=left.dtype, device=left.device)
    if problem.op == "matvec":
        return Prepared(lambda: triton_kernels.matvec(left, right, out), lambda: to_numpy(out))
    return Prepared(triton_kernels.Matmul(left, right, out), lambda: to_numpy(out))


def _triton_mode() -> str:
    import triton

    return f"Triton {triton.__version__}, a plain kernel of ours, sums in float32 or wider"


def _nvmath_prepare(problem: Problem, a: Any, b: Any) -> Prepared:
    from nvmath.linalg.advanced import Matmul

    left, right = to_cuda(a), to_cuda(b)
    product = Matmul(left, right)
    product.plan()
    latest: list[Any] = []

    def call() -> None:
        latest[:] = [product.execute()]

    return Prepared(call, lambda: to_numpy(latest[0]))


def _nvmath_mode() -> str:
    import nvmath

    return f"nvmath-python {nvmath.__version__}, cuBLASLt, its default compute type"


def _jax_absent() -> str | None:
    missing = module_missing("jax") or gpu_missing()
    return missing or "it launches on streams of its own, which our timed graphs cannot capture"


def _never_prepared(problem: Problem, a: Any, b: Any) -> Prepared:
    raise DeviceError("this peer is named with the reason for its absence, and never prepared.")


def _torch_peer(name: str, tf32: bool) -> Peer:
    refuses = _tf32_refuses if tf32 else functools.partial(_refuses, TORCH_DTYPES)
    return Peer(
        name,
        "cuda",
        torch_missing,
        refuses,
        functools.partial(_torch_prepare, tf32),
        functools.partial(_torch_mode, tf32),
    )


PEERS = (
    _torch_peer("torch", tf32=False),
    _torch_peer("torch tf32", tf32=True),
    Peer(
        "cupy", "cuda", lambda: module_missing("cupy") or gpu_missing(),
        functools.partial(_refuses, CUPY_DTYPES), _cupy_prepare, _cupy_mode,
    ),
    Peer(
        "triton", "cuda", lambda: module_missing("triton") or torch_missing(),
        _triton_refuses, _triton_prepare, _triton_mode,
    ),
    Peer(
        "nvmath", "cuda", lambda: module_missing("nvmath") or torch_missing(),
        functools.partial(_refuses, TORCH_DTYPES), _nvmath_prepare, _nvmath_mode,
    ),
    Peer("jax", "cuda", _jax_absent, lambda problem: None, _never_prepared, lambda: "JAX"),
)  # fmt: skip
