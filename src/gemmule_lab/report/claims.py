"""What rows allow to be said: how ours compare with others, by how much, and how surely.

A claim rests on a 95 % interval of paired blocks that other programs left alone; rows measured
beside busy programs, and ratios of too few blocks for an interval, are counted and never lead to
one. "Surely" is said of an interval that lies beyond what two quiet runs differ by. What a user
gets by default is told apart from what has to be asked for by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gemmule.timing.sampler import CONFIDENCE
from gemmule_lab.records.results import Results, geomean
from gemmule_lab.records.rows import Environment, Row, Speedup
from gemmule_lab.report.ladder_gains import ladder_of

REPEATS_WITHIN = 0.02  # what a ratio of two quiet runs differs by in nine of ten products
OTHERS = "the fastest other"
ASKED = DEFAULT, ROUNDED, NAMED = "by default", "int8 activations, by name", "a rung by name"
OPS = ("matvec", "vecmat", "matmul")
PLAIN_DTYPES = ("float64", "float32", "bfloat16", "float16", "int64")


@dataclass(frozen=True, slots=True)
class Kind:
    """What products are counted together: operation, format of the matrix, how ours was chosen.

    over: a peer that multiplies the same numbers in a plain dtype, else `OTHERS`.
    """

    op: str
    format: str
    asked: str
    over: str

    def __str__(self) -> str:
        words = f"{self.op} {self.format}"
        words += "" if self.asked == DEFAULT else f" ({self.asked})"
        return words if self.over == OTHERS else f"{words}, over {self.over}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One product of ours beside a peer. counted: an interval stands, and nothing disturbed it."""

    kind: Kind
    row: Row
    peer: str
    speedup: Speedup
    counted: bool

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, ``same`` or ``undecided``; see `verdict`."""
        return verdict(self.speedup.low, self.speedup.high) if self.counted else "undecided"

    def __str__(self) -> str:
        return f"{self.speedup.value:.2f}x {self.peer} ({self.row.group or self.kind})"


def verdict(low: float, high: float, margin: float = REPEATS_WITHIN) -> str:
    """Say what an interval of speed-ups shows beyond a margin on either side of 1.

    >>> verdict(1.1, 1.2), verdict(0.9, 0.97), verdict(0.99, 1.01), verdict(0.99, 1.1)
    ('faster', 'slower', 'same', 'undecided')
    """
    if low > 1 + margin:
        return "faster"
    if high < 1 / (1 + margin):
        return "slower"
    return "same" if low >= 1 / (1 + margin) and high <= 1 + margin else "undecided"


def format_of(row: Row) -> str:
    """Return the format of a row's matrix, ``int4`` or ``float16``."""
    spec = row.problem.quant
    return row.problem.a if spec is None else spec.format


def op_of(row: Row) -> str:
    """Return the operation of a row as its title has it, or as it is computed."""
    for op, words in {"vecmat": ("vecmat", "x A"), "matvec": ("matvec", "A x")}.items():
        if any(f", {word}" in row.group for word in words):
            return op
    op = ladder_of(row)
    return row.problem.op if op == "quantized" else op


def races(rows: Iterable[Row]) -> list[list[Row]]:
    """Return rows grouped by product, cold or warm, on one machine; ours from fast to slow."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        product = row.group or row.problem.describe()
        groups.setdefault((row.environment, product, row.temperature), []).append(row)
    return [sorted(g, key=lambda row: row.times_us.median) for g in groups.values()]


def comparisons(rows: Iterable[Row]) -> list[Comparison]:
    """Return each product of ours beside the fastest other, and beside each peer on plain numbers.

    Of several rungs asked for by name the fastest counts. Other rungs of ours are no peers.
    """
    found = []
    for race in races(rows):
        ours = [row for row in race if row.kind == "rung" and not row.mode]  # no cost of a call
        disturbed = {row.name for row in race if row.disturbed}
        mine = {row.name for row in ours}
        for asked, row in _asked(ours).items():
            others = {n: s for n, s in row.speedups.items() if n not in mine and "gemmule" not in n}
            alike = {name: one for name, one in others.items() if " on " not in name}
            beside = [min(alike, key=lambda name: alike[name].value)] if alike else []
            plain = [name for name in others if name.partition(" on ")[2] in PLAIN_DTYPES]
            for name in (*beside, *plain):
                kind = Kind(op_of(row), format_of(row), asked, OTHERS if name in alike else name)
                one = others[name]
                counted = one.confidence >= CONFIDENCE and not disturbed & {row.name, name}
                found.append(Comparison(kind, row, name, one, counted))
    return found


def _asked(ours: Sequence[Row]) -> dict[str, Row]:
    """Return our fastest row by how it was chosen.

    Files of before that was noted: of several rungs of one product each was named.
    """
    noted = any(row.named for row in ours)
    found: dict[str, Row] = {}
    for row in ours:
        spec = row.problem.quant
        asked = ROUNDED if spec is not None and spec.activations == "int8" else DEFAULT
        if row.named or (not noted and len(ours) > 1):
            asked = NAMED
        found.setdefault(asked, row)
    return found


def hardest(found: Iterable[Comparison]) -> list[Comparison]:
    """Return each product of ours beside the other that came nearest, whatever numbers it took.

    A library that multiplies the same codes slowly is nobody's choice where floats are quicker.
    """
    nearest: dict[int, Comparison] = {}
    for one in found:
        known = nearest.setdefault(id(one.row), one)
        if one.speedup.value < known.speedup.value:
            nearest[id(one.row)] = one
    return list(nearest.values())


def by_kind(found: Iterable[Comparison]) -> dict[Kind, list[Comparison]]:
    """Return comparisons by kind: what users get by default first."""
    kinds: dict[Kind, list[Comparison]] = {}
    for one in found:
        kinds.setdefault(one.kind, []).append(one)

    def place(kind: Kind) -> tuple[int, bool, int, str]:
        return ASKED.index(kind.asked), kind.over != OTHERS, OPS.index(kind.op), kind.format

    return {kind: kinds[kind] for kind in sorted(kinds, key=place)}


def mean(found: Sequence[Comparison]) -> float:
    """Return the geometric mean of the speed-ups of comparisons."""
    return geomean(one.speedup.value for one in found)


def tally(found: Sequence[Comparison]) -> dict[str, int]:
    """Return how many comparisons have each verdict."""
    names = ("faster", "same", "slower", "undecided")
    return {name: sum(one.verdict == name for one in found) for name in names}


def takeaway(rows: Sequence[Row], machines: Sequence[Environment]) -> list[str]:
    """Return sentences: what won, where it lost, how near the memory's limit, what is left out.

    machines: the runs on one device that the rows are of.
    """
    found = hardest(comparisons(rows))
    told = [_outcome(found, machines)]
    counted = [one for one in found if one.counted]
    kinds = {k: v for k, v in by_kind(counted).items() if k.asked == DEFAULT}
    if kinds:
        best = max(kinds, key=lambda kind: mean(kinds[kind]))
        if mean(kinds[best]) > 1:
            what = replace(best, over=OTHERS)  # over whom is told beside how much
            told.append(f"It gained most in {what}: {_times(kinds[best])}.")
        told += _lost(counted)
    told += [*_named(counted), *_reach(rows, machines)]
    left = len(found) - len(counted)
    if left:
        told.append(
            f"No claim rests on {left} {'more' if counted else 'measured'}, {_left_why(machines)}"
        )
    return told


def _left_why(machines: Sequence[Environment]) -> str:
    if machines[0].backend == "cuda":  # whose clock other programs do not disturb
        return "which had too few blocks for an interval; `gemmule bench --seconds 3` takes more."
    return (
        "which other programs disturbed or which had too few blocks for an interval; "
        "`gemmule bench --patience 600` waits for a quiet machine."
    )


TALLIED = {
    "faster": "surely faster on",
    "same": "as fast on",
    "slower": "surely slower on",
    "undecided": "undecided on",
}


def _outcome(found: Sequence[Comparison], machines: Sequence[Environment]) -> str:
    days = sorted({one.timestamp[:10] for one in machines if one.timestamp})
    when = " to ".join(dict.fromkeys([*days[:1], *days[-1:]])) or "undated"
    where = f"On {machines[0].device}, {when}"
    counted = [o for o in found if o.counted and o.kind.asked == DEFAULT]
    if not counted:
        return f"{where}: nothing can be said of what gemmule does by default beside others."
    many = tally(counted)
    words = [f"{words} {many[name]}" for name, words in TALLIED.items() if many[name]]
    return (
        f"{where}: beside {_beside(counted)} gemmule is {', '.join(words)} of {_products(counted)}."
    )


def _beside(found: Sequence[Comparison]) -> str:
    peers = list(dict.fromkeys(one.peer for one in found))
    return f"{OTHERS} ({', '.join(peers)})" if len(peers) > 1 else peers[0]


def _products(found: Sequence[Comparison]) -> str:
    return "1 product" if len(found) == 1 else f"{len(found):,} products"


def _times(found: Sequence[Comparison]) -> str:
    """Return the mean of speed-ups, over whom, and their range where there are several."""
    values = sorted(one.speedup.value for one in found)
    span = f" in the mean ({values[0]:.2f}x to {values[-1]:.2f}x)" if len(values) > 1 else ""
    return f"{mean(found):.2f}x {_beside(found)}{span}"


def _lost(counted: Sequence[Comparison]) -> list[str]:
    lost = [o for o in counted if o.verdict == "slower" and o.kind.asked == DEFAULT]
    if not lost:
        return ["It is surely slower on none."]
    worst = min(lost, key=lambda one: one.speedup.value)
    where = by_kind(lost)
    most = ", ".join(f"{len(group)} of {kind}" for kind, group in list(where.items())[:3])
    many = f"{_products(lost)}{', among them' if len(where) > 3 else ':'} {most}"
    return [f"It lost on {many}; at worst {worst}."]


def _named(counted: Sequence[Comparison]) -> list[str]:
    told = []
    for asked in (ROUNDED, NAMED):
        found = [one for one in counted if one.kind.asked == asked]
        if found:
            many = tally(found)
            told.append(
                f"Asked for ({asked}) it is surely faster than {_beside(found)} on "
                f"{many['faster']} of {_products(found)}, surely slower on {many['slower']}."
            )
    return told


def _reach(rows: Sequence[Row], machines: Sequence[Environment]) -> list[str]:
    """Say how near the read ceiling ours came, where nothing makes that doubtful."""
    ceilings = {one.id: one.ceilings["read"].value for one in machines if "read" in one.ceilings}
    sound = [r for r in rows if r.kind == "rung" and r.percent_of_ceiling and not r.flags]
    sound = [row for row in sound if row.environment in ceilings]
    if not sound:
        return []
    best = max(sound, key=lambda row: row.percent_of_ceiling or 0.0)
    return [
        f"It reads memory at up to {best.percent_of_ceiling:.0f} % of the "
        f"{ceilings[best.environment]:,.0f} GB/s measured ({best.group})."
    ]


def devices(results: Results) -> list[tuple[str, list[Row], list[Environment]]]:
    """Return each device with its rows and the runs that they are of."""
    found: dict[str, list[Row]] = {}
    for row in results.rows:
        found.setdefault(results.environments[row.environment].device, []).append(row)
    known = results.environments
    return [
        (device, rows, [known[key] for key in dict.fromkeys(row.environment for row in rows)])
        for device, rows in found.items()
    ]
