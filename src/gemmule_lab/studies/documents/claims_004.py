"""What document 004 says: its constants, and the rules of its claims."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from gemmule.core.problem import Problem
from gemmule.core.registry import cuda_rungs
from gemmule_lab.records.results import geomean
from gemmule_lab.studies import rules
from gemmule_lab.studies.records import Judged, Rows
from gemmule_lab.studies.rules import document, needed

WIDTHS = (8, 16, 32, 64, 128, 256)
ALGORITHMS = ("block_multiply", "block_multiply_transposed", "transpose_then")
NAIVE = dict(zip(ALGORITHMS, ("naive", "naive transposed", "naive transposed"), strict=True))
ITS_WIDTH, ITS_HEIGHT = 64, 1024
WIDTH_RUNS, HEIGHT_RUNS = "widths", "heights x widths"
HEIGHTS = (64, 128, 256, 512, ITS_HEIGHT)
TRANSPOSE_NAME, ZEROING_NAME = "the transpose alone", "zeroing and storing y"
EXPONENTS = tuple(range(7, 15))
THIN_EXPONENTS = (7, 9, 11, 13, 14)
MATRICES = 5
FIVE, FIXED = "five algorithms", "fixed cost"
MEGABYTE = 1_000_000
CLAIMS = rules.Claims("004")


def shapes(full: bool = True) -> list[tuple[int, int]]:
    """Return (m, n): n = 2^7 .. 2^14, m = 2^1 .. n; thinned to five values of n unless full."""
    chosen = EXPONENTS if full else THIN_EXPONENTS
    return [(1 << q, 1 << p) for p in chosen for q in range(1, p + 1)]


def warm_rows(rows: Rows) -> Rows:
    """Return the warm runs of all widths on a GPU."""
    return rows.where(WIDTH_RUNS, backend="cuda", temperature="warm")


def above_a_megabyte(rows: Rows, temperature: str) -> Rows:
    """Return the runs of all widths over matrices of more than 1 MB."""
    here = rows.where(WIDTH_RUNS, backend="cuda", temperature=temperature)
    return Rows(r for r in here if 4 * int(r.case["m"]) * int(r.case["n"]) > MEGABYTE)


@CLAIMS.rule("above-1-mb")
def _above_1_mb(rows: Rows) -> Judged:
    """Judge block & multiply, and tell in how many cases each algorithm wins, and by how much."""
    words, found = [], dict[str, list[float]]()
    for algorithm in ALGORITHMS:
        at, best = list[float](), 0
        for kept in ("warm", "cold"):
            here = above_a_megabyte(rows, kept)
            naive = NAIVE[algorithm]
            each = [here.faster(f"{algorithm} {width}", naive) for width in WIDTHS]
            its = each[WIDTHS.index(ITS_WIDTH)]
            at += its.values()
            best += sum(max(one.get(case, 0.0) for one in each) > 1 for case in its)
        if at:
            found[algorithm] = at
            words.append(
                f"{algorithm} in {sum(r > 1 for r in at)} of {len(at)} cases ({best} at its best "
                f"width), {geomean(at):.2f} times ({min(at):.2f} to {max(at):.2f})"
            )
    first = needed(found.get(ALGORITHMS[0]))
    return Judged(min(first) > 1, "; ".join(words), geomean(first))


def mean_us(rows: Rows, name: str) -> float | None:
    """Return the mean of a kernel's median times over all shapes, as the document averages."""
    values = list(rows.where(name=name).us().values())
    return float(np.mean(values)) if values else None


def best_width(rows: Rows, algorithm: str) -> tuple[int, float]:
    """Return the width with the smallest mean time over all shapes, and that mean in us."""
    means = {w: mean_us(rows, f"{algorithm} {w}") for w in WIDTHS}
    known = needed({w: us for w, us in means.items() if us is not None})
    width = min(known, key=lambda w: known[w])
    return width, known[width]


@CLAIMS.rule("width-64")
def _best_is_64(rows: Rows) -> Judged:
    found = {name: best_width(warm_rows(rows), name) for name in ALGORITHMS}
    words = ", ".join(f"{name} {width} ({us:.2f} us)" for name, (width, us) in found.items())
    holds = all(width == ITS_WIDTH for width, _ in found.values())
    return Judged(holds, f"best widths by mean time: {words}")


@CLAIMS.rule("height-1024")
def _height_1024(rows: Rows) -> Judged:
    """Hold the heights against each other at the document's width, by mean time over shapes."""
    runs = rows.where(HEIGHT_RUNS, backend="cuda", temperature="warm")
    words, holds = [], []
    for algorithm in ALGORITHMS:
        times = block_means(runs, algorithm)
        at_width = {h: us for (h, width), us in times.items() if width == ITS_WIDTH}
        needed(at_width, rules.NO_HEIGHTS)
        best = min(at_width, key=lambda height: at_width[height])
        height, width = min(times, key=lambda pair: times[pair])
        holds.append(best == ITS_HEIGHT)
        gain = at_width[ITS_HEIGHT] / at_width[best]
        words.append(
            f"{algorithm} {best} at width {ITS_WIDTH}, {gain:.2f} times as fast as {ITS_HEIGHT}; "
            f"of all {height} x {width}"
        )
    return Judged(all(holds), f"best heights: {'; '.join(words)}")


def block_means(runs: Rows, algorithm: str) -> dict[tuple[int, int], float]:
    """Return the geometric mean in us over the shapes, by the height and the width of a block."""
    return {
        (height, width): geomean(us)
        for height in HEIGHTS
        for width in WIDTHS
        if (us := runs.where(name=f"{algorithm} {height} x {width}").us().values())
    }


@CLAIMS.rule("own-optimum")
def _own_optimum(rows: Rows) -> Judged:
    table = document("004")["printed"]["width_ms"]
    best = {name: WIDTHS[int(np.argmin(times))] for name, times in table.items()}
    words = ", ".join(f"{name} {width}" for name, width in best.items())
    return Judged(set(best.values()) == {ITS_WIDTH}, f"smallest in its own table: {words}")


@CLAIMS.rule("always-faster", "block_multiply", 1)
@CLAIMS.rule("transposed-wins", "block_multiply_transposed", 160 / 296)
def _wins(rows: Rows, algorithm: str, share: float) -> Judged:
    """Judge a count of wins: shapes by median, and runs matrix by matrix."""
    warm, name = warm_rows(rows), f"{algorithm} {ITS_WIDTH}"
    by_shape = needed(warm.faster(name, NAIVE[algorithm]))
    runs = list(run_ratios(rows, algorithm))
    shape_wins, run_wins = (sum(r > 1 for r in v) for v in (by_shape.values(), runs))
    words = f"faster on {shape_wins} of {len(by_shape)} shapes, in {run_wins} of {len(runs)} runs"
    won = shape_wins / len(by_shape)
    return Judged(won == 1 if share == 1 else abs(won - share) <= 0.1, words, won)


def run_ratios(rows: Rows, algorithm: str) -> Iterator[float]:
    """Yield naive time over the algorithm's time, shape by shape and matrix by matrix."""
    runs = rows.where(FIVE, backend="cuda")
    for matrix in range(1, MATRICES + 1):
        ours, plain = f"{algorithm} {ITS_WIDTH} #{matrix}", f"{NAIVE[algorithm]} #{matrix}"
        yield from runs.faster(ours, plain).values()


@CLAIMS.rule("ratio-block", "block_multiply")
@CLAIMS.rule("ratio-transposed", "block_multiply_transposed")
@CLAIMS.rule("ratio-then", "transpose_then")
def _mean_ratio(rows: Rows, algorithm: str) -> Judged:
    """Judge "so many times faster": mean time over mean time, within a quarter."""
    printed = document("004")["printed"]["ratios"][algorithm]
    warm, names = warm_rows(rows), (f"{algorithm} {ITS_WIDTH}", NAIVE[algorithm])
    ours, plain = (needed(mean_us(warm, name)) for name in names)
    ratios = warm.faster(*names)
    words = (
        f"{plain / ours:.2f} from the means, {geomean(ratios.values()):.2f} as the geometric "
        f"mean over shapes, {printed} printed"
    )
    alone = mean_us(warm, TRANSPOSE_NAME)
    if algorithm == "transpose_then" and alone is not None and alone < ours:
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
    counted = rows.where("counted by the ladder", op="vecmat", dtype="float32")
    loads = [
        counted.where(name=name).figure("load requests") for name in ("thread_per_row", *names)
    ]
    if loads[0] is not None and all(loads):
        told = ", ".join(f"{100 * (n or 0) / loads[0]:.0f} %" for n in loads[1:])
        words += f"; load requests {told} of its"
    return Judged(math.log(alone) >= math.log(both) / 2, words, alone)


@CLAIMS.rule("coalescing")
def _coalescing(rows: Rows) -> Judged:
    sectors = {}
    for name in ("block_multiply", "block_multiply_transposed"):
        here = rows.where("counted by the ladder", name=name, dtype="float16")
        asked, requests = (needed(here.figure(f"load {what}")) for what in ("sectors", "requests"))
        sectors[name] = asked / requests
    square = Rows(r for r in above_a_megabyte(rows, "warm") if r.case["m"] == r.case["n"])
    names = [f"{name} {ITS_WIDTH}" for name in sectors]
    slower = geomean(needed(square.faster(*names)).values())
    alone = _ladder_gain(rows, "shared_x")
    few, many = sectors.values()
    words = (
        f"{few:.1f} sectors a request for {many:.1f} (halves); coalesced {slower:.2f} times as "
        f"fast on square matrices, x in shared memory alone {alone:.2f}"
    )
    return Judged(many >= 4 * few and slower >= alone, words, slower)


@CLAIMS.rule("any-dimension")
def _any_dimension(rows: Rows) -> Judged:
    """Count the columns that the listing's blocks multiply, for each width."""
    right = []
    for width in range(1, 301):
        blocks = -(-width // ITS_WIDTH)
        whole = [(block + 1) * ITS_WIDTH <= width for block in range(blocks)]
        columns = sum(width % ITS_WIDTH if one else ITS_WIDTH for one in whole)
        right += [width] if columns == width else []
    words = f"the listing multiplies every column once for {len(right)} of 300 widths"
    return Judged(len(right) == 300, words, len(right))


@CLAIMS.rule("zeroing")
def _zeroing(rows: Rows) -> Judged:
    fixed = rows.where(FIXED, backend="cuda", name=ZEROING_NAME)
    small, large = (next(iter(needed(fixed.where(m=m).us()).values())) for m in (1 << 7, 1 << 14))
    warm = warm_rows(rows).where(name=f"block_multiply {ITS_WIDTH}")
    median = float(np.median(list(needed(warm.us()).values())))
    words = f"{small:.2f} us of a median product of {median:.2f} us: {100 * small / median:.0f} %"
    largest = next(iter(warm.where(m=1 << 14, n=1 << 14).us().values()), None)
    if largest is not None:
        words += f"; {large:.2f} of {largest:.1f} us at 2^14 x 2^14: {100 * large / largest:.1f} %"
    return Judged(small / median < 0.05, words, small / median)


@CLAIMS.rule("case-count")
def _cases(rows: Rows) -> Judged:
    made = len(shapes())
    words = f"the sizes it gives make {made} shapes and {made * MATRICES} runs"
    return Judged(made in (294, 296), words, made)


def _printed_ratios() -> Mapping[str, float]:
    average = document("004")["printed"]["average_ms"]
    return {name: average["naive_transposed"] / average[name] for name in ALGORITHMS[1:]}


@CLAIMS.rule("whose-7.3")
def _whose_ratio(rows: Rows) -> Judged:
    ratios = _printed_ratios()
    words = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    return Judged(ratios["block_multiply_transposed"] > 7, f"from its own table 12: {words}")


@CLAIMS.rule("eighty-percent")
def _eighty_percent(rows: Rows) -> Judged:
    ratio = _printed_ratios()["block_multiply_transposed"]
    words = f"{ratio:.2f} times from its own table 12, a gain of {100 * (ratio - 1):.0f} %"
    return Judged(ratio >= 1.7, words, ratio)


@CLAIMS.rule("twice-memory")
def _copy_bytes(rows: Rows) -> Judged:
    """Compute the workspace of the rung at the largest shape: no device is needed."""
    from gemmule_lab.report.ladder_table import REFERENCE_GPU

    side = 1 << EXPONENTS[-1]
    problem = Problem("matvec", side, side)
    rung = next(r for r in cuda_rungs() if r.name == "transpose_then")
    extra = rung.workspace(problem, rung.check_params(problem, None), REFERENCE_GPU)
    share = (problem.matrix_bytes + extra) / problem.matrix_bytes
    words = f"{extra:,} bytes beside a matrix of {problem.matrix_bytes:,}: {share:.2f} times"
    return Judged(1.9 < share < 2.1, words, share)
