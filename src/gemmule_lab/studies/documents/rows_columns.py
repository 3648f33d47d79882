"""What the studies of documents 000 and 002 share: a grid of rows and columns, and its table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gemmule_lab.profile.single_launch import counting
from gemmule_lab.studies.grid import Cell, Lane, Step
from gemmule_lab.studies.records import Rows

EXPERIMENT, BY_TYPE = "rows x columns", "dtypes"
CHOICE = Lane("gemmule's choice", "auto")
BOTH = ("warm", "cold")

Shapes = Sequence[tuple[int, int]]


def every(sizes: Iterable[int]) -> Shapes:
    """Return every pair of sizes, as rows and columns."""
    known = list(sizes)
    return [(rows, columns) for rows in known for columns in known]


@dataclass(frozen=True, slots=True)
class Grid:
    """What one of the two studies measures.

    kernels: the document's, the basic one first. lanes(backend): every implementation. usual:
    shapes by back end; between: those that a full run has besides. counted: the launch whose
    counters are read, of these lanes.
    """

    op: str
    kernels: tuple[str, ...]
    lanes: Callable[[str], tuple[Lane, ...]]
    usual: Mapping[str, Shapes]
    between: Mapping[str, Shapes]
    temperatures: Mapping[str, Sequence[str]]
    types: tuple[str, ...]
    type_size: int
    type_temperatures: Sequence[str]
    counted: Mapping[str, int]
    counted_lanes: tuple[Lane, ...]

    def steps(self, backend: str, full: bool) -> Iterator[Step]:
        """Yield every implementation over rows and columns; on a GPU the document's by dtype, too.

        A full run on a GPU has the sizes in between for these, our choice and the peer.
        """
        whole = self.lanes(backend)
        few = whole
        if backend == "cuda":
            peers = [lane for lane in whole if lane.rung is None]
            few = (*(Lane(name, name) for name in self.kernels), CHOICE, *peers)
        shapes = [(shape, whole) for shape in self.usual[backend]]
        shapes += [(shape, few) for shape in self.between[backend] if full]
        for ((m, n), lanes), temperature in itertools.product(shapes, self.temperatures[backend]):
            yield Cell(EXPERIMENT, self.op, m, n, lanes, temperature, m * (self.op == "matmul"))
        if backend != "cuda":
            return
        for form, temperature in itertools.product(self.types, self.type_temperatures):
            lanes = tuple(Lane(name, name, form=form) for name in self.kernels)
            n = self.type_size
            whole_case = Cell(BY_TYPE, self.op, n, n, lanes, temperature, n * (self.op == "matmul"))
            yield replace(whole_case, case={**whole_case.filed, "dtype": form})
        yield counting(self.op, self.counted_lanes, dict(self.counted))

    def largest_squares(self, rows: Rows) -> Iterator[tuple[str, int, Rows]]:
        """Yield, for each back end, the size of the largest square on file and its timed rows."""
        for backend in ("cuda", "cpu"):
            here = rows.where(EXPERIMENT, backend=backend).timed()
            sizes = [int(row.case["m"]) for row in here if row.case["m"] == row.case["n"]]
            if sizes:
                yield backend, max(sizes), here.where(m=max(sizes), n=max(sizes))
