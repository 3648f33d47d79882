"""Document 001's products from host array to host array, in parts, all implementations in turns.

A pass on a GPU allocates, copies in, multiplies, copies out and frees, as the document's programs
do. The kernel's part lies between two events and holds a few microseconds of launching; every other
part is host time around work that is waited for.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

import gemmule as gm
from gemmule.backends.cuda import launch as cuda_launch
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.problem import Problem
from gemmule_lab.bench.host_to_host import Launch, Pass, pinned_copy
from gemmule_lab.harness import bench
from gemmule_lab.peers import eigen, registry
from gemmule_lab.peers.peer import Peer

CPU_LOOP, EIGEN, NUMPY = "cpu loop", "eigen", "numpy"
HIS_EIGEN = eigen.AS_001.name
NAIVE, SHARED, CUBLAS = "naive", "shared tile", "cublas"
HOST_NAMES = (CPU_LOOP, EIGEN, HIS_EIGEN, NUMPY)
RUNGS = {NAIVE: ("naive", {"width": 1}), SHARED: ("shared_tile", {"tile": 32})}
PINNED = ", pinned memory"
PARTS = ("allocate", "host to device", "launch", "kernel", "device to host", "free")
REPEATS, FEW_REPEATS = 30, 2
ENOUGH_US = 5e4  # of repeats, between these two numbers of them
SLOW_US, ALONE_US = 1e5, 2.5e5  # beyond, the first run counts: with one more; alone

Array = Any
Parts = Mapping[str, float]
Bind = Callable[[Sequence[int]], Launch]  # a launch on matrices in device memory


class Way(NamedTuple):
    """One implementation on given host matrices; ``run()`` returns microseconds by part."""

    name: str
    run: Callable[[], Parts]
    result: Array


def host_way(name: str, a: Array, b: Array, c: Array) -> Way | str:
    """Return a product on the CPU, or why there is none here."""
    call: Launch = functools.partial(np.matmul, a, b, out=c)
    result = c
    if name == CPU_LOOP:
        call = functools.partial(gm.plan("matmul", a, b, rung="triple_loop"), a, b, out=c)
    elif name != NUMPY:
        problem = gm.plan("matmul", a, b).problem
        peer = peer_named(name, problem)
        if isinstance(peer, str):
            return peer
        prepared = peer.prepare(problem, a, b)
        call, result = prepared.call, prepared.result().reshape(a.shape)

    def run() -> Parts:
        start = time.perf_counter()
        call()
        return {"product": (time.perf_counter() - start) * 1e6}

    return Way(name, run, result)


def peer_named(name: str, problem: Problem) -> Peer | str:
    """Return a CPU peer, checked on small operands, or why it takes no part."""
    among = (*registry.all_peers("cpu"), eigen.AS_001)
    present, absent = registry.select(problem, "cpu", peers=[p for p in among if p.name == name])
    return present[0] if present else absent[0].reason


def gpu_way(name: str, hosts: Sequence[Array], ordinal: int, stack: ExitStack) -> Way | str:
    """Return a product on a GPU from host arrays A, B to host array C, or why there is none here.

    Memory that is page-locked for it lives as long as `stack`.
    """
    base, result, n = name.removesuffix(PINNED), hosts[2], len(hosts[0])
    bind = _cublas(n, ordinal) if base == CUBLAS else _rung(base, n, ordinal)
    if isinstance(bind, str):
        return bind
    if name != base:
        hosts = [stack.enter_context(pinned_copy(host, ordinal)) for host in hosts]
        result = hosts[2].view(np.float32).reshape(result.shape)
    return Way(name, Pass(hosts, bind, ordinal).run, result)


def _views(pointers: Sequence[int], n: int, ordinal: int) -> list[DeviceArray]:
    return [DeviceArray(at, (n, n), (n, 1), "float32", ordinal, None) for at in pointers]


def _rung(name: str, n: int, ordinal: int) -> Bind:
    """Return what packs a rung's launch for three matrices of n x n."""
    rung, params = RUNGS[name]
    a, b, _ = _views([1 << 20] * 3, n, ordinal)  # a plan looks at alignment, not at the memory
    launcher = cuda_launch.Launcher(gm.plan("matmul", a, b, rung=rung, params=params).choice)
    start = launcher.starter(ordinal)
    return lambda pointers: lambda: start(0, *pointers, 0)


def _cublas(n: int, ordinal: int) -> Bind | str:
    """Return cuBLAS's product of n x n matrices through PyTorch, or why there is none."""
    from gemmule_lab.peers.gpu_float import to_cuda, torch_missing

    if (reason := torch_missing()) is not None:
        return reason
    import torch

    def bind(pointers: Sequence[int]) -> Launch:
        # Row-major operands and A before B: PyTorch asks cuBLAS for B^T A^T in column-major order.
        a, b, c = (to_cuda(view) for view in _views(pointers, n, ordinal))
        return lambda: torch.mm(a, b, out=c)

    return bind


def in_turns(
    ways: Sequence[Way], firsts: Mapping[str, Parts], seed: int, repeats: int = REPEATS
) -> dict[str, list[Parts]]:
    """Run each way some times, in rounds of random order; return the parts of every run.

    Each runs some 50 ms long, at most `repeats` times and at least twice; what takes over 100 ms
    once, and over 250 ms not again: all after a first run, which is the first of the list and
    counts only where it is slow. firsts: those first runs, by name.
    """
    found = {way.name: [firsts[way.name]] for way in ways}
    wanted = {name: min(repeats, _repeats(sum(first.values()))) for name, first in firsts.items()}
    done = 0
    for rounds in sorted({*wanted.values()}):
        here = {way.name: way.run for way in ways if wanted[way.name] >= rounds}
        for name, runs in bench.in_turns(here, rounds - done, seed + rounds).items():
            found[name] += runs
        done = rounds
    return found


def _repeats(us: float) -> int:
    """Return how often a product that took so long is run again."""
    if us > SLOW_US:
        return int(us <= ALONE_US)
    return min(REPEATS, max(FEW_REPEATS, int(ENOUGH_US / us)))


def counted(runs: Sequence[Parts]) -> Sequence[Parts]:
    """Return the runs that count: not the first, unless it is slow or alone."""
    return runs if sum(runs[0].values()) > SLOW_US or len(runs) == 1 else runs[1:]
