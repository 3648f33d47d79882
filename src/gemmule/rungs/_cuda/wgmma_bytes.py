"""What the matmul rungs on wgmma for 8-bit operands share: which are copied, launches, time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gemmule.core.device_model import Terms
from gemmule.core.packing import LinesMap, TensorMap
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, Machine, Params, Step
from gemmule.rungs._cuda import half_tiles
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, instance, modelled
from gemmule.rungs.matmul.cuda import wgmma_specialized

SCALED = ("float32", "bfloat16", "float16")  # what float32 sums, and scaled ones, are rounded to
FINISHED = ("bfloat16",)  # what scaled sums are rounded to behind an epilogue
STEPS = 128  # of the reduction, in a stage's lines of 128 bytes
AS_IT_IS, LINED_UP, TRANSPOSED = range(3)
PACK_THREADS, PACK_BLOCKS = 256, 8  # blocks of a multiprocessor
NARROW = 128  # tiles with fewer columns are for C with few rows or columns


def _copies(problem: Problem) -> tuple[int, int]:
    """Return what is done to A and to B, for wgmma to read lines along the sum."""
    along = half_tiles.along_k(problem)
    if problem.alignment == 16:
        a, b = (AS_IT_IS if one else TRANSPOSED for one in along)
    else:
        a, b = (LINED_UP if one else TRANSPOSED for one in along)
    return a, b


def _packed_bytes(problem: Problem) -> tuple[int, int]:
    """Return the bytes of the copies of A and of B, rounded up to 256; 0 of what is not copied."""
    of_a, of_b = _copies(problem)
    sides = (problem.m, problem.shared_a, of_a), (problem.n, problem.shared_b, of_b)
    line = ceil_div(problem.k, 16) * 16
    a, b = (
        ceil_div(line * size * (1 if shared else problem.batch), 256) * 256 if how else 0
        for size, shared, how in sides
    )
    return a, b


def _turned(problem: Problem, width: int) -> bool:
    """Tell whether C^T = B^T A^T is computed: narrow tiles have C's longer side for their rows."""
    return problem.m < problem.n if width < NARROW else problem.layout_out == "col"


def _stored_by_tma(problem: Problem, width: int) -> bool:
    by_columns = _turned(problem, width)
    return problem.alignment == 16 and problem.layout_out == ("col" if by_columns else "row")


def _maps(problem: Problem, size: tuple[int, int], cluster: int) -> tuple[TensorMap, ...]:
    """Return the maps of the tile's rows, of its columns, and of C where TMA stores it."""
    turned = _turned(problem, size[1])
    copies, begins = _copies(problem), (0, _packed_bytes(problem)[0])
    maps = []
    for side, rows in enumerate((size[0], size[1] // cluster)):
        operand = 1 - side if turned else side
        name, box = "ab"[operand], (STEPS, rows)
        copied = copies[operand] != AS_IT_IS
        maps.append(LinesMap(name, box, begins[operand]) if copied else TensorMap(name, box))
    if _stored_by_tma(problem, size[1]):
        maps.append(TensorMap("c", (128 // ITEMSIZE[problem.out], 16)))
    return tuple(maps)


def _seen(problem: Problem, width: int) -> Problem:
    """Return the problem with C in the order in which its tiles are counted."""
    return replace(problem, layout_out="col" if _turned(problem, width) else "row")


def workspace(problem: Problem, params: Params, machine: Machine) -> int:
    """Return the bytes of the copies."""
    return sum(_packed_bytes(problem))


def steps_by(tiles: dict[str, tuple[int, int]], most: int = 6) -> Callable[..., tuple[Step, ...]]:
    """Return the `steps` of a rung whose parameter `tile` is one of these, of `most` stages."""

    def steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
        (height, width), cluster = tiles[params["tile"]], params["cluster"]
        ring, turned = wgmma_specialized.stages(height, width, most), _turned(problem, width)
        count = wgmma_specialized.clusters(_seen(problem, width), (height, width), cluster)
        types = [CTYPE[problem.a], CTYPE[problem.b]]
        types = [*(types[::-1] if turned else types), CTYPE[problem.out]]
        kernel = "multiply_bytes" if _stored_by_tma(problem, width) else "multiply_bytes_apart"
        multiply = Step(
            kernel=instance(kernel, *types, height, width, ring, cluster, turned),
            grid=(min(machine.units // cluster, count) * cluster, 1, 1),
            block=(384, 1, 1),
            smem=ring * (height + width) * STEPS + wgmma_specialized.OUT_BYTES,
            cluster=(cluster, 1, 1),
            maps=_maps(problem, (height, width), cluster),
        )
        copies = _copies(problem)
        if not any(copies):
            return (multiply,)
        blocks = PACK_BLOCKS * machine.units
        return (
            Step(instance("pack_bytes", *copies), (blocks, 1, 1), (PACK_THREADS, 1, 1)),
            multiply,
        )

    return steps


def timed_by(rung: str, tiles: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Return what such a rung says of its time: that of halves and half the steps, and copies."""

    def terms(problem: Problem, params: Params, machine: Machine) -> Terms:
        size, copies = tiles[params["tile"]], _copies(problem)
        halves = replace(_seen(problem, size[1]), k=ceil_div(problem.k, 2))
        copied = workspace(problem, {}, machine) / machine.read_bytes_per_s
        more = {"copied": copied, "copy_s": float(any(copies))}
        more["turned_s"] = float(TRANSPOSED in copies)
        count, sides = wgmma_specialized.clusters(halves, size, 1), sum(size)
        apart = ceil_div(count, machine.units) * math.prod(size) * (problem.alignment < 16)
        more["apart_s"] = apart
        pair, loaded = {"pair_s": params["cluster"] - 1.0}, {"loaded_s": count * sides * problem.k}
        return wgmma_specialized.tiled(halves, machine, size, params["cluster"], more, pair, loaded)

    return modelled(rung, terms)


def common(rung: str, tiles: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Return what both rungs say of themselves."""
    return {
        "after": "wgmma_specialized",
        "layouts": ("row", "col"),
        "archs": ("sm_90a",),
        "params": {"tile": tuple(tiles), "cluster": (1, 2)},
        "constraints": (
            half_tiles.COUNTED,
            Constraint(
                "pairs of blocks share the widest tiles alone",
                lambda problem, params: params["cluster"] == 1 or "256" in params["tile"],
            ),
            Constraint(
                "at most 2^31 tiles",
                lambda problem, params: (
                    problem.m * problem.n * problem.batch < (2**31 - 2**16) * 64 * 128
                ),
            ),
        ),
        "batched": True,
        "workspace": workspace,
        "steps": steps_by(tiles),
        **timed_by(rung, tiles),
    }
