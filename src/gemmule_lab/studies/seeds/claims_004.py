"""Where seed 004's algorithms beat its naive kernels above 1 MB, and why not where they do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gemmule_lab.studies import verdicts
from gemmule_lab.studies.records import Finding, Rows, decided

WIDTHS = (8, 16, 32, 64, 128, 256)
ALGORITHMS = ("block_multiply", "block_multiply_transposed", "transpose_then")
NAIVE = {
    "block_multiply": "naive",
    "block_multiply_transposed": "naive transposed",
    "transpose_then": "naive transposed",
}
SEED_WIDTH, SEED_HEIGHT, NAIVE_BLOCK = 64, 1024, 256
WIDTH_RUNS, HEIGHT_RUNS = "widths", "heights x widths"
HEIGHTS = (64, 128, 256, 512, SEED_HEIGHT)
TRANSPOSE_NAME, ZEROING_NAME = "the transpose alone", "zeroing and storing y"
EXPONENTS = tuple(range(7, 15))
THIN_EXPONENTS = (7, 9, 11, 13, 14)
MATRICES = 5
FIVE, FIXED = "five algorithms", "fixed cost"
MEGABYTE = 1_000_000


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
        """Naive time over the time at the seed's width."""
        return self.naive_us / self.us[SEED_WIDTH]

    @property
    def best_width(self) -> int:
        """The width with the smallest time on this case."""
        return min(self.us, key=lambda width: self.us[width])

    @property
    def place(self) -> str:
        """The case in words: shape, temperature, and speed-up at the seed's and the best width."""
        best = self.naive_us / self.us[self.best_width]
        return (
            f"{self.m} x {self.n} {self.temperature} {self.speedup:.2f} "
            f"({best:.2f} at width {self.best_width})"
        )


def why_not(lost: Sequence[Race]) -> str:
    """Return what an algorithm lacks where it is slower than its naive kernel."""
    if lost[0].algorithm == "transpose_then":
        shares = [r.copy_us / r.us[SEED_WIDTH] for r in lost if r.copy_us is not None]
        if shares:
            low, high = 100 * min(shares), 100 * max(shares)
            return f"the transposed copy takes {low:.0f} to {high:.0f} % of its time there"
        return "it writes and reads a copy of the matrix first"
    flipped = lost[0].algorithm != "block_multiply"
    shapes = [(r.n, r.m) if flipped else (r.m, r.n) for r in lost]
    blocks = [-(-rows // SEED_HEIGHT) * -(-columns // SEED_WIDTH) for rows, columns in shapes]
    plain = [-(-rows // NAIVE_BLOCK) for rows, _ in shapes]
    return (
        f"its blocks of {SEED_HEIGHT:,} threads are {min(blocks)} to {max(blocks)} there, those of "
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
            if SEED_WIDTH in us:
                yield Race(algorithm, m, n, temperature, plain.us, us, copy)


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
            f"{SEED_WIDTH}, in {best} at its best width, times as fast: "
            f"{verdicts.spread([race.speedup for race in found])}"
        )
        if lost:
            words += f"; not on {', '.join(race.place for race in lost)}: {why_not(lost)}"
        sentences.append(words)
        if algorithm == ALGORITHMS[0]:
            holds = not lost
    return decided(verdicts.needed(holds), ". ".join(sentences))
