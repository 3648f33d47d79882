"""Every rung of the CUDA ladders at fixed problems: timed cold, each beside the rung before it.

The problems are few and always the same, so that a page of a ladder can be renewed as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import gemmule as gm
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.problem import Problem
from gemmule.core.registry import ladder
from gemmule.errors import CompileError
from gemmule.timing.clock import Entry
from gemmule.timing.sampler import Budget
from gemmule_lab.harness.bench import race
from gemmule_lab.records.known_proofs import proof_of
from gemmule_lab.records.rows import Environment, Facts, Row
from gemmule_lab.report.ladder_gains import before
from gemmule_lab.studies.grid import Cell, Lane

FILE = "ladder.jsonl"
TORCH = "torch"
PLAIN = "float16, our choice"  # what a matrix of codes is held against
CODES = {"uint8": "int8", "uint4": "int4"}
LANE_SECONDS = 0.25
MIN_BLOCKS, MAX_BLOCKS, BLOCK_S = 7, 16, 0.002
COMPILERS = 8
WRONG = "a wrong result"
BYTES = {"uint8"}


@dataclass(frozen=True, slots=True)
class Spot:
    """One product of a ladder: which ladder, in words, and the cell that measures it.

    counted: whether its hardware counters are read as well.
    """

    op: str
    title: str
    cell: Cell
    counted: bool = True


def spots() -> Iterator[Spot]:
    """Yield the products, those that are counted first within each ladder."""
    for op, layout in (("matvec", "row"), ("vecmat", "col")):
        for size in (4096, 8192):
            for dtype in ("float16", "float32"):
                words = "A x" if op == "matvec" else "x A"
                lanes = _lanes(op, dtype)
                cell = Cell("ladder", "matvec", size, size, lanes, "cold", layout=layout)
                yield Spot(op, f"{size} x {size}, {words}, {dtype}", cell, size == 4096)
    for size, dtype in ((4096, "float16"), *((2048, t) for t in ("float16", "float32", "uint8"))):
        cell = Cell("ladder", "matmul", size, size, _lanes("matmul", dtype), "cold", size)
        yield Spot("matmul", f"{size} x {size} x {size}, {dtype}", cell)
    for rows, depth, columns in ((4096, 4096, 8), (4096, 4096, 64), (512, 16384, 512)):
        cell = Cell("ladder", "matmul", rows, depth, _lanes("matmul", "float16"), "cold", columns)
        yield Spot("matmul", f"{rows} x {depth} by {columns} columns, float16", cell)
    coded = ladder("quantized", "cuda")
    lanes = (
        *(Lane(r.name, r.name, form=CODES.get(r.signatures[0][0], "int8")) for r in coded),
        Lane(PLAIN, "auto", form="float16"),
        Lane(TORCH, None, form="float16", peer=TORCH),
    )
    cell = Cell("ladder", "matvec", 4096, 4096, lanes, "cold")
    yield Spot("quantized", "4096 x 4096 codes, one scale, float16 x", cell)


def _lanes(op: str, dtype: str) -> tuple[Lane, ...]:
    ours = (Lane(rung.name, rung.name, form=dtype) for rung in ladder(op, "cuda"))
    return (*ours, Lane(TORCH, None, form=dtype, peer=TORCH))


def time_spot(
    spot: Spot, bench: Any, environment: Environment, seconds: float = LANE_SECONDS
) -> tuple[list[Row], list[str]]:
    """Judge and time every lane of a product; return rows, and a line for each that took no part.

    bench: a `gemmule_lab.studies.gpu.GpuBench`. The line of a wrong result begins with `WRONG`.
    """
    notes: list[str] = []
    bound: dict[str, tuple[Any, gm.Plan | None]] = {}
    shared = sets_of(spot.cell, bench)
    plans = plans_of(spot.cell, shared)
    for lane in spot.cell.lanes:
        made = _bound(spot.cell, lane, bench, shared[lane.form], plans.get(lane.name))
        if isinstance(made, str):
            notes.append(f"{spot.title}, {lane.name}: {made}")
        else:
            bound[lane.name] = made
    if not bound:
        return [], notes
    budget = Budget(seconds * len(bound), MIN_BLOCKS, MAX_BLOCKS, BLOCK_S)
    return race(list(_entries(spot, bound)), bench.clock, environment, budget), notes


def sets_of(cell: Cell, bench: Any) -> dict[str, Any]:
    """Return the operand sets of every form that a cell's lanes take, or why there are none."""
    lanes = {lane.form: lane for lane in cell.lanes}
    found = {form: bench.sets(cell, lane) for form, lane in lanes.items()}
    for form in set(found) & BYTES:  # the studies' bench knows bytes as codes alone
        if not isinstance(found[form], str):
            found[form] = [
                (a, b, DeviceArray.empty(out.shape, "int32", bench.ordinal))
                for a, b, out in found[form]
            ]
    return found


def plans_of(cell: Cell, sets: Mapping[str, Any]) -> dict[str, gm.Plan | str]:
    """Return each lane's plan, with the parameters that its rung suggests, or why there is none.

    sets: operand sets by form, or a reason. Planning compiles, so it is done in threads.
    """
    lanes = [lane for lane in cell.lanes if lane.rung is not None]

    def planned(lane: Lane) -> gm.Plan | str:
        found = sets[lane.form]
        if isinstance(found, str):
            return found
        a, b, _ = found[0]
        try:
            return gm.plan(cell.op, a, b, rung=None if lane.rung == "auto" else lane.rung)
        except (ValueError, TypeError, CompileError) as error:
            return str(error)

    with ThreadPoolExecutor(COMPILERS) as pool:
        return dict(zip([lane.name for lane in lanes], pool.map(planned, lanes), strict=True))


def _bound(
    cell: Cell, lane: Lane, bench: Any, sets: Any, plan: gm.Plan | str | None
) -> tuple[Any, gm.Plan | None] | str:
    """Return a lane's calls and its plan (None for a peer), or why it takes no part."""
    if isinstance(sets, str):
        return sets
    if isinstance(plan, str):
        return plan
    if plan is not None:
        lane = replace(lane, rung=plan.rung.name, params=plan.params)
    try:
        made = bench.bind(cell, lane, sets)
    except ArithmeticError as error:  # the others of this product are still worth timing
        return f"{WRONG}: {error}"
    return made if isinstance(made, str) else (made, plan)


def _entries(spot: Spot, bound: dict[str, tuple[Any, gm.Plan | None]]) -> Iterator[Entry]:
    rungs = {rung.name: rung for rung in ladder(spot.op, "cuda")}
    first = next(plan for _, plan in bound.values() if plan is not None)
    for name, (one, plan) in bound.items():
        problem = first.problem if plan is None else plan.problem
        facts = Facts(
            _plain(problem) if name == TORCH else problem,
            "peer" if plan is None else "rung",
            "cold",
            {} if plan is None else plan.params,
            proof=None if plan is None else proof_of(plan.rung, plan.problem),
            group=spot.title,
        )
        others = [TORCH, PLAIN]
        if name in rungs:
            others.append(before(rungs[name], tuple(rungs.values()), bound) or "")
        against = tuple(other for other in others if other in bound and other != name)
        yield replace(one.entry, about=replace(facts, against=against))


def _plain(problem: Problem) -> Problem:
    """Return what PyTorch computes: beside codes, the product of a float16 matrix."""
    return problem if problem.quant is None else replace(problem, a="float16", quant=None)
