"""Document 002: matmul, basic against square and rectangular tiles, over rows and columns."""

from __future__ import annotations

from collections.abc import Iterator

from gemmule.core.registry import ladder
from gemmule_lab.report.tables import significant
from gemmule_lab.studies import verdicts
from gemmule_lab.studies.documents.rows_columns import BOTH, EXPERIMENT, Grid, every
from gemmule_lab.studies.grid import Lane, Study
from gemmule_lab.studies.records import Finding, Rows, decided
from gemmule_lab.studies.verdicts import needed

SIZES = tuple(1 << p for p in range(8, 13))
THIN = (512, 1024, 4096)
COUNTED = 1024
TILE = 32
KERNELS = BASIC, SQUARE, RECTANGULAR = "naive", "shared_tile", "rectangular_tile"
CLAIMS = verdicts.Claims("002")


def lanes(backend: str) -> tuple[Lane, ...]:
    """Return every float32 rung of the ladder at its defaults, tiles of 16 too, and a peer."""
    peer = "torch" if backend == "cuda" else "numpy"
    halves = ("tensor_core", "tensor_core_int8")
    names = [r.name for r in ladder("matmul", backend) if not r.name.startswith(halves)]
    small = tuple(Lane(f"{n} 16", n, {"tile": 16}) for n in (SQUARE, RECTANGULAR) if n in names)
    return (*(Lane(name, name) for name in names), *small, Lane(peer, None, peer=peer))


GRID = Grid(
    number="002",
    what="Matrix product",
    op="matmul",
    kernels=KERNELS,
    lanes=lanes,
    usual={"cuda": every(THIN), "cpu": [(n, n) for n in (128, 256, 512)]},
    between={"cuda": [shape for shape in every(SIZES) if not {*shape} <= {*THIN}], "cpu": ()},
    temperatures={"cuda": BOTH, "cpu": ("warm",)},
    types=("float64", "float16", "bfloat16", "int32"),
    type_size=1024,
    type_temperatures=("warm",),
    counted={"m": COUNTED, "n": COUNTED, "columns": COUNTED},
    counted_kernels=KERNELS,
    rate="gflops",
    unit="GFLOP/s",
    ceiling="fma float32",
    shape="A is rows x columns, B columns x rows: the inner size is the columns of A",
    axes=("rows of A", "columns of A, the inner size"),
)


def left_out(full: bool) -> Iterator[str]:
    """Yield what the grid lacks."""
    if not full:
        yield f"rows and columns other than {', '.join(map(str, THIN))} on a GPU"
    yield "on a GPU, the rungs beyond the document's three at sizes between these"
    yield "the document's own sizes: it names none, its charts are pictures; ours are 2^8 to 2^12"


def _warm(rows: Rows) -> Rows:
    return rows.where(EXPERIMENT, backend="cuda", temperature="warm")


@CLAIMS.rule("tiles")
def _tiles_beat_basic(rows: Rows) -> Finding:
    both = [verdicts.gain(_warm(rows), name, BASIC) for name in (SQUARE, RECTANGULAR)]
    worst = next((one for one in both if one.outcome != "confirmed"), both[0])
    return Finding(worst.outcome, "; ".join(dict.fromkeys(one.figure for one in both)))


def _fewer(rows: Rows, more: str, less: str) -> tuple[float, str]:
    """Return how many times fewer load requests a kernel has than another, and that in words."""
    counted = rows.where("counters", backend="cuda")
    why = next((row.note for row in counted if row.note), verdicts.NO_GPU)
    asked = [needed(counted.where(name=n).figure("load requests"), why) for n in (more, less)]
    return asked[0] / asked[1], f"{asked[0]:,.0f} load requests against {asked[1]:,.0f}"


@CLAIMS.rule("tile-width")
def _tile_width(rows: Rows) -> Finding:
    """Compare sectors asked for by loads; a warp of the basic kernel reads one of A, four of B."""
    ratio, words = _fewer(rows, BASIC, SQUARE)
    words += f": {ratio:.1f} times fewer with tiles of {TILE}"
    return decided(abs(ratio / TILE - 1) <= 0.05, words)


@CLAIMS.rule("rectangular")
def _rectangular_further(rows: Rows) -> Finding:
    ratio, words = _fewer(rows, SQUARE, RECTANGULAR)
    words += f": {ratio:.2f} times fewer; (1 + 1) / (1 + 1/2) by counting"
    return decided(ratio > 1 + verdicts.SAME, words)


@CLAIMS.rule("compute-bound")
def _compute_bound(rows: Rows) -> Finding:
    """Judge the inference: a kernel far from both limits is bound by neither."""
    fma, read = (needed(rows.ceiling(name, "cuda")) for name in ("fma float32", "read"))
    warm = _warm(rows).where(m=SIZES[-1], n=SIZES[-1]).timed()
    words, near = [], []
    for name in KERNELS:
        one = warm.where(name=name)
        gflops, gbs = (needed(one.figure(rate)) for rate in ("gflops", "gbs"))
        near.append(gflops / fma >= 0.6)
        words.append(
            f"{name} {100 * gflops / fma:.0f} % of the FMA ceiling, "
            f"{100 * gbs / read:.1f} % of the read ceiling"
        )
    return decided(all(near), "; ".join(words))


@CLAIMS.rule("coalesced")
def _coalesced(rows: Rows) -> Finding:
    """Count the 32-byte sectors of A that the warps' first lanes ask for in one iteration."""
    lanes_of_warp = [(t // TILE, t % TILE) for t in range(32)]  # threadIdx.y, threadIdx.x
    sectors = len({row * COUNTED * 4 // 32 for row, _ in lanes_of_warp})
    counted = rows.where("counters", backend="cuda", name=BASIC)
    asked, requests = counted.figure("load sectors"), counted.figure("load requests")
    words = f"a warp of a 32-wide block asks for {sectors} sector of A: all lanes read one value"
    if asked is not None and requests is not None:
        words += f"; counted {asked / requests:.2f} sectors a request, (1 + 4) / 2 expected"
    return decided(sectors > 4, words)


def comparison(rows: Rows) -> Iterator[tuple[str, ...]]:
    """Yield each rung's rates on the largest square."""
    for backend, size, square in GRID.largest_squares(rows):
        fma, read = rows.ceiling("fma float32", backend), rows.ceiling("read", backend)
        for row in square.where(temperature="warm"):
            gbs, gflops = row.figures["gbs"], row.figures["gflops"]
            yield (
                f"{row.name}, {backend}, {size}",
                significant(row.us),
                f"{gbs:.1f}",
                "" if read is None else f"{100 * gbs / read:.1f} %",
                f"{gflops:,.0f}",
                "" if fma is None else f"{100 * gflops / fma:.0f} %",
            )


STUDY = Study(
    "002", "Matmul: basic, square and rectangular tiles", GRID.steps, left_out, CLAIMS.all(),
    comparison,
    ("rung, device, size", "us, warm", "GB/s", "of read ceiling", "GFLOP/s", "of FMA ceiling"),
    GRID.pictures,
)  # fmt: skip
