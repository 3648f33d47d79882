"""Seed 000: matvec, a thread a row against x in shared memory, over rows and columns."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator

from gemmule.core.registry import ladder
from gemmule_lab.profile.single_launch import counting
from gemmule_lab.studies import verdicts
from gemmule_lab.studies.grid import Cell, Lane, Step, Study
from gemmule_lab.studies.records import Finding, Rows, UnmeasuredError, Value, decided, pairs
from gemmule_lab.studies.seeds.pictures_000 import Grid, pictures

SIZES = tuple(1 << p for p in range(8, 15))
THIN = (512, 2048, 8192, 16384)
CPU_THIN = (256, 1024, 4096)
TYPES = ("float64", "float32", "float16", "bfloat16", "int32", "int64")
TYPE_SIZE = 4096
COUNTED = {"m": 16384, "n": 1024}
EXPERIMENT, BY_TYPE = "rows x columns", "dtypes"
BASIC, TILED, CHOICE = "thread_per_row", "shared_x", "gemmule's choice"
GROWS, STAYS = 10.0, 2.0


@functools.cache
def lanes(backend: str) -> tuple[Lane, ...]:
    """Return every rung of the ladder at its defaults, and a peer."""
    peer = "torch" if backend == "cuda" else "numpy"
    names = dict.fromkeys(rung.name for rung in ladder("matvec", backend))
    return (*(Lane(name, name) for name in names), Lane(peer, None, peer=peer))


def steps(backend: str, full: bool) -> Iterable[Step]:
    """Return the grid: every rung over rows and columns, and the seed's two in every dtype.

    A full run has the sizes in between for the seed's two, our choice and the peer.
    """
    thin = THIN if backend == "cuda" else CPU_THIN
    for m, n, temperature in itertools.product(thin, thin, ("warm", "cold")):
        yield Cell(EXPERIMENT, "matvec", m, n, lanes(backend), temperature)
    if backend != "cuda":
        if full:
            yield from _between(backend, thin, lanes(backend))
        return
    if full:
        yield from _between(backend, thin, _few(backend))
    for form in TYPES:
        pair = (Lane(BASIC, BASIC, form=form), Lane(TILED, TILED, form=form))
        case: dict[str, Value] = {"m": TYPE_SIZE, "n": TYPE_SIZE, "dtype": form}
        for temperature in ("warm", "cold"):
            yield Cell(BY_TYPE, "matvec", TYPE_SIZE, TYPE_SIZE, pair, temperature, case=case)
    yield counting("matvec", (BASIC,), COUNTED, COUNTED["m"], COUNTED["n"])


def _few(backend: str) -> tuple[Lane, ...]:
    rungs = (Lane(BASIC, BASIC), Lane(TILED, TILED), Lane(CHOICE, "auto"))
    return (*rungs, *(lane for lane in lanes(backend) if lane.kind == "peer"))


def _between(backend: str, thin: tuple[int, ...], few: tuple[Lane, ...]) -> Iterator[Step]:
    """Yield the cells of the whole grid that the default one lacks."""
    for m, n, temperature in itertools.product(SIZES, SIZES, ("warm", "cold")):
        if not {m, n} <= set(thin):
            yield Cell(EXPERIMENT, "matvec", m, n, few, temperature)


def left_out(full: bool) -> Iterator[str]:
    """Yield what the grid lacks."""
    if not full:
        yield f"rows and columns other than {', '.join(map(str, THIN))} (CPU: " + (
            f"{', '.join(map(str, CPU_THIN))})"
        )
    yield "on a GPU, the rungs beyond the document's two at sizes between these"
    yield "the document's own sizes: it names none, its charts are pictures; ours are 2^8 to 2^14"


def _tiling(rows: Rows) -> Finding:
    warm = rows.where(EXPERIMENT, backend="cuda", temperature="warm")
    found = verdicts.no_gain(warm, TILED, BASIC)
    cold = verdicts.speedups(
        rows.where(EXPERIMENT, backend="cuda", temperature="cold"), TILED, BASIC
    )
    if not cold:
        return found
    return Finding(found.outcome, f"{found.figure}; cold {verdicts.spread(list(cold.values()))}")


def _x_from_l2(rows: Rows) -> Finding:
    """Bound from below how much of x the L1 serves: A's sectors miss at least once each."""
    basic = rows.where("counters", backend="cuda", name=BASIC)
    sectors, hits = verdicts.counted(basic, "load sectors", "load sectors hit in L1")
    m, n = COUNTED["m"], COUNTED["n"]
    of_x = m // 32 * n  # a warp asks for one sector of x an iteration
    left = sectors - hits - m * n * 4 / 32
    served = 1 - max(left, 0.0) / of_x
    return decided(served < 0.5, f"the L1 serves at least {100 * served:.1f} % of the reads of x")


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


def _result_size(rows: Rows) -> Finding:
    return decided(False, "a 512 x 2048 matrix takes 2,048 values and gives 512: only if square")


def _vector_small(rows: Rows) -> Finding:
    share = max(n / (m * n + n + m) for m in SIZES for n in SIZES)
    return decided(share < 0.01, f"x is at most {100 * share:.2f} % of the bytes on our grid")


CLAIMS = verdicts.claims(
    "000",
    {
        "tiling": _tiling,
        "l2": _x_from_l2,
        "rows": _rows_not_columns,
        "small-x": _vector_small,
        "result-size": _result_size,
    },
)


def comparison(rows: Rows) -> Iterator[tuple[str, ...]]:
    """Yield each rung's bandwidth and use of the memory on the largest square, warm and cold."""
    for backend in ("cuda", "cpu"):
        here = rows.where(EXPERIMENT, backend=backend).timed()
        ceiling = rows.ceiling("read", backend)
        sizes = [int(r.case["m"]) for r in here if r.case["m"] == r.case["n"]]
        for size in sizes and [max(sizes)]:
            square = here.where(m=size, n=size)
            basic = {t: pairs_of(square, t) for t in ("warm", "cold")}
            for name in square.names():
                cells = [
                    _use(square.where(name=name, temperature=t), ceiling, t)
                    for t in ("warm", "cold")
                ]
                ratios = [basic[t].get(name, "") for t in ("warm", "cold")]
                yield (f"{name}, {backend}, {size}", *cells[0], ratios[0], *cells[1], ratios[1])


def pairs_of(square: Rows, temperature: str) -> dict[str, str]:
    """Return how many times as fast as the basic kernel each implementation is."""
    here = square.where(temperature=temperature)
    return {
        name: f"{next(iter(ratio.values())):.2f}"
        for name in here.names()
        if (ratio := pairs(here, BASIC, name))
    }


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


PICTURED = Grid(
    seed="000",
    what="Matrix times vector",
    kernels=(BASIC, TILED),
    rate="gbs",
    unit="GB/s",
    ceiling="read",
    shape="rows and columns are the matrix's",
    axes=("rows", "columns"),
)
_EACH = ("GB/s", "of datasheet", "of read ceiling", "x basic")
STUDY = Study(
    "000", "Matvec: a thread a row, and x in shared memory", steps, left_out, CLAIMS, comparison,
    ("rung, device, size", *(f"{t} {what}" for t in ("warm", "cold") for what in _EACH)),
    functools.partial(pictures, PICTURED),
)  # fmt: skip
