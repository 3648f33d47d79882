"""The CPU's bench: rungs and peers through the public API, on operands that rotate or stay."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

import gemmule as gm
from gemmule.core.problem import numpy_dtype
from gemmule.lab.bench.host import judged, sets_needed
from gemmule.lab.peers import registry
from gemmule.lab.peers.peer import check as check_peer
from gemmule.lab.records.environment import cpu_name
from gemmule.lab.records.rows import times_of
from gemmule.lab.studies.grid import CODE_BITS, Cell, Lane, Measured, rates
from gemmule.lab.verify import check
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.timing.clock import Contestant, HostClock
from gemmule.timing.sampler import sample

# Two thread pools that take turns disturb each other for some 60 ms (OpenBLAS, OpenMP and Numba on
# 2 cores, November 2026), so each pool's implementations are timed in a run of their own.
REST_S = 0.15
JUDGED_ELEMENTS = 1 << 24
COLD_BYTES = 1 << 30
SLOWEST_CALL_S = 4.0

Operands = tuple[Any, Any]


class CpuBench:
    """Times cells on this CPU. seconds: what one lane may take."""

    backend = "cpu"

    def __init__(self, seconds: float = 0.25) -> None:
        self.device = cpu_name()
        self.seconds = seconds

    def release(self) -> None:
        """Do nothing: operands live for one cell."""

    def measure(self, cell: Cell, lanes: tuple[Lane, ...]) -> Mapping[str, Measured]:
        """Return what became of each lane, by name; ArithmeticError for a wrong result."""
        found: dict[str, Measured] = {}
        ready: dict[str, list[tuple[Contestant, Mapping[str, Any]]]] = {}
        kept: dict[tuple[str, bool, int], Sequence[Operands] | str] = {}
        for lane in lanes:
            key = (lane.form, lane.flip, lane.matrix)
            if key not in kept:
                kept[key] = operand_sets(cell, lane)
            sets = kept[key]
            if isinstance(sets, str):
                found[lane.name] = Measured(note=sets)
                continue
            made = self._contestant(cell, lane, sets)
            if isinstance(made, str):
                found[lane.name] = Measured(note=made)
            else:
                ready.setdefault(_pool(lane), []).append(made)
        for group in ready.values():
            time.sleep(REST_S)
            timed = sample(
                [one for one, _ in group],
                HostClock(),
                max_seconds=self.seconds * len(group),
                min_blocks=6,
                max_blocks=15,
                min_block_s=0.005,
            )
            for one, params in group:
                times = times_of(timed[one.name])
                lane = next(lane for lane in lanes if lane.name == one.name)
                found[one.name] = Measured(times, rates(cell, lane, times.median), params=params)
        return found

    def _contestant(
        self, cell: Cell, lane: Lane, sets: Sequence[Operands]
    ) -> tuple[Contestant, Mapping[str, Any]] | str:
        """Judge a lane and return it ready to be timed with its parameters, or why it is not."""
        calls: list[Callable[[], Any]]
        if lane.rung is None:
            made = peer_calls(lane.peer, cell.op, sets)
            if isinstance(made, str):
                return made
            calls, params = made, {}
        else:
            rung = None if lane.rung == "auto" else lane.rung
            try:
                plan = gm.plan(cell.op, *sets[0], rung=rung)
            except (ValueError, TypeError) as error:
                return str(error)
            if cell.m * cell.n * max(cell.columns, 1) <= JUDGED_ELEMENTS:
                judged(cell.op, *sets[0], rung=rung)
            calls = list(_ours(cell.op, sets, rung, plan.problem.out))
            params = {**plan.params, "rung": plan.rung.name}
        start = time.perf_counter()
        calls[0]()
        if time.perf_counter() - start > SLOWEST_CALL_S:
            return f"one call takes {time.perf_counter() - start:.1f} s: too slow to be timed"
        return Contestant(lane.name, lambda i: calls[i](), len(calls)), params


def _pool(lane: Lane) -> str:
    if lane.rung is None:
        return lane.peer
    return lane.rung if "blas" in lane.rung else "numba"  # some convert with Numba, then call BLAS


def _ours(
    op: str, sets: Sequence[Operands], rung: str | None, dtype: str
) -> Iterator[Callable[[], Any]]:
    function = getattr(gm, op)
    extra = {} if rung is None else {"rung": rung}
    for left, right in sets:
        out = np.empty(check.result_shape(op, left, right), numpy_dtype(dtype))
        yield functools.partial(function, left, right, out=out, **extra)


def peer_calls(name: str, op: str, sets: Sequence[Operands]) -> list[Callable[[], Any]] | str:
    """Return a peer's calls, checked on small operands first, or why it takes no part."""
    peer = next((p for p in registry.all_peers("cpu") if p.name == name), None)
    if peer is None:
        return f"no CPU peer is called {name}"
    problem = gm.plan(op, *sets[0]).problem
    reason = peer.absent() or peer.refuses(problem) or check_peer(peer, problem)
    if reason is not None:
        return reason
    prepared = [peer.prepare(problem, left, right) for left, right in sets]
    return [one.call for one in prepared]


def operand_sets(cell: Cell, lane: Lane) -> list[Operands] | str:
    """Return the operands of a lane, as many sets as its temperature needs, or why there are none.

    Uniform numbers in [0, 1) for float32, as the documents take them; normal ones for others.
    """
    rng = np.random.default_rng(lane.matrix)
    first = _operands(cell, lane, rng)
    count = 1
    if cell.temperature == "cold":
        turn = sets_needed(sum(int(operand.nbytes) for operand in first))
        if not turn.cold or turn.bytes > COLD_BYTES:
            return "cold sets past the cache would take too much memory, or too many sets"
        count = turn.sets
    return [first, *(deepcopy(first) for _ in range(count - 1))]


def _operands(cell: Cell, lane: Lane, rng: np.random.Generator) -> Operands:
    rows, columns = (cell.n, cell.m) if lane.flip else (cell.m, cell.n)
    size = (columns, cell.columns) if cell.op == "matmul" else (columns,)
    if lane.form in CODE_BITS:
        return codes(rng, (rows, columns), CODE_BITS[lane.form]), _numbers(rng, size, "float16")
    stored = _numbers(rng, (cell.m, cell.n), lane.form)
    if cell.layout == "col":
        stored = np.asfortranarray(stored)
    return (stored.T if lane.flip else stored), _numbers(rng, size, lane.form)


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], form: str) -> Any:
    if form.startswith(("int", "uint")):
        return rng.integers(0, 100, shape).astype(numpy_dtype(form))
    values = rng.random(shape, np.float32) if form == "float32" else rng.standard_normal(shape)
    return values.astype(numpy_dtype(form))


def codes(rng: np.random.Generator, shape: tuple[int, int], bits: int) -> QuantizedMatrix:
    """Return random codes with one scale and one zero point for the whole matrix."""
    rows, columns = shape
    packed = rng.integers(0, 256, (rows, -(-columns * bits // 8)), np.uint8)
    if bits == 4 and columns % 2:
        packed[:, -1] &= 0x0F
    scale, zero = np.full((1, 1), 2.0**-8, np.float32), np.full((1, 1), 2.0 ** (bits - 1), "f4")
    return QuantizedMatrix.from_parts(packed, scale, zero, shape=shape, bits=bits, group_size=None)
