"""Peers for quantised matrices on a GPU: PyTorch's packed products, gemlite, bitsandbytes.

As on the CPU all compute ``X W^T`` and are given our codes, scales and zero points, unchanged in
value and packed outside the timed call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmule.core.problem import Problem
from gemmule.quant.matrix import QuantizedMatrix
from gemmule_lab.peers.cpu_quantized import int8_parts, int8_refuses, plain_quant, torch_call
from gemmule_lab.peers.gpu_float import gpu_missing, needing, to_cuda, torch_missing, unprepared
from gemmule_lab.peers.peer import Peer, Prepared, grouped_parts, release

INT4_GROUPS = (32, 64, 128, 256)
INNER_TILES = 8  # of PyTorch's packed int4: 16 columns each


def _rows(problem: Problem, b: Any) -> Any:
    """Return the transpose of B as a row-major tensor (columns, k)."""
    tensor = to_cuda(b)
    return tensor.reshape(1, -1) if problem.op == "matvec" else tensor.T.contiguous()


def _int4_refuses(problem: Problem) -> str | None:
    spec = plain_quant(problem, ("bfloat16",))
    if isinstance(spec, str):
        return spec
    if spec.bits != 4 or spec.group_size not in INT4_GROUPS:
        return "it takes 4 bits in groups of 32, 64, 128 or 256"
    if problem.m % 8 or problem.reduction % (16 * INNER_TILES):
        return "it needs a multiple of 8 rows and of 128 columns"
    return None


def _int4_prepare(problem: Problem, a: QuantizedMatrix, b: Any) -> Prepared:
    import torch

    x = _rows(problem, b)
    matrix = a.to("cuda" if a.device == "cpu" else None, layout="row")
    codes, scales = to_cuda(matrix.codes), to_cuda(matrix.scales).float()
    zeros = 1 << (a.bits - 1) if matrix.zeros is None else to_cuda(matrix.zeros)
    # The high four bits hold the even column there; w = (code - 8) * scale + offset.
    packed = torch._convert_weight_to_int4pack(codes << 4 | codes >> 4, INNER_TILES)
    offsets = torch.stack([scales, scales * (8 - zeros)], dim=-1).transpose(0, 1)
    offsets, group = offsets.contiguous().to(x.dtype), int(a.group_size or 1)
    return torch_call(problem, lambda: torch._weight_int4pack_mm(x, packed, group, offsets))


def _int8_prepare(problem: Problem, a: QuantizedMatrix, b: Any) -> Prepared:
    import torch

    x = _rows(problem, b)
    weights, scales = (part.cuda() for part in int8_parts(a, x.dtype))
    return torch_call(problem, lambda: torch._weight_int8pack_mm(x, weights, scales))


def _gemlite_refuses(problem: Problem) -> str | None:
    spec = plain_quant(problem, ("float16",))
    if isinstance(spec, str):
        return spec
    if spec.group_size not in INT4_GROUPS or not spec.has_zeros:
        return "it takes groups of 32, 64, 128 or 256 with zero points"
    if problem.m % 32 or problem.reduction % 32:
        return "it needs a multiple of 32 rows and columns"
    return None


def _gemlite_prepare(problem: Problem, a: QuantizedMatrix, b: Any) -> Prepared:
    import torch
    from gemlite.core import DType, GemLiteLinearTriton

    x = _rows(problem, b)
    codes, scales, zeros = grouped_parts(a)
    group = int(a.group_size or 1)
    layer = GemLiteLinearTriton(
        W_nbits=a.bits,
        group_size=group,
        in_features=problem.reduction,
        out_features=problem.m,
        input_dtype=DType.FP16,
        output_dtype=DType.FP16,
    )
    per_group = [
        torch.from_numpy(np.ascontiguousarray(part, np.float32)).cuda().to(x.dtype)
        for part in (scales, zeros)
    ]
    layer.pack(torch.from_numpy(codes).cuda(), *per_group, None)
    return torch_call(problem, lambda: layer(x))


def _bitsandbytes_refuses(problem: Problem) -> str | None:
    if problem.quant is None:
        return "it takes quantised matrices only"
    return "its 4-bit codes stand for a fixed table of numbers, not for scale x (code - zero)"


def _torch_mode() -> str:
    return f"PyTorch {release('torch')}, weights packed beforehand"


PEERS = (
    Peer("torch int4pack", "cuda", torch_missing, _int4_refuses, _int4_prepare, _torch_mode),
    Peer("torch int8pack", "cuda", torch_missing, int8_refuses, _int8_prepare, _torch_mode),
    Peer(
        "gemlite", "cuda", needing(torch_missing, "gemlite"), _gemlite_refuses, _gemlite_prepare,
        lambda: f"gemlite {release('gemlite')}",
    ),
    Peer(
        "bitsandbytes", "cuda", needing(gpu_missing, "bitsandbytes"), _bitsandbytes_refuses,
        unprepared, lambda: "bitsandbytes",
    ),
)  # fmt: skip
