"""What document 004 says: its constants, and the rules that decide each sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gemmule.core.problem import Problem
from gemmule.core.registry import cuda_rungs
from gemmule_lab.records.results import geomean
from gemmule_lab.studies import verdicts
from gemmule_lab.studies.records import Finding, Rows, decided
from gemmule_lab.studies.verdicts import needed, published

WIDTHS = (8, 16, 32, 64, 128, 256)
ALGORITHMS = ("block_multiply", "block_multiply_transposed", "transpose_then")
NAIVE = {
    "block_multiply": "naive",
    "block_multiply_transposed": "naive transposed",
    "transpose_then": "naive transposed",
}
ITS_WIDTH, ITS_HEIGHT, NAIVE_BLOCK = 64, 1024, 256
WIDTH_RUNS, HEIGHT_RUNS = "widths", "heights x widths"
HEIGHTS = (64, 128, 256, 512, ITS_HEIGHT)
TRANSPOSE_NAME, ZEROING_NAME = "the transpose alone", "zeroing and storing y"
EXPONENTS = tuple(range(7, 15))
THIN_EXPONENTS = (7, 9, 11, 13, 14)
MATRICES = 5
FIVE, FIXED = "five algorithms", "fixed cost"
MEGABYTE = 1_000_000
CLAIMS = verdicts.Claims("004")


def shapes(full: bool = True) -> list[tuple[int, int]]:
    """Return (m, n): n = 2^7 .. 2^14, m = 2^1 .. n; thinned to five values of n unless full."""
    chosen = EXPONENTS if full else THIN_EXPONENTS
    return [(1 << q, 1 << p) for p in chosen for q in range(1, p + 1)]


@dataclass(frozen=True, slots=True)
class Race:
    """An algorithm against its naive kernel on one case: times in us, its own by width."""

    algorithm: str
    m: int
    n: int
    temperature: str
    naive_us: float
    us: Mapping[int, float]
    copy_us: float | None

    @property
    def speedup(self) -> float:
        """Naive time over the time at the document's width."""
        return self.naive_us / self.us[ITS_WIDTH]

    @property
    def best_width(self) -> int:
        """The width with the smallest time on this case."""
        return min(self.us, key=lambda width: self.us[width])

    @property
    def place(self) -> str:
        """The case in words: shape, temperature, speed-up at the document's and the best width."""
        best = self.naive_us / self.us[self.best_width]
        return (
            f"{self.m} x {self.n} {self.temperature} {self.speedup:.2f} "
            f"({best:.2f} at width {self.best_width})"
        )


def why_not(lost: Sequence[Race]) -> str:
    """Return what an algorithm lacks where it is slower than its naive kernel."""
    if lost[0].algorithm == "transpose_then":
        shares = [r.copy_us / r.us[ITS_WIDTH] for r in lost if r.copy_us is not None]
        if shares:
            low, high = 100 * min(shares), 100 * max(shares)
            return f"the transposed copy takes {low:.0f} to {high:.0f} % of its time there"
        return "it writes and reads a copy of the matrix first"
    flipped = lost[0].algorithm != "block_multiply"
    shapes = [(r.n, r.m) if flipped else (r.m, r.n) for r in lost]
    blocks = [-(-rows // ITS_HEIGHT) * -(-columns // ITS_WIDTH) for rows, columns in shapes]
    plain = [-(-rows // NAIVE_BLOCK) for rows, _ in shapes]
    return (
        f"its blocks of {ITS_HEIGHT:,} threads are {min(blocks)} to {max(blocks)} there, those of "
        f"{NAIVE_BLOCK} of the naive kernel {min(plain)} to {max(plain)}, on more multiprocessors"
    )


def races(rows: Rows, algorithm: str) -> Iterator[Race]:
    """Yield the algorithm's cases of more than 1 MB, warm and cold, in the order of the file."""
    for temperature in ("warm", "cold"):
        here = rows.where(WIDTH_RUNS, backend="cuda", temperature=temperature)
        for plain in here.where(name=NAIVE[algorithm]).timed():
            m, n = int(plain.case["m"]), int(plain.case["n"])
            if 4 * m * n <= MEGABYTE:
                continue
            case = here.where(m=m, n=n)
            us = {w: t for w in WIDTHS for t in case.where(name=f"{algorithm} {w}").us().values()}
            copy = next(iter(case.where(name=TRANSPOSE_NAME).us().values()), None)
            if ITS_WIDTH in us:
                yield Race(algorithm, m, n, temperature, plain.us, us, copy)


@CLAIMS.rule("above-1-mb")
def above_a_megabyte(rows: Rows) -> Finding:
    """Judge: block & multiply beats naive in every case above 1 MB; say where others do not."""
    sentences, holds = [], None
    for algorithm in ALGORITHMS:
        found = list(races(rows, algorithm))
        if not found:
            continue
        lost = [race for race in found if race.speedup <= 1]
        best = sum(race.naive_us > min(race.us.values()) for race in found)
        words = (
            f"{algorithm} is faster in {len(found) - len(lost)} of {len(found)} cases at width "
            f"{ITS_WIDTH}, in {best} at its best width, times as fast: "
            f"{verdicts.spread([race.speedup for race in found])}"
        )
        if lost:
            words += f"; not on {', '.join(race.place for race in lost)}: {why_not(lost)}"
        sentences.append(words)
        if algorithm == ALGORITHMS[0]:
            holds = not lost
    return decided(needed(holds), ". ".join(sentences))


def warm_rows(rows: Rows) -> Rows:
    """Return the warm runs of all widths on a GPU."""
    return rows.where(WIDTH_RUNS, backend="cuda", temperature="warm")


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
def _best_is_64(rows: Rows) -> Finding:
    found = {name: best_width(warm_rows(rows), name) for name in ALGORITHMS}
    words = ", ".join(f"{name} {width} ({us:.2f} us)" for name, (width, us) in found.items())
    holds = all(width == ITS_WIDTH for width, _ in found.values())
    return decided(holds, f"best widths by mean time: {words}")


@CLAIMS.rule("height-1024")
def _height_1024(rows: Rows) -> Finding:
    """Hold the heights against each other at the document's width, by mean time over shapes."""
    runs = rows.where(HEIGHT_RUNS, backend="cuda", temperature="warm")
    words, holds = [], []
    for algorithm in ALGORITHMS:
        times = block_means(runs, algorithm)
        at_width = {h: us for (h, width), us in times.items() if width == ITS_WIDTH}
        needed(at_width, verdicts.NO_HEIGHTS)
        best = min(at_width, key=lambda height: at_width[height])
        height, width = min(times, key=lambda pair: times[pair])
        holds.append(best == ITS_HEIGHT)
        gain = at_width[ITS_HEIGHT] / at_width[best]
        words.append(
            f"{algorithm} {best} at width {ITS_WIDTH}, {gain:.2f} times as fast as {ITS_HEIGHT}; "
            f"of all {height} x {width}"
        )
    return decided(all(holds), f"best heights: {'; '.join(words)}")


def block_means(runs: Rows, algorithm: str) -> dict[tuple[int, int], float]:
    """Return the geometric mean in us over the shapes, by the height and the width of a block."""
    return {
        (height, width): geomean(us)
        for height in HEIGHTS
        for width in WIDTHS
        if (us := runs.where(name=f"{algorithm} {height} x {width}").us().values())
    }


@CLAIMS.rule("own-optimum")
def _own_optimum(rows: Rows) -> Finding:
    table = published("004")["width_ms"]
    best = {name: WIDTHS[int(np.argmin(times))] for name, times in table.items()}
    words = ", ".join(f"{name} {width}" for name, width in best.items())
    return decided(set(best.values()) == {ITS_WIDTH}, f"smallest in its own table: {words}")


@CLAIMS.rule("always-faster", "block_multiply", 1)
@CLAIMS.rule("transposed-wins", "block_multiply_transposed", 160 / 296)
def _wins(rows: Rows, algorithm: str, share: float) -> Finding:
    """Judge a count of wins: shapes by median, and runs matrix by matrix."""
    warm, name = warm_rows(rows), f"{algorithm} {ITS_WIDTH}"
    by_shape = needed(verdicts.speedups(warm, name, NAIVE[algorithm]))
    runs = list(run_ratios(rows, algorithm))
    shape_wins, run_wins = (sum(r > 1 for r in v) for v in (by_shape.values(), runs))
    words = (
        f"faster on {shape_wins} of {len(by_shape)} shapes, in {run_wins} of {len(runs)} runs "
        f"(the whole grid has 84 and 420)"
    )
    if share == 1:
        return decided(shape_wins == len(by_shape), words)
    return decided(abs(shape_wins / len(by_shape) - share) <= 0.1, words)


def run_ratios(rows: Rows, algorithm: str) -> Iterator[float]:
    """Yield naive time over the algorithm's time, shape by shape and matrix by matrix."""
    runs = rows.where(FIVE, backend="cuda")
    for matrix in range(1, MATRICES + 1):
        ours, plain = f"{algorithm} {ITS_WIDTH} #{matrix}", f"{NAIVE[algorithm]} #{matrix}"
        yield from verdicts.speedups(runs, ours, plain).values()


@CLAIMS.rule("ratio-block", "block_multiply")
@CLAIMS.rule("ratio-transposed", "block_multiply_transposed")
@CLAIMS.rule("ratio-then", "transpose_then")
def _mean_ratio(rows: Rows, algorithm: str) -> Finding:
    """Judge "so many times faster": mean time over mean time, within a quarter."""
    printed = published("004")["ratios"][algorithm]
    warm, names = warm_rows(rows), (f"{algorithm} {ITS_WIDTH}", NAIVE[algorithm])
    ours, plain = (needed(mean_us(warm, name)) for name in names)
    ratios = verdicts.speedups(warm, *names)
    words = (
        f"{plain / ours:.2f} from the means, {geomean(ratios.values()):.2f} as the geometric "
        f"mean over shapes, {printed} printed"
    )
    alone = mean_us(warm, TRANSPOSE_NAME)
    if algorithm == "transpose_then" and alone is not None and alone < ours:
        words += f"; {plain / (ours - alone):.2f} from the means without the transpose itself"
    return decided(abs(plain / ours / printed - 1) <= 0.25, words)


@CLAIMS.rule("zeroing")
def _zeroing(rows: Rows) -> Finding:
    fixed = rows.where(FIXED, backend="cuda", name=ZEROING_NAME)
    large = fixed.where(m=1 << 14).us()
    product = warm_rows(rows).where(name=f"block_multiply {ITS_WIDTH}", m=1 << 14, n=1 << 14).us()
    zero, whole = (next(iter(needed(times).values())) for times in (large, product))
    words = f"{zero:.2f} us of {whole:.1f} us at 2^14 x 2^14: {100 * zero / whole:.1f} %"
    small = next(iter(fixed.where(m=1 << 7).us().values()), None)
    words += "" if small is None else f"; {small:.2f} us of every small product"
    return decided(zero / whole < 0.05, words)


@CLAIMS.rule("case-count")
def _cases(rows: Rows) -> Finding:
    return decided(
        len(shapes()) in (294, 296),
        f"the sizes it gives make {len(shapes())} shapes and {len(shapes()) * MATRICES} runs; "
        "its two counts, 294 and 296, differ from these and from each other",
    )


@CLAIMS.rule("whose-7.3")
def _whose_ratio(rows: Rows) -> Finding:
    average = published("004")["average_ms"]
    plain = average["naive_transposed"]
    ratios = {n: plain / average[n] for n in ("block_multiply_transposed", "transpose_then")}
    words = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    return decided(ratios["block_multiply_transposed"] > 7, f"from its own table 12: {words}")


@CLAIMS.rule("eighty-percent")
def _eighty_percent(rows: Rows) -> Finding:
    average = published("004")["average_ms"]
    ratio = average["naive_transposed"] / average["block_multiply_transposed"]
    return decided(ratio >= 1.7, f"{ratio:.2f} times from its own table 12, a gain of 23 %")


@CLAIMS.rule("twice-memory")
def _copy_bytes(rows: Rows) -> Finding:
    """Compute the workspace of the rung at the largest shape: no device is needed."""
    from gemmule_lab.report.ladder_table import REFERENCE_GPU

    side = 1 << EXPONENTS[-1]
    problem = Problem("matvec", side, side)
    rung = next(r for r in cuda_rungs() if r.name == "transpose_then")
    extra = rung.workspace(problem, rung.check_params(problem, None), REFERENCE_GPU)
    matrix = problem.matrix_bytes
    share = (matrix + extra) / matrix
    words = f"{extra:,} bytes beside a matrix of {matrix:,}: {share:.2f} times the memory"
    return decided(1.9 < share < 2.1, words)
