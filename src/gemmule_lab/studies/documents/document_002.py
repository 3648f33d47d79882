"""Document 002: matmul, basic against square and rectangular tiles, over rows and columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gemmule_lab.profile.single_launch import counting
from gemmule_lab.records.study import Rows
from gemmule_lab.report.tables import significant
from gemmule_lab.studies import rules
from gemmule_lab.studies.charted import chart
from gemmule_lab.studies.documents import rows_columns as shared
from gemmule_lab.studies.grid import Lane, Step, Study
from gemmule_lab.studies.rules import Judged, needed, share, text

SIZES = tuple(1 << p for p in range(8, 13))
THIN = (512, 1024, 4096)
COUNTED = 1024
TILE = 32
KERNELS = BASIC, SQUARE, RECTANGULAR = "naive", "shared_tile", "rectangular_tile"
TYPES = ("float64", "float32", "float16", "bfloat16", "int32")
LADDER_COUNTS = "counted by the ladder"
PAST = {"sectors past the L1": "past the L1", "L2": "L2 sectors read"}
LEVELS = {"requests": "load requests", "sectors asked of the L1": "load sectors", **PAST}
LARGER = {"L2": "L2 sectors read", "DRAM": "DRAM bytes read"}
CLAIMS = rules.Claims("002")


def steps(backend: str, full: bool) -> Iterator[Step]:
    """Yield every float32 rung over rows and columns, smaller tiles too; dtypes, and counters."""
    whole = shared.every_rung("matmul", backend, ("tensor_core", "tensor_core_int8"))
    if backend == "cpu":
        yield from shared.cells("matmul", [(n, n) for n in (128, 256, 512)], whole, ("warm",))
        return
    small = [
        Lane(f"{name} {tile}", name, {"tile": tile})
        for tile in (16, 8)
        for name in (SQUARE, RECTANGULAR)
    ]
    yield from shared.cells("matmul", shared.every(THIN), (*whole, *small), shared.BOTH)
    if full:
        yield from shared.cells(
            "matmul", shared.every(SIZES, THIN), shared.few_of(whole, KERNELS), shared.BOTH
        )
    yield from shared.by_type("matmul", COUNTED, KERNELS, TYPES, ("warm",))
    squares = [lane for lane in small if lane.rung == SQUARE]
    counted = (*(Lane(name, name) for name in KERNELS), *squares)
    yield counting("matmul", counted, {"m": COUNTED, "n": COUNTED, "columns": COUNTED})


def _counts(rows: Rows, *names: str) -> list[Mapping[str, float]]:
    """Return each kernel's counters, with what passes the L1; UnmeasuredError for none."""
    here, found = rows.where("counters", backend="cuda"), list[Mapping[str, float]]()
    for name in names:
        row = next((r for r in here.where(name=name) if r.figures), None)
        figures = needed(row, next((r.note for r in here if r.note), rules.NO_GPU)).figures
        sectors, hits = (figures.get(f"load sectors{what}", 0.0) for what in ("", " hit in L1"))
        found.append({**figures, "past the L1": sectors - hits})
    return found


@CLAIMS.rule("tile-width", BASIC, SQUARE, 0.95 * TILE, 1.05 * TILE, "load requests")
@CLAIMS.rule("rectangular", SQUARE, RECTANGULAR, 1.02, float("inf"), "load requests")
@CLAIMS.rule("tile-traffic", BASIC, SQUARE, 1.02, float("inf"), "past the L1")
def _falls(rows: Rows, plain: str, tile: str, low: float, high: float, count: str) -> Judged:
    """Judge how many times a count falls from one kernel to another, and say it by level."""
    more, less = _counts(rows, plain, tile)
    by_ladder = rows.where(LADDER_COUNTS, dtype="float32")
    larger = [by_ladder.where(name=name) for name in (plain, tile)]
    levels = PAST if count in PAST.values() else LEVELS
    words = [f"times fewer at {COUNTED} cubed: {_fewer(more, less, levels)}"]
    if all(larger):
        counts = _fewer(larger[0][0].figures, larger[1][0].figures, LARGER)
        words.append(f"at {larger[0][0].case['n']} cubed {counts}")
    ratio = more[count] / needed(less[count])
    return Judged(low <= ratio <= high, "; ".join(words), ratio)


def _fewer(more: Mapping[str, float], less: Mapping[str, float], levels: Mapping[str, str]) -> str:
    """Return in words how many times fewer loads one kernel has than another, by level."""
    both = {k: v for k, v in levels.items() if more.get(v) and less.get(v)}
    return ", ".join(f"{level} {more[name] / less[name]:.2f}" for level, name in both.items())


@CLAIMS.rule("low-use", "gbs", "read", False)
@CLAIMS.rule("compute-bound", "gflops", "fma float32", True)
def _shares(rows: Rows, rate: str, ceiling: str, near: bool) -> Judged:
    """Judge whether all three are near a limit, or far from it, at the largest square."""
    limits = {name: needed(rows.ceiling(name, "cuda")) for name in ("fma float32", "read")}
    warm = rows.where(
        shared.EXPERIMENT, backend="cuda", temperature="warm", m=SIZES[-1], n=SIZES[-1]
    )
    words, shares = [], []
    for name in KERNELS:
        figures = {r: needed(warm.where(name=name).figure(r)) for r in ("gflops", "gbs")}
        shares.append(figures[rate] / limits[ceiling])
        words.append(
            f"{name} {100 * figures['gflops'] / limits['fma float32']:.0f} % of the FMA ceiling, "
            f"{100 * figures['gbs'] / limits['read']:.1f} % of the read ceiling"
        )
    holds = min(shares) >= 0.6 if near else max(shares) < 0.1
    return Judged(holds, "; ".join(words), max(shares))


@CLAIMS.rule("coalesced")
def _coalesced(rows: Rows) -> Judged:
    """Count the 32-byte sectors of A that the warps' first lanes ask for in one iteration."""
    lanes_of_warp = [(t // TILE, t % TILE) for t in range(32)]  # threadIdx.y, threadIdx.x
    sectors = len({row * COUNTED * 4 // 32 for row, _ in lanes_of_warp})
    counted = rows.where("counters", backend="cuda", name=BASIC)
    asked, requests = counted.figure("load sectors"), counted.figure("load requests")
    words = f"a warp of a 32-wide block asks for {sectors} sector of A: all lanes read one value"
    if asked is not None and requests is not None:
        words += f"; counted {asked / requests:.2f} sectors a request, (1 + 4) / 2 expected"
    return Judged(sectors > 4, words, sectors)


def comparison(rows: Rows) -> Iterator[tuple[str, ...]]:
    """Yield each rung's rates on the largest square, and where it was counted its traffic."""
    counted = rows.where(LADDER_COUNTS, dtype="float32")
    for backend, size, square in shared.largest_squares(rows):
        fma, read = rows.ceiling("fma float32", backend), rows.ceiling("read", backend)
        for row in square.where(temperature="warm"):
            gbs, gflops = row.figures["gbs"], row.figures["gflops"]
            here = counted.where(name=row.name) if backend == "cuda" else Rows(())
            traffic = {"load sectors": 32e-9, "L2 sectors read": 32e-9, "DRAM bytes read": 1e-9}
            yield (
                f"{row.name}, {backend}, {size}",
                significant(row.us),
                f"{gbs:.1f}",
                share(gbs, read, 1),
                f"{gflops:,.0f}",
                share(gflops, fma),
                *(text(here.figure(name), ".2f", scale) for name, scale in traffic.items()),
            )


_AXES = ("rows of A", "columns of A, the inner size")
_SHAPE = "A is rows x columns, B columns x rows: the inner size is the columns of A"
CHARTS = (
    *shared.charts("Matrix product", KERNELS, "gflops", "GFLOP/s", "fma", _SHAPE, "1,024 cubed",
                   "1,024 cubed", _AXES),
    chart("figures", "traffic", "The next question: what the kernels load, level by level",
          LADDER_COUNTS, "float32", "2,048 cubed", "millions of 32-byte sectors, Nsight Compute",
          names=[*KERNELS, "register_tile", "vector_tile"], at={"dtype": "float32"},
          figures={"asked of the L1": "load sectors", "read from the L2": "L2 sectors read"},
          scale=1e-6, unit="million"),
)  # fmt: skip
HEADER = (
    *("rung, device, size", "us, warm", "GB/s", "of read ceiling", "GFLOP/s", "of FMA ceiling"),
    *("GB asked of the L1 at 2048", "GB from the L2", "GB from DRAM"),
)
STUDY = Study("002", steps, CLAIMS.all(), (HEADER, comparison), CHARTS)
