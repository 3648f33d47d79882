"""Document 000: matvec, a thread a row against x in shared memory, over rows and columns."""

from __future__ import annotations

from collections.abc import Iterator

from gemmule_lab.profile.single_launch import counting
from gemmule_lab.records.study import Rows
from gemmule_lab.studies import rules
from gemmule_lab.studies.charted import chart
from gemmule_lab.studies.documents import rows_columns as shared
from gemmule_lab.studies.grid import Cell, Lane, Step, Study
from gemmule_lab.studies.rules import Judged, UnmeasuredError, share, text

SIZES = tuple(1 << p for p in range(8, 15))
THIN = (512, 2048, 8192, 16384)
CPU_THIN = (256, 1024, 4096)
COUNTED = {"m": 16384, "n": 1024}
BASIC, TILED, UNROLLED = "thread_per_row", "shared_x", "unrolled_rows"
BLOCKS, BLOCK_RUNS = (32, 64, 128, 256, 512, 1024), "blocks"
TYPES = ("float64", "float32", "float16", "bfloat16", "int32", "int64")
GROWS, STAYS = 10.0, 2.0
CLAIMS = rules.Claims("000")


def steps(backend: str, full: bool) -> Iterator[Step]:
    """Yield every rung over rows and columns, between the usual ones fewer on a GPU.

    Before it, on a GPU, whether the tile gains or the loads under way; after it, dtypes, counters.
    """
    gpu, whole = backend == "cuda", shared.every_rung("matvec", backend)
    lanes = tuple(
        Lane(f"{name}, blocks of {block}", name, {"block": block})
        for name in (BASIC, UNROLLED, TILED)
        for block in BLOCKS
    )
    for n in (1024, 4096, 16384) if gpu else ():
        for kept in shared.BOTH:
            yield Cell(BLOCK_RUNS, "matvec", n, n, (*lanes, shared.CHOICE), kept)
    usual = THIN if gpu else CPU_THIN
    yield from shared.cells("matvec", shared.every(usual), whole, shared.BOTH)
    if full:
        few = shared.few_of(whole, (BASIC, TILED)) if gpu else whole
        yield from shared.cells("matvec", shared.every(SIZES, usual), few, shared.BOTH)
    if gpu:
        yield from shared.by_type("matvec", 4096, (BASIC, TILED), TYPES, shared.BOTH)
        yield counting("matvec", (Lane(BASIC, BASIC),), COUNTED)


@CLAIMS.rule("l2")
def _x_from_l2(rows: Rows) -> Judged:
    """Bound from below how much of x the L1 serves: A's sectors miss at least once each."""
    basic = rows.where("counters", backend="cuda", name=BASIC)
    sectors, hits = rules.counted(basic, "load sectors", "load sectors hit in L1")
    m, n = COUNTED["m"], COUNTED["n"]
    of_x = m // 32 * n  # a warp asks for one sector of x an iteration
    left = sectors - hits - m * n * 4 / 32
    served = 1 - max(left, 0.0) / of_x
    return Judged(served < 0.5, f"the L1 serves at least {100 * served:.1f} % of them", served)


@CLAIMS.rule("rows")
def _rows_not_columns(rows: Rows) -> Judged:
    """Hold the growth of the bandwidth over the rows against that over the columns."""
    warm = rows.where(shared.EXPERIMENT, backend="cuda", temperature="warm", name=BASIC).timed()
    gbs = {(int(r.case["m"]), int(r.case["n"])): r.figures["gbs"] for r in warm}
    sizes = sorted({size for case in gbs for size in case})
    if len(sizes) < 2 or len(gbs) < len(sizes) ** 2:
        raise UnmeasuredError(rules.NO_GPU)
    first, last = sizes[0], sizes[-1]
    down = [gbs[last, n] / gbs[first, n] for n in sizes]
    across = [max(gbs[m, n] for n in sizes) / min(gbs[m, n] for n in sizes) for m in sizes]
    words = (
        f"{gbs[first, first]:.0f} GB/s at {first} x {first}, {gbs[first, last]:.0f} at "
        f"{first} x {last}, {gbs[last, first]:.0f} at {last} x {first}: with {last // first} times "
        f"the rows {min(down):.0f} to {max(down):.0f} times as much, over all columns at most "
        f"{max(across):.1f} times"
    )
    return Judged(min(down) >= GROWS and max(across) <= STAYS, words, min(down))


def comparison(rows: Rows) -> Iterator[tuple[str, ...]]:
    """Yield each rung's bandwidth and use of the memory on the largest square, warm and cold."""
    for backend, size, square in shared.largest_squares(rows):
        read = rows.ceiling("read", backend)
        for name in square.names():
            line = [f"{name}, {backend}, {size}"]
            for kept, ceiling in (("warm", None), ("cold", read)):
                here = square.where(temperature=kept)
                gbs, sheet = (here.where(name=name).figure(f) for f in ("gbs", "datasheet_gbs"))
                ratios = [f"{ratio:.2f}" for ratio in here.faster(name, BASIC).values()] or [""]
                line += [text(gbs, ".0f"), share(gbs, sheet), share(gbs, ceiling), *ratios]
            yield tuple(line)


_WHAT, _RATE = "Matrix times vector", {"value": "gbs", "unit": "GB/s"}
CHARTS = (
    *shared.charts(_WHAT, (BASIC, TILED), "gbs", "GB/s", "read",
                   "rows and columns are the matrix's", "4,096 x 4,096", "16,384 x 1,024",
                   ("rows", "columns")),
    chart("lines", "blocks", f"{_WHAT}: the tile or the loads under way, blocks of 128",
          BLOCK_RUNS, "float32", "GB/s", "n x n matrices", each=["cold"], over="n",
          names=[f"{name}, blocks of 128" for name in (BASIC, UNROLLED, TILED)], **_RATE),
    chart("lines", "by-columns", f"{_WHAT}: GB/s over the columns, the most rows",
          shared.EXPERIMENT, "float32", "GB/s", each=["warm"], at={"m": "most"}, over="n",
          axis="columns", names=[BASIC, TILED, shared.CHOICE.name, "torch"], **_RATE),
    chart("bars", "several", "The next question: matrix times vector on two GPUs", "several GPUs",
          "float16", "n x n matrices", "us", "own rows alone: without any exchange",
          label="{n} x {n}, {name}", value="us", unit="us"),
)  # fmt: skip
_EACH = ("GB/s", "of datasheet", "of read ceiling", "x basic")
HEADER = ("rung, device, size", *(f"{kept} {what}" for kept in shared.BOTH for what in _EACH))
STUDY = Study("000", steps, CLAIMS.all(), (HEADER, comparison), CHARTS)
