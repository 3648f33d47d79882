"""One layer of a mixture of experts with random weights: bfloat16 and int4 here, and PyTorch.

``python examples/experts_layer.py [mixtral|qwen [tokens ...]]`` routes tokens to their experts,
sorts them by expert on the device, and multiplies by `gemmule.grouped_matmul`; nothing waits for
the host in between, so a CUDA graph captures the whole layer. On a CPU the layer is a small one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import gemmule as gm

# Experts, experts a token, width of the model, width of an expert.
LAYERS = {"mixtral": (8, 2, 4096, 14336), "qwen": (128, 8, 2048, 768), "small": (16, 4, 256, 128)}
TOKENS = (1, 16, 256, 4096)
Product = Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]


class Experts(torch.nn.Module):
    """A router and its experts' matrices, (experts, n, k) as torch.nn.Linear would keep them."""

    def __init__(self, kind: str, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        count, self.best, model, width = LAYERS[kind]
        of = {"device": device, "dtype": dtype}
        self.router = torch.nn.Linear(model, count, bias=False, **of)
        self.gate_up = torch.randn(count, 2 * width, model, **of) * model**-0.5
        self.down = torch.randn(count, model, width, **of) * width**-0.5

    def forward(self, x: torch.Tensor, product: Product, weights: tuple[Any, Any]) -> torch.Tensor:
        """Return the layer's output for tokens (count, model)."""
        share, expert = torch.topk(torch.softmax(self.router(x).float(), -1), self.best)
        share = share / share.sum(-1, keepdim=True)
        order = torch.argsort(expert.flatten(), stable=True)  # places of (token, expert) by expert
        token = order // self.best
        numbers = torch.arange(1, self.router.out_features + 1, device=x.device)
        ends = torch.searchsorted(expert.flatten()[order], numbers).int()
        gate, up = product(x[token], weights[0], ends).chunk(2, -1)
        found = product(torch.nn.functional.silu(gate) * up, weights[1], ends)
        found = found * share.flatten()[order, None].to(found.dtype)
        return torch.zeros_like(x).index_add_(0, token, found)


def looped(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply expert by expert, which the host has to know the ends for."""
    parts, begin = [], 0
    for expert, end in enumerate(ends.tolist()):
        parts.append(x[begin:end] @ weights[expert])
        begin = end
    return torch.cat(parts)


def seconds(run: Callable[[], Any], captured: bool) -> float:
    """Return the median time of a call, on a GPU by a captured graph where that is possible."""
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            run = graph.replay
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


@torch.no_grad()
def main(kind: str, counts: list[int]) -> None:
    """Print a line for each number of tokens and each way to multiply."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = Experts(kind, device, dtype)
    plain = layer.gate_up.transpose(1, 2), layer.down.transpose(1, 2)
    codes = tuple(gm.quantize_experts(w, bits=4, group_size=64, symmetric=True) for w in plain)
    ways: dict[str, tuple[Product, tuple[Any, Any], bool]] = {
        "gemmule": (gm.grouped_matmul, plain, True),
        "gemmule int4": (gm.grouped_matmul, (codes[0], codes[1]), True),
        "loop": (looped, plain, False),
    }
    if device == "cuda":
        ways["torch._grouped_mm"] = (lambda x, w, e: torch._grouped_mm(x, w, offs=e), plain, True)
    for count in counts:
        x = torch.randn(count, layer.router.in_features, device=device, dtype=dtype)
        wanted = layer(x, looped, plain).float()
        for name, (product, weights, captured) in ways.items():
            off = (layer(x, product, weights).float() - wanted).norm() / wanted.norm()
            took = seconds(lambda p=product, w=weights, x=x: layer(x, p, w), captured)
            print(f"{count:5} tokens  {name:18} {took * 1e6:9.0f} us  {off:.1%} off the loop")


if __name__ == "__main__":
    names = sys.argv[1:]
    default = "qwen" if torch.cuda.is_available() else "small"
    main(names[0] if names else default, [int(n) for n in names[1:]] or list(TOKENS))
