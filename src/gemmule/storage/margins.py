"""Measured speed-ups of rungs over the vendor's library, by device and product.

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

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gemmule.core.problem import Problem
from gemmule.core.rung import Machine
from gemmule.storage import evidence, lines

SCHEMA = 1
FILE = "margins.jsonl"
ENOUGH = 1.10
REACH = 2.0
LEAST_WORK = 0.25


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
        """Return what has to be equal, on one device, for this product to speak for another."""
        return (self.arch, self.a, self.b, self.out, self.layout_a, self.layout_b)

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


def near(machine: Machine, problem: Problem) -> dict[tuple[str, str], Margin]:
    """Return by (folder, name) what was measured of a rung beside the vendor's, nearest."""
    if problem.precision == "tf32":  # with which the vendor's is faster
        return {}
    kind = (machine.arch, problem.a, problem.b, problem.out, problem.layout_a, problem.layout_b)
    found: dict[tuple[str, str], Margin] = {}
    for margin in known(machine.name).get(kind, ()):
        if not margin.is_near(problem):
            continue
        name = (margin.folder, margin.rung)
        if name not in found or _spread(margin, problem) < _spread(found[name], problem):
            found[name] = margin
    return found


def _spread(margin: Margin, problem: Problem) -> float:
    """Return how far apart the sizes are altogether, by their logarithms."""
    pairs = zip(margin.sizes(), _sizes(problem), strict=True)
    return sum(math.log2(one / max(other, 1)) ** 2 for one, other in pairs)


def _sizes(problem: Problem) -> tuple[int, int, int, int]:
    return problem.m, problem.n, problem.k, problem.batch


@functools.cache
def known(device: str) -> dict[tuple[str, ...], tuple[Margin, ...]]:
    """Return a device's margins by kind, of rungs that did not change since they were measured."""
    path = evidence.folder() / evidence.slug(device) / FILE
    if not path.is_file():  # as for every processor: nothing else has to be read
        return {}
    proved = {(r.folder, r.rung, r.variant, r.key) for r in evidence.read()}
    found: dict[tuple[str, ...], list[Margin]] = {}
    for margin in read_file(path):
        variant = evidence.variant_named((margin.a, margin.b, margin.out))
        is_proved = (margin.folder, margin.rung, variant, margin.key) in proved
        if is_proved and margin.device == device:
            found.setdefault(margin.kind(), []).append(margin)
    return {kind: tuple(margins) for kind, margins in found.items()}


def read_file(path: Path) -> Iterator[Margin]:
    """Yield the well-formed margins of one file; others are skipped."""
    return lines.read_records(path, SCHEMA, Margin, _is_sound)


def _is_sound(margin: Margin) -> bool:
    """Tell whether every field is what this package could have written."""
    for value in dataclasses.astuple(margin):
        if isinstance(value, str) and not (0 < len(value) <= 200 and value.isprintable()):
            return False
        if isinstance(value, int) and not 0 < value < 2**31:
            return False
    return 0.0 < margin.ratio < 1e3
