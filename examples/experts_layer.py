"""One layer of a mixture of experts with random weights: bfloat16 and int4 here, and others.

``python examples/experts_layer.py [mixtral|qwen [tokens ...]]`` routes tokens to their experts and
multiplies. `gemmule.grouped_matmul` takes the experts' numbers as the router gives them, applies
the gate and adds up what a token's experts give; for the others tokens are sorted first. Nothing
waits for the host but the loop, so a CUDA graph captures the layer. On a CPU the layer is a small
one.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import gemmule as gm
import gemmule.torch as gt

# Experts, experts a token, width of the model, width of an expert.
LAYERS = {"mixtral": (8, 2, 4096, 14336), "qwen": (128, 8, 2048, 768), "small": (16, 4, 256, 128)}
TOKENS = (1, 16, 256, 4096)
Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(torch.nn.Module):
    """A router and its experts' matrices, (experts, n, k) as torch.nn.Linear would keep them."""

    def __init__(self, kind: str, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        count, self.best, model, width = LAYERS[kind]
        of = {"device": device, "dtype": dtype}
        self.router = torch.nn.Linear(model, count, bias=False, **of)
        self.gate_up = torch.randn(count, 2 * width, model, **of) * model**-0.5
        self.down = torch.randn(count, model, width, **of) * width**-0.5

    @property
    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both projections as (experts, k, n), where they lie."""
        return self.gate_up.mT, self.down.mT

    def forward(self, x: torch.Tensor, way: Way) -> torch.Tensor:
        """Return the layer's output for tokens (count, model); `way` computes the experts."""
        share, expert = torch.topk(torch.softmax(self.router(x).float(), -1), self.best)
        return way(x, expert, share / share.sum(-1, keepdim=True))


def by_indices(gate_up: Any, down: Any) -> Way:
    """Return the experts of two products that take the router's numbers; the other ways sort."""

    def experts(x: torch.Tensor, expert: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        hidden = gm.grouped_matmul(x, gate_up, indices=expert, epilogue="silu_gate")
        found: torch.Tensor = gm.grouped_matmul(hidden, down, indices=expert, weights=share)
        return found

    return experts


def by_sorting(product: Callable[..., torch.Tensor], gate_up: Any, down: Any) -> Way:
    """Return the experts by a product of rows that are sorted by expert, and what that takes."""

    def experts(x: torch.Tensor, expert: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        numbers, order = torch.sort(expert.flatten(), stable=True)
        token = order // expert.shape[1]
        every = torch.arange(len(gate_up), device=x.device)
        ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
        gate, up = product(x[token], gate_up, ends).chunk(2, -1)
        found = product(torch.nn.functional.silu(gate) * up, down, ends)
        found = found * share.flatten()[order, None].to(found.dtype)
        return torch.zeros_like(x).index_add_(0, token, found)

    return experts


def looped(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply expert by expert, which the host has to know the ends for."""
    parts, begin = [], 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            parts.append(x[begin:end] @ weights[expert])
        begin = end
    return torch.cat(parts)


def ways_of(layer: Layer) -> dict[str, tuple[Way, bool]]:
    """Return who computes a layer's experts, and whether a graph captures that."""
    matrices = layer.matrices
    codes = (
        gm.quantize_experts(w, bits=4, group_size=64, symmetric=True, scale_dtype="float16")
        for w in matrices
    )
    ways: dict[str, tuple[Way, bool]] = {
        "gemmule": (by_indices(*matrices), True),
        "gemmule int4": (gt.QuantExperts(*codes), True),
        "loop": (by_sorting(looped, *matrices), False),
    }
    if layer.gate_up.is_cuda:
        product = lambda x, w, ends: torch._grouped_mm(x, w, offs=ends)  # noqa: E731
        ways["torch._grouped_mm"] = by_sorting(product, *matrices), True
        if importlib.util.find_spec("triton") is not None:
            from gemmule_lab.peers import triton_kernels  # a plain kernel, for comparison

            ways["Triton"] = by_sorting(triton_kernels.grouped, *matrices), True
    return ways


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
    layer = Layer(kind, device, dtype)
    ways = ways_of(layer)
    for count in counts:
        x = torch.randn(count, layer.router.in_features, device=device, dtype=dtype)
        wanted = layer(x, ways["loop"][0]).float()
        for name, (way, captured) in ways.items():
            off = (layer(x, way).float() - wanted).norm() / wanted.norm()
            took = seconds(lambda way=way, x=x: layer(x, way), captured)
            print(f"{count:5} tokens  {name:18} {took * 1e6:9.0f} us  {off:.1%} off the loop")


if __name__ == "__main__":
    names = sys.argv[1:]
    default = "qwen" if torch.cuda.is_available() else "small"
    main(names[0] if names else default, [int(n) for n in names[1:]] or list(TOKENS))
