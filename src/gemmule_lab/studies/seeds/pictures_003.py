"""The pictures of study 003: run times, bandwidths under their ceiling, the alternatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gemmule_lab.report.charts import Axes, Line
from gemmule_lab.studies import pictures as draw
from gemmule_lab.studies.pictures import Picture
from gemmule_lab.studies.records import Rows

EXPERIMENT = "sizes"
DTYPES = "matrix in fp16, or in int8 or int4 codes with one scale; x and y in fp16"
WHICH = {"": "the main kernels", "-more": "the alternatives"}
SIZE = "n, of an n x n matrix"
ALTERNATIVES = (
    ("fp16 y blocks", "fp16 one block a row"),
    ("fp16 x in shared memory", "fp16 one block a row"),
    ("int8 product table", "int8 codes, 128 threads"),
    ("int4 product table", "int4 codes, 128 threads"),
    ("int4 codes", "int4 codes, 8 values"),
    ("fp16 16-byte loads", "fp16 scalar loads"),
)


def pictures(rows: Rows, backend: str, chief: Sequence[str]) -> Iterator[Picture]:
    """Yield the drawings of a back end; `chief` are the kernels that the document prints."""
    start, marks = f"study-003-{backend}", draw.ceiling_marks(rows, backend)
    for temperature in ("warm", "cold"):
        here = rows.where(EXPERIMENT, backend=backend, temperature=temperature).timed()
        order = {name: index for index, name in enumerate(chief)}
        names = sorted(here.names(), key=lambda name: order.get(name, len(order)))
        first = [name for name in names if name in order] or names[:6]
        for which, chosen in (("", first), ("-more", [n for n in names if n not in first])):
            title = f"Matrix times vector in halves and codes, {WHICH[which]}"
            for file, what, value, fact, axes, ceilings in (
                ("times", "run time", draw.microseconds, "us of one product",
                 Axes(SIZE, "us", log_y=True), []),
                ("rates", "bandwidth", draw.figure("gbs"),
                 "GB/s: matrix, vector and result once each", Axes(SIZE, "GB/s"), marks),
            ):  # fmt: skip
                lines = [
                    line for name in chosen for line in draw.lines_of(here.where(name=name), value)
                ]
                below = draw.subtitle(here, DTYPES, fact, temperature=temperature)
                name, words = (
                    f"{start}-{file}{which}-{temperature}",
                    f"{title}: {what}, {temperature}",
                )
                yield from draw.line_charts(name, words, below, lines, axes, ceilings)
        lines = [line for pair in ALTERNATIVES for line in _ratio(here, *pair)]
        fact = "times as fast as the plain form; above 1 it pays"
        below = draw.subtitle(here, DTYPES, fact, temperature=temperature)
        title = f"What was tried beside the plain kernels, {temperature}"
        name, axes = f"{start}-alternatives-{temperature}", Axes(SIZE, "times as fast")
        yield from draw.line_charts(name, title, below, lines, axes)


def _ratio(here: Rows, tried: str, plain: str) -> Iterator[Line]:
    """Yield how many times as fast one kernel is as another over the sizes, if both were timed."""
    times, theirs = (
        {float(row.case["n"]): row.us for row in here.where(name=name)} for name in (tried, plain)
    )
    points = [(n, theirs[n] / us) for n, us in sorted(times.items()) if n in theirs]
    if points:
        yield Line(f"{tried} / {plain.removeprefix(tried.split()[0] + ' ')}", points)
