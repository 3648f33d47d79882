"""How a study's cells are timed: each lane as a benchmark entry on its operands, all in one race.

`CpuBench` and `GpuBench` are the lab's own benches (`gemmule_lab.harness`) with what studies want
of them: their budgets, kernels launched by themselves, and who may be timed in one run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import gemmule as gm
from gemmule.backends.cpu.threads import thread_count
from gemmule.backends.cuda import driver, launch_args, starter
from gemmule.backends.cuda import launch as cuda_launch
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.errors import DeviceError
from gemmule.timing.clock import Clock, Entry, entry_over
from gemmule.timing.sampler import Budget, sample
from gemmule_lab.ceilings.device import measure_ceilings
from gemmule_lab.harness.bench import Bench
from gemmule_lab.harness.device import DeviceBench
from gemmule_lab.harness.host import HostBench
from gemmule_lab.harness.operands import Sets
from gemmule_lab.harness.products import FLOATS, Product
from gemmule_lab.peers import registry
from gemmule_lab.records.environment import capture_environment, cpu_name
from gemmule_lab.records.rows import Environment, times_of
from gemmule_lab.studies.grid import CODE_BITS, Cell, Lane, Measured, rates

# Two thread pools that take turns disturb each other for some 60 ms (OpenBLAS, OpenMP and ours on
# 2 cores, November 2026), so each pool's implementations are timed in a run of their own.
REST_S = 0.15
JUDGED_ELEMENTS, MIN_BLOCKS = 1 << 24, 6
SLOWEST_CALL_S = 4.0
CEILING_SECONDS = {"cpu": 3.0, "cuda": 4.0}


class CellBench:
    """Times cells on a bench of the lab. seconds: what one lane may take."""

    backend: str
    bench: Bench
    max_blocks: ClassVar[int]
    block_s: ClassVar[float]

    def __init__(self, device: str, clock: Clock, seconds: float) -> None:
        self.device, self.clock, self.seconds = device, clock, seconds

    def release(self) -> None:
        """Give back what libraries keep from cell to cell: by default there is nothing."""

    def runs(self, entries: Sequence[Entry], lanes: Mapping[str, Lane]) -> Iterable[list[Entry]]:
        """Yield the entries that are timed together."""
        yield list(entries)

    def figures(self, cell: Cell, lane: Lane, us: float) -> dict[str, float]:
        """Return what follows from the time of one call."""
        return rates(cell, lane, us)

    def measure(self, cell: Cell, lanes: tuple[Lane, ...]) -> Mapping[str, Measured]:
        """Return what became of each lane, by name; ArithmeticError for a wrong result."""
        found: dict[str, Measured] = {}
        entries: list[Entry] = []
        kept: dict[tuple[str, bool, int], Any] = {}
        for lane in lanes:
            key = (lane.form, lane.flip, lane.matrix)
            try:
                if key not in kept:
                    kept[key] = self.sets(cell, lane)
                made = kept[key]
                made = made if isinstance(made, str) else self.bind(cell, lane, made)
            except DeviceError as error:
                if error.restart:
                    raise
                made = str(error)
            if isinstance(made, str):
                found[lane.name] = Measured(note=made)
            else:
                entries.append(made)
        by_name = {lane.name: lane for lane in lanes}
        for run in self.runs(entries, by_name):
            budget = Budget(self.seconds * len(run), MIN_BLOCKS, self.max_blocks, self.block_s)
            samples = sample(run, self.clock, budget) if run else {}
            for one in run:
                times = times_of(samples[one.name])
                figures = self.figures(cell, by_name[one.name], times.median)
                found[one.name] = Measured(times, figures, params=one.about)
        return found

    def sets(self, cell: Cell, lane: Lane) -> Any:
        """Return a lane's operand sets, one when warm, or in words why there are none."""
        cold = cell.temperature == "cold"
        sets = self.bench.sets(self.product(cell, lane), seed=lane.matrix, warm=not cold)
        if cold and not sets.cold:
            held = f"{len(sets.items):,} sets of operands"
            return f"{held}, which is what there is room for, stay warm"
        return sets

    def product(self, cell: Cell, lane: Lane) -> Product:
        """Return the product that a lane computes."""
        form = lane.form if lane.form in FLOATS else f"plain {lane.form}"
        form = f"{lane.form} codes" if lane.form in CODE_BITS else form
        order = {"column_major": cell.layout == "col", "transposed": lane.flip}
        shape = (cell.m, cell.n)
        return Product(cell.op, form, shape, cell.columns or 1, **order, uniform=cell.uniform)

    def bind(self, cell: Cell, lane: Lane, sets: Any) -> Entry | str:
        """Return a lane over its operands, judged once, or why it takes no part.

        `about` are the parameters that it runs with.
        """
        if lane.rung is None:
            known = [p for p in registry.all_peers(self.backend) if p.name == lane.peer]
            if not known:
                return f"no {'GPU' if self.backend == 'cuda' else 'CPU'} peer is called {lane.peer}"
            entries, absent = self.bench.theirs(sets, known)
            return replace(entries[0], about={}, name=lane.name) if entries else absent[0].reason
        try:
            return self.ours(cell, lane, sets, None if lane.rung == "auto" else lane.rung)
        except (ValueError, TypeError) as error:
            return str(error)
        except ArithmeticError as error:
            raise ArithmeticError(f"{lane.name} on {dict(cell.filed)}: {error}") from None

    def ours(self, cell: Cell, lane: Lane, sets: Sets, rung: str | None) -> Entry:
        """Return one of our rungs over a lane's operands."""
        entry = self.bench.ours(sets, rung, name=lane.name)
        return replace(entry, about={**entry.about.params, "rung": sets.plan(rung).rung.name})


class _Host(HostBench):
    """The CPU's bench, which judges where that is quick."""

    def judged(self, sets: Sets, plan: gm.Plan) -> float | None:
        """Judge every element of a result, unless there are too many products in it."""
        problem = plan.problem
        quick = problem.m * max(problem.n, 1) * max(problem.k, 1) <= JUDGED_ELEMENTS
        return super().judged(sets, plan) if quick else None


class CpuBench(CellBench):
    """Times cells on this CPU, through the public API."""

    backend = "cpu"
    max_blocks, block_s = 15, 0.005

    def __init__(self, seconds: float = 0.25) -> None:
        self.bench = _Host(slowest_s=SLOWEST_CALL_S)
        super().__init__(cpu_name(), self.bench.clock, seconds)

    def product(self, cell: Cell, lane: Lane) -> Product:
        """Return a lane's product: uniform numbers for float32, as the documents take them."""
        return replace(super().product(cell, lane), uniform=lane.form == "float32")

    def bind(self, cell: Cell, lane: Lane, sets: Any) -> Entry | str:
        """Return a lane over its operands, or why it takes no part: it may be too slow."""
        made = super().bind(cell, lane, sets)
        start = time.perf_counter()
        if isinstance(made, Entry):
            made.call(0)
        seconds = time.perf_counter() - start
        return f"one call takes {seconds:.1f} s: too slow" if seconds > SLOWEST_CALL_S else made

    def runs(self, entries: Sequence[Entry], lanes: Mapping[str, Lane]) -> Iterator[list[Entry]]:
        """Yield the entries of each pool of threads, after a rest."""
        by_pool: dict[str, list[Entry]] = {}
        for one in entries:
            by_pool.setdefault(_pool(lanes[one.name]), []).append(one)
        for group in by_pool.values():
            time.sleep(REST_S)
            yield group


def _pool(lane: Lane) -> str:
    if lane.rung is None:
        return lane.peer
    return lane.rung if "blas" in lane.rung else "own"  # some convert by kernels, then call BLAS


class GpuBench(CellBench):
    """Times cells on one device, by captured calls."""

    backend = "cuda"
    max_blocks, block_s = 8, 0.001

    def __init__(self, ordinal: int = 0, seconds: float = 0.04) -> None:
        self.ordinal = ordinal
        self.bench: DeviceBench = DeviceBench(ordinal)
        super().__init__(self.bench.device, self.bench.clock, seconds)

    def release(self) -> None:
        """Give back the memory that PyTorch keeps from cell to cell."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def figures(self, cell: Cell, lane: Lane, us: float) -> dict[str, float]:
        """Return the rates, and beside them what the device's data sheet says."""
        datasheet = driver.device_info(self.ordinal).datasheet_bytes_per_s * 1e-9
        return {**rates(cell, lane, us), "datasheet_gbs": datasheet}

    def ours(self, cell: Cell, lane: Lane, sets: Sets, rung: str | None) -> Entry:
        """Return one of our rungs, by a preset or parameters, or just some of its kernels."""
        params = None if rung is None else dict(lane.params)
        if lane.preset:
            params = dict(starter.cuda_rung(sets.plan(rung).choice).presets[lane.preset])
        plan = sets.plan(rung, params)
        if lane.only:
            entry = entry_over(lane.name, self._launches(plan, sets, lane.only), keep=sets)
        else:
            entry = self.bench.ours(sets, rung, params, name=lane.name)
        data = {"data": "uniform"} if cell.uniform else {}
        return replace(entry, about={**plan.params, "rung": plan.rung.name, **data})

    def _launches(
        self, plan: gm.Plan, sets: Sets, only: tuple[str, ...]
    ) -> list[Callable[[], None]]:
        """Return, for each set, what launches the steps whose kernels begin with these names."""
        launcher = cuda_launch.Launcher(plan.choice)
        work = DeviceArray.empty((max(launcher.workspace, 1),), "uint8", self.ordinal)
        whole = launcher.load(self.ordinal)
        chosen = [i for i, step in enumerate(whole.steps) if step.kernel.startswith(only)]
        steps = tuple(whole.steps[i] for i in chosen)
        kernels = whole._replace(steps=steps, functions=tuple(whole.functions[i] for i in chosen))
        start = starter.starter(kernels, launcher.words)

        def made(one: Any) -> Callable[[], None]:
            a, b = (one.b, one.a) if plan.choice.call.swapped else (one.a, one.b)
            left = launch_args.packed_addresses(a) if launcher.quantized else a.pointer
            stream = self.bench.clock.stream

            def launch(_alive: object = (work, sets)) -> None:
                with driver.on_device(self.ordinal):
                    start(stream, left, b.pointer, one.out.pointer, work.pointer)

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
    seconds = CEILING_SECONDS[bench.backend]
    if bench.backend == "cpu":
        here = HostBench().environment(seconds)
    else:
        ceilings = measure_ceilings(max_seconds=seconds, store=False)
        gpus, threads = (bench.device,), thread_count()
        here = capture_environment(
            bench.device, bench.backend, ceilings=ceilings, threads=threads, gpus=gpus
        )
    ceilings = {name: replace(one, tried={}) for name, one in here.ceilings.items()}
    return replace(here, ceilings=ceilings)
