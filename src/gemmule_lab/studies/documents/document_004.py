"""Document 004: block & multiply over column-major storage, transposed forms, block widths."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from gemmule_lab.records.results import geomean
from gemmule_lab.records.study import Rows
from gemmule_lab.report.charts import Line
from gemmule_lab.studies.charted import chart
from gemmule_lab.studies.documents import claims_004 as said
from gemmule_lab.studies.grid import Cell, Lane, Step, Study
from gemmule_lab.studies.rules import document

_BOTH, DTYPE = ("warm", "cold"), "float32, matrix by columns"
COLD_BYTES = 1 << 17  # of less, thousands of matrices fit into the L2 of a large GPU
CPU_SHAPES = ((128, 128), (1024, 64), (1024, 1024), (4096, 512), (4096, 4096))
HEIGHT_SHAPES = ((1024, 1024), (64, 8192), (4096, 4096), (1024, 16384), (16384, 16384))


def _lane(algorithm: str, width: int) -> Lane:
    flip = algorithm != "block_multiply"
    return Lane(f"{algorithm} {width}", algorithm, preset=f"seed_width_{width}", flip=flip)


NAIVE_LANES = (
    Lane("naive", "col_thread_per_row", {"block": 256}),
    Lane("naive transposed", "col_transposed", {"block": 256}, flip=True),
)
WIDTH_LANES = tuple(
    _lane(algorithm, width) for algorithm in said.ALGORITHMS for width in said.WIDTHS
)
TRANSPOSE, ZEROING = (
    replace(_lane(algorithm, said.ITS_WIDTH), name=name, only=kernels)
    for name, algorithm, kernels in (
        (said.TRANSPOSE_NAME, "transpose_then", ("transpose_tiles",)),
        (said.ZEROING_NAME, "block_multiply", ("zero_sums", "store_sums")),
    )
)


def _both(*lanes: Lane) -> Iterator[Lane]:
    """Yield lanes, each followed by itself over the transpose."""
    for lane in lanes:
        yield from (lane, replace(lane, name=f"{lane.name} transposed", flip=True))


CHOICE, NUMPY = Lane("gemmule's choice", "auto"), Lane("numpy", None, peer="numpy")
OTHERS = tuple(_both(CHOICE, Lane("torch", None, peer="torch")))
CPU_LANES = tuple(_both(Lane("scalar loop", "scalar_loop"), CHOICE, NUMPY))
FIVE_LANES = tuple(
    replace(lane, name=f"{lane.name} #{matrix}", matrix=matrix)
    for matrix in range(1, said.MATRICES + 1)
    for lane in (*NAIVE_LANES, *(_lane(a, said.ITS_WIDTH) for a in said.ALGORITHMS))
)
HEIGHT_LANES = tuple(
    replace(_lane(name, said.ITS_WIDTH), name=f"{name} {height} x {width}", preset="",
            params={"height": height, "width": width})
    for name, height, width in itertools.product(said.ALGORITHMS, said.HEIGHTS, said.WIDTHS)
    if width <= height
)  # fmt: skip


def _cell(experiment: str, m: int, n: int, lanes: tuple[Lane, ...], kept: str = "warm") -> Cell:
    """Return a cell over a column-major matrix of uniform numbers, as in the document."""
    look: dict[str, Any] = {"layout": "col", "uniform": True}
    return Cell(experiment, "matvec", m, n, lanes, kept, **look)


def steps(backend: str, full: bool) -> Iterable[Step]:
    """Return the grid: heights and widths of blocks, naive kernels, and runs on five matrices."""
    if backend == "cpu":
        for (n, m), kept in itertools.product(CPU_SHAPES, _BOTH):
            yield _cell("cpu", m, n, CPU_LANES, kept)
        return
    for m in (1 << 7, 1 << 14):
        yield replace(_cell(said.FIXED, m, 128, (ZEROING,)), case={"m": m})
    for m, n in HEIGHT_SHAPES:
        yield _cell(said.HEIGHT_RUNS, m, n, HEIGHT_LANES)
    lanes = (*NAIVE_LANES, *WIDTH_LANES, TRANSPOSE, *OTHERS)
    for m, n in said.shapes(full):
        for kept in _BOTH if 4 * m * n >= COLD_BYTES else _BOTH[:1]:
            yield _cell(said.WIDTH_RUNS, m, n, lanes, kept)
        yield _cell(said.FIVE, m, n, FIVE_LANES)


def comparison(rows: Rows) -> Iterator[tuple[str, ...]]:
    """Yield the printed mean times beside ours: means and geometric means, over the same shapes."""
    table = document("004")["printed"]
    average = {name.replace("_t", " t"): 1e3 * ms for name, ms in table["average_ms"].items()}
    printed = {
        f"{algorithm} {width}": 1e3 * ms
        for algorithm in said.ALGORITHMS
        for width, ms in zip(said.WIDTHS, table["width_ms"][algorithm], strict=True)
    }
    printed |= {said.TRANSPOSE_NAME: 0.0, **{lane.name: average[lane.name] for lane in NAIVE_LANES}}
    for name, us in printed.items():
        here = rows.where(said.WIDTH_RUNS, backend="cuda", name=name)
        yield (name, f"{us:.1f}" if us else "", *_means(here))
    beside = {"scalar loop": "naive", "scalar loop transposed": "naive transposed"}
    here = rows.where("cpu", backend="cpu").timed()
    for name in here.names():  # our means of the few shapes that are timed on a CPU
        theirs = f"{average[beside[name]]:.1f}" if name in beside else ""
        yield (f"{name}, on our CPU", theirs, *_means(here.where(name=name)))


def _means(rows: Rows) -> Iterator[str]:
    """Yield mean, geometric mean and median of the warm times; then means where cold ones are."""
    warm, cold = (rows.where(temperature=t).us() for t in ("warm", "cold"))
    both = [warm[case] for case in cold if case in warm]
    times = list(warm.values())
    yield from _two_means(times)
    yield f"{np.median(times):.2f}" if times else ""
    for values in (both, list(cold.values())):
        yield from _two_means(values)


def _two_means(us: list[float]) -> tuple[str, str]:
    return (f"{np.mean(us):.2f}", f"{geomean(us):.2f}") if us else ("", "")


_ACROSS = {
    "A x": ("naive", f"block_multiply {said.ITS_WIDTH}", "gemmule's choice", "torch"),
    "A^T x": (
        "naive transposed", f"block_multiply_transposed {said.ITS_WIDTH}",
        f"transpose_then {said.ITS_WIDTH}", said.TRANSPOSE_NAME, "gemmule's choice transposed",
        "torch transposed",
    ),
}  # fmt: skip
_PRINTED = [
    Line(f"{name}, printed", [(w, 1e3 * ms) for w, ms in zip(said.WIDTHS, table, strict=True)])
    for name, table in document("004")["printed"]["width_ms"].items()
]
_US = {"value": "us", "unit": "us"}
CHARTS = (
    chart("maps", "wins", f"Where width {said.ITS_WIDTH} beats the naive kernels, {{won}} cases",
          said.WIDTH_RUNS, DTYPE, "times as fast: naive for A x, naive transposed for A^T x",
          each=_BOTH, axes=("rows of A", "columns of A"), value="us",
          pairs=[(f"{name} {said.ITS_WIDTH}", said.NAIVE[name]) for name in said.ALGORITHMS]),
    chart("bars", "parallelism", "The next question: shared memory, or more threads a row",
          "ladder", "float32, matrix by columns", "us", at={"order": "columns"},
          names=["thread_per_row", "shared_x", "block_multiply", "split_columns", "torch"],
          label="{m} x {n}, {name}", **_US),
    *(
        chart("lines", file, f"{what}: the algorithms over n", said.WIDTH_RUNS, DTYPE,
              "us; square matrices", each=_BOTH, names=_ACROSS[what], square=True, over="n",
              log=True, **_US)
        for what, file in (("A x", "product"), ("A^T x", "transposed"))
    ),
    chart("bars", "products", "Column-major products on the CPU", "cpu", DTYPE, "us",
          label="{shape}, {name}", **_US),
    chart("lines", "widths", "The width of a block", said.WIDTH_RUNS, DTYPE,
          "mean us over all shapes, 1,024 rows a block", each=_BOTH, over="name",
          axis="BLOCK_WIDTH", log=True, names=[lane.name for lane in WIDTH_LANES],
          beside=_PRINTED, **_US),
    chart("maps", "heights", "Height x width of a block: the times of each algorithm, and its best",
          said.HEIGHT_RUNS, DTYPE, "geometric mean us over the matrices {shapes}", over="name",
          axes=("BLOCK_HEIGHT", "BLOCK_WIDTH"), key="us; darker is slower", **_US),
    chart("ranges", "five", f"Five algorithms at width {said.ITS_WIDTH} on five random matrices",
          said.FIVE, DTYPE, "mean us over all shapes: the middle one of 5 random matrices and "
          "their range", **_US),
)  # fmt: skip
STUDY = Study(
    "004", steps, said.CLAIMS.all(),
    (("algorithm and width", "printed mean us", "our mean us, warm", "geometric", "median",
      "mean us of the shapes on the right, warm", "geometric, warm", "mean us, cold",
      "geometric, cold"), comparison),
    CHARTS,
)  # fmt: skip
