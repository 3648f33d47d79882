"""What a study measures: cells, each a few implementations on one case, timed interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gemmule_lab.records.rows import Times
from gemmule_lab.records.study import Rows, Value
from gemmule_lab.studies.rules import Claim


@dataclass(frozen=True)
class Lane:
    """One implementation of a cell.

    rung: a rung by name, ``"auto"`` for the automatic choice, None for the peer called `peer`.
    form: one of the lab's `FORMATS`. flip: compute with the transpose of the stored matrix. preset:
    a named point of the rung's parameter space. matrix: which of the case's several matrices. only:
    time just the launches of these kernels of the rung, on a GPU.
    """

    name: str
    rung: str | None
    params: Mapping[str, Value] = field(default_factory=dict)
    preset: str = ""
    form: str = "float32"
    flip: bool = False
    peer: str = ""
    matrix: int = 0
    only: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[str, bool, int]:
        """What lanes of a cell have in common that run over the same operands."""
        return self.form, self.flip, self.matrix


@dataclass(frozen=True, slots=True)
class Measured:
    """What became of one lane: times and figures, or a note that says why there are none."""

    times_us: Times | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    params: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


Names = tuple[str, ...]
Case = Mapping[str, Value]
Found = Mapping[str, Measured]


@dataclass(frozen=True)
class Cell:
    """One case at one temperature, and who is timed on it.

    Stored matrix: m x n in `layout`. A matmul's second operand is n x columns. `case` is what the
    rows are filed under. uniform: numbers in [0, 1), where others are normal.
    """

    experiment: str
    op: str
    m: int
    n: int
    lanes: tuple[Lane, ...]
    temperature: str
    columns: int = 0
    layout: str = "row"
    case: Case = field(default_factory=dict)
    uniform: bool = False

    @property
    def names(self) -> Names:
        """The names of the rows."""
        return tuple(lane.name for lane in self.lanes)

    @property
    def filed(self) -> Case:
        """The case that the rows carry."""
        sizes: dict[str, Value] = {"m": self.m, "n": self.n}
        return self.case or sizes | ({"columns": self.columns} if self.columns else {})

    def measured(self, bench: Bench, names: Names) -> Found:
        """Return what became of the named lanes."""
        return bench.measure(self, tuple(lane for lane in self.lanes if lane.name in names))


class Bench(Protocol):
    """What measures cells on one device."""

    backend: str
    device: str
    ordinal: int

    def measure(self, cell: Cell, lanes: tuple[Lane, ...]) -> Found:
        """Return what became of each lane, by name; ArithmeticError for a wrong result."""
        ...


@dataclass(frozen=True)
class Task:
    """Part of a study that no cell describes: host times, counters, limits.

    `names` are the rows that it gives, all filed under one case and ``once``; ``run(bench, names,
    case)`` measures those that are asked for.
    """

    experiment: str
    names: Names
    filed: Case
    run: Callable[[Bench, Names, Case], Found]
    temperature: str = "once"

    def measured(self, bench: Bench, names: Names) -> Found:
        """Return what became of the named parts."""
        return self.run(bench, names, self.filed)


Step = Cell | Task


@dataclass(frozen=True)
class Study:
    """One document's experiments; its file says what it asks, and what the grid leaves out.

    ``steps(backend, full)`` is the grid, `table` the header of the table of printed figures beside
    ours and what yields its lines, `charts` are those that `gemmule_lab.studies.charted` draws.
    together: on a machine with a GPU the GPU's bench times the CPU's implementations as well.
    """

    number: str
    steps: Callable[[str, bool], Iterable[Step]]
    claims: tuple[Claim, ...]
    table: tuple[tuple[str, ...], Callable[[Rows], Iterator[tuple[str, ...]]]]
    charts: tuple[Mapping[str, Any], ...]
    together: bool = False
