"""Writes models as other tools do, of random codes.

GPTQ, AWQ, HQQ, compressed-tensors, ModelOpt, gpt-oss and GGUF.

Each function is given a folder that holds a float model, writes the quantised one into another, and
returns the float weights that its codes stand for, by layer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

SIZE = 32  # of a group
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # column j of eight lies in nibble AWQ_ORDER[j]
Written = dict[str, torch.Tensor]


def _words(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Pack codes along the last axis into int32, the first in the lowest bits."""
    per = 32 // bits
    padded = np.pad(codes.astype(np.uint32), ((0, 0), (0, -codes.shape[1] % per)))
    shifts = np.arange(per, dtype=np.uint32) * np.uint32(bits)
    words = (padded.reshape(len(codes), -1, per) << shifts).sum(-1, dtype=np.uint32)
    return torch.from_numpy(words.view(np.int32).copy())


def _random(m: int, n: int, bits: int, rng: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    codes = rng.integers(0, 2**bits, (m, n)).astype(np.uint8)
    zeros = rng.integers(1, 2**bits, (m, n // SIZE)).astype(np.uint8)
    scales = (rng.uniform(0.5, 1.5, zeros.shape) / 2**bits / 8).astype(np.float16)
    return codes, zeros, scales


def _weights(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: Any) -> torch.Tensor:
    steps = codes.astype(np.float32) - zeros.astype(np.float32)[:, groups]
    return torch.from_numpy(scales.astype(np.float32)[:, groups] * steps)


def gptq(bits: int, act_order: bool, stored_zero: int = 1) -> Callable[..., Any]:
    def layer(m: int, n: int, rng: Any) -> tuple[Written, torch.Tensor]:
        codes, zeros, scales = _random(m, n, bits, rng)
        groups = np.arange(n) // SIZE
        if act_order:
            rng.shuffle(groups)
        parts = {
            "qweight": _words(codes, bits).T.contiguous(),  # packed down W^T
            "qzeros": _words(zeros.T - stored_zero, bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return parts, _weights(codes, zeros, scales, groups)

    config = {"quant_method": "gptq", "bits": bits, "group_size": SIZE, "desc_act": act_order}
    config |= {} if stored_zero else {"checkpoint_format": "gptq_v2"}
    return lambda source, target: _write(source, target, layer, config)


def awq(source: Path, target: Path) -> Written:
    def layer(m: int, n: int, rng: Any) -> tuple[Written, torch.Tensor]:
        codes, zeros, scales = _random(m, n, 4, rng)
        order = np.argsort(AWQ_ORDER)
        packed = [
            _words(one.reshape(len(one), -1, 8)[..., order].reshape(len(one), -1), 4)
            for one in (codes.T, zeros.T)
        ]
        parts = {
            "qweight": packed[0],
            "qzeros": packed[1],
            "scales": torch.from_numpy(scales.T.copy()),
        }
        return parts, _weights(codes, zeros, scales, np.arange(n) // SIZE)

    config = {"quant_method": "awq", "bits": 4, "group_size": SIZE, "version": "gemm"}
    return _write(source, target, layer, config)


def hqq(source: Path, target: Path) -> Written:
    def layer(m: int, n: int, rng: Any) -> tuple[Written, torch.Tensor]:
        codes, zeros, scales = _random(m, n, 4, rng)
        rows = codes.reshape(-1, SIZE)
        half = len(rows) // 2
        zeros = zeros.astype(np.float16) + np.float16(0.25)
        parts = {
            "W_q": torch.from_numpy(rows[:half] << 4 | rows[half:]),
            "scale": torch.from_numpy(scales.reshape(-1, 1)),
            "zero": torch.from_numpy(zeros.reshape(-1, 1)),
            "nbits": torch.tensor(4),
            "axis": torch.tensor(1),
            "shape": torch.tensor([m, n]),
            "group_size": torch.tensor(SIZE),
            "view_as_float": torch.tensor(False),
        }
        return parts, _weights(codes, zeros, scales, np.arange(n) // SIZE)

    params = {"nbits": 4, "group_size": SIZE, "axis": 1}
    config = {"quant_method": "hqq", "quant_config": {"weight_quant_params": params}}
    return _write(source, target, layer, config)


def compressed(bits: int, symmetric: bool) -> Callable[..., Any]:
    def layer(m: int, n: int, rng: Any) -> tuple[Written, torch.Tensor]:
        codes, zeros, scales = _random(m, n, bits, rng)
        if symmetric:
            zeros[:] = 2 ** (bits - 1)
        parts = {
            "weight_packed": _words(codes, bits),
            "weight_scale": torch.from_numpy(scales).bfloat16(),
            "weight_shape": torch.tensor([m, n]),
        }
        scales = parts["weight_scale"].float().numpy()
        if not symmetric:
            parts["weight_zero_point"] = _words(zeros.T, bits).T.contiguous()
        return parts, _weights(codes, zeros, scales, np.arange(n) // SIZE)

    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": SIZE}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    return lambda source, target: _write(source, target, layer, config)


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _float4(shape: tuple[int, ...], rng: Any) -> tuple[torch.Tensor, np.ndarray]:
    """Return random 4-bit floats, two a byte along the last axis, and what they stand for."""
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    values = np.where(codes & 8, -1, 1) * _E2M1[codes & 7]
    return torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4), values.astype(np.float32)


def _powers(shape: tuple[int, ...], rng: Any) -> tuple[torch.Tensor, np.ndarray]:
    """Return random exponents, and the powers of two they stand for."""
    exponents = rng.integers(119, 124, shape).astype(np.uint8)
    return torch.from_numpy(exponents), np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)


def nvfp4(weight: str, whole: str, config: dict[str, Any]) -> Callable[..., Any]:
    """Return a writer of NVFP4; weight, whole: names of the codes and of the number for all."""

    def layer(m: int, n: int, rng: Any) -> tuple[Written, torch.Tensor]:
        packed, values = _float4((m, n), rng)
        scales = torch.from_numpy(rng.uniform(0.5, 400, (m, n // 16))).to(torch.float8_e4m3fn)
        factor = np.float32(rng.uniform(1e-4, 2e-4))
        parts = {
            weight: packed,
            "weight_scale": scales,
            whole: torch.tensor(1 / factor if "global" in whole else factor),
            "input_scale": torch.tensor(0.5),
        }
        if "global" in whole:
            factor = np.float32(1 / np.float64(parts[whole].item()))
        whole_codes = values * scales.float().numpy().repeat(16, axis=1)
        return parts, torch.from_numpy(whole_codes * factor)

    return lambda source, target: _write(source, target, layer, config)


def mxfp4(source: Path, target: Path) -> Written:
    """Write MXFP4 as compressed-tensors does."""

    def layer(m: int, n: int, rng: Any) -> tuple[Written, torch.Tensor]:
        packed, values = _float4((m, n), rng)
        exponents, powers = _powers((m, n // 32), rng)
        parts = {"weight_packed": packed, "weight_scale": exponents}
        return parts, torch.from_numpy(values * powers.repeat(32, axis=1))

    return _write(source, target, layer, _compressed("mxfp4-pack-quantized", 32))


def _compressed(form: str, size: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": size}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 4}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def gpt_oss(source: Path, target: Path) -> Written:
    """Write experts as gpt-oss keeps them; the weights that are returned are (experts, in, out)."""
    rng, weights = np.random.default_rng(0), {}
    state: Written = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            state[name] = tensor
            continue
        experts, width, height = tensor.shape
        packed, values = _float4((experts, height, width), rng)
        exponents, powers = _powers((experts, height, width // 32), rng)
        state[f"{name}_blocks"] = packed.reshape(experts, height, width // 32, 16)
        state[f"{name}_scales"] = exponents
        weights[name] = torch.from_numpy(values * powers.repeat(32, axis=2)).swapaxes(1, 2)
    _put(source, target, state, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return weights


def _write(source: Path, target: Path, layer: Any, quantization: dict[str, Any]) -> Written:
    """Write a model whose linear layers but the head are quantised, in two files."""
    rng, weights = np.random.default_rng(0), {}
    state: Written = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        path = name.removesuffix(".weight")
        if path.endswith("_proj") and path != name:
            parts, weights[path] = layer(*tensor.shape, rng)
            state |= {f"{path}.{part}": one.contiguous() for part, one in parts.items()}
        else:
            state[name] = tensor
    _put(source, target, state, quantization)
    return weights


def _put(source: Path, target: Path, state: Written, quantization: dict[str, Any]) -> None:
    target.mkdir()
    names = sorted(state)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in halves.items():
        save_file({name: state[name] for name in some}, target / file, {"format": "pt"})
    where = {name: file for file, some in halves.items() for name in some}
    index = {"metadata": {}, "weight_map": where}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config))
    for file in source.glob("generation_config.json"):
        shutil.copy(file, target)


WRITERS: dict[str, Callable[[Path, Path], Written]] = {
    "gptq": gptq(4, False),
    "gptq, act-order": gptq(4, True),
    "gptq, 8 bits": gptq(8, False),
    "gptq_v2": gptq(4, False, stored_zero=0),
    "awq": awq,
    "hqq": hqq,
    "compressed-tensors": compressed(4, True),
    "compressed-tensors, zero points": compressed(4, False),
    "compressed-tensors, 8 bits": compressed(8, True),
    "compressed-tensors, nvfp4": nvfp4(
        "weight_packed", "weight_global_scale", _compressed("nvfp4-pack-quantized", 16)
    ),
    "compressed-tensors, mxfp4": mxfp4,
    "modelopt": nvfp4(
        "weight", "weight_scale_2", {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    ),
}


def gguf(source: Path, target: Path) -> Written:
    """Write ``target/model.gguf`` of a Llama or Qwen as llama.cpp's converter does."""
    import gguf as package

    config = json.loads((source / "config.json").read_text())
    kind, heads = config["model_type"], config["num_attention_heads"]
    target.mkdir()
    writer = package.GGUFWriter(target / "model.gguf", kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_key_length(config.get("head_dim", config["hidden_size"] // heads))
    names = package.get_tensor_name_map(
        {name: number for number, name in package.MODEL_ARCH_NAMES.items()}[kind], 2
    )
    types = package.GGMLQuantizationType
    weights: Written = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        path, data, block = name.removesuffix(".weight"), tensor.numpy(), types.F32
        if data.ndim == 2:
            last = path.rpartition(".")[2]
            kinds = {"q_proj": types.Q4_0, "up_proj": types.Q4_1, "down_proj": types.MXFP4}
            block = kinds.get(last, types.F16 if last == "lm_head" else types.Q8_0)
        if kind == "llama" and path.endswith(("q_proj", "k_proj")):
            count = heads if path.endswith("q_proj") else config["num_key_value_heads"]
            data = data.reshape(count, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        raw = package.quants.quantize(data, block)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(theirs, raw, raw_dtype=block)
        back = package.quants.dequantize(raw, block)
        if kind == "llama" and path.endswith(("q_proj", "k_proj")):
            back = back.reshape(count, -1, 2, back.shape[1]).swapaxes(1, 2).reshape(back.shape)
        weights[path if path != name else name] = torch.from_numpy(back.copy())
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    return weights
