"""Document 004: block & multiply over column-major storage, transposed forms, block widths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from gemmule_lab.studies.documents.claims_004 import (
    ALGORITHMS,
    CLAIMS,
    EXPONENTS,
    FIVE,
    FIXED,
    HEIGHT_RUNS,
    HEIGHTS,
    ITS_WIDTH,
    MATRICES,
    THIN_EXPONENTS,
    TRANSPOSE_NAME,
    WIDTH_RUNS,
    WIDTHS,
    ZEROING_NAME,
    shapes,
)
from gemmule_lab.studies.documents.pictures_004 import pictures
from gemmule_lab.studies.grid import Cell, Lane, Step, Study
from gemmule_lab.studies.records import Rows
from gemmule_lab.studies.verdicts import published

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
WIDTH_LANES = tuple(_lane(algorithm, width) for algorithm in ALGORITHMS for width in WIDTHS)
TRANSPOSE, ZEROING = (
    replace(_lane(algorithm, ITS_WIDTH), name=name, only=kernels)
    for name, algorithm, kernels in (
        (TRANSPOSE_NAME, "transpose_then", ("transpose_tiles",)),
        (ZEROING_NAME, "block_multiply", ("zero_sums", "store_sums")),
    )
)
BEST = (Lane("gemmule's choice", "auto"), Lane("gemmule's choice transposed", "auto", flip=True))
PEERS = (
    Lane("torch", None, peer="torch"),
    Lane("torch transposed", None, peer="torch", flip=True),
)


FIVE_LANES = tuple(
    replace(lane, name=f"{lane.name} #{matrix}", matrix=matrix)
    for matrix in range(1, MATRICES + 1)
    for lane in (*NAIVE_LANES, *(_lane(a, ITS_WIDTH) for a in ALGORITHMS))
)
CPU_LANES = (
    Lane("scalar loop", "scalar_loop"),
    Lane("scalar loop transposed", "scalar_loop", flip=True),
    *BEST,
    Lane("numpy", None, peer="numpy"),
    Lane("numpy transposed", None, peer="numpy", flip=True),
)


HEIGHT_LANES = tuple(
    Lane(
        f"{algorithm} {height} x {width}",
        algorithm,
        {"height": height, "width": width},
        flip=algorithm != "block_multiply",
    )
    for algorithm in ALGORITHMS
    for height in HEIGHTS
    for width in WIDTHS
    if width <= height
)


def steps(backend: str, full: bool) -> Iterable[Step]:
    """Return the grid: heights and widths of blocks, naive kernels, and runs on five matrices.

    Numbers are uniform, as in the document.
    """
    if backend == "cpu":
        for n, m in CPU_SHAPES:
            for temperature in ("warm", "cold"):
                yield Cell("cpu", "matvec", m, n, CPU_LANES, temperature, layout="col")
        return
    for m in (1 << 7, 1 << 14):
        yield Cell(FIXED, "matvec", m, 128, (ZEROING,), "warm", layout="col", case={"m": m})
    for m, n in HEIGHT_SHAPES:
        yield Cell(HEIGHT_RUNS, "matvec", m, n, HEIGHT_LANES, "warm", layout="col", uniform=True)
    for m, n in shapes(full):
        lanes = (*NAIVE_LANES, *WIDTH_LANES, TRANSPOSE, *BEST, *PEERS)
        for temperature in ("warm", "cold") if 4 * m * n >= COLD_BYTES else ("warm",):
            yield Cell(WIDTH_RUNS, "matvec", m, n, lanes, temperature, layout="col", uniform=True)
        yield Cell(FIVE, "matvec", m, n, FIVE_LANES, "warm", layout="col", uniform=True)


def left_out(full: bool) -> Iterator[str]:
    """Yield what the grid lacks."""
    if not full:
        skipped = sorted(set(EXPONENTS) - set(THIN_EXPONENTS))
        yield f"the sizes n = {', '.join(f'2^{p}' for p in skipped)}"
    yield "cold rows of matrices below 128 KiB: the L2 holds thousands of them"


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
        yield (
            name,
            f"{printed:.1f}" if printed else "",
            *_means(rows.where(WIDTH_RUNS, backend="cuda", name=name)),
        )
    beside = {"scalar loop": "naive", "scalar loop transposed": "naive_transposed"}
    here = rows.where("cpu", backend="cpu").timed()
    for name in here.names():  # our means of the few shapes that are timed on a CPU
        theirs = f"{average[beside[name]] * 1000:.1f}" if name in beside else ""
        yield (f"{name}, on our CPU", theirs, *_means(here.where(name=name)))


def _means(rows: Rows) -> tuple[str, str, str]:
    """Return mean and median of the warm times, and the mean of the cold ones."""
    warm, cold = (list(rows.where(temperature=t).us().values()) for t in ("warm", "cold"))
    ours = (f"{np.mean(warm):.2f}", f"{np.median(warm):.2f}") if warm else ("", "")
    return (*ours, f"{np.mean(cold):.2f}" if cold else "")


STUDY = Study(
    "004", "Block & multiply over column-major storage", steps, left_out, CLAIMS.all(), comparison,
    ("algorithm and width", "printed mean us", "our mean us, warm", "our median us, warm",
     "our mean us, cold shapes"),
    pictures,
)  # fmt: skip
