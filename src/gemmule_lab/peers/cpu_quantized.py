"""Peers for quantised matrices on the CPU: PyTorch's packed products, ONNX Runtime's MatMulNBits.

All compute ``X W^T`` for row-major X of shape (columns, k), so they are given the transpose of B,
made outside the timed call, and our codes, scales and zero points, unchanged in value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gemmule.core.problem import Problem, QuantSpec
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.timing.machine import usable_cpus
from gemmule_lab.peers.cpu_float import to_numpy, to_torch, torch_mode
from gemmule_lab.peers.peer import Peer, Prepared, grouped_parts, module_missing, packing, release

ORT_BITS = (4, 8)
ORT_LEVELS = (0, 4)
TWO_BITS = 2
ORT_SMALLEST_BLOCK = 16


def rows_of(problem: Problem, b: np.ndarray) -> np.ndarray:
    """Return the transpose of B, row-major: (columns, k)."""
    return b.reshape(1, -1) if problem.op == "matvec" else np.ascontiguousarray(b.T)


def shaped(problem: Problem, result: np.ndarray) -> np.ndarray:
    """Return a result of shape (columns, m) as the problem's own: (m,) or (m, columns)."""
    return result.reshape(-1) if problem.op == "matvec" else result.T


def plain_quant(problem: Problem, dtypes: tuple[str, ...]) -> QuantSpec | str:
    """Return the quantisation of a problem that packed products serve, or why they do not."""
    spec = problem.quant
    if spec is None:
        return "it takes quantised matrices only"
    if spec.transposed or spec.has_perm or problem.batch != 1:
        return "it takes no transposed, permuted or batched quantised matrix"
    if problem.b not in dtypes or problem.out != problem.b:
        return f"it does not take {problem.b} to {problem.out}"
    return spec


def int8_refuses(problem: Problem) -> str | None:
    """Return why PyTorch's packed int8 does not serve a problem, or None."""
    spec = plain_quant(problem, ("float32", "float16", "bfloat16"))
    if isinstance(spec, str):
        return spec
    if spec.bits != 8 or spec.group_size != -1 or spec.has_zeros:
        return "it takes symmetric int8 with one scale per row"
    return None


def _int8_prepare(problem: Problem, a: QuantizedMatrix, b: np.ndarray) -> Prepared:
    import torch

    # The kernel loads as if aligned to 64 bytes, as PyTorch's own memory is: others crash it.
    x = to_torch(rows_of(problem, b)).clone()
    weights, scales = (part.clone() for part in int8_parts(a, x.dtype))
    return torch_call(problem, lambda: torch._weight_int8pack_mm(x, weights, scales))


def int8_parts(a: QuantizedMatrix, dtype: Any) -> tuple[Any, Any]:
    """Return signed codes and one scale a row, as PyTorch takes them."""
    import torch

    codes, scales, _ = grouped_parts(a)
    signed = torch.from_numpy((codes ^ 0x80).view(np.int8))
    return signed, torch.from_numpy(scales[:, 0].copy()).to(dtype)


def _int4_refuses(problem: Problem) -> str | None:
    spec = plain_quant(problem, ("float32", "float16", "bfloat16"))
    if isinstance(spec, str):
        return spec
    if spec.bits != 4 or spec.group_size not in (32, 64, 128, 256):
        return "it takes 4 bits in groups of 32, 64, 128 or 256"
    if problem.m % 16 or problem.reduction % spec.group_size:
        return "it needs a multiple of 16 rows and whole groups"
    return None


def _int4_copies(problem: Problem, a: QuantizedMatrix, b: np.ndarray) -> Callable[[], Prepared]:
    import torch

    x = to_torch(rows_of(problem, b)).clone()
    codes, scales, zeros = grouped_parts(a)
    group = int(a.group_size or 1)
    packed = torch._convert_weight_to_int4pack_for_cpu(torch.from_numpy(codes.astype(np.int32)), 1)
    # Scale and offset of each group, of w = (code - 8) * scale + offset.
    pairs = np.stack([scales, scales * (8 - zeros)], axis=-1).transpose(1, 0, 2)
    offsets = torch.from_numpy(np.ascontiguousarray(pairs, np.float32)).to(x.dtype)

    def make() -> Prepared:
        weights, shifts = packed.clone(), offsets.clone()
        return torch_call(
            problem, lambda: torch._weight_int4pack_mm_for_cpu(x, weights, group, shifts)
        )

    return make


def torch_call(problem: Problem, multiply: Callable[[], Any]) -> Prepared:
    """Return a product of PyTorch's, of shape (columns, m), ready to be called."""
    import torch

    latest: list[Any] = []

    def call() -> None:
        with torch.inference_mode():
            latest[:] = [multiply()]

    return Prepared(call, lambda: shaped(problem, to_numpy(latest[0])))


def _ort_refuses(problem: Problem) -> str | None:
    spec = plain_quant(problem, ("float32",))
    if isinstance(spec, str):
        return spec
    group = problem.reduction if spec.group_size == -1 else spec.group_size
    if spec.bits not in ORT_BITS or group is None:
        return f"it takes groups of {ORT_BITS} bits, not one scale for the whole matrix"
    if group < ORT_SMALLEST_BLOCK or group & (group - 1):
        return "its groups are powers of two from 16 on"
    return None


def _ort_two_bits_refuses(problem: Problem) -> str | None:
    if problem.quant is not None and problem.quant.bits != 4:
        return "2 bits are shown beside 4 bits only"
    return _ort_refuses(problem)


def two_bits(a: QuantizedMatrix) -> QuantizedMatrix:
    """Return the matrix of the upper 2 bits of each 4-bit code, which has no format of ours.

    Codes from 0 to 3 in 4-bit form, with scales and zero points to match.
    """
    from gemmule.quant.layouts import pack_nibbles

    codes, scales, _ = grouped_parts(a)
    upper = pack_nibbles((codes >> 2).astype(np.uint8))
    zeros = np.full(scales.shape, 2, np.float32)
    return QuantizedMatrix.from_parts(
        upper, 4 * scales, zeros, shape=a.stored_shape, bits=4, group_size=a.group_size
    )


def _ort_copies(
    level: int, bits: int | None, problem: Problem, a: QuantizedMatrix, b: np.ndarray
) -> Callable[[], Prepared]:
    """Make the model once; every session packs its weights into memory of its own.

    bits: pack codes into so many bits; None: into as many as the matrix has.
    """
    import onnxruntime as ort

    x = rows_of(problem, b)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # Idle threads that spin would slow whichever entry runs next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.use_per_session_threads = not _ort_pool()
    matrix = two_bits(a) if bits == TWO_BITS else a
    model = _ort_model(problem, matrix, level, bits or a.bits)

    def make() -> Prepared:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        out = np.empty((x.shape[0], problem.m), np.float32)
        binding = session.io_binding()
        binding.bind_cpu_input("X", x)
        binding.bind_output("Y", "cpu", 0, np.float32, out.shape, out.ctypes.data)
        return Prepared(lambda: session.run_with_iobinding(binding), lambda: shaped(problem, out))

    return make


@functools.cache
def _ort_pool() -> bool:
    """Make one pool of threads for all sessions; a hundred pools would fight for two cores."""
    import onnxruntime as ort

    try:
        ort.set_global_thread_pool_sizes(len(usable_cpus()), 1)
    except (AttributeError, RuntimeError):  # an old version, or a session that was made before
        return False
    return True


def _ort_model(problem: Problem, a: QuantizedMatrix, level: int, bits: int) -> bytes:
    """Return a one-node model whose constant weights are packed when the session is made."""
    from onnx import TensorProto, helper, numpy_helper

    codes, scales, points = grouped_parts(a)
    rows, k = codes.shape
    block = k if a.group_size == -1 else int(a.group_size or 1)
    blocks = -(-k // block)
    padded = codes
    if k % block:
        padded = np.zeros((rows, blocks * block), np.uint8)
        padded[:, :k] = codes
    if (points != np.rint(points)).any() or points.min() < 0 or points.max() >= 1 << bits:
        raise ValueError("its zero points are codes, integers within the range of the bits")
    tensors = {
        "W": pack_bits(padded, bits).reshape(rows, blocks, -1),
        "S": np.ascontiguousarray(scales, np.float32).reshape(-1),
        "Z": pack_bits(points.astype(np.uint8), bits).reshape(-1),
    }
    about = {"K": k, "N": rows, "bits": bits, "block_size": block, "accuracy_level": level}
    operands = ["X", *tensors], ["Y"]
    node = helper.make_node("MatMulNBits", *operands, domain="com.microsoft", **about)
    columns = 1 if problem.op == "matvec" else problem.n
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [columns, k])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [columns, rows])],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return model


def pack_bits(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack the codes of each row into bytes, the earlier code in the lower bits."""
    per_byte = 8 // bits
    width = -(-codes.shape[1] // per_byte) * per_byte
    packed = np.zeros((codes.shape[0], width // per_byte), np.uint8)
    for place in range(per_byte):
        some = codes[:, place::per_byte]
        packed[:, : some.shape[1]] |= some << np.uint8(place * bits)
    return packed


def _ort_peer(level: int, bits: int | None = None) -> Peer:
    arithmetic = "int8" if level == 4 else "float32"
    words = f"accuracy level {level} ({arithmetic} activations), {len(usable_cpus())} threads"
    return packing(
        f"onnxruntime level {level}{'' if bits is None else f' on {bits} bits'}",
        partial(_ort_copies, level, bits),
        absent=partial(module_missing, "onnxruntime", "onnx"),
        refuses=_ort_refuses if bits is None else _ort_two_bits_refuses,
        mode=lambda: f"ONNX Runtime {release('onnxruntime')}, {words}",
        activation_bits=8 if level == 4 else None,
        stand_in=None if bits is None else two_bits,
        own_bytes=lambda problem: problem.compulsory_bytes // (1 if bits is None else 2),
    )


_torch_absent = partial(module_missing, "torch")
PEERS = (
    Peer("torch int8pack", "cpu", _torch_absent, int8_refuses, _int8_prepare, torch_mode),
    packing(
        "torch int4pack", _int4_copies, absent=_torch_absent, refuses=_int4_refuses, mode=torch_mode
    ),
    *(_ort_peer(level) for level in ORT_LEVELS),
    *(_ort_peer(level, TWO_BITS) for level in ORT_LEVELS),
)
