"""Document 001: matmul from host to host, by CPU loops, own kernels, cuBLAS and Eigen, in parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gemmule_lab.profile.single_launch import counting
from gemmule_lab.report.tables import significant
from gemmule_lab.studies.documents.claims_001 import (
    CLAIMS,
    FIRST_SIZES,
    FMA_OFF,
    FMA_ON,
    KERNELS,
    LONE_NAIVE,
    LONE_TILE,
    REFUSED,
    TOTAL,
    crossing,
    totals_of,
)
from gemmule_lab.studies.documents.pictures_001 import pictures
from gemmule_lab.studies.grid import Bench, Case, Cell, Found, Lane, Names, Step, Study, Task
from gemmule_lab.studies.products.first_call import first_call
from gemmule_lab.studies.products.largest import FITS, WHOLE, largest
from gemmule_lab.studies.products.passes import (
    CPU_LOOP,
    CUBLAS,
    EIGEN,
    HOST_NAMES,
    NAIVE,
    NUMPY,
    PARTS,
    PINNED,
    SHARED,
)
from gemmule_lab.studies.products.totals import proof, small_check, totals, warm_up
from gemmule_lab.studies.records import Rows, Value
from gemmule_lab.studies.verdicts import published

LARGEST = {CPU_LOOP: 1024, NAIVE: 2048, SHARED: 4096}
DOUBLING = tuple(32 << i for i in range(8))
OWN_SIZES = (*range(1, 1000, 10), *range(1000, 4001, 100), *DOUBLING)
PEER_SIZES = (*range(1, 5002, 10), *range(5000, 10001, 1000))
CUBLAS_SIZES = (*PEER_SIZES, *range(10000, 26001, 1000))
FEW = (151, 201, 301, 501, 701, 991, 1000, 1001, 2000, 2001, 3000, 4000, 4001, 5001, 10000, 26000)
THIN_SIZES = frozenset((*range(1, 102, 10), *FEW, *DOUBLING))
PINNED_SIZES = (11, 64, 101, 256, 1024, 2048, 4096, 10000)
PROOF_RUNS, COUNTED = 10, 1024
KERNEL_SIZES = (1024, 2048)

KERNEL_LANES = (
    Lane("naive, fused", "naive"),
    Lane("naive, multiply and add apart", "naive", {"fma": False}),
    Lane("naive, sums in C", "naive", {"accumulate": "global"}),
    Lane("naive, blocks of 16 x 16", "naive", {"width": 16}),
    *(Lane(f"shared tile {t}", "shared_tile", {"tile": t}) for t in (8, 16)),
    Lane(FMA_ON, "shared_tile", {"tile": 32}),
    Lane(FMA_OFF, "shared_tile", {"tile": 32, "fma": False}),
    Lane("gemmule's choice", "auto"),
    Lane("torch", None, peer="torch"),
)
LONE_LANES = (
    Lane(LONE_NAIVE, "naive", {"width": 1}),
    Lane(LONE_TILE, "shared_tile", {"tile": 1}),
)


def steps(backend: str, full: bool) -> Iterable[Step]:
    """Return the grid: proofs and checks, times by size, kernels, counters, where memory ends.

    The sizes of the default grid come first, so that a full run that is stopped has them.
    """
    runs: dict[str, Value] = {"runs": PROOF_RUNS}
    gpu = backend == "cuda"
    yield Task("proof", ("all implementations",), runs, proof)
    libraries = (EIGEN, NUMPY, CUBLAS) if gpu else (EIGEN, NUMPY)
    yield Task("check of 32 x 32", libraries, {"n": 32}, small_check)
    for names, n in ((HOST_NAMES, 1024), ((NAIVE,), 2048), ((SHARED, CUBLAS, EIGEN), 4096)):
        here = tuple(name for name in names if gpu or name in HOST_NAMES)
        if here:
            yield Task("warm-up", here, {"n": n}, warm_up)
    usual = sorted(THIN_SIZES)
    yield from _totals((n for n in usual if n <= LARGEST[SHARED]), gpu)
    if gpu:
        yield from _kernels()
    yield from _totals((n for n in usual if n > LARGEST[SHARED]), gpu)
    if full:
        yield from _totals(halving({*OWN_SIZES, *CUBLAS_SIZES} - THIN_SIZES), gpu)
    if gpu and full:
        yield Task("largest", (WHOLE,), {}, largest)


def _totals(sizes: Iterable[int], gpu: bool) -> Iterator[Step]:
    for n in sizes:
        names = tuple(name for name in _names(n) if gpu or name in HOST_NAMES)
        if names:
            yield Task(TOTAL, names, {"n": n}, totals)


def _names(n: int) -> Iterator[str]:
    """Yield who is timed at a size; NumPy, which the document has not, at the default ones only."""
    if n in OWN_SIZES:
        yield from (name for name in (CPU_LOOP, NAIVE, SHARED) if n <= LARGEST[name])
    yield CUBLAS
    if n in PEER_SIZES or n in DOUBLING:
        yield EIGEN
        if n in THIN_SIZES and n <= LARGEST[SHARED]:
            yield NUMPY
    if n in PINNED_SIZES:
        yield from (f"{name}{PINNED}" for name in (SHARED, CUBLAS) if n <= LARGEST.get(name, n))


def halving(sizes: Iterable[int]) -> list[int]:
    """Return sizes such that the first few are spread over all, and so on, wherever it ends.

    >>> halving([1, 2, 3, 4, 5, 6, 7])
    [4, 2, 6, 1, 3, 5, 7]
    """
    ordered = sorted(sizes)
    spans, found = [(0, len(ordered))], []
    for low, high in spans:  # grows while it is walked
        if low < high:
            middle = (low + high) // 2
            found.append(ordered[middle])
            spans += [(low, middle), (middle + 1, high)]
    return found


def _kernels() -> Iterator[Step]:
    for n in FIRST_SIZES:
        yield Task("first call", ("shared_tile",), {"n": n}, _first)
    for n in KERNEL_SIZES:
        for temperature in ("warm", "cold"):
            lone = (n, temperature) == (KERNEL_SIZES[0], "warm")
            lanes = (*KERNEL_LANES, *LONE_LANES) if lone else KERNEL_LANES
            yield Cell(KERNELS, "matmul", n, n, lanes, temperature, n, case={"n": n})
    yield counting("matmul", ("shared_tile",), {"n": COUNTED})
    yield Task("largest", (FITS, REFUSED), {}, largest)


def _first(bench: Bench, names: Names, case: Case) -> Found:
    return {name: first_call(name, int(case["n"])) for name in names}


def left_out(full: bool) -> Iterator[str]:
    """Yield what the grid lacks."""
    yield "kernels in blocks of one thread cold, and at 2048"
    every = {*OWN_SIZES, *CUBLAS_SIZES}
    if not full:
        yield f"all but {len(THIN_SIZES)} of {len(every)} sizes, and all of the largest product"
    yield "the CPU loop above 1024, the naive kernel above 2048, the shared above 4096, as there"
    yield "NumPy at all but the default sizes: the document has Eigen"


def comparison(rows: Rows) -> Iterator[tuple[str, ...]]:
    """Yield totals and parts by size, then the break-even sizes beside the printed ones."""
    sizes = sorted({int(r.case["n"]) for r in totals_of(rows)})
    shown = [n for n in sizes if n in SHOWN or n == sizes[-1]]
    for n in shown:
        for row in totals_of(rows).where(n=n):
            parts = [significant(row.figures[p]) if p in row.figures else "" for p in PARTS]
            yield (f"{row.name}, n = {n}", "", significant(row.us), *parts)
    printed = published("001")["break_even"]
    for words, cpu, gpu, theirs in (
        ("Eigen and cuBLAS", EIGEN, CUBLAS, printed["eigen_cublas"]),
        ("NumPy and cuBLAS", NUMPY, CUBLAS, ""),
        ("CPU loop and own kernels", CPU_LOOP, SHARED, printed["cpu_own"]),
    ):
        ours = crossing(rows, cpu, gpu)
        found = "" if ours is None else ours.words
        yield (f"break-even n: {words}", str(theirs), found, *[""] * len(PARTS))


SHOWN = (11, 41, 64, 101, 256, 1024, 2048, 4096, 10000, 26000)
STUDY = Study(
    "001", "Matmul from host to host, split by part", steps, left_out, CLAIMS.all(), comparison,
    ("what", "printed", "ours, us or n", *(f"{part} us" for part in PARTS)),
    pictures, together=True,
)  # fmt: skip
