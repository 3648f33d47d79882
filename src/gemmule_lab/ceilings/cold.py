"""How many bytes have to rotate before every read comes from memory: measured, not looked up.

A virtual machine reports the whole last-level cache of its host, of which its few processors may
get a small share. So a buffer is walked round and round, over more and more of it: where the rate
has come down to that of the largest walks, the cache no longer helps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from gemmule.backends.cpu.target import vector_bytes
from gemmule.timing.clock import HostClock
from gemmule_lab.ceilings.loops import STEP_BYTES, read_loop
from gemmule_lab.records.rows import Ceiling

COLD_FROM = "cold from"
SMALLEST = 32 << 20  # smaller walks may stay in the second-level caches, which no row is to be in
LARGEST_SIZES = 3  # their median is the rate of the memory
WITHIN = 0.10
WALKS, STREAMS = 5, 4
SAFETY = 2.0  # for the 10 %, and since neighbours may leave more of the cache another day


def cold_from(address: int, nbytes: int, workers: int) -> Ceiling:
    """Return the bytes, in MiB, whose cyclic reading is as slow as that of the whole buffer.

    Walks of lengths a factor of sqrt(2) apart, each by all workers and timed by the best of five,
    since neighbours only ever slow a walk down; `tried` keeps the rate of each in GB/s. Of a buffer
    no larger than the cache that is its length.
    """
    loop = read_loop(STREAMS, vector_bytes() // 8)
    clock = HostClock()
    rates: dict[int, float] = {}
    steps = max(0, math.floor(2 * math.log2(nbytes / SMALLEST))) if nbytes > SMALLEST else 0
    for step in range(steps, -1, -1):
        length = int(nbytes / 2 ** (step / 2)) // (workers * STREAMS) // STEP_BYTES * STEP_BYTES
        arguments = (address, 0, length, STREAMS * length, workers)
        loop(*arguments)
        seconds = []
        for _ in range(WALKS):
            start = clock.now()
            loop(*arguments)
            seconds.append(clock.now() - start)
        walked = workers * STREAMS * length
        rates[walked] = walked / min(seconds) * 1e-9
    tried = {f"{size / 2**20:.0f} MiB": rate for size, rate in rates.items()}
    found = plateau_from(rates) / 2**20
    return Ceiling(COLD_FROM, found, "MiB", "cyclic reading at the memory's rate", workers, tried)


def plateau_from(rates: Mapping[int, float]) -> int:
    """Return the least size from which on every rate is within 10 % of the largest sizes' median.

    >>> plateau_from({32: 30.0, 64: 29.0, 128: 22.0, 256: 17.1, 512: 17.0, 1024: 17.2})
    256
    """
    sizes = sorted(rates)
    level = float(np.median([rates[size] for size in sizes[-LARGEST_SIZES:]]))
    found = sizes[-1]
    for size in reversed(sizes):
        if rates[size] > (1 + WITHIN) * level:
            break
        found = size
    return found


def rotating_bytes(ceilings: Mapping[str, Ceiling]) -> int | None:
    """Return how many bytes have to pass between two uses of a set, or None if not measured."""
    found = ceilings.get(COLD_FROM)
    return None if found is None else int(SAFETY * found.value * 2**20)
