"""Seed 004: block & multiply over column-major storage, its transposed forms, and block widths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from gemmule.core.problem import Problem
from gemmule.core.registry import cuda_rungs
from gemmule.lab.records.results import geomean
from gemmule.lab.studies import verdicts
from gemmule.lab.studies.grid import Cell, Lane, Step, Study
from gemmule.lab.studies.published import published
from gemmule.lab.studies.records import Claim, Finding, Rows, decided, unmeasured
from gemmule.lab.studies.seeds.claims_004 import (
    ALGORITHMS,
    NAIVE,
    SEED_WIDTH,
    TRANSPOSE_NAME,
    WIDTH_RUNS,
    WIDTHS,
    above_a_megabyte,
)

EXPONENTS = tuple(range(7, 15))
THIN_EXPONENTS = (7, 9, 11, 13, 14)
MATRICES = 5
COLD_BYTES = 1 << 17  # of less, thousands of matrices fit into the L2 of a large GPU
CPU_SHAPES = ((128, 128), (1024, 64), (1024, 1024), (4096, 512), (4096, 4096))
FIVE, FIXED = "five algorithms", "fixed cost"


def shapes(full: bool = True) -> list[tuple[int, int]]:
    """Return (m, n): n = 2^7 .. 2^14, m = 2^1 .. n; thinned to five values of n unless full."""
    chosen = EXPONENTS if full else THIN_EXPONENTS
    return [(1 << q, 1 << p) for p in chosen for q in range(1, p + 1)]


def _lane(algorithm: str, width: int, matrix: int = 0) -> Lane:
    flip = algorithm != "block_multiply"
    name = f"{algorithm} {width}" + (f" #{matrix}" if matrix else "")
    return Lane(name, algorithm, preset=f"seed_width_{width}", flip=flip, matrix=matrix)


NAIVE_LANES = (
    Lane("naive", "col_thread_per_row", {"block": 256}),
    Lane("naive transposed", "col_transposed", {"block": 256}, flip=True),
)
WIDTH_LANES = tuple(_lane(algorithm, width) for algorithm in ALGORITHMS for width in WIDTHS)
TRANSPOSE = Lane(
    TRANSPOSE_NAME,
    "transpose_then",
    preset=f"seed_width_{SEED_WIDTH}",
    flip=True,
    only=("transpose_tiles",),
)
ZEROING = Lane(
    "zeroing and storing y",
    "block_multiply",
    preset=f"seed_width_{SEED_WIDTH}",
    only=("zero_sums", "store_sums"),
)
BEST = (Lane("gemmule's choice", "auto"), Lane("gemmule's choice transposed", "auto", flip=True))
PEERS = (
    Lane("torch", None, peer="torch"),
    Lane("torch transposed", None, peer="torch", flip=True),
)


def _again(lanes: Iterable[Lane], matrix: int) -> tuple[Lane, ...]:
    return tuple(replace(one, name=f"{one.name} #{matrix}", matrix=matrix) for one in lanes)


FIVE_LANES = tuple(
    lane
    for matrix in range(1, MATRICES + 1)
    for lane in _again((*NAIVE_LANES, *(_lane(a, SEED_WIDTH) for a in ALGORITHMS)), matrix)
)
CPU_LANES = (
    Lane("scalar loop", "scalar_loop"),
    Lane("scalar loop transposed", "scalar_loop", flip=True),
    *BEST,
    Lane("numpy", None, peer="numpy"),
    Lane("numpy transposed", None, peer="numpy", flip=True),
)


def steps(backend: str, full: bool) -> Iterable[Step]:
    """Return the grid: widths and naive kernels warm and cold, and the runs on five matrices."""
    if backend == "cpu":
        for n, m in CPU_SHAPES:
            for temperature in ("warm", "cold"):
                yield Cell("cpu", "matvec", m, n, CPU_LANES, temperature, layout="col")
        return
    for m, n in shapes(full):
        lanes = (*NAIVE_LANES, *WIDTH_LANES, TRANSPOSE, *BEST, *PEERS)
        for temperature in ("warm", "cold") if 4 * m * n >= COLD_BYTES else ("warm",):
            yield Cell(WIDTH_RUNS, "matvec", m, n, lanes, temperature, layout="col")
        yield Cell(FIVE, "matvec", m, n, FIVE_LANES, "warm", layout="col")
    for m in (1 << 7, 1 << 14):
        yield Cell(FIXED, "matvec", m, 128, (ZEROING,), "warm", layout="col", case={"m": m})


def left_out(full: bool) -> Iterator[str]:
    """Yield what the grid lacks."""
    if not full:
        skipped = sorted(set(EXPONENTS) - set(THIN_EXPONENTS))
        yield f"the sizes n = {', '.join(f'2^{p}' for p in skipped)}"
    yield "cold rows of matrices below 128 KiB: the L2 holds thousands of them"


def _warm(rows: Rows) -> Rows:
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
    warm = _warm(rows)
    found = [best_width(warm, algorithm) for algorithm in ALGORITHMS]
    if None in found:
        return unmeasured(verdicts.NO_GPU)
    holds = all(one is not None and one[0] == SEED_WIDTH for one in found)
    return decided(holds, f"best widths by mean time: {_widths_in_words(warm)}")


def _own_optimum(rows: Rows) -> Finding:
    table = published("004")["width_ms"]
    best = {name: WIDTHS[int(np.argmin(times))] for name, times in table.items()}
    words = ", ".join(f"{name} {width}" for name, width in best.items())
    return decided(set(best.values()) == {SEED_WIDTH}, f"smallest in its own table: {words}")


def _wins(algorithm: str, share: float) -> Callable[[Rows], Finding]:
    """Return the judge of a count of wins: shapes by median, and runs matrix by matrix."""

    def judge(rows: Rows) -> Finding:
        warm, name = _warm(rows), f"{algorithm} {SEED_WIDTH}"
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
        warm = _warm(rows)
        ours = mean_us(warm, f"{algorithm} {SEED_WIDTH}")
        plain = mean_us(warm, NAIVE[algorithm])
        if ours is None or plain is None:
            return unmeasured(verdicts.NO_GPU)
        ratios = verdicts.speedups(warm, f"{algorithm} {SEED_WIDTH}", NAIVE[algorithm])
        words = (
            f"{plain / ours:.2f} from the means, {geomean(ratios.values()):.2f} as the geometric "
            f"mean over shapes, {printed} printed"
        )
        alone = mean_us(warm, TRANSPOSE.name)
        if algorithm == "transpose_then" and alone is not None and alone < ours:
            words += f"; {plain / (ours - alone):.2f} from the means without the transpose itself"
        return decided(abs(plain / ours / printed - 1) <= 0.25, words)

    return judge


def _zeroing(rows: Rows) -> Finding:
    fixed = rows.where(FIXED, backend="cuda", name=ZEROING.name)
    large = fixed.where(m=1 << 14).us()
    product = _warm(rows).where(name=f"block_multiply {SEED_WIDTH}", m=1 << 14, n=1 << 14).us()
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
    from gemmule.lab.report.ladder_table import REFERENCE_GPU

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


def comparison(rows: Rows) -> Iterator[tuple[str, ...]]:
    """Yield the printed mean times beside ours (warm mean and median over shapes, cold mean)."""
    table = published("004")
    lines = [
        (f"{algorithm} {width}", milliseconds * 1000)
        for algorithm in ALGORITHMS
        for width, milliseconds in zip(WIDTHS, table["width_ms"][algorithm], strict=True)
    ]
    average = table["average_ms"]
    lines.append((TRANSPOSE.name, 0.0))
    lines += [
        ("naive", average["naive"] * 1000),
        ("naive transposed", average["naive_transposed"] * 1000),
    ]
    for name, printed in lines:
        warm = list(_warm(rows).where(name=name).us().values())
        cold = list(
            rows.where(WIDTH_RUNS, backend="cuda", temperature="cold", name=name).us().values()
        )
        ours = [f"{np.mean(warm):.2f}", f"{np.median(warm):.2f}"] if warm else ["", ""]
        yield (
            name,
            f"{printed:.1f}" if printed else "",
            *ours,
            f"{np.mean(cold):.2f}" if cold else "",
        )


STUDY = Study(
    "004", "Block & multiply over column-major storage", steps, left_out, CLAIMS, comparison,
    ("algorithm and width", "printed mean us", "our mean us, warm", "our median us, warm",
     "our mean us, cold shapes"),
    plots=((WIDTH_RUNS, "warm", "n"), (WIDTH_RUNS, "cold", "n"), ("cpu", "warm", "n")),
)  # fmt: skip
