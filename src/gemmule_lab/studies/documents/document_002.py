"""Document 002: matmul, basic against square and rectangular tiles, over rows and columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gemmule.core.registry import ladder
from gemmule_lab.report.tables import significant
from gemmule_lab.studies import rules
from gemmule_lab.studies.charted import chart
from gemmule_lab.studies.documents.rows_columns import BOTH, BY_TYPE, EXPERIMENT, Grid, every
from gemmule_lab.studies.grid import Lane, Study
from gemmule_lab.studies.records import Judged, Rows
from gemmule_lab.studies.rules import needed

SIZES = tuple(1 << p for p in range(8, 13))
THIN = (512, 1024, 4096)
COUNTED = 1024
TILE = 32
KERNELS = BASIC, SQUARE, RECTANGULAR = "naive", "shared_tile", "rectangular_tile"
LADDER_COUNTS = "counted by the ladder"
LEVELS = {"requests": "load requests", "sectors asked of the L1": "load sectors"}
CLAIMS = rules.Claims("002")


def lanes(backend: str) -> tuple[Lane, ...]:
    """Return every float32 rung of the ladder at its defaults, smaller tiles too, and a peer."""
    peer = "torch" if backend == "cuda" else "numpy"
    halves = ("tensor_core", "tensor_core_int8")
    names = [r.name for r in ladder("matmul", backend) if not r.name.startswith(halves)]
    small = (
        Lane(f"{n} {tile}", n, {"tile": tile})
        for tile in (16, 8)
        for n in (SQUARE, RECTANGULAR)
        if n in names
    )
    return (*(Lane(name, name) for name in names), *small, Lane(peer, None, peer=peer))


GRID = Grid(
    op="matmul",
    kernels=KERNELS,
    lanes=lanes,
    usual={"cuda": every(THIN), "cpu": [(n, n) for n in (128, 256, 512)]},
    between={"cuda": [shape for shape in every(SIZES) if not {*shape} <= {*THIN}], "cpu": ()},
    temperatures={"cuda": BOTH, "cpu": ("warm",)},
    types=("float64", "float32", "float16", "bfloat16", "int32"),
    type_size=1024,
    type_temperatures=("warm",),
    counted={"m": COUNTED, "n": COUNTED, "columns": COUNTED},
    counted_lanes=(
        *(Lane(name, name) for name in KERNELS),
        *(Lane(f"{SQUARE} {tile}", SQUARE, {"tile": tile}) for tile in (16, 8)),
    ),
)


def _counts(rows: Rows, *names: str) -> list[Mapping[str, float]]:
    """Return each kernel's counters, with what passes the L1; UnmeasuredError for none."""
    counted = rows.where("counters", backend="cuda")
    why = next((row.note for row in counted if row.note), rules.NO_GPU)
    found: list[Mapping[str, float]] = []
    for name in names:
        row = needed(next((r for r in counted.where(name=name) if r.figures), None), why)
        sectors, hits = (row.figures.get(f"load sectors{what}", 0.0) for what in ("", " hit in L1"))
        found.append({**row.figures, "past the L1": sectors - hits})
    return found


def _fewer(more: Mapping[str, float], less: Mapping[str, float]) -> str:
    """Return in words how many times fewer loads one kernel has than another, by level."""
    levels = {**LEVELS, "sectors past the L1": "past the L1", "L2": "L2 sectors read"}
    both = {k: v for k, v in levels.items() if more.get(v) and less.get(v)}
    return ", ".join(f"{level} {more[name] / less[name]:.2f}" for level, name in both.items())


@CLAIMS.rule("tile-width", BASIC, SQUARE, 0.95 * TILE, 1.05 * TILE, "load requests")
@CLAIMS.rule("rectangular", SQUARE, RECTANGULAR, 1.02, float("inf"), "load requests")
@CLAIMS.rule("tile-traffic", BASIC, SQUARE, 1.02, float("inf"), "past the L1")
def _falls(rows: Rows, plain: str, tile: str, low: float, high: float, count: str) -> Judged:
    """Judge how many times a count falls from one kernel to another, and say it by level."""
    more, less = _counts(rows, plain, tile)
    ratio = more[count] / needed(less[count])
    words = f"times fewer at {COUNTED} cubed: {_fewer(more, less)}"
    by_ladder = rows.where(LADDER_COUNTS, dtype="float32")
    larger = [by_ladder.where(name=name) for name in (plain, tile)]
    if all(larger):
        sizes = larger[0][0].case["n"]
        levels = {"L2": "L2 sectors read", "DRAM": "DRAM bytes read"}
        more, less = (one[0].figures for one in larger)
        told = (f"{k} {more[v] / less[v]:.2f}" for k, v in levels.items())
        words += f"; at {sizes} cubed {', '.join(told)}"
    return Judged(low <= ratio <= high, words, ratio)


@CLAIMS.rule("low-use", "gbs", "read", False)
@CLAIMS.rule("compute-bound", "gflops", "fma float32", True)
def _shares(rows: Rows, rate: str, ceiling: str, near: bool) -> Judged:
    """Judge whether all three are near a limit, or far from it, at the largest square."""
    limits = {name: needed(rows.ceiling(name, "cuda")) for name in ("fma float32", "read")}
    warm = rows.where(EXPERIMENT, backend="cuda", temperature="warm", m=SIZES[-1], n=SIZES[-1])
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
    for backend, size, square in GRID.largest_squares(rows):
        fma, read = rows.ceiling("fma float32", backend), rows.ceiling("read", backend)
        for row in square.where(temperature="warm"):
            gbs, gflops = row.figures["gbs"], row.figures["gflops"]
            here = counted.where(name=row.name) if backend == "cuda" else Rows(())
            traffic = [here.figure(name) for name in ("load sectors", "L2 sectors read")]
            gigabytes = [f"{32e-9 * n:.2f}" if n is not None else "" for n in traffic]
            dram = here.figure("DRAM bytes read")
            yield (
                f"{row.name}, {backend}, {size}",
                significant(row.us),
                f"{gbs:.1f}",
                "" if read is None else f"{100 * gbs / read:.1f} %",
                f"{gflops:,.0f}",
                "" if fma is None else f"{100 * gflops / fma:.0f} %",
                *gigabytes,
                "" if dram is None else f"{1e-9 * dram:.2f}",
            )


_RATE = {"value": "gflops", "unit": "GFLOP/s"}
_AXES = {"axes": ("rows of A", "columns of A, the inner size")}
_SHAPE = "A is rows x columns, B columns x rows: the inner size is the columns of A"
_BUSY = ("SM throughput", "memory throughput", "FMA pipe")
_WHAT = "Matrix product"
CHARTS = (
    chart("gains", "gain", f"{_WHAT}: tiles are {{means}} times as fast as the basic kernel",
          EXPERIMENT, "float32", _SHAPE, each=("cold", "warm"),
          pairs=[(SQUARE, BASIC), (RECTANGULAR, BASIC)], **_AXES),
    chart("figures", "traffic", "The next question: what the kernels load, level by level",
          LADDER_COUNTS, "float32", "2,048 cubed", "millions of 32-byte sectors, Nsight Compute",
          names=[*KERNELS, "register_tile", "vector_tile"], at={"dtype": "float32"},
          figures={"asked of the L1": "load sectors", "read from the L2": "L2 sectors read"},
          scale=1e-6, unit="million"),
    chart("maps", "use", f"{_WHAT}: use of the memory's bandwidth, the document's kernels",
          EXPERIMENT, "float32", "percent of the data sheet's bandwidth", _SHAPE, each=["warm"],
          names=KERNELS, value="use", unit="%", **_AXES),
    chart("lines", "over-rows", f"{_WHAT}: GFLOP/s over the rows, the most columns", EXPERIMENT,
          "float32", "GFLOP/s", _SHAPE, each=["cold"], at={"n": "most"}, over="m", limit="fma",
          axis="rows of A", first=KERNELS, **_RATE),
    chart("maps", "rates", f"{_WHAT}: GFLOP/s by rows and columns", EXPERIMENT, "float32",
          "GFLOP/s in each cell", _SHAPE, each=BOTH, **_RATE, **_AXES),
    chart("bars", "dtypes", f"{_WHAT}: GFLOP/s by dtype", BY_TYPE, "{dtypes}", "1,024 cubed",
          "GFLOP/s", label="{dtype}, {name}", **_RATE),
    chart("figures", "balance", f"{_WHAT}: what the kernels keep busy", "counters", "float32",
          "1,024 cubed", "Nsight Compute, percent of each unit's peak",
          figures={unit: f"{unit} percent" for unit in _BUSY}, scale=1, unit="%"),
)  # fmt: skip
STUDY = Study(
    "002", GRID.steps, CLAIMS.all(),
    (("rung, device, size", "us, warm", "GB/s", "of read ceiling", "GFLOP/s", "of FMA ceiling",
      "GB asked of the L1 at 2048", "GB from the L2", "GB from DRAM"), comparison),
    CHARTS,
)  # fmt: skip
