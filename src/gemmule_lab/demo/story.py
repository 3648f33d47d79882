"""The demo as a story: a sentence to repeat, a chart, tables of its products and of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gemmule.timing.sampler import CONFIDENCE
from gemmule_lab.demo.search import Embedded
from gemmule_lab.records.rows import Row, Speedup
from gemmule_lab.report.charts import Dots
from gemmule_lab.report.render import Figure, Story
from gemmule_lab.report.tables import Column, TableData, byte_text, significant, table_of

FORMATS = ("int4", "int8", "float16", "bfloat16", "float32")
OPS = {"matvec": "A x", "vecmat": "x A", "matmul": "A B, 64 columns"}
EVEN = 0.03  # within so much of 1 is "as fast"
NUMPY = "NumPy in float32"
NOTE = (
    "A dot is one product, its line the 95 % interval; each colour is a number format of the "
    "weights. To the right of 1× gemmule is faster than NumPy on the same matrix in float32."
)
# Column -> the peers whose ratio may stand in it: of several, one serves a number format.
PEER_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "x NumPy": ("numpy",),
    "x NumPy f32": ("numpy on float32",),
    "x torch": ("torch", "torch int8pack", "torch int4pack"),
    "x torch f32": ("torch on float32",),
}
LEGEND = (
    "x: gemmule is that many times as fast as the peer in the same format, or as the peer on "
    "float32 weights; by 95 % intervals '-' marks surely slower, '=' the same within 1 %, "
    "'?' undecided, or too few blocks for an interval. "
    "% read: of the measured read ceiling; cached: the matrices stay in the "
    "cache, !: above the ceiling, so one of both was disturbed. "
    "error: largest error over its bound. saved: bytes against float32."
)


@dataclass(frozen=True, slots=True)
class Gain:
    """One product of ours over NumPy in float32. shape: rows x columns (how many such matrices).

    sure: there are blocks enough for an interval, and other programs left them alone.
    """

    shape: str
    count: int
    op: str
    format: str
    time_us: float
    over: Speedup
    sure: bool = True

    @property
    def title(self) -> str:
        """Shape and operation."""
        return f"{self.shape}, {OPS[self.op]}"


def gains_of(rows: Sequence[Row]) -> list[Gain]:
    """Return what the rows say of NumPy's float32, in the order of the rows."""
    found = []
    for row in rows:
        over = row.speedups.get("numpy on float32", row.speedups.get("numpy"))
        shape, op, form = row.group.rsplit(", ", 2)
        if row.kind == "rung" and over is not None:
            count = int(shape.rpartition("(")[2].rstrip(")"))
            sure = is_sure(row, over)
            found.append(Gain(shape, count, op, form, row.times_us.median, over, sure))
    return found


def is_sure(row: Row, over: Speedup) -> bool:
    """Tell whether a speed-up rests on enough blocks, which no other program disturbed."""
    return over.confidence >= CONFIDENCE and not row.disturbed


def sentences(rows: Sequence[Row], found: Sequence[Embedded], texts: int = 0) -> tuple[str, ...]:
    """Return what to remember: the whole model first, then its linear layers, then what loses.

    A layer's speed is NumPy's whole time over ours, of one product by every matrix. Single and
    disturbed blocks decide nothing.
    """
    gains = gains_of(rows)
    calm = not gains or any(one.sure for one in gains)
    told = [_model(found, texts, calm=calm)] if found else []
    for op in ("matvec", "matmul"):
        if any(one.op == op and one.sure for one in gains):
            told.append(_layers(op, gains))
    raced = [(g.title, g.format, g.over, g.sure) for g in gains]
    return (*told, losses(raced, NUMPY))


def _model(found: Sequence[Embedded], texts: int, *, calm: bool) -> str:
    """Tell the model's times; calm: other programs left some of the products alone, too."""
    plain, *others = found

    def told(over: Speedup) -> str:
        return times(over if calm else replace(over, verdict="undecided"))

    parts = [
        f"{one.format} {told(one.all_over)} with {texts} sentences at once and "
        f"{told(one.one_over)} with one at a time, "
        f"{one.layer_bytes / plain.layer_bytes:.0%} of the memory, cosine {one.cosine:.4f}"
        for one in others
    ]
    return f"The whole model, against {NUMPY}: {'; '.join(parts)}."


def _layers(op: str, gains: Sequence[Gain]) -> str:
    parts = []
    for form in FORMATS:
        ours = [one for one in gains if one.format == form and one.op == op]
        if ours:
            parts.append(f"{form} {_speed(ours)}")
    by = {"matvec": "one vector", "matmul": "64 columns"}[op]
    return f"Its linear layers alone, by {by}: {', '.join(parts)}."


def _speed(gains: Sequence[Gain]) -> str:
    if not all(one.sure for one in gains):
        return "undecided"
    ours = sum(one.count * one.time_us for one in gains)
    ratio = sum(one.count * one.time_us * one.over.value for one in gains) / ours
    return times_of(ratio)


def times_of(ratio: float) -> str:
    """Return a ratio of whole times in a sentence; within `EVEN` of 1 it is ``as fast``."""
    return "as fast" if abs(ratio - 1) <= EVEN else f"{ratio:.2f}x"


def times(over: Speedup) -> str:
    """Return a speed-up in a sentence: ``2.10x``, ``as fast``, or ``about 1.1x`` if undecided.

    >>> times(Speedup(2.1, 2.0, 2.2, 9, 0.95, "faster"))
    '2.10x'
    """
    if over.verdict == "same":
        return "as fast"
    sure = over.verdict in ("faster", "slower") and over.confidence >= CONFIDENCE
    return f"{over.value:.2f}x" if sure else f"about {over.value:.1f}x"


def losses(gains: Sequence[tuple[str, str, Speedup, bool]], other: str) -> str:
    """Return how many products are surely slower, and the worst.

    gains: of each product its title, its format, the speed-up, and whether that is sure.
    """
    sure = [one for one in gains if one[3]]
    lost = sorted((one for one in sure if one[2].high < 1 - EVEN), key=lambda one: one[2].value)
    unsure = len(gains) - len(sure)
    end = f" Of {unsure} more nothing can be said: disturbed, or too few blocks." if unsure else ""
    if not sure:
        return f"Nothing can be said of any product: all {unsure} were disturbed; measure again."
    if not lost:
        return f"None of {len(sure)} products is surely slower than {other}.{end}"
    title, form, over, _ = lost[0]
    worst = f"{form} {title}, {over.value:.2f}x"
    return f"Surely slower than {other}: {len(lost)} of {len(sure)} products; worst: {worst}.{end}"


def chart(rows: Sequence[Row]) -> Figure:
    """Return every product's speed over NumPy's float32 on one logarithmic axis, and its table."""
    gains = gains_of(rows)
    formats = [form for form in FORMATS if any(one.format == form for one in gains)]
    lines: dict[str, dict[str, tuple[float, float, float]]] = {}
    for one in sorted(gains, key=lambda one: list(OPS).index(one.op)):
        dot = (one.over.value, one.over.low, one.over.high)
        lines.setdefault(one.title, {})[one.format] = dot
    caption = "How many times as fast as NumPy in float32, by layer shape and number format"
    foot = "slower than NumPy in float32 ← 1 → faster; logarithmic axis"
    return Figure(Dots(caption, "", lines, formats, foot), _layer_table(gains, formats))


def _layer_table(gains: Sequence[Gain], formats: Sequence[str]) -> TableData:
    """Return one line for each shape and operation, with time and ratio in every format."""
    cells: dict[str, dict[str, str]] = {}
    for one in gains:
        mark = "" if one.sure else "~"
        slower = "-" if one.sure and one.over.verdict == "slower" else ""
        text = f"{significant(one.time_us)} us, {mark}{one.over.value:.2f}x{slower}"
        cells.setdefault(one.title, {})[one.format] = text
    body = tuple((title, *(found.get(f, "") for f in formats)) for title, found in cells.items())
    title = "By layer: our time, times NumPy's float32 ('-': surely slower, '~': disturbed)"
    header = ("matrices (how many), product", *formats)
    return TableData(title, header, body, (False, *[True] * len(formats)))


def work_table(found: Sequence[Embedded], sentences: int) -> TableData:
    """Return what each format did to the sentences."""

    def timed(one: Embedded, text: str, over: Speedup) -> str:
        return text if one is found[0] else f"{text}, {times(over)}"

    title = f"{sentences} sentences embedded by all-MiniLM-L6-v2, and the nearest found to each"
    columns: tuple[Column[Embedded], ...] = (
        ("linear layers in", lambda one: one.format, False),
        ("their weights", lambda one: byte_text(one.layer_bytes), True),
        ("all at once", lambda one: timed(one, f"{one.all_s:.2f} s", one.all_over), True),
        ("one alone", lambda one: timed(one, f"{1e3 * one.one_s:.1f} ms", one.one_over), True),
        ("mean cosine", lambda one: f"{one.cosine:.4f}", True),
        ("least", lambda one: f"{one.least:.3f}", True),
        ("same nearest as float32", lambda one: f"{one.agreeing} of {sentences}", True),
    )
    return table_of(title, found, columns)


def examples_table(examples: Sequence[tuple[str, str, str]], last: str) -> TableData:
    """Return sentences with their nearest by float32 and by another format."""
    header = ("sentence", "nearest by float32", f"nearest by {last}")
    body = tuple(
        (one, right, "the same" if right == other else other) for one, right, other in examples
    )
    return TableData("For example", header, body, (False,) * 3)


def story(
    rows: Sequence[Row],
    found: Sequence[Embedded] = (),
    texts: int = 0,
    examples: Sequence[tuple[str, str, str]] = (),
) -> Story:
    """Return the page's first screen; without `found` the model's work is left out.

    texts: how many sentences the model embedded.
    """
    figure = chart(rows)
    tables = [work_table(found, texts)] if found else []
    tables.append(figure.table)
    tables += [examples_table(examples, found[-1].format)] if examples else []
    return Story(sentences(rows, found, texts), figure, NOTE, tuple(tables))


def tables(rows: Sequence[Row]) -> list[TableData]:
    """Return a table for each operation, in the order of the rows."""
    ours = [row for row in rows if row.kind == "rung"]
    columns = [name for name in PEER_COLUMNS if any(_peer(row, name) for row in ours)]
    header = ("shape", "format", "rung", "us", "GB/s", "% read", *columns, "error", "saved")
    numeric = (False, False, False, *[True] * (len(header) - 3))
    bodies: dict[str, list[tuple[str, ...]]] = {}
    told: dict[str, str] = {}  # the shape of an operation's last line
    for row in ours:
        shape, op, form = row.group.rsplit(", ", 2)
        head = "" if told.get(op) == shape else shape
        bodies.setdefault(op, []).append((head, form, *cells(row, columns)))
        told[op] = shape
    return [TableData(op, header, tuple(body), numeric) for op, body in bodies.items()]


def cells(row: Row, columns: Sequence[str]) -> list[str]:
    """Return the texts of one line."""
    share = row.percent_of_ceiling
    return [
        row.name,
        significant(row.times_us.median),
        significant(row.gbs),
        "cached" if share is None else f"{share:.0f}{'!' if row.flags else ''}",
        *(ratio_text(_peer(row, column)) for column in columns),
        "" if row.error_ratio is None else f"{row.error_ratio:.2g}",
        byte_text(row.bytes_saved),
    ]


def _peer(row: Row, column: str) -> Speedup | None:
    found = (row.speedups.get(name) for name in PEER_COLUMNS[column])
    return next((speedup for speedup in found if speedup is not None), None)


def ratio_text(speedup: Speedup | None) -> str:
    """Return a ratio with its mark: ``1.50``, ``0.80-``, ``1.01=``, ``1.20?``; see `LEGEND`."""
    if speedup is None:
        return ""
    mark = {"faster": "", "slower": "-", "same": "="}.get(speedup.verdict, "?")
    return f"{speedup.value:.2f}{mark}" if speedup.value < 100 else f"{speedup.value:.0f}{mark}"
