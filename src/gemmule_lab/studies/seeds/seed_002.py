"""Seed 002: matmul, basic against square and rectangular tiles, over rows and columns."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator

from gemmule.core.registry import ladder
from gemmule_lab.profile.single_launch import counting
from gemmule_lab.report.tables import significant
from gemmule_lab.studies import verdicts
from gemmule_lab.studies.grid import Cell, Lane, Step, Study
from gemmule_lab.studies.records import Finding, Rows, Value, decided
from gemmule_lab.studies.seeds.pictures_000 import Grid, pictures
from gemmule_lab.studies.verdicts import needed

SIZES = tuple(1 << p for p in range(8, 13))
THIN = (512, 1024, 4096)
CPU_SIZES = (128, 256, 512)
TYPES = ("float64", "float16", "bfloat16", "int32")
TYPE_SIZE = COUNTED = 1024
TILE = 32
BASIC, SQUARE, RECTANGULAR = "naive", "shared_tile", "rectangular_tile"
EXPERIMENT, BY_TYPE = "rows x columns", "dtypes"


@functools.cache
def lanes(backend: str) -> tuple[Lane, ...]:
    """Return every float32 rung of the ladder at its defaults, tiles of 16 too, and a peer."""
    peer = "torch" if backend == "cuda" else "numpy"
    halves = ("tensor_core", "tensor_core_int8")
    names = [r.name for r in ladder("matmul", backend) if not r.name.startswith(halves)]
    small = tuple(Lane(f"{n} 16", n, {"tile": 16}) for n in (SQUARE, RECTANGULAR) if n in names)
    return (*(Lane(name, name) for name in names), *small, Lane(peer, None, peer=peer))


FEW = (
    *(Lane(name, name) for name in (BASIC, SQUARE, RECTANGULAR)),
    Lane("gemmule's choice", "auto"),
    Lane("torch", None, peer="torch"),
)


def steps(backend: str, full: bool) -> Iterable[Step]:
    """Return the grid: A of m x n by B of n x m, every rung; the seed's three in other dtypes.

    A full run has the sizes in between for the seed's three, our choice and the peer.
    """
    if backend == "cpu":
        for n in CPU_SIZES:
            yield Cell(EXPERIMENT, "matmul", n, n, lanes("cpu"), "warm", columns=n)
        return
    for m, n, temperature in itertools.product(THIN, THIN, ("warm", "cold")):
        yield Cell(EXPERIMENT, "matmul", m, n, lanes("cuda"), temperature, columns=m)
    for m, n, temperature in itertools.product(SIZES, SIZES, ("warm", "cold")):
        if full and not {m, n} <= set(THIN):
            yield Cell(EXPERIMENT, "matmul", m, n, FEW, temperature, columns=m)
    for form in TYPES:
        three = tuple(Lane(name, name, form=form) for name in (BASIC, SQUARE, RECTANGULAR))
        case: dict[str, Value] = {"m": TYPE_SIZE, "n": TYPE_SIZE, "columns": TYPE_SIZE}
        case["dtype"] = form
        yield Cell(
            BY_TYPE, "matmul", TYPE_SIZE, TYPE_SIZE, three, "warm", columns=TYPE_SIZE, case=case
        )
    whole: dict[str, Value] = {"m": COUNTED, "n": COUNTED, "columns": COUNTED}
    three_rungs = (BASIC, SQUARE, RECTANGULAR)
    yield counting("matmul", three_rungs, whole, COUNTED, COUNTED, COUNTED)


def left_out(full: bool) -> Iterator[str]:
    """Yield what the grid lacks."""
    if not full:
        yield f"rows and columns other than {', '.join(map(str, THIN))} on a GPU"
    yield "on a GPU, the rungs beyond the document's three at sizes between these"
    yield "the document's own sizes: it names none, its charts are pictures; ours are 2^8 to 2^12"


def _warm(rows: Rows) -> Rows:
    return rows.where(EXPERIMENT, backend="cuda", temperature="warm")


def _tiles_beat_basic(rows: Rows) -> Finding:
    both = [verdicts.gain(_warm(rows), name, BASIC) for name in (SQUARE, RECTANGULAR)]
    worst = next((one for one in both if one.outcome != "confirmed"), both[0])
    return Finding(worst.outcome, "; ".join(dict.fromkeys(one.figure for one in both)))


def _requests(rows: Rows, name: str) -> float:
    counted = rows.where("counters", backend="cuda")
    why = next((row.note for row in counted if row.note), verdicts.NO_GPU)
    return verdicts.needed(counted.where(name=name).figure("load requests"), why)


def _tile_width(rows: Rows) -> Finding:
    """Compare sectors asked for by loads; a warp of the basic kernel reads one of A, four of B."""
    basic, square = (_requests(rows, name) for name in (BASIC, SQUARE))
    ratio = basic / square
    words = f"{basic:,.0f} load requests against {square:,.0f}: {ratio:.1f} times fewer"
    return decided(abs(ratio / TILE - 1) <= 0.05, f"{words} with tiles of {TILE}")


def _rectangular_further(rows: Rows) -> Finding:
    square, wide = (_requests(rows, name) for name in (SQUARE, RECTANGULAR))
    words = f"{square:,.0f} load requests against {wide:,.0f}: {square / wide:.2f} times fewer"
    return decided(square / wide > 1 + verdicts.SAME, f"{words}; (1 + 1) / (1 + 1/2) by counting")


def _compute_bound(rows: Rows) -> Finding:
    """Judge the inference: a kernel far from both limits is bound by neither."""
    fma, read = (needed(rows.ceiling(name, "cuda")) for name in ("fma float32", "read"))
    warm = _warm(rows).where(m=SIZES[-1], n=SIZES[-1]).timed()
    words, near = [], []
    for name in (BASIC, SQUARE, RECTANGULAR):
        one = warm.where(name=name)
        gflops, gbs = (needed(one.figure(rate)) for rate in ("gflops", "gbs"))
        near.append(gflops / fma >= 0.6)
        words.append(
            f"{name} {100 * gflops / fma:.0f} % of the FMA ceiling, "
            f"{100 * gbs / read:.1f} % of the read ceiling"
        )
    return decided(all(near), "; ".join(words))


def sectors_of_a_warp(width: int = TILE, columns: int = COUNTED) -> int:
    """Return how many 32-byte sectors of A the warps' first lanes ask for in one iteration."""
    lanes_of_warp = [(t // width, t % width) for t in range(32)]  # threadIdx.y, threadIdx.x
    return len({row * columns * 4 // 32 for row, _ in lanes_of_warp})


def _coalesced(rows: Rows) -> Finding:
    sectors = sectors_of_a_warp()
    counted = rows.where("counters", backend="cuda", name=BASIC)
    asked, requests = counted.figure("load sectors"), counted.figure("load requests")
    words = f"a warp of a 32-wide block asks for {sectors} sector of A: all lanes read one value"
    if asked is not None and requests is not None:
        words += f"; counted {asked / requests:.2f} sectors a request, (1 + 4) / 2 expected"
    return decided(sectors > 4, words)


CLAIMS = verdicts.claims(
    "002",
    {
        "tiles": _tiles_beat_basic,
        "tile-width": _tile_width,
        "rectangular": _rectangular_further,
        "compute-bound": _compute_bound,
        "coalesced": _coalesced,
    },
)


def comparison(rows: Rows) -> Iterator[tuple[str, ...]]:
    """Yield each rung's rates on the largest square."""
    for backend in ("cuda", "cpu"):
        here = rows.where(EXPERIMENT, backend=backend).timed()
        fma, read = rows.ceiling("fma float32", backend), rows.ceiling("read", backend)
        sizes = [int(r.case["m"]) for r in here if r.case["m"] == r.case["n"]]
        for size in sizes and [max(sizes)]:
            for row in here.where(m=size, n=size, temperature="warm"):
                gbs, gflops = row.figures["gbs"], row.figures["gflops"]
                yield (
                    f"{row.name}, {backend}, {size}",
                    significant(row.us),
                    f"{gbs:.1f}",
                    "" if read is None else f"{100 * gbs / read:.1f} %",
                    f"{gflops:,.0f}",
                    "" if fma is None else f"{100 * gflops / fma:.0f} %",
                )


PICTURED = Grid(
    seed="002",
    what="Matrix product",
    kernels=(BASIC, SQUARE, RECTANGULAR),
    rate="gflops",
    unit="GFLOP/s",
    ceiling="fma float32",
    shape="A is rows x columns, B columns x rows: the inner size is the columns of A",
    axes=("rows of A", "columns of A, the inner size"),
)
STUDY = Study(
    "002", "Matmul: basic, square and rectangular tiles", steps, left_out, CLAIMS, comparison,
    ("rung, device, size", "us, warm", "GB/s", "of read ceiling", "GFLOP/s", "of FMA ceiling"),
    functools.partial(pictures, PICTURED),
)  # fmt: skip
