"""The CPU's bench: rungs and peers through the public API, on operands that rotate or stay."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import gemmule as gm
from gemmule.core.problem import numpy_dtype
from gemmule.timing.clock import Entry, HostClock
from gemmule_lab.harness.host import judged, sets_needed
from gemmule_lab.harness.operands import codes
from gemmule_lab.records.environment import cpu_name
from gemmule_lab.studies.grid import CODE_BITS, Cell, Lane
from gemmule_lab.studies.harness import Bound, CellBench, peer_named
from gemmule_lab.verify import check

# Two thread pools that take turns disturb each other for some 60 ms (OpenBLAS, OpenMP and Numba on
# 2 cores, November 2026), so each pool's implementations are timed in a run of their own.
REST_S = 0.15
JUDGED_ELEMENTS = 1 << 24
COLD_BYTES = 1 << 30
SLOWEST_CALL_S = 4.0

Operands = tuple[Any, Any]


class CpuBench(CellBench):
    """Times cells on this CPU, through the public API."""

    backend = "cpu"
    max_blocks, block_s = 15, 0.005

    def __init__(self, seconds: float = 0.25) -> None:
        super().__init__(cpu_name(), HostClock(), seconds)

    def release(self) -> None:
        """Do nothing: operands live for one cell."""

    def sets(self, cell: Cell, lane: Lane) -> Sequence[Operands] | str:
        """Return the operands of a lane, as many sets as its temperature needs, or why none.

        Uniform numbers in [0, 1) for float32, as the documents take them; normal ones for others.
        """
        first = _operands(cell, lane, np.random.default_rng(lane.matrix))
        if cell.temperature != "cold":
            return [first]
        turn = sets_needed(sum(int(operand.nbytes) for operand in first))
        if not turn.cold or turn.bytes > COLD_BYTES:
            return "cold sets past the cache would take too much memory, or too many sets"
        return turn.copies_of(first)

    def bind(self, cell: Cell, lane: Lane, sets: Sequence[Operands]) -> Bound | str:
        """Return a lane over its operands, judged where that is quick, or why it takes no part."""
        params: Mapping[str, Any] = {}
        if lane.rung is None:
            calls = peer_calls(lane.peer, cell.op, sets)
            if isinstance(calls, str):
                return calls
        else:
            rung = None if lane.rung == "auto" else lane.rung
            try:
                plan = gm.plan(cell.op, *sets[0], rung=rung)
            except (ValueError, TypeError) as error:
                return str(error)
            if cell.m * cell.n * max(cell.columns, 1) <= JUDGED_ELEMENTS:
                judged(cell.op, *sets[0], rung=rung)
            calls = _public_calls(cell.op, sets, plan, {} if rung is None else {"rung": rung})
            params = {**plan.params, "rung": plan.rung.name}
        start = time.perf_counter()
        calls[0]()
        if time.perf_counter() - start > SLOWEST_CALL_S:
            return f"one call takes {time.perf_counter() - start:.1f} s: too slow to be timed"
        return Bound(lane, Entry(lane.name, lambda i: calls[i](), len(calls)), params)

    def runs(self, bound: Sequence[Bound]) -> Iterator[Sequence[Bound]]:
        """Yield the lanes of each pool of threads, after a rest."""
        by_pool: dict[str, list[Bound]] = {}
        for one in bound:
            by_pool.setdefault(_pool(one.lane), []).append(one)
        for group in by_pool.values():
            time.sleep(REST_S)
            yield group


def _pool(lane: Lane) -> str:
    if lane.rung is None:
        return lane.peer
    return lane.rung if "blas" in lane.rung else "numba"  # some convert with Numba, then call BLAS


def _public_calls(
    op: str, sets: Sequence[Operands], plan: gm.Plan, options: Mapping[str, Any]
) -> list[Callable[[], Any]]:
    shape, dtype = check.result_shape(op, *sets[0]), numpy_dtype(plan.problem.out)
    return [
        functools.partial(getattr(gm, op), *operands, out=np.empty(shape, dtype), **options)
        for operands in sets
    ]


def peer_calls(name: str, op: str, sets: Sequence[Operands]) -> list[Callable[[], Any]] | str:
    """Return a peer's calls, checked on small operands first, or why it takes no part."""
    problem = gm.plan(op, *sets[0]).problem
    peer = peer_named(name, "cpu", problem)
    if isinstance(peer, str):
        return peer
    return [peer.prepare(problem, left, right).call for left, right in sets]


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
