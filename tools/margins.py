"""Measure where our own matrix products beat the vendor's library, for the evidence.

``python tools/margins.py evidence/`` on a machine with a GPU times, at every product of a grid, the
rung that plans would take without the vendor's and the vendor's, in turns and cold, and writes
``<root>/<gpu>/margins.jsonl``, which plans read (`gemmule.storage.margins`). With names of rungs
behind the folder only products are measured whose rung is one of them; other rungs' lines stay.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from gemmule import choose
from gemmule.backends.cuda import launch as cuda_launch
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.backends.cuda.graph_clock import GraphClock
from gemmule.core.choice import Choice
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Machine
from gemmule.rungs._cuda.tiles import PARTS
from gemmule.storage import evidence, lines, margins
from gemmule.storage.evidence import slug
from gemmule.timing.clock import Entry
from gemmule_lab.ceilings.device import filled
from proofs import proofs

SIDES = (512, 2048, 8192, 32768)
COLUMNS = (2, 4, 8, 16, 32, 64)
DTYPES = ("float16", "bfloat16", "float32", "float64")
MOST_BYTES, COLD_BYTES = 2 << 30, 256 << 20
FEW, OUT = 1 << 22, 1 << 26  # elements of the pools for few columns and, 8 bytes each, for C
ROUNDS = 5
PROBLEM = ("a", "b", "out", "layout_a", "layout_b", "m", "n", "k", "batch")  # of a margin
LAYOUTS = tuple(itertools.product(("row", "col"), repeat=2))
# Sides of products of two large matrices of floats: aligned to 16, 8 and 4 bytes.
CUBES = ((512, 2048, 8192), (1024, 4096), (1022, 4094), (1023, 4093))
NARROW, LARGE = (64, 256), (2048, 8192)
# Of halves: few rows by a large matrix, and rows that begin at multiples of 8, 4 and 2 bytes.
ROWS, DEEP = (16, 32, 64), (2048, 4096, 8192, 16384)
HALVES = ((1020, 4092), (1022, 4094), (1023, 4093))
COMPLEX = (1024, 4096)
DOUBLES = (2048, 4096, 8192)
AS_INTEGERS = Problem("matmul", 1, 1, 1, 1, *("float64",) * 3, precision="float64")


def problems() -> Iterator[Problem]:
    """Yield the grid: a large matrix by few columns, and products of two large ones."""
    for dtype, m, k, n, layout in itertools.product(DTYPES, SIDES, SIDES, COLUMNS, ("row", "col")):
        if m * k * ITEMSIZE[dtype] <= MOST_BYTES:
            yield Problem("matmul", m, n, k, a=dtype, b=dtype, out=dtype, layout_b=layout)
    sizes = [size for sides in CUBES for size in itertools.product(sides, repeat=3)]
    for large, k, narrow in itertools.product(LARGE, LARGE, NARROW):
        sizes += [(large, k, narrow), (narrow, k, large)]
    for (m, k, n), (layout_a, layout_b) in itertools.product(sizes, LAYOUTS):
        yield Problem("matmul", m, n, k, layout_a=layout_a, layout_b=layout_b)
    sizes = [size for sides in HALVES for size in itertools.product(sides, repeat=3)]
    kinds = itertools.product(("float16", "bfloat16"), sizes, LAYOUTS)
    for dtype, (m, k, n), (layout_a, layout_b) in kinds:
        yield Problem(
            "matmul", m, n, k, a=dtype, b=dtype, out=dtype, layout_a=layout_a, layout_b=layout_b
        )
    for (m, k, n), (a, b) in itertools.product(itertools.product(COMPLEX, repeat=3), LAYOUTS):
        kind = "complex64"
        yield Problem("matmul", m, n, k, a=kind, b=kind, out=kind, layout_a=a, layout_b=b)
    for (m, k, n), (a, b) in itertools.product(itertools.product(DOUBLES, repeat=3), LAYOUTS):
        yield replace(AS_INTEGERS, m=m, n=n, k=k, layout_a=a, layout_b=b)
    # Few rows by a large matrix along the sum.
    for dtype, m, k, n in itertools.product(("float16", "bfloat16"), ROWS, DEEP, DEEP):
        yield Problem("matmul", m, n, k, a=dtype, b=dtype, out=dtype, layout_b="col")


def rivals(problem: Problem, machine: Machine) -> tuple[Choice, Choice] | None:
    """Return the choice without the vendor, and the vendor's; None where there are not both."""
    call = proofs.packed_call(problem)
    ranked = sorted(choose.suggestions(call, machine), key=lambda one: one.expected_s or 0.0)
    named = (one for one in ranked if one.rung.precision)  # what the precision is named for
    ours = next(named, None) or next((one for one in ranked if not one.rung.vendor), None)
    vendors = next((one for one in ranked if one.rung.vendor), None)
    return None if ours is None or vendors is None else (ours, vendors)


class Meter:
    """A device with a pool of random numbers for each dtype, of which operands are cut."""

    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal, self.clock = ordinal, GraphClock(ordinal)
        self.machine = cuda_launch.CudaBackend().machine(f"cuda:{ordinal}")
        self.pools: dict[str, Any] = {}
        self.columns = filled(1 << 24, "float64", ordinal, 2)
        self.out = DeviceArray.empty((OUT,), "float64", ordinal)

    def pool(self, dtype: str) -> Any:
        """Return the pool of a dtype; the one before is given back."""
        if dtype not in self.pools:
            self.pools.clear()
            part = PARTS.get(dtype, dtype)
            sizes = (MOST_BYTES + COLD_BYTES, FEW * ITEMSIZE[dtype])
            whole, few = (
                filled(size // ITEMSIZE[part], part, self.ordinal, seed)
                for size, seed in zip(sizes, (1, 3), strict=True)
            )
            self.pools[dtype] = (whole, few)
        return self.pools[dtype]

    def ratio(self, problem: Problem, pair: tuple[Choice, Choice]) -> float:
        """Return the vendor's time over ours: the median over rounds in turns."""
        runners = [self.clock.prepare(self._entry(problem, one)) for one in pair]
        for run in runners:
            run(0, 1)
        found = []
        for index in range(ROUNDS):
            order = (0, 1) if index % 2 else (1, 0)
            seconds = {}
            for which in order:
                timing = runners[which](0, 1)
                seconds[which] = timing.seconds / timing.calls
            found.append(seconds[1] / seconds[0])
        return float(np.median(found))

    def _entry(self, problem: Problem, choice: Choice) -> Entry:
        run = cuda_launch.CudaBackend().prepare(choice)
        dtype, matrix = problem.a, problem.m * problem.k
        whole, few = self.pool(dtype)
        room = (MOST_BYTES + COLD_BYTES) // ITEMSIZE[dtype]
        other = problem.k * problem.n
        if other > FEW:  # then it follows A in the large pool
            few, matrix = whole, matrix + other
        sets = max(2, -(-COLD_BYTES // (matrix * ITEMSIZE[dtype])))
        sets = min(sets, room // matrix, 512)
        results = min(4, 8 * OUT // (problem.m * problem.n * ITEMSIZE[problem.out]))
        views = proofs.packed_call(problem)

        def cut(pool: Any, view: Any, start: int) -> Any:
            from gemmule.backends.cuda.arrays import from_own

            address = pool.pointer + start * ITEMSIZE[dtype]
            array = DeviceArray(address, view.shape, view.strides, dtype, self.ordinal, pool)
            return from_own(array)

        def operands(index: int) -> tuple[Any, Any, Any]:
            b = cut(few, views.b, index * matrix + problem.m * problem.k if few is whole else 0)
            out = cut(self.out, views.out, index % results * problem.m * problem.n)
            return cut(whole, views.a, index * matrix), b, out

        every = [operands(index) for index in range(sets)]
        return Entry(choice.rung.name, lambda i: run(*every[i], 1.0, 0.0), sets)


def measure(root: Path, names: Collection[str] = ()) -> Path:
    """Measure the grid, of the rungs called `names` alone if any, and write the file."""
    meter = Meter()
    keys = {(r.folder, r.rung, r.variant): r.key for r in evidence.read()}
    today, found = lines.today(), []
    for problem in problems():
        pair = rivals(problem, meter.machine)
        if pair is None:
            continue
        rung = pair[0].rung
        if names and rung.name not in names:
            continue
        key = keys[(rung.folder, rung.name, evidence.variant_of(problem))]
        ratio = round(meter.ratio(problem, pair), 3)
        told: dict[str, Any] = {name: getattr(problem, name) for name in PROBLEM}
        told |= {"alignment": pair[0].problem.alignment, "ratio": ratio, "date": today}
        where = (meter.machine.name, meter.machine.arch, rung.folder, rung.name, key)
        found.append(margins.Margin(*where, **told))
        print(f"{ratio:.2f} {rung.name} {problem.describe()}", flush=True)
    path = root / slug(meter.machine.name) / margins.FILE
    if names:
        found = [one for one in margins.read_file(path) if one.rung not in names] + found
    lines.write(path, ({"schema": margins.SCHEMA, **asdict(one)} for one in found))
    return path


if __name__ == "__main__":
    print(measure(Path(sys.argv[1]), sys.argv[2:]))
