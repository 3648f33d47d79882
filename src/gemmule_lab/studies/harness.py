"""How a study's cells are timed: each lane as a benchmark entry on its operands, all in one race.

`CpuBench` and `GpuBench` are the lab's own benches (`gemmule_lab.harness`) with what studies want
of them: their budgets, points of a parameter space by name, kernels launched by themselves.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import gemmule as gm
from gemmule.backends.cpu.threads import thread_count
from gemmule.backends.cuda import driver, launch_args, starter
from gemmule.backends.cuda import launch as cuda_launch
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.registry import cuda_rungs
from gemmule.errors import DeviceError
from gemmule.timing.clock import Entry, entry_over
from gemmule.timing.sampler import Budget, sample
from gemmule_lab.harness.bench import Bench
from gemmule_lab.harness.device import DeviceBench
from gemmule_lab.harness.host import HostBench
from gemmule_lab.harness.operands import Sets
from gemmule_lab.harness.products import Product
from gemmule_lab.peers import registry
from gemmule_lab.records.environment import cpu_name
from gemmule_lab.records.rows import Environment, Facts, times_of
from gemmule_lab.records.study import Value
from gemmule_lab.studies.grid import Cell, Lane, Measured

MIN_BLOCKS, SLOWEST_CALL_S, CEILING_SECONDS = 6, 4.0, 4.0
PATIENCE, TIMER_SHARE = 2.0, 2.5e-3
COMPILERS = 16  # at a time, at most

T = TypeVar("T")


class CellBench:
    """Times cells on a bench of the lab. lane_s: what one lane may take, twice that for six rounds.

    seconds: another limit than that.
    """

    backend: str
    ordinal = 0
    bench: Bench
    max_blocks: ClassVar[int]
    block_s: ClassVar[float]
    lane_s: ClassVar[float]

    def __init__(self, device: str, seconds: float | None) -> None:
        self.device, self.seconds = device, seconds or self.lane_s
        self.clock, self.more = self.bench.clock, dict[str, float]()  # figures of every row

    def measure(self, cell: Cell, lanes: tuple[Lane, ...]) -> Mapping[str, Measured]:
        """Return what became of each lane, by name; ArithmeticError for a wrong result."""
        found: dict[str, Measured] = {}
        entries: list[Entry] = []
        each = {lane.operands: functools.partial(self.sets, cell, lane) for lane in lanes}
        kept = {operands: unless_refused(made) for operands, made in each.items()}
        self.compiled_ahead([(lane, kept[lane.operands]) for lane in lanes])
        for lane in lanes:
            made = kept[lane.operands]
            if not isinstance(made, str):
                made = unless_refused(functools.partial(self.bind, cell, lane, made))
            if isinstance(made, str):
                found[lane.name] = Measured(note=made)
            else:
                entries.append(made)
        if not entries:
            return found
        limits = MIN_BLOCKS, self.max_blocks, self.block_s
        at_most = self.seconds * len(entries)
        budget = Budget(at_most, *limits, patience=PATIENCE, timer_share=TIMER_SHARE)
        samples = sample(entries, self.clock, budget)
        for one in entries:
            times, problem = times_of(samples[one.name]), one.about.problem
            rates = {"gbs": problem.compulsory_bytes, "gflops": problem.flops}
            figures = {name: 1e-3 * count / times.median for name, count in rates.items()}
            params = one.about.params if one.about.kind == "rung" else {}
            found[one.name] = Measured(times, {**figures, **self.more}, params=params)
        return found

    def compiled_ahead(self, lanes: Sequence[tuple[Lane, Any]]) -> None:
        """Compile what lanes run over their operands, where that is done side by side."""

    def sets(self, cell: Cell, lane: Lane) -> Any:
        """Return a lane's operand sets, one when warm, or in words why there are none."""
        cold, order = cell.temperature == "cold", {"column_major": cell.layout == "col"}
        shape, look = (cell.m, cell.n), {"transposed": lane.flip, "uniform": cell.uniform}
        product = Product(cell.op, lane.form, shape, cell.columns or 1, **order, **look)
        sets = self.bench.sets(product, seed=lane.matrix, warm=not cold)
        if cold and not sets.cold:
            held = f"{len(sets.items):,} sets of operands"
            return f"{held}, which is what there is room for, stay warm"
        return sets

    def bind(self, cell: Cell, lane: Lane, sets: Any) -> Entry | str:
        """Return a lane over its operands, judged once, or why it takes no part."""
        try:
            return self.ours(cell, lane, sets) if lane.rung else self.theirs(lane, sets)
        except (ValueError, TypeError) as error:
            return str(error)
        except ArithmeticError as error:
            raise ArithmeticError(f"{lane.name} on {dict(cell.filed)}: {error}") from None

    def theirs(self, lane: Lane, sets: Sets) -> Entry | str:
        """Return a peer, checked, or why it takes no part; TypeError where ours has no plan."""
        known = [p for p in registry.all_peers(self.backend) if p.name == lane.peer]
        if not known:
            return f"no {'GPU' if self.backend == 'cuda' else 'CPU'} peer is called {lane.peer}"
        entries, absent = self.bench.theirs(sets, known)
        return replace(entries[0], name=lane.name) if entries else absent[0].reason

    def ours(self, cell: Cell, lane: Lane, sets: Sets) -> Entry:
        """Return one of our rungs, by a preset or parameters, or just some of its kernels."""
        rung, params = chosen(lane)
        plan = sets.plan(rung, params)
        if lane.only:
            about = Facts(plan.problem, "rung", sets.temperature)
            entry = entry_over(lane.name, _launches(plan, sets, lane.only, self.clock), about)
        else:
            entry = self.bench.ours(sets, rung, params, name=lane.name)
        data = {"data": "uniform"} if cell.uniform else {}
        ran = {**plan.params, "rung": plan.rung.name, **data}
        return replace(entry, about=replace(entry.about, params=ran))


def chosen(lane: Lane) -> tuple[str | None, dict[str, Value] | None]:
    """Return the rung of a lane, None for the automatic choice, and its parameters."""
    if lane.rung in (None, "auto"):
        return None, None
    if lane.preset:
        named = (rung.presets for rung in cuda_rungs() if rung.name == lane.rung)
        return lane.rung, dict(next(one for one in named if lane.preset in one)[lane.preset])
    return lane.rung, dict(lane.params)


def unless_refused(make: Callable[[], T]) -> T | str:
    """Return what is made, or why the device refuses; DeviceError where it is lost."""
    try:
        return make()
    except DeviceError as error:
        if error.restart:
            raise
        return str(error)


class CpuBench(CellBench):
    """Times cells on this CPU, through the public API."""

    backend = "cpu"
    max_blocks, block_s, lane_s = 15, 0.005, 0.2

    def __init__(self, seconds: float | None = None) -> None:
        self.bench = HostBench(slowest_s=SLOWEST_CALL_S)
        super().__init__(cpu_name(), seconds)

    def bind(self, cell: Cell, lane: Lane, sets: Any) -> Entry | str:
        """Return a lane over its operands, or why it takes no part: it may be too slow."""
        made = super().bind(cell, lane, sets)
        start = time.perf_counter()
        if isinstance(made, Entry):
            made.call(0)
        seconds = time.perf_counter() - start
        return f"one call takes {seconds:.1f} s: too slow" if seconds > SLOWEST_CALL_S else made


class GpuBench(CellBench):
    """Times cells on one device, by captured calls; rows tell what its data sheet says."""

    backend = "cuda"
    max_blocks, block_s, lane_s = 8, 0.001, 0.02

    def __init__(self, ordinal: int = 0, seconds: float | None = None) -> None:
        self.ordinal = ordinal
        self.bench: DeviceBench = DeviceBench(ordinal)
        super().__init__(self.bench.device, seconds)
        self.more["datasheet_gbs"] = 1e-9 * driver.device_info(ordinal).datasheet_bytes_per_s

    def compiled_ahead(self, lanes: Sequence[tuple[Lane, Any]]) -> None:
        """Compile kernels side by side; what fails here fails again on its turn."""

        def plan(lane: Lane, sets: Sets) -> None:
            with contextlib.suppress(Exception):
                sets.plan(*chosen(lane))

        with ThreadPoolExecutor(min(COMPILERS, os.cpu_count() or 1)) as pool:
            ours = (one for one in lanes if one[0].rung and not isinstance(one[1], str))
            list(pool.map(plan, *zip(*ours, strict=True)))


def _launches(
    plan: gm.Plan, sets: Sets, only: tuple[str, ...], clock: Any
) -> list[Callable[[], None]]:
    """Return, for each set, what launches the steps whose kernels begin with these names."""
    launcher, ordinal = cuda_launch.Launcher(plan.choice), sets.items[0].out.ordinal
    work = DeviceArray.empty((max(launcher.workspace, 1),), "uint8", ordinal)
    whole = launcher.load(ordinal)
    chosen = [i for i, step in enumerate(whole.steps) if step.kernel.startswith(only)]
    steps = tuple(whole.steps[i] for i in chosen)
    kernels = whole._replace(steps=steps, functions=tuple(whole.functions[i] for i in chosen))
    start = starter.starter(kernels, launcher.words)

    def made(one: Any) -> Callable[[], None]:
        a, b = (one.b, one.a) if plan.choice.call.swapped else (one.a, one.b)
        left = launch_args.packed_addresses(a) if launcher.quantized else a.pointer

        def launch(_alive: object = (work, sets)) -> None:
            with driver.on_device(ordinal):
                start(clock.stream, left, b.pointer, one.out.pointer, work.pointer)

        return launch

    return [made(one) for one in sets.items]


def benches(only: str | None) -> tuple[list[CellBench], str]:
    """Return the GPU's bench, where there is a GPU, and the CPU's; and why there is no GPU.

    only: ``"cpu"`` or ``"cuda"`` for one of them; DeviceError where that one is not there.
    """
    found: list[CellBench] = []
    missing = ""
    try:
        found += [GpuBench()] if only != "cpu" else []
    except (DeviceError, ImportError) as error:
        if only == "cuda":
            raise
        missing = str(error)
    return [*found, *([CpuBench()] if only != "cuda" else [])], missing


def environment_of(bench: CellBench) -> Environment:
    """Return what rows of a bench depend on, its ceilings measured now, to keep lines short less
    what every shape of one gave.
    """
    here = bench.bench.environment(CEILING_SECONDS)
    ceilings = {name: replace(one, tried={}) for name, one in here.ceilings.items()}
    return replace(here, ceilings=ceilings, threads=thread_count())
