"""What quantised layers and a model of them take on a CPU, beside PyTorch's own.

    PYTHONPATH=src python tools/prompt_times.py [part of a group's name] [--threads 1,2]

A group's calls take turns in random order, each after a pause in which the threads of the one
before fall asleep; the last of some calls in a row is timed. Each count of threads has a process of
its own, which may use so many processors, as PyTorch does. Printed are least and median times in
ms, and PyTorch's best in floats over them: above 1 is quicker than it; of models also how many
tokens a second that is, by the median. Needs PyTorch; groups of models need transformers.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gemmule_lab.harness.bench import in_turns

PAUSE_S, CALLS = 0.004, 3
SHAPES = {"2048 x 2048": (2048, 2048), "4096 x 11008": (11008, 4096)}  # inputs, outputs turned
TOKENS = (1, 16, 64, 128, 512)
FLOATS = ("torch bfloat16", "torch float32")
Calls = dict[str, Callable[[], Any]]


@functools.cache
def layers(shape: tuple[int, int]) -> dict[str, tuple[Any, Any]]:
    """Return one layer (out, in) in floats and in codes, and the dtype of its x."""
    import torch

    from gemmule.torch import QuantLinear

    torch.manual_seed(0)
    out, inner = shape
    floats = torch.nn.Linear(inner, out, bias=False).requires_grad_(False)
    halves = torch.nn.Linear(inner, out, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    made = {"torch bfloat16": (halves, torch.bfloat16), "torch float32": (floats, torch.float32)}
    for bits in (4, 8):
        coded = QuantLinear.from_linear(floats, bits=bits)
        made[f"int{bits}"] = coded, torch.bfloat16
        made[f"int{bits} by float32"] = coded, torch.float32
    return made


def forward(shape: tuple[int, int], tokens: int) -> Calls:
    """Return the products of a layer."""
    import torch

    x = torch.randn(tokens, shape[1])
    return {name: functools.partial(m, x.to(t)) for name, (m, t) in layers(shape).items()}


def step(shape: tuple[int, int], tokens: int) -> Calls:
    """Return a product and its gradient, ``grad W``, as a step of an adapter has them."""
    import torch

    def both(layer: Any, dtype: torch.dtype) -> Callable[[], Any]:
        x = torch.randn(tokens, shape[1], dtype=dtype, requires_grad=True)
        grad = torch.randn(tokens, shape[0], dtype=dtype)

        def call() -> Any:
            with torch.enable_grad():
                return torch.autograd.grad(layer(x), x, grad)

        return call

    return {name: both(*one) for name, one in layers(shape).items()}


@functools.cache
def llamas() -> dict[str, Any]:
    """Return a Llama of 4 layers of 2048 in floats and in codes."""
    import copy

    import torch
    import transformers as tf

    import gemmule.torch as gt

    torch.manual_seed(0)
    tf.utils.logging.disable_progress_bar()
    config = tf.LlamaConfig(
        hidden_size=2048, intermediate_size=5504, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=4096, dtype="bfloat16",
    )  # fmt: skip
    halves = tf.LlamaForCausalLM(config).eval().to(torch.bfloat16)
    models = {"torch bfloat16": halves}
    for bits in (4, 8):
        coded = models[f"int{bits}"] = copy.deepcopy(halves)
        layers = coded.model.layers
        while len(layers) > 1:  # copies of the first, which is quantised in their stead
            del layers[1]
        gt.quantize_(coded, bits=bits)
        for i in range(1, config.num_hidden_layers):
            layers.append(copy.deepcopy(layers[0]))
            layers[i].self_attn.layer_idx = i
    return models


def llama(tokens: int) -> Calls:
    """Return the models by so many tokens; by one: the next of 64 before it."""
    import torch

    ids = torch.randint(0, 4096, (1, 65))

    def prompt(model: Any) -> Callable[[], Any]:
        return lambda: model(ids[:, :tokens], use_cache=False)

    def decode(model: Any) -> Callable[[], Any]:
        cache = model(ids[:, :64], use_cache=True).past_key_values

        def call() -> Any:
            model(ids[:, 64:], past_key_values=cache, use_cache=True)
            cache.crop(-1)

        return call

    return {name: (decode if tokens == 1 else prompt)(one) for name, one in llamas().items()}


def groups() -> dict[str, Callable[[], Calls]]:
    """Return what makes each group's calls."""
    made: dict[str, Callable[[], Calls]] = {}
    for name, shape in SHAPES.items():
        for tokens in TOKENS:
            made[f"layer {name}, {tokens} tokens"] = functools.partial(forward, shape, tokens)
        made[f"step {name}, 64 tokens"] = functools.partial(step, shape, 64)
    return made | {
        "model, 64 tokens": functools.partial(llama, 64),
        "model, next token": functools.partial(llama, 1),
    }


def last_of_some(call: Callable[[], Any]) -> float:
    """Return the seconds of the last of some calls in a row, after a pause."""
    time.sleep(PAUSE_S)
    for _ in range(CALLS):
        begin = time.perf_counter()
        call()
    return time.perf_counter() - begin


def measured(calls: Calls, turns: int, tokens: int = 0) -> Iterator[str]:
    """Yield a line for each call of a group; tokens: how many a call of a model takes."""
    clocks = {name: functools.partial(last_of_some, call) for name, call in calls.items()}
    in_turns(clocks, 1)  # compiles
    times = in_turns(clocks, turns)
    theirs = [times[name] for name in FLOATS if name in times]
    least, median = min(map(min, theirs)), min(map(statistics.median, theirs))
    for name, found in times.items():
        mid = statistics.median(found)
        rate = f", {tokens / mid:.1f} tokens a second" if tokens else ""
        yield (
            f"  {name:18s} {min(found) * 1e3:8.2f} {mid * 1e3:8.2f} ms, {least / min(found):5.2f} "
            f"{median / mid:5.2f} of PyTorch's, worst {max(found) / min(found):5.1f} of the least"
            f"{rate}"
        )


def child(asked: str, turns: int) -> None:
    """Print the groups that were asked for, by as many threads as there are processors."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with torch.no_grad():
        for name, make in groups().items():
            if asked in name:
                tokens = {"model, 64 tokens": 64, "model, next token": 1}.get(name, 0)
                print(name, *measured(make(), turns, tokens), sep="\n", flush=True)


def spread_out() -> list[int]:
    """Return the processors of this process, one of each core first."""
    found = []
    for one in sorted(os.sched_getaffinity(0)):
        file = Path(f"/sys/devices/system/cpu/cpu{one}/topology/thread_siblings_list")
        first = re.match(r"\d+", file.read_text()) if file.exists() else None
        found.append((first is not None and int(first[0]) != one, one))
    return [one for _, one in sorted(found)]


def main() -> None:
    """Start a process for each count of threads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("asked", nargs="?", default="")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--turns", type=int, default=25)
    given = parser.parse_args()
    if given.threads == "here":
        child(given.asked, given.turns)
        return
    for count in map(int, given.threads.split(",")):
        print(f"{count} threads", flush=True)
        processors = ",".join(map(str, spread_out()[:count]))
        command = ["taskset", "-c", processors, sys.executable, __file__, given.asked]
        subprocess.run([*command, "--threads=here", f"--turns={given.turns}"], check=True)


if __name__ == "__main__":
    main()
