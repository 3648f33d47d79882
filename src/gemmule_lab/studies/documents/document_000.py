"""Document 000: matvec, a thread a row against x in shared memory, over rows and columns."""

from __future__ import annotations

from collections.abc import Iterator

from gemmule.core.registry import ladder
from gemmule_lab.studies import verdicts
from gemmule_lab.studies.documents.rows_columns import BOTH, EXPERIMENT, Grid, every
from gemmule_lab.studies.grid import Lane, Study
from gemmule_lab.studies.records import Finding, Rows, UnmeasuredError, decided, pairs

SIZES = tuple(1 << p for p in range(8, 15))
THIN = (512, 2048, 8192, 16384)
CPU_THIN = (256, 1024, 4096)
COUNTED = {"m": 16384, "n": 1024}
BASIC, TILED = "thread_per_row", "shared_x"
GROWS, STAYS = 10.0, 2.0
CLAIMS = verdicts.Claims("000")


def lanes(backend: str) -> tuple[Lane, ...]:
    """Return every rung of the ladder at its defaults, and a peer."""
    peer = "torch" if backend == "cuda" else "numpy"
    names = dict.fromkeys(rung.name for rung in ladder("matvec", backend))
    return (*(Lane(name, name) for name in names), Lane(peer, None, peer=peer))


GRID = Grid(
    number="000",
    what="Matrix times vector",
    op="matvec",
    kernels=(BASIC, TILED),
    lanes=lanes,
    usual={"cuda": every(THIN), "cpu": every(CPU_THIN)},
    between={
        "cuda": [shape for shape in every(SIZES) if not {*shape} <= {*THIN}],
        "cpu": [shape for shape in every(SIZES) if not {*shape} <= {*CPU_THIN}],
    },
    temperatures={"cuda": BOTH, "cpu": BOTH},
    types=("float64", "float32", "float16", "bfloat16", "int32", "int64"),
    type_size=4096,
    type_temperatures=BOTH,
    counted=COUNTED,
    counted_kernels=(BASIC,),
    rate="gbs",
    unit="GB/s",
    ceiling="read",
    shape="rows and columns are the matrix's",
    axes=("rows", "columns"),
)


def left_out(full: bool) -> Iterator[str]:
    """Yield what the grid lacks."""
    if not full:
        yield f"rows and columns other than {', '.join(map(str, THIN))} (CPU: " + (
            f"{', '.join(map(str, CPU_THIN))})"
        )
    yield "on a GPU, the rungs beyond the document's two at sizes between these"
    yield "the document's own sizes: it names none, its charts are pictures; ours are 2^8 to 2^14"


@CLAIMS.rule("tiling")
def _tiling(rows: Rows) -> Finding:
    warm, cold = (rows.where(EXPERIMENT, backend="cuda", temperature=t) for t in BOTH)
    found, ratios = verdicts.no_gain(warm, TILED, BASIC), verdicts.speedups(cold, TILED, BASIC)
    words = f"; cold {verdicts.spread(list(ratios.values()))}" if ratios else ""
    return Finding(found.outcome, found.figure + words)


@CLAIMS.rule("l2")
def _x_from_l2(rows: Rows) -> Finding:
    """Bound from below how much of x the L1 serves: A's sectors miss at least once each."""
    basic = rows.where("counters", backend="cuda", name=BASIC)
    sectors, hits = verdicts.counted(basic, "load sectors", "load sectors hit in L1")
    m, n = COUNTED["m"], COUNTED["n"]
    of_x = m // 32 * n  # a warp asks for one sector of x an iteration
    left = sectors - hits - m * n * 4 / 32
    served = 1 - max(left, 0.0) / of_x
    return decided(served < 0.5, f"the L1 serves at least {100 * served:.1f} % of the reads of x")


@CLAIMS.rule("rows")
def _rows_not_columns(rows: Rows) -> Finding:
    """Hold the growth of the bandwidth over the rows against that over the columns."""
    warm = rows.where(EXPERIMENT, backend="cuda", temperature="warm", name=BASIC).timed()
    gbs = {(int(r.case["m"]), int(r.case["n"])): r.figures["gbs"] for r in warm}
    sizes = sorted({size for case in gbs for size in case})
    if len(sizes) < 2 or len(gbs) < len(sizes) ** 2:
        raise UnmeasuredError(verdicts.NO_GPU)
    first, last = sizes[0], sizes[-1]
    down = [gbs[last, n] / gbs[first, n] for n in sizes]
    across = [max(gbs[m, n] for n in sizes) / min(gbs[m, n] for n in sizes) for m in sizes]
    words = (
        f"{gbs[first, first]:.0f} GB/s at {first} x {first}, {gbs[first, last]:.0f} at "
        f"{first} x {last}, {gbs[last, first]:.0f} at {last} x {first}: with {last // first} times "
        f"the rows {min(down):.0f} to {max(down):.0f} times as much, over all columns at most "
        f"{max(across):.1f} times: a thread a row, so few rows leave multiprocessors idle"
    )
    return decided(min(down) >= GROWS and max(across) <= STAYS, words)


@CLAIMS.rule("result-size")
def _result_size(rows: Rows) -> Finding:
    return decided(False, "a 512 x 2048 matrix takes 2,048 values and gives 512: only if square")


@CLAIMS.rule("small-x")
def _vector_small(rows: Rows) -> Finding:
    share = max(n / (m * n + n + m) for m in SIZES for n in SIZES)
    return decided(share < 0.01, f"x is at most {100 * share:.2f} % of the bytes on our grid")


def comparison(rows: Rows) -> Iterator[tuple[str, ...]]:
    """Yield each rung's bandwidth and use of the memory on the largest square, warm and cold."""
    for backend, size, square in GRID.largest_squares(rows):
        ceiling = rows.ceiling("read", backend)
        for name in square.names():
            cells: list[str] = []
            for temperature in BOTH:
                here = square.where(temperature=temperature)
                cells += _use(here.where(name=name), ceiling, temperature)
                cells += [f"{ratio:.2f}" for ratio in pairs(here, BASIC, name).values()] or [""]
            yield (f"{name}, {backend}, {size}", *cells)


def _use(rows: Rows, ceiling: float | None, temperature: str) -> tuple[str, str, str]:
    """Return GB/s, and its shares of the datasheet and of the measured ceiling."""
    gbs = rows.figure("gbs")
    if gbs is None:
        return "", "", ""
    datasheet = rows.figure("datasheet_gbs")
    share = "" if ceiling is None or temperature == "warm" else f"{100 * gbs / ceiling:.0f} %"
    if ceiling is not None and share and gbs > 1.1 * ceiling:
        share += " (above: ceiling disturbed)"
    return (f"{gbs:.0f}", "" if not datasheet else f"{100 * gbs / datasheet:.0f} %", share)


_EACH = ("GB/s", "of datasheet", "of read ceiling", "x basic")
STUDY = Study(
    "000", "Matvec: a thread a row, and x in shared memory", GRID.steps, left_out, CLAIMS.all(),
    comparison, ("rung, device, size", *(f"{t} {what}" for t in BOTH for what in _EACH)),
    GRID.pictures,
)  # fmt: skip
