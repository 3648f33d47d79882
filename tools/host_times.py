"""What calls cost the host, ours beside PyTorch's, and what a quantised model takes of memory.

    PYTHONPATH=src python tools/host_times.py [part of a group's name]

A block is a number of calls that nothing waits for, too few to fill the stream's queue; blocks of a
group's calls take turns in random order. Printed are medians and least times of a call in us, the
ratio of the medians to the group's first, and the Python frames of a call. Needs a GPU and PyTorch.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import gemmule as gm
from gemmule.torch import QuantLinear
from gemmule_lab.harness.bench import in_turns

CALLS, BLOCKS, MOST_S = 60, 25, 0.6
Calls = dict[str, Callable[[], Any]]


def random_tensor(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Return normal numbers on the GPU."""
    return torch.randn(shape, device="cuda", dtype=dtype)


def layers(shape: tuple[int, ...], *, grad: bool = False, inference: bool = False) -> Calls:
    """Return products of a float layer with a bias, and of its form by 4 bits."""
    linear = torch.nn.Linear(4096, 4096, device="cuda", dtype=torch.float16)
    linear.requires_grad_(False)
    coded = QuantLinear.from_linear(linear, bits=4, group_size=128)
    x = random_tensor(*shape, 4096).requires_grad_(grad)

    def within(layer: Any) -> Callable[[], Any]:
        def call() -> Any:
            with torch.inference_mode():
                return layer(x)

        return call if inference else lambda: layer(x)

    return {"nn.Linear": within(linear), "QuantLinear": within(coded)}


def turned(rows: int) -> Calls:
    """Return products with a matrix of 4 bits behind x."""
    W, x = random_tensor(4096, 4096), random_tensor(rows, 4096)
    Q = gm.quantize(W, bits=4, group_size=128)
    return {"torch.mm": lambda: torch.mm(x, W.T), "x @ Q.T": lambda: x @ Q.T}


def straight(columns: int) -> Calls:
    """Return products with a matrix of 4 bits in front of X."""
    W, X = random_tensor(4096, 4096), random_tensor(4096, columns)
    Q = gm.quantize(W, bits=4, group_size=128)
    plan = gm.plan("matmul", Q, X)
    return {"torch.mm": lambda: torch.mm(W, X), "Q @ X": lambda: Q @ X, "plan": lambda: plan(Q, X)}


def dense(shape: tuple[int, ...], dtype: torch.dtype) -> Calls:
    """Return products of dense matrices, alone or in a batch."""
    A, B = random_tensor(*shape, dtype=dtype), random_tensor(*shape, dtype=dtype)
    out, plan, theirs = torch.empty_like(A), gm.plan("matmul", A, B), torch.matmul
    name = "torch.bmm" if A.ndim > 2 else "torch.mm"
    theirs = getattr(torch, name[6:])
    return {
        name: lambda: theirs(A, B),
        f"gm.matmul, {plan.rung.name}": lambda: gm.matmul(A, B),
        "plan": lambda: plan(A, B),
        f"{name}, out": lambda: theirs(A, B, out=out),
        "gm.matmul, out": lambda: gm.matmul(A, B, out=out),
        "plan, out": lambda: plan(A, B, out=out),
    }


def vector() -> Calls:
    """Return products of a matrix and a vector."""
    A, x = random_tensor(64, 64), random_tensor(64)
    return {"torch.mv": lambda: torch.mv(A, x), "gm.matvec": lambda: gm.matvec(A, x)}


GROUPS: dict[str, Callable[[], Calls]] = {
    "layer, 1 row": lambda: layers((1,)),
    "layer, 8 rows": lambda: layers((8,)),
    "layer, 64 rows": lambda: layers((64,)),
    "layer, 1 x 1 row": lambda: layers((1, 1)),
    "layer, 8 rows, inference": lambda: layers((8,), inference=True),
    "layer, 8 rows, gradient": lambda: layers((8,), grad=True),
    "x @ Q.T, 1 row": lambda: turned(1),
    "x @ Q.T, 8 rows": lambda: turned(8),
    "Q @ X, 8 columns": lambda: straight(8),
    "matmul, float16 64": lambda: dense((64, 64), torch.float16),
    "matmul, float32 64": lambda: dense((64, 64), torch.float32),
    "matmul, float16 1024": lambda: dense((1024, 1024), torch.float16),
    "matmul, float32 1024": lambda: dense((1024, 1024), torch.float32),
    "batch, float16 8 x 64": lambda: dense((8, 64, 64), torch.float16),
    "batch, float32 8 x 64": lambda: dense((8, 64, 64), torch.float32),
    "matvec, float16 64": vector,
}


def block(call: Callable[[], Any]) -> float:
    """Return what a call of a block took the host, in us."""
    begin = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    took = time.perf_counter_ns() - begin
    torch.cuda.synchronize()
    return took / CALLS / 1e3


def frames(call: Callable[[], Any]) -> int:
    """Return the Python functions that a call enters, the measured lambda apart."""
    entered = 0

    def note(frame: Any, event: str, given: Any) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered - 1


def measured(calls: Calls) -> Iterator[str]:
    """Yield a line for each call of a group."""
    for call in calls.values():
        for _ in range(5):
            call()
    torch.cuda.synchronize()
    blocks = {name: functools.partial(block, call) for name, call in calls.items()}
    times = in_turns(blocks, BLOCKS, seconds=MOST_S)
    medians = {name: statistics.median(found) for name, found in times.items()}
    first = next(iter(medians.values()))
    for name, median in medians.items():
        numbers = f"{median:8.2f} us  least {min(times[name]):7.2f}  {median / first:5.2f}"
        yield f"  {name:34s} {numbers}  frames {frames(calls[name])}"


def memory() -> str:
    """Return what a model of 8 layers takes after products of all kinds, beside its parts."""
    torch.cuda.synchronize()
    before, made = torch.cuda.memory_allocated(), []
    for _ in range(8):
        linear = torch.nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16)
        made.append(QuantLinear.from_linear(linear, bits=4, group_size=128))
    del linear
    model, Q = torch.nn.Sequential(*made), made[0].matrix
    with torch.no_grad():
        for rows in (1, 8, 64, 512, 4096):
            x = random_tensor(rows, 4096, dtype=torch.bfloat16)
            model(x), x @ Q, Q @ x.T
    wanted = sum(layer.matrix.nbytes for layer in made)
    del x
    torch.cuda.synchronize()
    share = (torch.cuda.memory_allocated() - before) / wanted
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info()
    return (
        f"memory after products of all kinds over codes, scales and zero points: {share:.3f}; "
        f"the device has {(whole - free) / 2**20:.0f} MiB in use, PyTorch's allocator "
        f"{torch.cuda.memory_reserved() / 2**20:.0f}"
    )


def main() -> None:
    """Print the groups whose name has what was asked for."""
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    for name, make in GROUPS.items():
        if asked in name:
            print(name, *measured(make()), sep="\n", flush=True)
    if asked in "memory":
        print(memory())


if __name__ == "__main__":
    main()
