"""GGUF files as models of transformers, their blocks' codes in quantised layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from gemmule.errors import INSTALL
from gemmule.quant import checks
from gemmule.quant.gguf import from_gguf, kinds
from gemmule.quant.matrix import QuantizedMatrix

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Those whose tensors are transformers' by other names; in llama's, heads' rows are interleaved."""
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load(path: Path, model_class: Any, config_class: Callable[..., Any], **options: Any) -> Any:
    """Return the model in a GGUF file; ValueError, with nothing loaded, names what is not served.

    config_class: makes the quantisation's configuration of the types of blocks, a reader of one
    layer, and the names of all tensors.
    """
    try:
        import gguf
    except ImportError as error:
        raise ImportError(f"GGUF files need the package gguf: {INSTALL['gguf']}") from error
    reader = gguf.GGUFReader(path)
    field = reader.get_field("general.architecture")
    architecture = "" if field is None else str(field.contents())
    faults = {
        f"{one.name} is {one.tensor_type.name}"
        for one in reader.tensors
        if one.tensor_type.name not in (*kinds(), *_FLOATS)
    }
    if architecture not in ARCHITECTURES:
        faults.add(f"its architecture is {architecture!r}; read are {', '.join(ARCHITECTURES)}")
    if faults:
        shown = "; ".join(sorted(faults)[:8])
        raise ValueError(f"{path} is not served: {shown}; types read are {', '.join(kinds())}")
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    width = reader.get_field(f"{architecture}.attention.key_length")
    if width is not None:  # transformers does not read it for every architecture
        config.head_dim = int(width.contents())
    kind = model_class or transformers.AutoModelForCausalLM
    with torch.device("meta"):
        skeleton = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    names = _names(gguf, architecture, config.num_hidden_layers, skeleton)
    state, shapes = {}, {}
    for one in reader.tensors:
        name = names.get(one.name)
        if name is not None:
            sizes = tuple(int(size) for size in reversed(one.shape))
            blocks = one.tensor_type.name in kinds()
            key = f"{name.removesuffix('.weight')}.{one.tensor_type.name}" if blocks else name
            state[key] = _tensor(path, one, sizes, blocks)
            shapes[name.removesuffix(".weight")] = sizes
    heads = config.num_attention_heads, config.num_key_value_heads
    turned = heads if architecture == "llama" else (None, None)

    def read(name: str, parts: dict[str, Any]) -> QuantizedMatrix:
        ((block, data),) = parts.items()
        count = {"q_proj": turned[0], "k_proj": turned[1]}.get(name.rpartition(".")[2])
        rows = data if count is None else _by_halves(data, count)
        return from_gguf(rows.reshape(-1), block, checks.shape(shapes[name]))  # type: ignore[arg-type]

    own = config_class(kinds(), read, list(state))
    kind = type(skeleton)
    options = {"dtype": torch.float32, **options}
    return kind.from_pretrained(
        None, config=config, state_dict=state, quantization_config=own, **options
    )


def _names(gguf: Any, architecture: str, layers: int, skeleton: Any) -> dict[str, str]:
    """Return transformers' name of each of a file's tensors."""
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], layers)
    pairs = ((names.get_name(n, try_suffixes=(".weight", ".bias")), n) for n in _keys(skeleton))
    return {theirs: name for theirs, name in pairs if theirs is not None}


def _keys(skeleton: Any) -> list[str]:
    """Return the names of a model's parameters, without those that others are tied to."""
    tied = set(skeleton.all_tied_weights_keys)
    return [name for name in skeleton.state_dict() if name not in tied]


def _tensor(path: Path, one: Any, sizes: tuple[int, ...], blocks: bool) -> torch.Tensor:
    """Return a tensor of a file: floats, or the bytes of the blocks of each row; read when used."""
    shown = np.memmap(path, np.uint8, "c", one.data_offset, (one.n_bytes,))
    flat = torch.from_numpy(shown)  # written to, it would leave the file alone
    if blocks:
        return flat.reshape(sizes[0], -1)
    return flat.view(_FLOATS[one.tensor_type.name]).reshape(sizes)


def _by_halves(rows: Any, heads: int) -> Any:
    """Return the rows of each head as transformers has them: even ones first, then odd ones."""
    m, width = rows.shape
    return np.ascontiguousarray(rows.reshape(heads, m // heads // 2, 2, width).swapaxes(1, 2))
