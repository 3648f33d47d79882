"""Seed 001: matmul from host to host: CPU loops, own kernels, cuBLAS and Eigen, split by part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gemmule.lab.bench.host_to_host import PARTS
from gemmule.lab.profile.single_launch import counting
from gemmule.lab.report.tables import significant
from gemmule.lab.studies.first_call import first_call
from gemmule.lab.studies.grid import (
    Bench,
    Case,
    Cell,
    Found,
    Lane,
    Measured,
    Names,
    Step,
    Study,
    Task,
)
from gemmule.lab.studies.host_products import (
    cpu_total,
    cublas_multiply,
    largest,
    ordinal_of,
    proof,
    rung_multiply,
    small_check,
    split_product,
)
from gemmule.lab.studies.published import published
from gemmule.lab.studies.records import Rows, Value
from gemmule.lab.studies.seeds.claims_001 import (
    CLAIMS,
    CPU_LOOP,
    CUBLAS,
    EIGEN,
    FIRST_SIZES,
    FMA_OFF,
    FMA_ON,
    KERNELS,
    NAIVE,
    NUMPY,
    SHARED,
    TOTAL,
    break_even,
    by_size,
)

LARGEST = {CPU_LOOP: 1024, NAIVE: 2048, SHARED: 4096}
OWN_SIZES = (*range(1, 1000, 10), *range(1000, 4001, 100), *(32 << i for i in range(8)))
PEER_SIZES = (*range(1, 5002, 10), *range(5000, 10001, 1000))
CUBLAS_SIZES = (*PEER_SIZES, *range(10000, 26001, 1000))
THIN_OWN = (
    *range(1, 102, 10), 151, 201, 301, 501, 701, 991, 1000, 2000, 3000, 4000,
    *(32 << i for i in range(8)),
)  # fmt: skip
THIN_PEER = (*range(1, 102, 10), 151, 201, 301, 501, 1001, 2001, 4001)
THIN_CUBLAS = (*THIN_PEER, 5001, 10000, 26000)
PROOF_RUNS, COUNTED = 10, 1024
KERNEL_SIZES = (1024, 2048)
RUNGS = {NAIVE: ("naive", {"width": 1}), SHARED: ("shared_tile", {"tile": 32})}

KERNEL_LANES = (
    Lane(FMA_ON, "naive"),
    Lane(FMA_OFF, "naive", {"fma": False}),
    Lane("naive, sums in C", "naive", {"accumulate": "global"}),
    Lane("naive, blocks of 16 x 16", "naive", {"width": 16}),
    *(Lane(f"shared tile {t}", "shared_tile", {"tile": t}) for t in (8, 16, 32)),
    Lane("gemmule's choice", "auto"),
    Lane("torch", None, peer="torch"),
)
LONE_LANES = (
    Lane("naive, blocks of one thread", "naive", {"width": 1}),
    Lane("shared tile 1", "shared_tile", {"tile": 1}),
)


def steps(backend: str, full: bool) -> Iterable[Step]:
    """Return the grid: proofs and checks first, then totals by size, kernels and counters."""
    runs: dict[str, Value] = {"runs": PROOF_RUNS}
    yield Task("proof", ("all implementations",), runs, proof)
    yield Task(
        "check of 32 x 32",
        (EIGEN, NUMPY) if backend == "cpu" else (CUBLAS,),
        {"n": 32},
        small_check,
    )
    if backend == "cpu":
        yield from _cpu_steps(full)
        return
    yield Task("warm-up", (SHARED, CUBLAS), {"n": LARGEST[SHARED]}, _total)
    yield Task("warm-up", (NAIVE,), {"n": LARGEST[NAIVE]}, _total)
    own = OWN_SIZES if full else THIN_OWN
    cublas = CUBLAS_SIZES if full else THIN_CUBLAS
    for n in sorted({*own, *cublas}):
        names = [name for name in (NAIVE, SHARED) if n in own and n <= LARGEST[name]]
        names += [CUBLAS] if n in cublas or n in own else []
        yield Task(TOTAL, tuple(names), {"n": n}, _total)
    for n in FIRST_SIZES:
        yield Task("first call", ("shared_tile",), {"n": n}, _first)
    for n in KERNEL_SIZES:
        for temperature in ("warm", "cold"):
            lone = (n, temperature) == (KERNEL_SIZES[0], "warm")
            lanes = (*KERNEL_LANES, *LONE_LANES) if lone else KERNEL_LANES
            yield Cell(KERNELS, "matmul", n, n, lanes, temperature, n, case={"n": n})
    yield counting("matmul", ("shared_tile",), {"n": COUNTED}, COUNTED, COUNTED, COUNTED)
    yield Task("largest", ("allocation", "product") if full else ("allocation",), {}, largest)


def _cpu_steps(full: bool) -> Iterator[Step]:
    own = OWN_SIZES if full else THIN_OWN
    peer = PEER_SIZES if full else THIN_PEER
    for n in sorted({*own, *peer}):
        names = [CPU_LOOP] if n in own and n <= LARGEST[CPU_LOOP] else []
        names += [EIGEN, NUMPY] if n in peer else []
        if names:
            yield Task(TOTAL, tuple(names), {"n": n}, cpu_total)


def _total(bench: Bench, names: Names, case: Case) -> Found:
    """Return the split times of GPU products of n x n, raw allocations and copies included."""
    n, ordinal = int(case["n"]), ordinal_of(bench)
    found = {}
    for name in names:
        made = cublas_multiply() if name == CUBLAS else rung_multiply(*RUNGS[name])
        if isinstance(made, str):
            found[name] = Measured(note=made)
        else:
            found[name] = split_product(n, made, ordinal, _repeats(n))
    return found


def _repeats(n: int) -> int:
    return 5 if n <= 1000 else 3 if n <= 5001 else 1


def _first(bench: Bench, names: Names, case: Case) -> Found:
    return {name: first_call(name, int(case["n"])) for name in names}


def left_out(full: bool) -> Iterator[str]:
    """Yield what the grid lacks."""
    yield "kernels in blocks of one thread cold, and at 2048"
    if not full:
        yield f"all but {len(set(THIN_OWN))} of {len(set(OWN_SIZES))} sizes of the own kernels"
        yield f"all but {len(set(THIN_CUBLAS))} of {len(set(CUBLAS_SIZES))} sizes of cuBLAS"
        yield "Eigen above 4001, and the product at the largest size that fits"


def comparison(rows: Rows) -> Iterator[tuple[str, ...]]:
    """Yield totals and parts by size, then the break-even sizes beside the printed ones."""
    sizes = sorted({int(r.case["n"]) for r in rows.where(TOTAL).timed()})
    shown = [n for n in sizes if n in SHOWN or n == sizes[-1]]
    for n in shown:
        for row in rows.where(TOTAL, n=n).timed():
            parts = [significant(row.figures[p]) if p in row.figures else "" for p in PARTS]
            yield (f"{row.name}, n = {n}", "", significant(row.us), *parts)
    printed = published("001")["break_even"]
    for words, cpu, gpu, theirs in (
        ("Eigen and cuBLAS", EIGEN, CUBLAS, printed["eigen_cublas"]),
        ("NumPy and cuBLAS", NUMPY, CUBLAS, ""),
        ("CPU loop and own kernels", CPU_LOOP, SHARED, printed["cpu_own"]),
    ):
        ours = break_even(by_size(rows, cpu), by_size(rows, gpu))
        yield (
            f"break-even n: {words}",
            str(theirs),
            "" if ours is None else str(ours),
            *[""] * len(PARTS),
        )


SHOWN = (11, 41, 64, 101, 256, 1024, 2048, 4096, 10000, 26000)
STUDY = Study(
    "001", "Matmul from host to host, split by part", steps, left_out, CLAIMS, comparison,
    ("what", "printed", "ours, us or n", *(f"{part} us" for part in PARTS)),
    plots=((TOTAL, "once", "n"), (KERNELS, "warm", "n")), rate="gflops",
)  # fmt: skip
