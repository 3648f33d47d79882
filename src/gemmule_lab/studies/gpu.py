"""The GPU's bench: captured launches of CUDA rungs and peers on operands in device memory.

Matrices are views of one large block of random numbers a dtype, made on the device. A rung's
launches are packed once for each operand set, with a workspace that outlives the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import gemmule as gm
from gemmule.backends.cuda import driver, starter
from gemmule.backends.cuda import launch as cuda_launch
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.backends.cuda.graph_clock import GraphClock
from gemmule.core.problem import ITEMSIZE
from gemmule.core.rung import LibraryRung
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.timing.clock import Contestant
from gemmule.timing.machine import rotation
from gemmule_lab.ceilings.device import filled
from gemmule_lab.peers.peer import Peer
from gemmule_lab.studies.cpu import codes
from gemmule_lab.studies.grid import CODE_BITS, Cell, Lane, Measured, rates
from gemmule_lab.studies.harness import Bound, CellBench, peer_named
from gemmule_lab.verify import check

MOST_SETS = 2048
L2_FACTOR = 4.0
SPACING = 256
JUDGED_ROWS = 48

Operands = tuple[Any, Any, DeviceArray]


class GpuBench(CellBench):
    """Times cells on one device, by captured launches."""

    backend = "cuda"
    max_blocks, block_s = 8, 0.001

    def __init__(self, ordinal: int = 0, seconds: float = 0.04) -> None:
        self.ordinal = ordinal
        self.info = driver.device_info(ordinal)
        clock = GraphClock(ordinal)
        super().__init__(self.info.name, clock, seconds)
        self._stream = clock.stream
        self._arenas: dict[tuple[str, bool], DeviceArray] = {}
        self._peers: dict[tuple[Any, ...], Peer | str] = {}
        self._host: dict[int, Any] = {}

    def release(self) -> None:
        """Give back the memory that is kept from cell to cell, PyTorch's cache too."""
        self._arenas.clear()
        self._host.clear()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def measure(self, cell: Cell, lanes: tuple[Lane, ...]) -> Mapping[str, Measured]:
        """Return what became of each lane, by name; ArithmeticError for a wrong result."""
        self._host.clear()
        return super().measure(cell, lanes)

    def figures(self, cell: Cell, lane: Lane, us: float) -> dict[str, float]:
        """Return the rates, and beside them what the device's data sheet says."""
        datasheet = self.info.datasheet_bytes_per_s * 1e-9
        return {**rates(cell, lane, us), "datasheet_gbs": datasheet}

    def bind(self, cell: Cell, lane: Lane, sets: Sequence[Operands]) -> Bound | str:
        """Return a lane's captured calls, judged once, or why it takes no part."""
        if lane.rung is None:
            return self._peer(cell, lane, sets)
        rung = None if lane.rung == "auto" else lane.rung
        a, b, _ = sets[0]
        try:
            plan = gm.plan(cell.op, a, b, rung=rung)
            params = (
                dict(starter.cuda_rung(plan.choice).presets[lane.preset])
                if lane.preset
                else dict(lane.params)
            )
            if rung is not None:
                plan = gm.plan(cell.op, a, b, rung=rung, params=params)
        except (ValueError, TypeError) as error:
            return str(error)
        calls = self._calls(plan, sets, lane.only)
        calls[0](0)
        driver.synchronize(self.ordinal)
        if not lane.only:
            self._judge(cell, lane, plan, sets[0])
        stream = self._stream
        named = {**plan.params, "rung": plan.rung.name}
        named |= {"data": "uniform"} if cell.uniform else {}
        return Bound(lane, Contestant(lane.name, lambda i: calls[i](stream), len(sets)), named)

    def _calls(
        self, plan: gm.Plan, sets: Sequence[Operands], only: tuple[str, ...]
    ) -> list[Callable[[int], None]]:
        """Return `launches`, or of a library its calls, which start on the current stream."""
        if not isinstance(plan.rung, LibraryRung):
            return self.launches(plan, sets, only)

        def made(operands: Operands) -> Callable[[int], None]:
            a, b, out = operands

            def call(stream: int) -> None:
                plan(a, b, out=out)

            return call

        return [made(operands) for operands in sets]

    def launches(
        self, plan: gm.Plan, sets: Sequence[Operands], only: tuple[str, ...] = ()
    ) -> list[Callable[[int], None]]:
        """Return a function of a stream's handle for each operand set; device memory is kept.

        only: launch just the steps whose kernels begin with these names.
        """
        launcher = cuda_launch.Launcher(plan.choice)
        space = max(launcher.workspace, 1)
        work = DeviceArray.empty((space,), "uint8", self.ordinal)
        kernels, words = launcher.load(self.ordinal), launcher.words
        chosen = [
            (step, function)
            for step, function in zip(kernels.steps, kernels.functions, strict=True)
            if not only or step.kernel.startswith(only)
        ]
        steps, functions = zip(*chosen, strict=True)
        kernels = kernels._replace(steps=steps, functions=functions)

        def made(operands: Operands) -> Callable[[int], None]:
            a, b, out = operands
            if plan.choice.call.swapped:
                a, b = b, a
            start = starter.starter(kernels, words)
            left = cuda_launch.packed_parts(a) if launcher.quantized else a.pointer

            def launch(stream: int, _alive: object = (work, operands)) -> None:
                with driver.on_device(self.ordinal):
                    start(stream, left, b.pointer, out.pointer, work.pointer)

            return launch

        return [made(operands) for operands in sets]

    def _peer(self, cell: Cell, lane: Lane, sets: Sequence[Operands]) -> Bound | str:
        a, b, _ = sets[0]
        problem = gm.plan(cell.op, a, b).problem if cell.op != "matvec" else _problem(cell, a, b)
        key = (lane.peer, problem.op, problem.a, problem.layout_a)
        if key not in self._peers:
            self._peers[key] = peer_named(lane.peer, "cuda", problem)
        peer = self._peers[key]
        if isinstance(peer, str):
            return peer
        prepared = [peer.prepare(problem, left, right) for left, right, _ in sets]
        calls = [one.call for one in prepared]

        def call(index: int, _alive: object = (prepared, sets)) -> None:
            calls[index]()

        return Bound(lane, Contestant(lane.name, call, len(sets)))

    def sets(self, cell: Cell, lane: Lane) -> Sequence[Operands] | str:
        """Return a lane's operand sets: one when warm, else as many as pass the L2 four times."""
        rows, columns = (cell.n, cell.m) if lane.flip else (cell.m, cell.n)
        if lane.form in CODE_BITS:
            nbytes = rows * -(-columns * CODE_BITS[lane.form] // 8)
        else:
            nbytes = rows * columns * ITEMSIZE[lane.form]
        nbytes += columns * max(cell.columns, 1) * ITEMSIZE.get(lane.form, 2)
        count, first = 1, lane.matrix
        if cell.temperature == "cold":
            free_bytes, _ = driver.memory_bytes(self.ordinal)
            turn = rotation(
                nbytes, self.info.l2_bytes, factor=L2_FACTOR, memory_bytes=free_bytes // 3
            )
            if not turn.cold or turn.sets > MOST_SETS:
                return f"{turn.sets:,} sets do not make a matrix of {nbytes:,} bytes cold"
            count, first = turn.sets, 0
        if lane.form in CODE_BITS:
            return self._code_sets(cell, lane, count)
        return [self._views(cell, lane, first + index) for index in range(count)]

    def _views(self, cell: Cell, lane: Lane, index: int) -> Operands:
        size = max(ITEMSIZE[lane.form], 1)
        right = (cell.m if lane.flip else cell.n) * max(cell.columns, 1)
        stride = _round_up(cell.m * cell.n + right, SPACING // size)
        begin = index * _round_up(stride, SPACING // size)
        arena = self.arena(lane.form, begin + stride + SPACING, cell.uniform)
        at = arena.pointer + begin * size
        shape = (cell.m, cell.n)
        steps = (1, cell.m) if cell.layout == "col" else (cell.n, 1)
        a = DeviceArray(at, shape, steps, lane.form, self.ordinal, arena)
        a = a.T if lane.flip else a
        length = a.shape[1]
        at += _round_up(cell.m * cell.n, SPACING // size) * size
        if cell.op == "matmul":
            b_shape, b_steps = (length, cell.columns), (cell.columns, 1)
            b = DeviceArray(at, b_shape, b_steps, lane.form, self.ordinal, arena)
            out = DeviceArray.empty((a.shape[0], cell.columns), _out(lane.form), self.ordinal)
            return a, b, out
        x = DeviceArray(at, (length,), (1,), lane.form, self.ordinal, arena)
        return a, x, DeviceArray.empty((a.shape[0],), _out(lane.form), self.ordinal)

    def _code_sets(self, cell: Cell, lane: Lane, count: int) -> list[Operands]:
        host = codes(np.random.default_rng(7), (cell.m, cell.n), CODE_BITS[lane.form])
        x = filled(cell.n, "float16", self.ordinal, 3)
        found = []
        for _ in range(count):
            moved = host.to(self.clock_device, layout="row")  # as the documents store codes
            out = DeviceArray.empty((cell.m,), "float16", self.ordinal)
            found.append((moved, x, out))
        return found

    @property
    def clock_device(self) -> str:
        """The device's name in this package."""
        return f"cuda:{self.ordinal}"

    def arena(self, form: str, count: int, uniform: bool = False) -> DeviceArray:
        """Return a block of at least `count` random numbers of a dtype; it grows by doubling."""
        old = self._arenas.get((form, uniform))
        if old is not None and old.shape[0] >= count:
            return old
        self._arenas.pop((form, uniform), None)
        size = max(count, 1 << 20, 0 if old is None else min(2 * old.shape[0], 1 << 29))
        size = _round_up(size, 1 << 12)
        if form in ("float32", "float64", "float16", "bfloat16"):
            block = filled(size, form, self.ordinal, 11, uniform=uniform)
        else:
            numbers = np.random.default_rng(11).integers(0, 100, size, np.int64)
            block = DeviceArray.from_host(numbers.astype(form), self.ordinal)
        self._arenas[form, uniform] = block
        return block

    def _judge(self, cell: Cell, lane: Lane, plan: gm.Plan, operands: Operands) -> None:
        """Hold rows of the result, the first and last among them, against the oracle."""
        a, b, out = operands
        rows = sorted(
            {
                *range(16),
                *range(out.shape[0] - 16, out.shape[0]),
                *range(0, out.shape[0], max(1, out.shape[0] // 16)),
            }
        )
        chosen = [row for row in rows if 0 <= row < out.shape[0]][:JUDGED_ROWS]
        if id(a) not in self._host:  # several lanes share their operands
            self._host[id(a)] = self._rows_of(cell, a, chosen)
        left = self._host[id(a)]
        result = np.ascontiguousarray(out.to_host()[chosen])
        verdict = check.judge(cell.op, left, b.to_host(), result, check.Rounding.of(plan))
        if not verdict.ok:
            raise ArithmeticError(
                f"{lane.name} ({plan.rung.name} {dict(plan.params)}) on {dict(cell.filed)}: "
                f"{verdict.text}"
            )

    def _rows_of(self, cell: Cell, a: Any, chosen: list[int]) -> Any:
        if not isinstance(a, QuantizedMatrix):
            return np.ascontiguousarray(a.to_host()[chosen])
        host = a.to("cpu")
        return QuantizedMatrix.from_parts(
            np.asarray(host.codes)[chosen],
            host.scales,
            host.zeros,
            shape=(len(chosen), cell.n),
            bits=host.bits,
            group_size=None,
        )


def _problem(cell: Cell, a: Any, b: Any) -> Any:
    """Return the problem as an automatic plan, or else the simplest rung, sees it."""
    rung = "col_thread_per_row" if cell.layout == "col" and a.strides[0] == 1 else "thread_per_row"
    return gm.plan(cell.op, a, b, rung=rung).problem


def _out(form: str) -> str:
    return {"int8": "int32", "int32": "int64"}.get(form, form)


def _round_up(count: int, step: int) -> int:
    return -(-count // max(step, 1)) * max(step, 1)
