"""What document 004 says: its constants, and the rules of its claims."""

from __future__ import annotations

import itertools
import math

import numpy as np

from gemmule.core.problem import Problem
from gemmule.core.registry import cuda_rungs
from gemmule_lab.records.results import geomean
from gemmule_lab.records.study import Rows
from gemmule_lab.report.ladder_table import REFERENCE_GPU
from gemmule_lab.studies import rules
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
