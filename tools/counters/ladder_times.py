"""Every rung of the CUDA ladders at fixed problems: timed cold, each beside the rung before it.

The problems are few and always the same, so that a page of a ladder can be renewed as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import gemmule as gm
from gemmule.core.registry import ladder
from gemmule.errors import CompileError
from gemmule.timing.clock import Entry
from gemmule.timing.sampler import Budget
from gemmule_lab.harness.bench import race
from gemmule_lab.harness.device import DeviceBench
from gemmule_lab.harness.operands import Sets
from gemmule_lab.harness.products import Product
from gemmule_lab.peers.registry import named
from gemmule_lab.records.rows import Environment, Row
from gemmule_lab.report.ladder_gains import before

FILE = "ladder.jsonl"
TORCH = "torch"
PLAIN = "float16, our choice"  # what a matrix of codes is held against
EIGHT_BITS = {"any_codes", "int8_codes", "product_table_int8"}  # the others are timed with 4
ENTRY_SECONDS = 0.25
MIN_BLOCKS, MAX_BLOCKS, BLOCK_S = 7, 16, 0.002
COMPILERS = 8
WRONG = "a wrong result"


@dataclass(frozen=True, slots=True)
class Spot:
    """One product of a ladder: which ladder, in words, and what is timed there.

    rungs: by name, each with the product it is timed on. product: that of the peer, and with a
    `choice` that of our automatic choice. counted: whether hardware counters are read as well.
    """

    op: str
    title: str
    rungs: tuple[tuple[str, Product], ...]
    product: Product
    choice: bool = False
    counted: bool = True


def spots() -> Iterator[Spot]:
    """Yield the products, those that are counted first within each ladder."""
    for op, by_columns in (("matvec", False), ("vecmat", True)):
        for size in (4096, 8192):
            for dtype in ("float16", "float32"):
                words = "A x" if op == "matvec" else "x A"
                product = Product("matvec", dtype, (size, size), column_major=by_columns)
                title = f"{size} x {size}, {words}, {dtype}"
                yield _spot(op, title, product, counted=size == 4096)
    for size, dtype in ((4096, "float16"), *((2048, t) for t in ("float16", "float32", "uint8"))):
        name = f"plain {dtype}" if dtype == "uint8" else dtype
        product = Product("matmul", name, (size, size), size)
        yield _spot("matmul", f"{size} x {size} x {size}, {dtype}", product)
    for rows, depth, columns in ((4096, 4096, 8), (4096, 4096, 64), (512, 16384, 512)):
        product = Product("matmul", "float16", (rows, depth), columns)
        yield _spot("matmul", f"{rows} x {depth} by {columns} columns, float16", product)
    coded = ladder("quantized", "cuda")
    for size, words, form in (
        (4096, "codes, one scale, float16 x", "int{} codes"),
        (8192, "codes in groups of 128, float16 x", "int{} g128 x float16"),
    ):
        plain = Product("matvec", "float16", (size, size))
        rungs = tuple(
            (rung.name, replace(plain, format=form.format(bits)))
            for rung in coded
            if rung.op == "matvec"
            for bits in (8 if rung.name in EIGHT_BITS else 4,)
        )
        title = f"{size} x {size} {words}"
        yield Spot("quantized", title, rungs, plain, choice=True, counted=size == 4096)
    for op, columns, words in (
        ("matmul", 16, "by 16 columns"),
        ("matmul", 512, "by 512 columns"),
        ("vecmat", 1, "x A"),
    ):
        plain = Product(op, "float16", (8192, 8192), columns)
        product = replace(plain, format="int4 g128 x float16")
        taking = "matmul" if op == "matmul" else "matvec"
        rungs = tuple((rung.name, product) for rung in coded if rung.op == taking)
        title = f"8192 x 8192 4-bit codes in groups of 128, {words}, float16"
        yield Spot("quantized", title, rungs, plain, choice=True, counted=False)


def _spot(op: str, title: str, product: Product, *, counted: bool = True) -> Spot:
    rungs = tuple((rung.name, product) for rung in ladder(op, "cuda"))
    return Spot(op, title, rungs, product, counted=counted)


def time_spot(
    spot: Spot, bench: DeviceBench, environment: Environment, seconds: float = ENTRY_SECONDS
) -> tuple[list[Row], list[str]]:
    """Judge and time everything at a product; return rows, and a line for each that took no part.

    The line of a wrong result begins with `WRONG`.
    """
    sets = {product: bench.sets(product) for product in {spot.product, *dict(spot.rungs).values()}}
    planned(spot, sets)
    wanted: list[tuple[str, str | None, Product]] = [(n, n, product) for n, product in spot.rungs]
    wanted += [(PLAIN, None, spot.product)] if spot.choice else []
    entries: list[Entry] = []
    notes = []
    for name, rung, product in wanted:
        try:
            entries.append(bench.ours(sets[product], rung, name=name, group=spot.title))
        except ArithmeticError as error:  # the others of this product are still worth timing
            notes.append(f"{spot.title}, {name}: {WRONG}: {error}")
        except (ValueError, TypeError, CompileError) as error:
            notes.append(f"{spot.title}, {name}: {error}")
    theirs, absent = bench.theirs(sets[spot.product], named([TORCH], "cuda"), group=spot.title)
    notes += [f"{spot.title}, {one.name}: {one.reason}" for one in absent]
    entries += theirs
    if not entries:
        return [], notes
    budget = Budget(seconds * len(entries), MIN_BLOCKS, MAX_BLOCKS, BLOCK_S)
    return race(_paired(spot, entries), bench.clock, environment, budget), notes


def planned(spot: Spot, sets: dict[Product, Sets]) -> dict[str, gm.Plan | str]:
    """Return each rung's plan, with the parameters that it suggests, or why there is none.

    Planning compiles, so it is done in threads.
    """

    def plan(one: tuple[str, Product]) -> gm.Plan | str:
        rung, product = one
        try:
            return sets[product].plan(rung)
        except (ValueError, TypeError, CompileError) as error:
            return str(error)

    with ThreadPoolExecutor(COMPILERS) as pool:
        return dict(zip(dict(spot.rungs), pool.map(plan, spot.rungs), strict=True))


def _paired(spot: Spot, entries: list[Entry]) -> list[Entry]:
    """Return the entries, each rung held against the peer and the rung before it."""
    present = [one.name for one in entries]
    rungs = {rung.name: rung for rung in ladder(spot.op, "cuda")}
    found = []
    for one in entries:
        others = [TORCH, PLAIN]
        if one.name in rungs:
            others.append(before(rungs[one.name], tuple(rungs.values()), present) or "")
        against = tuple(other for other in others if other in present and other != one.name)
        found.append(replace(one, about=replace(one.about, against=against)))
    return found
