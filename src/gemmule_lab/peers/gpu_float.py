"""Peers for plain arrays on a GPU: cuBLAS through PyTorch and CuPy, nvmath, and Triton.

Operands may be host arrays, which are copied to the first GPU outside the timed call, or arrays of
any library that lie there already. Every call goes to the current stream, so that it can be
captured into a graph; libraries that launch elsewhere are named and not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from gemmule.backends.cuda import driver
from gemmule.core.problem import COMPLEX, ITEMSIZE, Problem
from gemmule.errors import DeviceError
from gemmule_lab.peers.cpu_float import to_numpy, to_torch
from gemmule_lab.peers.peer import (
    Peer,
    Prepared,
    module_missing,
    plain_refusal,
    release,
    result_shape,
)

Absent: TypeAlias = Callable[[], str | None]

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


def _torch_prepare(tf32: bool, problem: Problem, a: Any, b: Any) -> Prepared:
    import torch

    left, right = to_cuda(a), to_cuda(b)
    out = torch.empty(result_shape(problem), dtype=left.dtype, device=left.device)
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
    library = release("nvidia-cublas", "nvidia-cublas-cu12")
    return f"PyTorch {torch.__version__}, cuBLAS {library}, {words}"


def _tf32_refuses(problem: Problem) -> str | None:
    if problem.a != "float32" or problem.op != "matmul":
        return "TF32 is a mode of float32 matrix products"
    return plain_refusal(problem, TORCH_DTYPES, batches=True)


EIGHT_BITS = 16  # torch's products of 8 bits take sizes that are multiples of it, and more rows


def _bytes_refuse(dtype: str, problem: Problem) -> str | None:
    if problem.quant is not None or problem.op != "matmul" or problem.batch != 1:
        return "it multiplies two plain matrices"
    if not problem.a == problem.b == dtype:
        return f"it multiplies {dtype} by {dtype}"
    if problem.m <= EIGHT_BITS or problem.m % EIGHT_BITS or problem.k % EIGHT_BITS:
        return f"it takes sizes that are multiples of {EIGHT_BITS}, and more rows than that"
    return None


def _in_its_order(a: Any, b: Any) -> tuple[Any, Any]:
    """Return A by rows and B by columns, a multiple of 16 of them: the order it is fastest in."""
    import torch

    left, right = to_cuda(a).contiguous(), to_cuda(b)
    columns = -(-right.shape[1] // EIGHT_BITS) * EIGHT_BITS
    turned = torch.zeros((columns, right.shape[0]), dtype=right.dtype, device=right.device)
    turned[: right.shape[1]] = right.T
    return left, turned.T


def _int_mm_prepare(problem: Problem, a: Any, b: Any) -> Prepared:
    import torch

    left, right = _in_its_order(a, b)
    out = torch.empty((problem.m, right.shape[1]), dtype=torch.int32, device=left.device)
    return Prepared(
        lambda: torch._int_mm(left, right, out=out), lambda: to_numpy(out[:, : problem.n])
    )


def _scaled_mm_prepare(problem: Problem, a: Any, b: Any) -> Prepared:
    import torch

    left, right = _in_its_order(a, b)
    one, dtype = torch.ones((), device=left.device), getattr(torch, problem.out)
    latest: list[Any] = []

    def call() -> None:
        latest[:] = [torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=dtype)]

    return Prepared(call, lambda: to_numpy(latest[0][:, : problem.n]))


def _bytes_mode(words: str) -> Callable[[], str]:
    return lambda: f"{_torch_mode(False).partition(', float32')[0]}, {words}, B turned before"


def _cupy_prepare(problem: Problem, a: Any, b: Any) -> Prepared:
    import cupy

    left, right = (_to_cupy(cupy, operand) for operand in (a, b))
    out = cupy.empty(result_shape(problem), dtype=left.dtype)
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
    reason = plain_refusal(problem, TORCH_DTYPES)
    if reason is not None:
        return reason
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


def _nvmath_prepare(problem: Problem, a: Any, b: Any) -> Prepared:
    from nvmath.linalg.advanced import Matmul

    left, right = to_cuda(a), to_cuda(b)
    product = Matmul(left, right)
    product.plan()
    latest: list[Any] = []

    def call() -> None:
        latest[:] = [product.execute()]

    return Prepared(call, lambda: to_numpy(latest[0]))


def _streams_of_its_own() -> str:
    words = "it launches on streams of its own, which our timed graphs cannot capture"
    return gpu_missing() or words


def unprepared(problem: Problem, a: Any, b: Any) -> Prepared:
    """Stand for what prepares a peer that is only named, with the reason for its absence."""
    raise DeviceError("this peer is named with the reason for its absence, and never prepared.")


def needing(missing: Absent, *modules: str) -> Absent:
    """Return what tells which module is not installed, or what else is missing."""
    return lambda: module_missing(*modules) or missing()


def _peer(
    name: str, absent: Absent, prepare: Any, mode: Callable[[], str], dtypes: tuple[str, ...]
) -> Peer:
    refuses = partial(plain_refusal, dtypes=dtypes, batches=True)
    return Peer(name, "cuda", absent, refuses, prepare, mode)


PEERS = (
    _peer(
        "torch", torch_missing, partial(_torch_prepare, False), partial(_torch_mode, False),
        (*TORCH_DTYPES, *COMPLEX),
    ),
    Peer(
        "torch tf32", "cuda", torch_missing, _tf32_refuses, partial(_torch_prepare, True),
        partial(_torch_mode, True),
    ),
    Peer(
        "torch int_mm", "cuda", torch_missing, partial(_bytes_refuse, "int8"), _int_mm_prepare,
        _bytes_mode("torch._int_mm, sums in int32"),
    ),
    Peer(
        "torch scaled_mm", "cuda", torch_missing, partial(_bytes_refuse, "float8_e4m3fn"),
        _scaled_mm_prepare, _bytes_mode("torch._scaled_mm by one scale, without fast sums"),
    ),
    _peer("cupy", needing(gpu_missing, "cupy"), _cupy_prepare, _cupy_mode, CUPY_DTYPES),
    Peer(
        "triton", "cuda", needing(torch_missing, "triton"), _triton_refuses, _triton_prepare,
        lambda: f"Triton {release('triton')}, a plain kernel of ours, sums in float32 or wider",
    ),
    _peer(
        "nvmath", needing(torch_missing, "nvmath"), _nvmath_prepare,
        lambda: f"nvmath-python {release('nvmath-python')}, cuBLASLt, its default compute type",
        TORCH_DTYPES,
    ),
    Peer(
        "jax", "cuda", needing(_streams_of_its_own, "jax"), lambda problem: None, unprepared,
        lambda: "JAX",
    ),
)  # fmt: skip
