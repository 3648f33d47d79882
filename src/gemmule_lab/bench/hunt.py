"""``gemmule hunt``: random products beside a peer, and which of them come off worst.

Suites measure the shapes that somebody thought of. Here rows and columns are drawn evenly by their
logarithms, from a seed that is printed, and what counts are the tails: the products that are
slowest against the peer, and those farthest from the least time that reading their bytes takes.
Products of codes on a GPU have sides and columns as models have them, and come in pairs that differ
in one of them, so that it shows where more work takes less time. On a GPU a first look at each is
brief, and those that it tells against are measured again, for as long as a product of a suite.
"""

from __future__ import annotations

import functools
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import RenderableType

from gemmule.core.problem import Problem
from gemmule.timing.sampler import CONFIDENCE, Budget
from gemmule_lab.bench.session import measured_environment
from gemmule_lab.harness.bench import Bench
from gemmule_lab.harness.products import FORMATS, Product
from gemmule_lab.peers.peer import Peer
from gemmule_lab.progress import say, working
from gemmule_lab.records import results
from gemmule_lab.records.results import geomean
from gemmule_lab.records.rows import Environment, Row
from gemmule_lab.report.render import terminal_table, wide_console
from gemmule_lab.report.tables import Column, table_of

LONGEST = 1 << 18
SMALL = 256  # sides of the products by which a peer is asked what it takes
LEAST_BYTES, MOST_BYTES = 1 << 10, 2 << 30
START_US = 2.0  # of any call; what is slower than it and the bytes is slow
SLOW, NEAR = 0.95, 1.15  # speed over the peer; time over the floor
VERY_SLOW = 0.8
LARGE, MISSED = 512, 0.9  # sides from which on everyday products have no excuse below this speed
INVERTED = 0.95  # the time of a product beside that of one with less of everything
AGAIN = 0.25  # share of a hunt in which products are measured that brief looks told against
SHOWN = 15
MOST_COLUMNS = 64
EVERYDAY = {"matvec": (64, 16384), "vecmat": (64, 16384), "matmul": (64, 2048)}  # sides
SIDES, WIDTHS, GROUPS = (256, 16384), (1, 4096), (32, 64, 128)  # of codes on a GPU


@dataclass(frozen=True, slots=True)
class Find:
    """One product measured. ratio: our speed over the peer's; floor_us: its least time, if cold.

    quickest, quickest_us: the rung of all that were timed. sure: there were blocks enough for an
    interval, and no other program disturbed them; the summary counts no others.
    """

    product: Product
    rung: str
    us: float
    ratio: float
    floor_us: float | None
    quickest: str
    quickest_us: float
    sure: bool = True
    problem: Problem | None = None

    @property
    def over_floor(self) -> float:
        """Our time over the floor; 0 where there is none."""
        return 0.0 if self.floor_us is None else self.us / self.floor_us

    @property
    def is_slow(self) -> bool:
        """Whether its speed counts against us; of codes by many columns only a much lower one."""
        product = self.product
        many = product.form.bits is not None and product.width > MOST_COLUMNS
        return self.ratio < (VERY_SLOW if many else SLOW)


@dataclass(slots=True)
class Hunt:
    """What a hunt has found so far, beside `peer`. told: what was not measured, in words."""

    peer: str
    finds: list[Find] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def add(self, product: Product, rows: Sequence[Row], environment: Environment) -> None:
        """Keep a product's row of ours."""
        wide = [f"{self.peer} on {dtype}" for dtype in ("float32", product.form.dtype)]
        names = (*wide, self.peer)
        ours = [row for row in rows if row.kind == "rung"]
        beside = [ours[0].speedups[name] for name in names if name in ours[0].speedups]
        if not beside:
            self.told.append(f"{product.title}: {self.peer} took no part")
            return
        row, ratio = ours[0], beside[0].value
        disturbed = any(one.disturbed for one in rows if one.name in (row.name, self.peer))
        sure = beside[0].confidence >= CONFIDENCE and not disturbed
        best = min(ours, key=lambda one: one.times_us.median)
        read, floor = environment.ceilings.get("read"), None
        if read is not None and row.temperature == "cold":
            floor = row.problem.compulsory_bytes / (read.value * 1e3) + START_US
        quickest = best.name, best.times_us.median
        times = row.times_us.median, ratio, floor, *quickest
        self.finds.append(Find(product, row.name, *times, sure=sure, problem=row.problem))

    def summary(self) -> str:
        """Return how many products there were, how fast in the mean, and how long the tails are."""
        if not self.finds:
            return "no product was measured"
        sure = self._sure()
        left = len(self.finds) - len(sure)
        more = f"; {left} more not counted: disturbed, or too few blocks" if left else ""
        if not sure:
            return f"no product counts{more}"
        mean = geomean(find.ratio for find in sure)
        slow = sum(find.ratio < SLOW for find in sure)
        floors = [find for find in sure if find.floor_us is not None]
        near = sum(find.over_floor <= NEAR for find in floors)
        words = f"{len(sure)} products: {mean:.2f} x {self.peer} in the geometric mean, "
        words += f"{slow} below {SLOW}"
        if floors:
            words += f"; {near / len(floors):.0%} of {len(floors)} cold ones "
            words += f"within {NEAR} x the floor"
        return words + more

    def _sure(self) -> list[Find]:
        return [find for find in self.finds if find.sure]

    def worst(self) -> list[Problem]:
        """Return the problems of the slowest products, against the peer and over the floor."""
        ranked = (
            sorted(self.finds, key=lambda find: find.ratio),
            sorted(self.finds, key=lambda find: -find.over_floor),
        )
        found = (find.problem for some in ranked for find in some[:SHOWN])
        return list(dict.fromkeys(problem for problem in found if problem is not None))

    def large(self) -> str:
        """Return how many products of large sides there are, and the share that is slow."""
        found = [find for find in self.finds if min(find.product.shape) >= LARGE]
        missed = sum(find.ratio < MISSED for find in found)
        share = missed / max(1, len(found))
        sides = f"{len(found)} products of sides from {LARGE} on"
        return f"{missed} of {sides} ({share:.1%}) below {MISSED} of {self.peer}'s speed"

    def doubtful(self) -> list[Find]:
        """Return the finds that count against us, slow or turned round, the slowest first."""
        turned = {id(find) for pair in turned_round(pairs_of(self.finds)) for find in pair}
        found = [find for find in self.finds if find.is_slow or id(find) in turned]
        return sorted(found, key=lambda find: find.ratio)

    def tails(self) -> list[str]:
        """Return, of products of codes, the shares that are slow, and inversions, a line each."""
        coded = [find for find in self._sure() if find.product.form.bits is not None]
        if not coded:
            return []
        few = [find for find in coded if find.product.width <= MOST_COLUMNS]
        slow = sum(find.ratio < SLOW for find in few) / max(1, len(few))
        slower = sum(find.ratio < VERY_SLOW for find in coded) / len(coded)
        missed = sum(math.log(find.us / find.quickest_us) for find in coded) / len(coded)
        pairs = pairs_of(coded)
        turned = turned_round(pairs)
        least = min(find.ratio for find in coded)
        return [
            f"of {len(few)} by at most {MOST_COLUMNS} columns {slow:.1%} below {SLOW}; "
            f"of all {slower:.1%} below {VERY_SLOW}; the least is {least:.2f}",
            f"the choice takes {math.exp(missed):.3f} times the quickest rung that was timed",
            f"{len(turned)} of {len(pairs)} pairs: more of everything in less than "
            f"{INVERTED} of the time",
            *(
                f"  {a.product.title} {a.us:.1f} us by {a.rung}, "
                f"{b.product.title} {b.us:.1f} us by {b.rung}"
                for a, b in sorted(turned, key=lambda pair: pair[0].us / pair[1].us)[:SHOWN]
            ),
        ]


def pairs_of(finds: Iterable[Find]) -> list[tuple[Find, Find]]:
    """Return pairs of products of codes, the second with no more rows, columns or bits."""
    alike = defaultdict[object, list[tuple[tuple[int, ...], Find]]](list)
    for find in finds:
        product, form = find.product, find.product.form
        if form.bits is not None:
            alike[form.group_size].append(((*product.shape, product.width, form.bits), find))
    return [
        (a, b)
        for group in alike.values()
        for mine, a in group
        for its, b in group
        if mine[0] >= its[0]
        and mine[1] >= its[1]
        and mine[2] >= its[2]
        and mine[3] >= its[3]
        and mine != its
    ]


def turned_round(pairs: Iterable[tuple[Find, Find]]) -> list[tuple[Find, Find]]:
    """Return the pairs of which the larger product takes surely less time."""
    return [(a, b) for a, b in pairs if a.us < INVERTED * b.us]


def products(
    ops: Sequence[str], formats: Sequence[str], seed: int, most_bytes: int = MOST_BYTES
) -> Iterator[Product]:
    """Yield random products without end, the same for the same seed.

    Sides are drawn evenly by their logarithms up to 2^18, redrawn until the matrix has at least
    1 KiB and at most `most_bytes`; dense matrices lie by rows or by columns.
    """
    rng = random.Random(seed)  # noqa: S311  no secret
    while True:
        op, name = rng.choice(ops), rng.choice(formats)
        rows, columns = (round(2 ** rng.uniform(0, math.log2(LONGEST))) for _ in range(2))
        form = FORMATS[name]
        if not LEAST_BYTES <= form.matrix_bytes(rows, columns) <= most_bytes:
            continue
        width = round(2 ** rng.uniform(0, math.log2(MOST_COLUMNS)))
        by_columns = form.bits is None and rng.random() < 0.5
        yield Product(op, name, (rows, columns), max(2, width), by_columns)


def everyday_products(
    ops: Sequence[str], formats: Sequence[str], seed: int, most_bytes: int = MOST_BYTES
) -> Iterator[Product]:
    """Yield random products of sides as most people have them, the same for the same seed.

    All sides are drawn evenly by their logarithms within `EVERYDAY`. Dense matrices, and what codes
    are multiplied by, lie by rows or by columns.
    """
    rng = random.Random(seed)  # noqa: S311  no secret
    while True:
        op, name = rng.choice(ops), rng.choice(formats)
        rows, columns, width = (_evenly(rng, *EVERYDAY[op]) for _ in range(3))
        form = FORMATS[name]
        if max(form.matrix_bytes(rows, columns), 4 * rows * columns) <= most_bytes:
            by_columns = (form.bits is None or op == "matmul") and rng.random() < 0.5
            yield Product(op, name, (rows, columns), width, by_columns)


def raced(
    bench: Bench, peer: Peer, ops: Sequence[str], formats: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the formats that a peer multiplies in all operations, and the others.

    Numbers of a format count, and where a bench has it beside them what they stand for: NumPy
    multiplies bfloat16 in float32.
    """
    found: tuple[list[str], list[str]] = [], []
    for name in formats:
        told = [_refused(bench, peer, Product(op, name, (SMALL, SMALL))) for op in ops]
        found[any(told)].append(name)
    return found


def _refused(bench: Bench, peer: Peer, product: Product) -> bool:
    wanted = bench.prepared(product)
    plain = None if peer.name not in (wanted.plain_peers or ()) else wanted.plain
    both = [sets for sets in (wanted.sets, plain) if sets is not None]
    return all(peer.refuses(sets.plan().problem) is not None for sets in both)


def products_of_codes(formats: Sequence[str], seed: int) -> Iterator[Product]:
    """Yield random products of codes by bfloat16 without end, the same for the same seed.

    Rows and columns are drawn evenly by their logarithms from 256 to 16384, columns of x from 1 to
    4096, groups of 32, 64 or 128 columns. Each second product is the one before with one of its
    sizes, or its bits, drawn anew.
    """
    rng = random.Random(seed)  # noqa: S311  no secret
    limits = (SIDES, SIDES, WIDTHS)
    while True:
        group, name = rng.choice(GROUPS), rng.choice(formats)
        sizes = [_evenly(rng, *limit) for limit in limits]
        for again in (None, rng.randrange(len(sizes) + 1)):
            if again == len(sizes):
                name = rng.choice(formats)
            elif again is not None:
                sizes[again] = _evenly(rng, *limits[again])
            rows, columns, width = sizes
            op = "matvec" if width == 1 else "matmul"
            form = f"{name} g{group} x bfloat16, scales float16"
            yield Product(op, form, (rows, columns), width)


def _evenly(rng: random.Random, low: int, high: int) -> int:
    return round(2 ** rng.uniform(math.log2(low), math.log2(high)))


def run(
    bench: Bench,
    drawn: Iterable[Product],
    path: Path,
    *,
    peer: str,
    seconds: float,
    ceiling_seconds: float,
) -> Hunt:
    """Measure random products for so long, each on disk before the next; show the worst.

    Where the bench has a brief budget, that is given first, and the last quarter of the time to
    products that count against us, the slowest first, by the bench's own.
    """
    environment = measured_environment(bench, ceiling_seconds)
    results.append(path, [environment])
    hunt, end = Hunt(peer), time.monotonic() + seconds
    measure = functools.partial(_measure, bench, environment, hunt, path)
    first = end if bench.brief is None else end - AGAIN * seconds
    try:
        with working("hunting") as tell:
            for product in drawn:
                left = first - time.monotonic()
                if left <= 0:
                    break
                tell(f"{product.title}, {left:.0f} s left")
                measure(product, bench.brief)
            doubtful = hunt.doubtful() if bench.brief is not None else []
            for number, find in enumerate(doubtful):
                if time.monotonic() >= end:
                    say(f"{len(doubtful) - number} of {len(doubtful)} were not measured again")
                    break
                tell(f"again {find.product.title}")
                if measure(find.product, None):
                    hunt.finds.remove(find)
    finally:
        show(hunt, path)
    return hunt


def _measure(
    bench: Bench,
    environment: Environment,
    hunt: Hunt,
    path: Path,
    product: Product,
    budget: Budget | None,
) -> bool:
    """Measure a product and tell whether it was found; what is slow is said, but of brief looks."""
    before = len(hunt.finds)
    try:
        attempt = bench.attempt(product, environment)
        rows, _ = attempt() if budget is None else attempt(budget=budget)
    except (ValueError, TypeError, MemoryError, RuntimeError, ArithmeticError) as error:
        hunt.told.append(f"{product.title}: {error}")
        return False
    results.append(path, rows)
    hunt.add(product, rows, environment)
    found = len(hunt.finds) > before
    if found and budget is None and hunt.finds[-1].ratio < SLOW:
        find = hunt.finds[-1]
        words = f"{find.ratio:.2f} x {hunt.peer} by {find.rung}"
        say(f"{find.product.title}: {words}{'' if find.sure else ', not surely'}")
    return found


def show(hunt: Hunt, path: Path) -> None:
    """Print the worst against the peer, the worst against the floor, and the summary."""
    console = wide_console()
    by_ratio = sorted(hunt.finds, key=lambda find: find.ratio)[:SHOWN]
    by_floor = sorted(hunt.finds, key=lambda find: -find.over_floor)[:SHOWN]
    if by_ratio:
        console.print(_table(f"slowest against {hunt.peer}", by_ratio))
    if by_floor and by_floor[0].over_floor:
        console.print(_table(f"farthest from bytes / read ceiling + {START_US:.0f} us", by_floor))
    for line in hunt.told:
        click.echo(f"not measured: {line}")
    for line in (hunt.summary(), hunt.large(), *hunt.tails()):
        click.echo(line)
    click.echo(f'wrote {path}; gemmule bench --product "TITLE" measures one of them again')


def _table(title: str, finds: Sequence[Find]) -> RenderableType:
    return terminal_table(table_of(title, finds, COLUMNS))


def _quicker(find: Find) -> str:
    return "" if find.quickest == find.rung else f"{find.quickest} {find.quickest_us:.1f}"


COLUMNS: tuple[Column[Find], ...] = (
    ("product", lambda find: find.product.title, False),
    ("rung", lambda find: find.rung, False),
    ("us", lambda find: f"{find.us:.1f}", True),
    ("x the peer", lambda find: f"{'' if find.sure else '~'}{find.ratio:.2f}", True),
    ("x the floor", lambda find: f"{find.over_floor:.2f}" if find.floor_us else "warm", True),
    ("quicker", _quicker, False),
)
