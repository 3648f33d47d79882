"""What the studies of documents 000 and 002 share: a grid of rows and columns, and its pictures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gemmule_lab.profile.single_launch import counting
from gemmule_lab.records.results import geomean
from gemmule_lab.report.charts import Axes, Mark
from gemmule_lab.studies import pictures as draw
from gemmule_lab.studies.grid import Cell, Lane, Step
from gemmule_lab.studies.pictures import Picture
from gemmule_lab.studies.records import Rows, Value

EXPERIMENT, BY_TYPE = "rows x columns", "dtypes"
DTYPE = "float32"  # of all but the experiment by dtype
CHOICE = Lane("gemmule's choice", "auto")
BOTH = ("warm", "cold")

Shapes = Sequence[tuple[int, int]]


def every(sizes: Iterable[int]) -> Shapes:
    """Return every pair of sizes, as rows and columns."""
    known = list(sizes)
    return [(rows, columns) for rows in known for columns in known]


@dataclass(frozen=True, slots=True)
class Grid:
    """One of the two studies: what it measures, and how it shows it.

    kernels: the document's, the basic one first. lanes(backend): every implementation. usual:
    shapes by back end; between: those that a full run has besides. temperatures: by back end. types
    and type_size: the experiment by dtype, at its temperatures. counted: the launch whose counters
    are read, of these kernels. shape: what rows and columns are, in words; axes: the same, short.
    """

    number: str
    what: str
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
    counted_kernels: tuple[str, ...]
    rate: str
    unit: str
    ceiling: str
    shape: str
    axes: tuple[str, str]

    def cell(
        self,
        experiment: str,
        m: int,
        n: int,
        lanes: tuple[Lane, ...],
        temperature: str,
        form: str = "",
    ) -> Cell:
        """Return a cell of an m x n matrix; a matrix product's second one is n x m."""
        columns = m if self.op == "matmul" else 0
        case: dict[str, Value] = {}
        if form:
            sizes = {"m": m, "n": n, **({"columns": columns} if columns else {})}
            case = {**sizes, "dtype": form}
        return Cell(experiment, self.op, m, n, lanes, temperature, columns, case=case)

    def steps(self, backend: str, full: bool) -> Iterator[Step]:
        """Yield every implementation over rows and columns; on a GPU the document's by dtype, too.

        A full run on a GPU has the sizes in between for these, our choice and the peer.
        """
        whole = self.lanes(backend)
        few = whole
        if backend == "cuda":
            peers = [lane for lane in whole if lane.kind == "peer"]
            few = (*(Lane(name, name) for name in self.kernels), CHOICE, *peers)
        shapes = [(shape, whole) for shape in self.usual[backend]]
        shapes += [(shape, few) for shape in self.between[backend] if full]
        for ((m, n), lanes), temperature in itertools.product(shapes, self.temperatures[backend]):
            yield self.cell(EXPERIMENT, m, n, lanes, temperature)
        if backend != "cuda":
            return
        for form, temperature in itertools.product(self.types, self.type_temperatures):
            lanes, size = (
                tuple(Lane(name, name, form=form) for name in self.kernels),
                self.type_size,
            )
            yield self.cell(BY_TYPE, size, size, lanes, temperature, form)
        yield counting(self.op, self.counted_kernels, dict(self.counted))

    def largest_squares(self, rows: Rows) -> Iterator[tuple[str, int, Rows]]:
        """Yield, for each back end, the size of the largest square on file and its timed rows."""
        for backend in ("cuda", "cpu"):
            here = rows.where(EXPERIMENT, backend=backend).timed()
            sizes = [int(row.case["m"]) for row in here if row.case["m"] == row.case["n"]]
            if sizes:
                yield backend, max(sizes), here.where(m=max(sizes), n=max(sizes))

    def pictures(self, rows: Rows, backend: str) -> Iterator[Picture]:
        """Yield heat maps of the rate, of the memory's use and of the gain, and lines."""
        start, rate = f"study-{self.number}-{backend}", draw.figure(self.rate)
        key = f"{self.unit}; darker is more"
        for temperature in BOTH:
            here = rows.where(EXPERIMENT, backend=backend, temperature=temperature).timed()
            facts = (DTYPE, f"{self.unit} in each cell", self.shape)
            title = f"{self.what}: {self.unit} by rows and columns, {temperature}"
            head = draw.head(f"{start}-rates-{temperature}", title, here, *facts, kept=temperature)
            yield from draw.maps(head, draw.panels(here, rate), key, axes=self.axes)
        warm = rows.where(EXPERIMENT, backend=backend, temperature="warm").timed()
        if not warm:
            return
        yield from self._own_kernels(warm, start)
        yield from self._over_rows(rows, warm, backend)
        if self.rate == "gbs":
            yield from self._over_columns(warm, start)
        here = rows.where(BY_TYPE, backend=backend).timed()
        groups = draw.by_temperature(here, rate, lambda row: f"{row.case['dtype']}, {row.name}")
        dtypes = ", ".join(dict.fromkeys(str(row.case["dtype"]) for row in here))
        warmth = [draw.WORDS[t] for t in draw.WORDS if here.where(temperature=t)]
        title = f"{self.what}: {self.unit} by dtype"
        words = (dtypes, draw.shapes_of(here), self.unit, *warmth)
        yield from draw.bars(draw.head(f"{start}-dtypes", title, here, *words), groups, self.unit)
        title = f"{self.what}: what the kernels keep busy"
        yield from draw.counters(rows, backend, f"{start}-balance", title)

    def _own_kernels(self, warm: Rows, start: str) -> Iterator[Picture]:
        """Yield the document's kernels: their use of the memory, the gain over the basic one."""
        own = Rows((row for row in warm if row.name in self.kernels), warm.environments)
        title = f"{self.what}: use of the memory's bandwidth, the document's kernels, warm"
        fact = "percent of the data sheet's bandwidth in each cell"
        head = draw.head(f"{start}-use", title, own, DTYPE, fact, self.shape, kept="warm")
        shown = draw.panels(own, draw.utilisation)
        yield from draw.maps(head, shown, "%; darker is more", axes=self.axes)
        basic, *others = self.kernels
        gains = draw.ratios(warm, ((name, basic) for name in others))
        found = " and ".join(f"{geomean(cells.values()):.2f}" for cells in gains.values())
        title = f"{self.what}: tiles are {found} times as fast as the basic kernel, warm"
        fact = f"times as fast as {basic}"
        head = draw.head(f"{start}-gain", title, own, DTYPE, fact, self.shape, kept="warm")
        yield from draw.maps(head, gains, draw.FASTER, axes=self.axes, ratios=True)

    def _over_rows(self, rows: Rows, warm: Rows, backend: str) -> Iterator[Picture]:
        """Yield the rate of every kernel over the rows of the widest matrices, with the ceiling."""
        cold = rows.where(EXPERIMENT, backend=backend, temperature="cold").timed() or warm
        widest = max(int(row.case["n"]) for row in cold)
        lines = draw.lines_of(cold.where(n=widest), draw.figure(self.rate), "m")
        order = {name: index for index, name in enumerate(self.kernels)}
        lines.sort(key=lambda line: (order.get(line.name, len(order)), -line.points[-1][1]))
        facts = [DTYPE, self.unit, self.shape]
        marks: list[Mark] = []
        if self.rate == "gbs":
            marks = draw.ceiling_marks(rows, backend)
        elif (limit := rows.ceiling(self.ceiling, backend)) is not None:
            marks = [Mark(f"measured FMA ceiling, {limit:,.0f} GFLOP/s", limit)]
            if any(rate > limit for line in lines for _, rate in line.points):
                facts.append("what is beyond the FMA ceiling runs on tensor cores")
        name = f"study-{self.number}-{backend}-over-rows"
        title = f"{self.what}: {self.unit} over the rows, {widest:,} {self.axes[1]}"
        head = draw.head(name, title, cold, *facts, kept=cold[0].temperature)
        yield from draw.line_charts(head, lines, Axes(self.axes[0], self.unit), marks)

    def _over_columns(self, warm: Rows, start: str) -> Iterator[Picture]:
        """Yield the basic kernel's rate over the columns, a line for each of the last heights."""
        basic = warm.where(name=self.kernels[0])
        lines = [
            replace(line, name=f"{m:,} rows")
            for m in sorted({int(row.case["m"]) for row in warm})[-draw.MOST_LINES :]
            for line in draw.lines_of(basic.where(m=m), draw.figure(self.rate))
        ]
        title = f"{self.kernels[0]}: {self.unit} over the columns, a line for each number of rows"
        head = draw.head(f"{start}-by-columns", title, warm, DTYPE, self.unit, kept="warm")
        yield from draw.line_charts(head, lines, Axes("columns", self.unit))
