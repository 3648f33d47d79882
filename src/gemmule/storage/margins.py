"""By how much rungs were measured to be faster than the vendor's library, and on which device.

Where the vendor computes the same product, a plan takes the vendor's rung until another is known,
on this machine, to be faster by `ENOUGH`. What is known is data: lines of ``margins.jsonl`` below a
device's folder of the evidence, each one product at which a rung and the vendor's were timed in
turns. A product that was not measured is taken to behave like the nearest that was, if no size is
farther than `REACH` times from it and it is aligned alike: what is fast where rows begin anywhere
says nothing of whole 16 bytes, where the vendor is faster, nor the other way round. Nor does it
speak for one of less than a `LEAST_WORK` of its operations, where what each call costs counts. A
line counts as long as the rung's proof is the one that stood when it was measured, so an edit of
the kernel ends it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemmule.core.problem import Problem
from gemmule.core.rung import Machine
from gemmule.storage import evidence, lines

SCHEMA = 1
FILE = "margins.jsonl"
ENOUGH = 1.10
REACH = 2.0
LEAST_WORK = 0.25
_TEXTS = (
    "device",
    "arch",
    "folder",
    "rung",
    "key",
    "a",
    "b",
    "out",
    "layout_a",
    "layout_b",
    "date",
)
_SIZES = ("m", "n", "k", "batch", "alignment")


@dataclass(frozen=True, slots=True)
class Margin:
    """One product measured. ratio: the vendor's time over the rung's."""

    device: str
    arch: str
    folder: str
    rung: str
    key: str
    a: str
    b: str
    out: str
    layout_a: str
    layout_b: str
    m: int
    n: int
    k: int
    batch: int
    alignment: int
    ratio: float
    date: str

    def kind(self) -> tuple[str, ...]:
        """Return what has to be equal for this product to speak for another."""
        return (self.device, self.arch, self.a, self.b, self.out, self.layout_a, self.layout_b)

    def sizes(self) -> tuple[int, int, int, int]:
        """Return rows and columns of C, the length of the sums, and the batch."""
        return self.m, self.n, self.k, self.batch

    def distance(self, problem: Problem) -> float:
        """Return how many times larger or smaller the farthest of a problem's sizes is."""
        pairs = zip(self.sizes(), _sizes(problem), strict=True)
        return max(max(one, other) / max(min(one, other), 1) for one, other in pairs)

    def is_near(self, problem: Problem) -> bool:
        """Whether it speaks for a problem of its kind."""
        if self.alignment != problem.alignment or self.distance(problem) > REACH:
            return False
        return math.prod(_sizes(problem)) >= LEAST_WORK * math.prod(self.sizes())

    def words(self) -> str:
        """Return what was measured, for people."""
        sizes = f"{self.m} x {self.k} x {self.n}"
        return f"{self.ratio:.2f} x the vendor's library at {sizes} on this device, {self.date}"


def faster(machine: Machine, problem: Problem) -> dict[tuple[str, str], Margin]:
    """Return the rungs, (folder, name), known to be faster than the vendor's at such a product."""
    kind = (machine.name, machine.arch, problem.a, problem.b, problem.out)
    if problem.precision == "tf32":  # with which the vendor's is faster
        return {}
    near = known().get((*kind, problem.layout_a, problem.layout_b), ())
    found: dict[tuple[str, str], Margin] = {}
    for margin in near:
        if not margin.is_near(problem):
            continue
        name = (margin.folder, margin.rung)
        if name not in found or _spread(margin, problem) < _spread(found[name], problem):
            found[name] = margin
    return {name: margin for name, margin in found.items() if margin.ratio >= ENOUGH}


def _spread(margin: Margin, problem: Problem) -> float:
    """Return how far apart the sizes are altogether, by their logarithms."""
    pairs = zip(margin.sizes(), _sizes(problem), strict=True)
    return sum(math.log2(one / max(other, 1)) ** 2 for one, other in pairs)


def _sizes(problem: Problem) -> tuple[int, int, int, int]:
    return problem.m, problem.n, problem.k, problem.batch


@functools.cache
def known() -> dict[tuple[str, ...], tuple[Margin, ...]]:
    """Return the margins in the evidence whose rungs are as they were measured, by kind."""
    proved = {(r.folder, r.rung, r.variant, r.key) for r in evidence.read()}
    found: dict[tuple[str, ...], list[Margin]] = {}
    for gpu in sorted(evidence.folder().glob("*")):
        for margin in read_file(gpu / FILE):
            variant = evidence.variant_named((margin.a, margin.b, margin.out))
            if (margin.folder, margin.rung, variant, margin.key) in proved:
                found.setdefault(margin.kind(), []).append(margin)
    return {kind: tuple(margins) for kind, margins in found.items()}


def read_file(path: Path) -> Iterator[Margin]:
    """Yield the well-formed margins of one file; others are skipped."""
    for data in lines.read(path, SCHEMA):
        margin = _margin(data)
        if margin is not None:
            yield margin


def _margin(data: dict[str, Any]) -> Margin | None:
    fields: dict[str, Any] = {name: data.get(name) for name in (*_TEXTS, *_SIZES, "ratio")}
    texts, sizes, ratio = [fields[t] for t in _TEXTS], [fields[s] for s in _SIZES], fields["ratio"]
    if not all(type(t) is str and 0 < len(t) <= 200 and t.isprintable() for t in texts):
        return None
    if not all(type(size) is int and 0 < size < 2**31 for size in sizes):
        return None
    if type(ratio) is not float or not 0.0 < ratio < 1e3:
        return None
    return Margin(**fields)
