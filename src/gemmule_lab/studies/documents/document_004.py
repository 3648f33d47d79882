"""Document 004: block & multiply over column-major storage, transposed forms, block widths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from gemmule.core.problem import Problem
from gemmule.core.registry import cuda_rungs
from gemmule_lab.records.results import geomean
from gemmule_lab.records.study import Rows
from gemmule_lab.report.charts import Line
from gemmule_lab.report.ladder_table import REFERENCE_GPU
from gemmule_lab.studies import rules
from gemmule_lab.studies.charted import chart
from gemmule_lab.studies.grid import Cell, Lane, Step, Study
from gemmule_lab.studies.rules import Judged, needed

WIDTHS = (8, 16, 32, 64, 128, 256)
ALGORITHMS = ("block_multiply", "block_multiply_transposed", "transpose_then")
NAIVE = dict(zip(ALGORITHMS, ("naive", "naive transposed", "naive transposed"), strict=True))
ITS_WIDTH, ITS_HEIGHT = 64, 1024
WIDTH_RUNS, HEIGHT_RUNS = "widths", "heights x widths"
HEIGHTS = (64, 128, 256, 512, ITS_HEIGHT)
TRANSPOSE_NAME, ZEROING_NAME = "the transpose alone", "zeroing and storing y"
EXPONENTS, THIN_EXPONENTS = tuple(range(7, 15)), (7, 9, 11, 13, 14)
MATRICES = 5
FIVE, FIXED = "five algorithms", "fixed cost"
MEGABYTE = 1_000_000
CLAIMS = rules.Claims("004")
PRINTED = rules.document("004")["printed"]
_BOTH, DTYPE = ("warm", "cold"), "float32, matrix by columns"
COLD_BYTES = 1 << 17  # of less, thousands of matrices fit into the L2 of a large GPU
CPU_SHAPES = ((128, 128), (1024, 64), (1024, 1024), (4096, 512), (4096, 4096))
HEIGHT_SHAPES = ((1024, 1024), (64, 8192), (4096, 4096), (1024, 16384), (16384, 16384))


def _turns(algorithm: str) -> bool:
    return algorithm != "block_multiply"


def _lane(algorithm: str, width: int) -> Lane:
    name, preset = f"{algorithm} {width}", f"seed_width_{width}"
    return Lane(name, algorithm, preset=preset, flip=_turns(algorithm))


NAIVE_LANES = (
    Lane("naive", "col_thread_per_row", {"block": 256}),
    Lane("naive transposed", "col_transposed", {"block": 256}, flip=True),
)
WIDTH_LANES = tuple(_lane(algorithm, width) for algorithm in ALGORITHMS for width in WIDTHS)
TRANSPOSE, ZEROING = (
    replace(_lane(algorithm, ITS_WIDTH), name=name, only=kernels)
    for name, algorithm, kernels in (
        (TRANSPOSE_NAME, "transpose_then", ("transpose_tiles",)),
        (ZEROING_NAME, "block_multiply", ("zero_sums", "store_sums")),
    )
)


def _both(*lanes: Lane) -> Iterator[Lane]:
    """Yield lanes, each followed by itself over the transpose."""
    for lane in lanes:
        yield from (lane, replace(lane, name=f"{lane.name} transposed", flip=True))


CHOICE, NUMPY = Lane("gemmule's choice", "auto"), Lane("numpy", None, peer="numpy")
OTHERS = tuple(_both(CHOICE, Lane("torch", None, peer="torch")))
CPU_LANES = tuple(_both(Lane("scalar loop", "scalar_loop"), CHOICE, NUMPY))
FIVE_LANES = tuple(
    replace(lane, name=f"{lane.name} #{matrix}", matrix=matrix)
    for matrix in range(1, MATRICES + 1)
    for lane in (*NAIVE_LANES, *(_lane(a, ITS_WIDTH) for a in ALGORITHMS))
)
HEIGHT_LANES = tuple(
    Lane(f"{name} {height} x {width}", name, {"height": height, "width": width}, flip=_turns(name))
    for name, height, width in itertools.product(ALGORITHMS, HEIGHTS, WIDTHS)
    if width <= height
)


def _cell(experiment: str, m: int, n: int, lanes: tuple[Lane, ...], kept: str = "warm") -> Cell:
    """Return a cell over a column-major matrix of uniform numbers, as in the document."""
    look: dict[str, Any] = {"layout": "col", "uniform": True}
    return Cell(experiment, "matvec", m, n, lanes, kept, **look)


def steps(backend: str, full: bool) -> Iterable[Step]:
    """Return the grid: heights and widths of blocks, naive kernels, and runs on five matrices."""
    if backend == "cpu":
        for (n, m), kept in itertools.product(CPU_SHAPES, _BOTH):
            yield _cell("cpu", m, n, CPU_LANES, kept)
        return
    for m in (1 << 7, 1 << 14):
        yield replace(_cell(FIXED, m, 128, (ZEROING,)), case={"m": m})
    for m, n in HEIGHT_SHAPES:
        yield _cell(HEIGHT_RUNS, m, n, HEIGHT_LANES)
    lanes = (*NAIVE_LANES, *WIDTH_LANES, TRANSPOSE, *OTHERS)
    for m, n in shapes(full):
        for kept in _BOTH if 4 * m * n >= COLD_BYTES else _BOTH[:1]:
            yield _cell(WIDTH_RUNS, m, n, lanes, kept)
        yield _cell(FIVE, m, n, FIVE_LANES)


def shapes(full: bool = True) -> list[tuple[int, int]]:
    """Return (m, n): n = 2^7 .. 2^14, m = 2^1 .. n; thinned to five values of n unless full."""
    chosen = EXPONENTS if full else THIN_EXPONENTS
    return [(1 << q, 1 << p) for p in chosen for q in range(1, p + 1)]


def width_runs(rows: Rows, temperature: str = "warm", above: int = 0) -> Rows:
    """Return the runs of all widths on a GPU, over matrices of more than so many bytes."""
    here = rows.where(WIDTH_RUNS, backend="cuda", temperature=temperature)
    return here.only(r for r in here if 4 * int(r.case["m"]) * int(r.case["n"]) > above)


@CLAIMS.rule("above-1-mb")
def _above_1_mb(rows: Rows) -> Judged:
    """Judge block & multiply, and tell in how many cases each algorithm wins, and by how much."""
    large, words, first = (
        [width_runs(rows, kept, MEGABYTE) for kept in ("warm", "cold")],
        [],
        list[float](),
    )
    for name in ALGORITHMS:
        each = [[one.faster(f"{name} {width}", NAIVE[name]) for one in large] for width in WIDTHS]
        its = each[WIDTHS.index(ITS_WIDTH)]
        at = [ratio for one in its for ratio in one.values()]
        first = first or needed(at)
        if not at:
            continue
        best = [max(one[i].get(case, 0.0) for one in each) for i in (0, 1) for case in its[i]]
        won, most = (sum(r > 1 for r in ratios) for ratios in (at, best))
        words.append(
            f"{name} in {won} of {len(at)} cases ({most} at its best width), "
            f"{geomean(at):.2f} times ({min(at):.2f} to {max(at):.2f})"
        )
    return Judged(min(first) > 1, "; ".join(words), geomean(first))


def mean_us(rows: Rows, name: str) -> float:
    """Return the mean of a kernel's median times over all shapes, as the document averages."""
    return float(np.mean([*needed(rows.where(name=name).us()).values()]))


@CLAIMS.rule("width-64")
def _best_is_64(rows: Rows) -> Judged:
    warm, best = width_runs(rows), {}
    for name in ALGORITHMS:
        known = [w for w in WIDTHS if warm.where(name=f"{name} {w}").timed()]
        best[name] = min((mean_us(warm, f"{name} {w}"), w) for w in needed(known))
    words = ", ".join(f"{name} {width} ({us:.2f} us)" for name, (us, width) in best.items())
    holds = all(width == ITS_WIDTH for _, width in best.values())
    return Judged(holds, f"best widths by mean time: {words}")


@CLAIMS.rule("height-1024")
def _height_1024(rows: Rows) -> Judged:
    """Hold the heights against each other at the document's width, by mean time over shapes."""
    runs = rows.where(HEIGHT_RUNS, backend="cuda", temperature="warm")
    words, holds = [], []
    for algorithm in ALGORITHMS:
        pairs = itertools.product(HEIGHTS, WIDTHS)
        us = {(h, w): runs.where(name=f"{algorithm} {h} x {w}").us().values() for h, w in pairs}
        times = {at: geomean(found) for at, found in us.items() if found}
        at_width = {h: one for (h, width), one in times.items() if width == ITS_WIDTH}
        best = min(needed(at_width, "no heights of blocks are on file"), key=at_width.__getitem__)
        height, width = min(times, key=times.__getitem__)
        holds.append(best == ITS_HEIGHT)
        gain = at_width[ITS_HEIGHT] / at_width[best]
        words.append(
            f"{algorithm} {best} at width {ITS_WIDTH}, {gain:.2f} times as fast as {ITS_HEIGHT}; "
            f"of all {height} x {width}"
        )
    return Judged(all(holds), f"best heights: {'; '.join(words)}")


@CLAIMS.rule("always-faster", "block_multiply", 1)
@CLAIMS.rule("transposed-wins", "block_multiply_transposed", 160 / 296)
def _wins(rows: Rows, algorithm: str, share: float) -> Judged:
    """Judge a count of wins: shapes by median, and runs matrix by matrix."""
    ours, plain = f"{algorithm} {ITS_WIDTH}", NAIVE[algorithm]
    five = rows.where(FIVE, backend="cuda")
    shapes_won = [r > 1 for r in needed(width_runs(rows).faster(ours, plain)).values()]
    each = [five.faster(f"{ours} #{i}", f"{plain} #{i}") for i in range(1, MATRICES + 1)]
    runs = [r > 1 for one in each for r in one.values()]
    counts = f"{sum(shapes_won)} of {len(shapes_won)} shapes, in {sum(runs)} of {len(runs)} runs"
    won = sum(shapes_won) / len(shapes_won)
    return Judged(won == 1 if share == 1 else abs(won - share) <= 0.1, f"faster on {counts}", won)


@CLAIMS.rule("ratio-block", "block_multiply")
@CLAIMS.rule("ratio-transposed", "block_multiply_transposed")
@CLAIMS.rule("ratio-then", "transpose_then")
def _mean_ratio(rows: Rows, algorithm: str) -> Judged:
    """Judge "so many times faster": mean time over mean time, within a quarter."""
    printed, warm = PRINTED["ratios"][algorithm], width_runs(rows)
    names = (f"{algorithm} {ITS_WIDTH}", NAIVE[algorithm])
    ours, plain = (mean_us(warm, name) for name in names)
    words = (
        f"{plain / ours:.2f} from the means, {geomean(warm.faster(*names).values()):.2f} as the "
        f"geometric mean over shapes, {printed} printed"
    )
    timed = algorithm == "transpose_then" and warm.where(name=TRANSPOSE_NAME).timed()
    if timed and (alone := mean_us(warm, TRANSPOSE_NAME)) < ours:
        words += (
            f"; {plain / (ours - alone):.2f} without the transpose, {alone / ours:.0%} of its time"
        )
    return Judged(abs(plain / ours / printed - 1) <= 0.25, words, plain / ours)


def _ladder_gain(rows: Rows, name: str) -> float:
    """Return how many times as fast a rung of the ladder is as a thread a row, by columns, cold."""
    here = rows.where("ladder", backend="cuda", temperature="cold", order="columns")
    return geomean(needed(here.faster(name, "thread_per_row")).values())


@CLAIMS.rule("shared-memory")
def _shared_memory(rows: Rows) -> Judged:
    """Hold x in shared memory with the naive kernel's threads against both ideas together."""
    names = ("shared_x", "block_multiply", "split_columns")
    alone, both, sections = (_ladder_gain(rows, name) for name in names)
    words = (
        f"times as fast as a thread a row: x in shared memory {alone:.2f}, block & multiply "
        f"{both:.1f}, sections without shared memory for x {sections:.1f}"
    )
    here = rows.where("counted by the ladder", op="vecmat", dtype="float32")
    plain, *loads = (here.where(name=n).figure("load requests") for n in ("thread_per_row", *names))
    if plain is not None and all(loads):
        told = ", ".join(f"{100 * (n or 0) / plain:.0f} %" for n in loads)
        words += f"; load requests, of a thread a row's: {told}"
    return Judged(math.log(alone) >= math.log(both) / 2, words, alone)


@CLAIMS.rule("coalescing")
def _coalescing(rows: Rows) -> Judged:
    here, sectors = rows.where("counted by the ladder", dtype="float16"), {}
    for name in ALGORITHMS[:2]:
        counts = rules.counted(here.where(name=name), "load sectors", "load requests")
        sectors[f"{name} {ITS_WIDTH}"] = counts[0] / counts[1]
    warm = width_runs(rows, above=MEGABYTE)
    square = warm.only(r for r in warm if r.case["m"] == r.case["n"])
    slower = geomean(needed(square.faster(*sectors)).values())
    alone = _ladder_gain(rows, "shared_x")
    few, many = sectors.values()
    words = (
        f"{few:.1f} sectors a request for {many:.1f} (halves); coalesced {slower:.2f} times as "
        f"fast on square matrices, x in shared memory alone {alone:.2f}"
    )
    return Judged(many >= 4 * few and slower >= alone, words, slower)


@CLAIMS.rule("zeroing")
def _zeroing(rows: Rows) -> Judged:
    fixed = rows.where(FIXED, backend="cuda", name=ZEROING_NAME)
    small, large = (next(iter(needed(fixed.where(m=m).us()).values())) for m in (1 << 7, 1 << 14))
    warm = width_runs(rows).where(name=f"block_multiply {ITS_WIDTH}")
    median = float(np.median(list(needed(warm.us()).values())))
    words = f"{small:.2f} us of a median product of {median:.2f} us: {100 * small / median:.0f} %"
    for us in warm.where(m=1 << 14, n=1 << 14).us().values():
        words += f"; {large:.2f} of {us:.1f} us at 2^14 x 2^14: {100 * large / us:.1f} %"
    return Judged(small / median < 0.05, words, small / median)


@CLAIMS.rule("twice-memory")
def _copy_bytes(rows: Rows) -> Judged:
    """Compute the workspace of the rung at the largest shape: no device is needed."""
    problem = Problem("matvec", 1 << EXPONENTS[-1], 1 << EXPONENTS[-1])
    rung = next(r for r in cuda_rungs() if r.name == "transpose_then")
    extra = rung.workspace(problem, rung.check_params(problem, None), REFERENCE_GPU)
    share = 1 + extra / problem.matrix_bytes
    words = f"{extra:,} bytes beside a matrix of {problem.matrix_bytes:,}: {share:.2f} times"
    return Judged(1.9 < share < 2.1, words, share)


def comparison(rows: Rows) -> Iterator[tuple[str, ...]]:
    """Yield the printed mean times beside ours: means and geometric means, over the same shapes."""
    average = {name.replace("_t", " t"): 1e3 * ms for name, ms in PRINTED["average_ms"].items()}
    printed = {
        f"{algorithm} {width}": 1e3 * ms
        for algorithm in ALGORITHMS
        for width, ms in zip(WIDTHS, PRINTED["width_ms"][algorithm], strict=True)
    }
    printed |= {TRANSPOSE_NAME: 0.0, **{lane.name: average[lane.name] for lane in NAIVE_LANES}}
    for name, us in printed.items():
        here = rows.where(WIDTH_RUNS, backend="cuda", name=name)
        yield (name, f"{us:.1f}" if us else "", *_means(here))
    beside = {"scalar loop": "naive", "scalar loop transposed": "naive transposed"}
    here = rows.where("cpu", backend="cpu").timed()
    for name in here.names():  # our means of the few shapes that are timed on a CPU
        theirs = f"{average[beside[name]]:.1f}" if name in beside else ""
        yield (f"{name}, on our CPU", theirs, *_means(here.where(name=name)))


def _means(rows: Rows) -> Iterator[str]:
    """Yield mean, geometric mean and median of the warm times; then means where cold ones are."""
    warm, cold = (rows.where(temperature=t).us() for t in ("warm", "cold"))
    both = [warm[case] for case in cold if case in warm]
    times = list(warm.values())
    yield from _two_means(times)
    yield f"{np.median(times):.2f}" if times else ""
    for values in (both, list(cold.values())):
        yield from _two_means(values)


def _two_means(us: list[float]) -> tuple[str, str]:
    return (f"{np.mean(us):.2f}", f"{geomean(us):.2f}") if us else ("", "")


_TURNED = f"block_multiply_transposed {ITS_WIDTH}", f"transpose_then {ITS_WIDTH}", TRANSPOSE_NAME
_OTHERS = "gemmule's choice transposed", "torch transposed"
_ACROSS = {
    "A x": ("naive", f"block_multiply {ITS_WIDTH}", "gemmule's choice", "torch"),
    "A^T x": ("naive transposed", *_TURNED, *_OTHERS),
}
_PRINTED = [
    Line(f"{name}, printed", [(w, 1e3 * ms) for w, ms in zip(WIDTHS, table, strict=True)])
    for name, table in PRINTED["width_ms"].items()
]
_US = {"value": "us", "unit": "us"}
CHARTS = (
    chart("maps", "wins", f"Where width {ITS_WIDTH} beats the naive kernels, {{won}} cases",
          WIDTH_RUNS, DTYPE, "times as fast: naive for A x, naive transposed for A^T x",
          each=_BOTH, axes=("rows of A", "columns of A"), value="us",
          pairs=[(f"{name} {ITS_WIDTH}", NAIVE[name]) for name in ALGORITHMS]),
    chart("bars", "parallelism", "The next question: shared memory, or more threads a row",
          "ladder", "float32, matrix by columns", "us", at={"order": "columns"},
          names=["thread_per_row", "shared_x", "block_multiply", "split_columns", "torch"],
          label="{m} x {n}, {name}", **_US),
    *(
        chart("lines", file, f"{what}: the algorithms over n", WIDTH_RUNS, DTYPE,
              "us; square matrices", each=_BOTH, names=_ACROSS[what], square=True, over="n",
              log=True, **_US)
        for what, file in (("A x", "product"), ("A^T x", "transposed"))
    ),
    chart("bars", "products", "Column-major products on the CPU", "cpu", DTYPE, "us",
          label="{shape}, {name}", **_US),
    chart("lines", "widths", "The width of a block", WIDTH_RUNS, DTYPE,
          "mean us over all shapes, 1,024 rows a block", each=_BOTH, over="name",
          axis="BLOCK_WIDTH", log=True, names=[lane.name for lane in WIDTH_LANES],
          beside=_PRINTED, **_US),
    chart("maps", "heights", "Height x width of a block: the times of each algorithm, and its best",
          HEIGHT_RUNS, DTYPE, "geometric mean us over the matrices {shapes}", over="name",
          axes=("BLOCK_HEIGHT", "BLOCK_WIDTH"), key="us; darker is slower", **_US),
    chart("ranges", "five", f"Five algorithms at width {ITS_WIDTH} on five random matrices",
          FIVE, DTYPE, "mean us over all shapes: the middle one of 5 random matrices and "
          "their range", **_US),
)  # fmt: skip
HEADER = (
    *("algorithm and width", "printed mean us", "our mean us, warm", "geometric", "median"),
    *("mean us of the shapes on the right, warm", "geometric, warm"),
    *("mean us, cold", "geometric, cold"),
)
STUDY = Study("004", steps, CLAIMS.all(), (HEADER, comparison), CHARTS)
