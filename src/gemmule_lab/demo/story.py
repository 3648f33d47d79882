"""The demo as a story: a sentence to repeat, one chart, a table by layer, and the model at work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemmule_lab.demo.search import Embedded
from gemmule_lab.records.rows import Row, Speedup
from gemmule_lab.report.charts import Dots
from gemmule_lab.report.render import Figure, Story
from gemmule_lab.report.tables import TableData, byte_text, significant

FORMATS = ("int4", "int8", "float16", "bfloat16", "float32")
OPS = {"matvec": "A x", "vecmat": "x A", "matmul": "A B, 64 columns"}
EVEN = 0.03  # within so much of 1 is "as fast"


@dataclass(frozen=True, slots=True)
class Gain:
    """One product of ours over NumPy in float32. shape: rows x columns (how many such matrices)."""

    shape: str
    count: int
    op: str
    format: str
    time_us: float
    over: Speedup

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
            found.append(Gain(shape, count, op, form, row.times_us.median, over))
    return found


def sentence(rows: Sequence[Row], found: Sequence[Embedded]) -> str:
    """Return what to remember: each format's speed by a vector, its memory, and its cosine.

    The speed is of one vector by every matrix: NumPy's whole time over ours.
    """
    gains, parts = gains_of(rows), []
    for form in FORMATS:
        ours = [one for one in gains if one.format == form and one.op == "matvec"]
        if ours:
            parts.append(f"{form} {_speed(ours)}{_cost(form, found)}")
    slower = sum(one.over.verdict == "slower" for one in gains)
    end = f" Of all {len(gains)} products measured, {slower} are surely slower than NumPy's."
    return f"A vector by every matrix, against NumPy in float32: {'; '.join(parts)}.{end}"


def _speed(gains: Sequence[Gain]) -> str:
    ours = sum(one.count * one.time_us for one in gains)
    ratio = sum(one.count * one.time_us * one.over.value for one in gains) / ours
    return "as fast" if abs(ratio - 1) <= EVEN else f"{ratio:.1f}x"


def _cost(form: str, found: Sequence[Embedded]) -> str:
    """Return a format's memory and cosine in words, where it embedded sentences."""
    by_format = {one.format: one for one in found}
    one, plain = by_format.get(form), by_format.get("float32")
    if one is None or plain is None or one is plain:
        return ""
    return f", {one.layer_bytes / plain.layer_bytes:.0%} of the memory, cosine {one.cosine:.4f}"


def chart(rows: Sequence[Row]) -> Figure:
    """Return every product's speed over NumPy's float32 on one logarithmic axis."""
    gains = gains_of(rows)
    lines: dict[str, dict[str, tuple[float, float, float]]] = {}
    for one in sorted(gains, key=lambda one: list(OPS).index(one.op)):
        dot = (one.over.value, one.over.low, one.over.high)
        lines.setdefault(one.title, {})[one.format] = dot
    caption = "How many times as fast as NumPy in float32, by layer shape and number format"
    formats = [form for form in FORMATS if any(one.format == form for one in gains)]
    foot = "slower than NumPy in float32 ← 1 → faster; logarithmic axis"
    return Figure(Dots(caption, "", lines, formats, foot), layer_table(rows))


def layer_table(rows: Sequence[Row]) -> TableData:
    """Return one line for each shape and operation, with time and ratio in every format."""
    gains = gains_of(rows)
    formats = [form for form in FORMATS if any(one.format == form for one in gains)]
    cells: dict[str, dict[str, str]] = {}
    for one in gains:
        text = f"{significant(one.time_us)} us, {one.over.value:.2f}x{_mark(one.over)}"
        cells.setdefault(one.title, {})[one.format] = text
    body = tuple((title, *(found.get(f, "") for f in formats)) for title, found in cells.items())
    title = "By layer: our time, and times as fast as NumPy's float32 ('-': surely slower)"
    header = ("matrices (how many), product", *formats)
    return TableData(title, header, body, (False, *[True] * len(formats)))


def _mark(over: Speedup) -> str:
    return "-" if over.verdict == "slower" else ""


def work_table(found: Sequence[Embedded], sentences: int) -> TableData:
    """Return what each format did to the sentences."""
    plain = found[0]
    body = tuple(
        (
            one.format,
            byte_text(one.layer_bytes),
            f"{one.all_s:.2f} s, {plain.all_s / one.all_s:.2f}x",
            f"{1e3 * one.one_s:.1f} ms, {plain.one_s / one.one_s:.2f}x",
            f"{one.cosine:.4f}",
            f"{one.least:.3f}",
            f"{one.agreeing} of {sentences}",
        )
        for one in found
    )
    title = f"{sentences} sentences embedded by all-MiniLM-L6-v2, and the nearest found to each"
    header = (
        "linear layers in", "their weights", "all at once", "one alone", "mean cosine", "least",
        "same nearest as float32",
    )  # fmt: skip
    return TableData(title, header, body, (False, *[True] * (len(header) - 1)))


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
    sentences: int = 0,
    examples: Sequence[tuple[str, str, str]] = (),
) -> Story:
    """Return the page's first screen; without `found` the model's work is left out."""
    figure = chart(rows)
    tables = [figure.table]
    tables += [work_table(found, sentences)] if found else []
    tables += [examples_table(examples, found[-1].format)] if examples else []
    return Story(sentence(rows, found), figure, tuple(tables))
