"""Tokens per second of a Llama with random weights: bfloat16, int8 and int4 here, PyTorch's int4.

``python examples/generate_tokens.py [tokens [layers [prompt]]]`` builds a model from a
configuration, for which nothing is downloaded, quantises its linear layers but the last, and
generates greedily by transformers' ``generate``. There Python starts every kernel, and what it
costs is in the figures. Beside that stand the tokens a second of a prompt, and of single steps with
a cache of fixed size: as Python starts their kernels, and on a GPU in a CUDA graph, also of
compiled layers.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo

from gemmule.torch.linear import quantize_

GROUP, PROMPT, LAST = 128, 16, "lm_head"


class TinyGemm(torch.nn.Module):
    """A linear layer by PyTorch's packed int4 product (tinygemm), in groups with an offset each."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        grouped = weight.float().unflatten(1, (-1, GROUP))
        low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)
        scales = (high - low).clamp(min=1e-6) / 15
        codes = ((grouped - low) / scales).round().clamp(0, 15).flatten(1)
        if weight.is_cuda:
            pairs = codes.to(torch.uint8)  # the even column in the high four bits
            packed = torch._convert_weight_to_int4pack(pairs[:, ::2] << 4 | pairs[:, 1::2], 8)
        else:
            packed = torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
        # w = (code - 8) * scale + offset
        offsets = torch.cat([scales, low + 8 * scales], 2).transpose(0, 1).contiguous()
        self.register_buffer("packed", packed)
        self.register_buffer("offsets", offsets.to(weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = torch._weight_int4pack_mm if x.is_cuda else torch._weight_int4pack_mm_for_cpu
        y = product(x.reshape(-1, x.shape[-1]), self.packed, GROUP, self.offsets)
        return y.reshape(*x.shape[:-1], -1)


def with_tinygemm(model: Any) -> Any:
    """Replace the linear layers but the last one by PyTorch's int4."""
    for name, layer in [*model.named_modules()]:
        if type(layer) is torch.nn.Linear and name != LAST:
            model.set_submodule(name, TinyGemm(layer))
    return model


def ours(bits: int) -> Callable[[Any], Any]:
    """Return what replaces the linear layers but the last one by this package's."""
    return lambda model: quantize_(model, bits, GROUP, filter=lambda name, _: name != LAST).model


def built(device: str, layers: int) -> Any:
    """Return a Llama with random weights, as wide as one of 7 billion on a GPU, small on a CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, heads = (4096, 32) if device == "cuda" else (512, 8)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        vocab_size=32000,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def seconds(model: Any, prompt: torch.Tensor, count: int) -> float:
    """Return how long `count` tokens take; everything is compiled and packed before."""
    options = {"do_sample": False, "min_new_tokens": count, "max_new_tokens": count}
    model.generate(prompt, **options)
    begin = time.perf_counter()
    model.generate(prompt, **options).tolist()  # waits for the device
    return time.perf_counter() - begin


def prompt_seconds(model: Any, length: int) -> float:
    """Return the least time that a prompt takes to its last token's logits."""
    ids = torch.ones((1, length), dtype=torch.long, device=model.device)
    return min(timed(lambda: model(ids, use_cache=False, logits_to_keep=1), 1) for _ in range(4))


def timed(call: Callable[[], object], count: int) -> float:
    """Return the seconds of so many calls, the device's work included."""
    begin = time.perf_counter()
    for _ in range(count):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def steps(model: Any, count: int) -> Iterator[float]:
    """Yield the seconds of a token: eager, in a CUDA graph, and in one with its layers compiled."""
    from transformers import StaticCache

    token, place = (torch.full((1, 1), n, device=model.device) for n in (1, 0))
    cache = StaticCache(model.config, max_cache_len=count + 1)

    def step() -> Any:
        return model(token, position_ids=place, past_key_values=cache, use_cache=True).logits

    def least(call: Callable[[], object]) -> float:
        found = []
        for _ in range(3):
            cache.reset()
            found.append(timed(call, count) / count)
        return min(found)

    def captured() -> torch.cuda.CUDAGraph:
        cache.reset()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        stream.synchronize()
        with torch.cuda.graph(graph):
            step()
        return graph

    timed(step, 1)
    yield least(step)
    if model.device.type == "cuda":
        yield least(captured().replay)
        # Each layer is compiled for itself: beyond a limit, which the layers of models before count
        # against, PyTorch would run the others as they are.
        torch.compiler.reset()
        layers = model.model.layers
        with torch._dynamo.config.patch(recompile_limit=len(layers) + 1):
            for layer in layers:
                layer.compile()
            yield least(captured().replay)


def ways() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield a name and what changes a model, the model as it is first."""
    yield "bfloat16", lambda model: model
    yield "gemmule int8", ours(8)
    yield "gemmule int4", ours(4)
    if hasattr(torch, "_weight_int4pack_mm_for_cpu"):
        yield "tinygemm int4", with_tinygemm


def main(count: int = 64, layers: int = 8, length: int = 512) -> None:
    """Print a row for each way."""
    if importlib.util.find_spec("transformers") is None:
        print("skipped: this example needs transformers (pip install transformers)")
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    whole = built(device, layers)
    prompt = torch.arange(1, PROMPT + 1, device=device)[None]
    print(f"tokens/s on {device}; a prompt of {length} tokens")
    print("linear layers     MB  generate    prompt    eager  in a graph  compiled in a graph")
    for name, change in ways():
        with torch.inference_mode():
            model = change(copy.deepcopy(whole))
            speed = count / seconds(model, prompt, count)
            fast = length / prompt_seconds(model, length)
            nbytes = sum(p.numel() * p.itemsize for p in (*model.parameters(), *model.buffers()))
            alone = "   ".join(f"{1 / took:8.1f}" for took in steps(model, count))
        print(f"{name:13} {nbytes / 1e6:6.0f}  {speed:8.1f}  {fast:8.0f} {alone}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
