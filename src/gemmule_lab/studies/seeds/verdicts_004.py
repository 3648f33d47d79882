"""What document 004 says, and the rules that decide each sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from gemmule.core.problem import Problem
from gemmule.core.registry import cuda_rungs
from gemmule_lab.records.results import geomean
from gemmule_lab.studies import verdicts
from gemmule_lab.studies.published import published
from gemmule_lab.studies.records import Claim, Finding, Rows, decided, unmeasured
from gemmule_lab.studies.seeds.claims_004 import (
    ALGORITHMS,
    EXPONENTS,
    FIVE,
    FIXED,
    HEIGHT_RUNS,
    HEIGHTS,
    MATRICES,
    NAIVE,
    SEED_HEIGHT,
    SEED_WIDTH,
    TRANSPOSE_NAME,
    WIDTH_RUNS,
    WIDTHS,
    ZEROING_NAME,
    above_a_megabyte,
    shapes,
)


def warm_rows(rows: Rows) -> Rows:
    """Return the warm runs of all widths on a GPU."""
    return rows.where(WIDTH_RUNS, backend="cuda", temperature="warm")


def mean_us(rows: Rows, name: str) -> float | None:
    """Return the mean of a kernel's median times over all shapes, as the document averages."""
    values = list(rows.where(name=name).us().values())
    return float(np.mean(values)) if values else None


def best_width(rows: Rows, algorithm: str) -> tuple[int, float] | None:
    """Return the width with the smallest mean time over all shapes, and that mean in us."""
    means = {w: mean_us(rows, f"{algorithm} {w}") for w in WIDTHS}
    known = {w: us for w, us in means.items() if us is not None}
    if not known:
        return None
    width = min(known, key=lambda w: known[w])
    return width, known[width]


def _widths_in_words(rows: Rows) -> str:
    words = []
    for algorithm in ALGORITHMS:
        found = best_width(rows, algorithm)
        if found is not None:
            words.append(f"{algorithm} {found[0]} ({found[1]:.2f} us)")
    return ", ".join(words)


def _best_is_64(rows: Rows) -> Finding:
    warm = warm_rows(rows)
    found = [best_width(warm, algorithm) for algorithm in ALGORITHMS]
    if None in found:
        return unmeasured(verdicts.NO_GPU)
    holds = all(one is not None and one[0] == SEED_WIDTH for one in found)
    return decided(holds, f"best widths by mean time: {_widths_in_words(warm)}")


def _height_1024(rows: Rows) -> Finding:
    """Hold the heights against each other at the document's width, by mean time over shapes."""
    runs = rows.where(HEIGHT_RUNS, backend="cuda", temperature="warm")
    words, holds = [], []
    for algorithm in ALGORITHMS:
        times = {
            (height, width): geomean(us)
            for height in HEIGHTS
            for width in WIDTHS
            if (us := runs.where(name=f"{algorithm} {height} x {width}").us().values())
        }
        at_width = {h: us for (h, width), us in times.items() if width == SEED_WIDTH}
        if not at_width:
            return unmeasured(verdicts.NO_HEIGHTS)
        best = min(at_width, key=lambda height: at_width[height])
        height, width = min(times, key=lambda pair: times[pair])
        holds.append(best == SEED_HEIGHT)
        gain = at_width[SEED_HEIGHT] / at_width[best]
        words.append(
            f"{algorithm} {best} at width {SEED_WIDTH}, {gain:.2f} times as fast as {SEED_HEIGHT}; "
            f"of all {height} x {width}"
        )
    return decided(all(holds), f"best heights: {'; '.join(words)}")


def _own_optimum(rows: Rows) -> Finding:
    table = published("004")["width_ms"]
    best = {name: WIDTHS[int(np.argmin(times))] for name, times in table.items()}
    words = ", ".join(f"{name} {width}" for name, width in best.items())
    return decided(set(best.values()) == {SEED_WIDTH}, f"smallest in its own table: {words}")


def _wins(algorithm: str, share: float) -> Callable[[Rows], Finding]:
    """Return the judge of a count of wins: shapes by median, and runs matrix by matrix."""

    def judge(rows: Rows) -> Finding:
        warm, name = warm_rows(rows), f"{algorithm} {SEED_WIDTH}"
        by_shape = verdicts.speedups(warm, name, NAIVE[algorithm])
        if not by_shape:
            return unmeasured(verdicts.NO_GPU)
        runs = list(run_ratios(rows, algorithm))
        shape_wins, run_wins = (sum(r > 1 for r in v) for v in (by_shape.values(), runs))
        words = (
            f"faster on {shape_wins} of {len(by_shape)} shapes, in {run_wins} of {len(runs)} runs "
            f"(the whole grid has 84 and 420)"
        )
        if share == 1:
            return decided(shape_wins == len(by_shape), words)
        return decided(abs(shape_wins / len(by_shape) - share) <= 0.1, words)

    return judge


def run_ratios(rows: Rows, algorithm: str) -> Iterator[float]:
    """Yield naive time over the algorithm's time, shape by shape and matrix by matrix."""
    runs = rows.where(FIVE, backend="cuda")
    for matrix in range(1, MATRICES + 1):
        ours, plain = f"{algorithm} {SEED_WIDTH} #{matrix}", f"{NAIVE[algorithm]} #{matrix}"
        yield from verdicts.speedups(runs, ours, plain).values()


def _mean_ratio(algorithm: str) -> Callable[[Rows], Finding]:
    """Return the judge of "so many times faster": mean time over mean time, within a quarter."""
    printed = published("004")["ratios"][algorithm]

    def judge(rows: Rows) -> Finding:
        warm = warm_rows(rows)
        ours = mean_us(warm, f"{algorithm} {SEED_WIDTH}")
        plain = mean_us(warm, NAIVE[algorithm])
        if ours is None or plain is None:
            return unmeasured(verdicts.NO_GPU)
        ratios = verdicts.speedups(warm, f"{algorithm} {SEED_WIDTH}", NAIVE[algorithm])
        words = (
            f"{plain / ours:.2f} from the means, {geomean(ratios.values()):.2f} as the geometric "
            f"mean over shapes, {printed} printed"
        )
        alone = mean_us(warm, TRANSPOSE_NAME)
        if algorithm == "transpose_then" and alone is not None and alone < ours:
            words += f"; {plain / (ours - alone):.2f} from the means without the transpose itself"
        return decided(abs(plain / ours / printed - 1) <= 0.25, words)

    return judge


def _zeroing(rows: Rows) -> Finding:
    fixed = rows.where(FIXED, backend="cuda", name=ZEROING_NAME)
    large = fixed.where(m=1 << 14).us()
    product = warm_rows(rows).where(name=f"block_multiply {SEED_WIDTH}", m=1 << 14, n=1 << 14).us()
    if not large or not product:
        return unmeasured(verdicts.NO_GPU)
    zero, whole = next(iter(large.values())), next(iter(product.values()))
    words = f"{zero:.2f} us of {whole:.1f} us at 2^14 x 2^14: {100 * zero / whole:.1f} %"
    small = next(iter(fixed.where(m=1 << 7).us().values()), None)
    words += "" if small is None else f"; {small:.2f} us of every small product"
    return decided(zero / whole < 0.05, words)


def _cases(rows: Rows) -> Finding:
    return decided(
        len(shapes()) in (294, 296),
        f"the sizes it gives make {len(shapes())} shapes and {len(shapes()) * MATRICES} runs; "
        "its two counts, 294 and 296, differ from these and from each other",
    )


def _whose_ratio(rows: Rows) -> Finding:
    data = published("004")
    average = data["average_ms"]
    plain = average["naive_transposed"]
    ratios = {n: plain / average[n] for n in ("block_multiply_transposed", "transpose_then")}
    words = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    return decided(ratios["block_multiply_transposed"] > 7, f"from its own table 12: {words}")


def _eighty_percent(rows: Rows) -> Finding:
    average = published("004")["average_ms"]
    ratio = average["naive_transposed"] / average["block_multiply_transposed"]
    return decided(ratio >= 1.7, f"{ratio:.2f} times from its own table 12, a gain of 23 %")


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


_RATIO_RULE = "confirmed if the ratio of mean warm times is within a quarter of the printed one"
CLAIMS = (
    Claim("width-64", "A block width of 64 is the optimum.",
          "confirmed if 64 has the smallest mean warm time for all three algorithms", _best_is_64),
    Claim("height-1024", "The block height should be as large as possible, 1024.",
          "confirmed if 1024 has the smallest geometric mean time of its heights for all three "
          "algorithms at width 64, warm", _height_1024),
    Claim("own-optimum", "The document's own table shows 64 to be the optimum.",
          "confirmed if 64 is the smallest time of each of its rows", _own_optimum),
    Claim("always-faster", "Block & multiply is faster than the naive kernel in every case.",
          "confirmed if faster on every shape, warm, at width 64", _wins("block_multiply", 1)),
    Claim("above-1-mb",
          "Not in the document: above 1 MB it is faster in every case, warm and cold.",
          "confirmed if block_multiply at width 64 beats the naive kernel in each; the transposed "
          "forms are held against the naive transposed kernel", above_a_megabyte),
    Claim("transposed-wins", "Transposed block & multiply is faster in 160 of 296 cases.",
          "confirmed if its share of shapes is within 10 points of 54 %",
          _wins("block_multiply_transposed", 160 / 296)),
    Claim("ratio-block", "Block & multiply is 5.5 times as fast as the naive kernel.",
          _RATIO_RULE, _mean_ratio("block_multiply")),
    Claim("ratio-transposed", "Transposed block & multiply is 1.2 times as fast as naive.",
          _RATIO_RULE, _mean_ratio("block_multiply_transposed")),
    Claim("ratio-then", "Transposing first is 7.3 times as fast, the transpose included.",
          _RATIO_RULE, _mean_ratio("transpose_then")),
    Claim("zeroing", "Zeroing y costs little.",
          "confirmed if zeroing and storing the sums take under 5 % of a product of 2^14 x 2^14",
          _zeroing),
    Claim("twice-memory", "Transposing first takes about twice the memory.",
          "confirmed if matrix and workspace are 1.9 to 2.1 times the matrix", _copy_bytes),
    Claim("case-count", "There were 294 (or 296) test cases.",
          "confirmed if the sizes that it gives make as many", _cases),
    Claim("whose-7.3", "The 7.3 times belong to transposed block & multiply.",
          "confirmed if its own averages give more than 7 for that algorithm", _whose_ratio),
    Claim("eighty-percent", "Shared memory alone gains about 80 % in the transposed product.",
          "confirmed if its own averages give at least 1.7 times", _eighty_percent),
)  # fmt: skip
