"""The pictures of study 003: run times, bandwidths under their ceiling, the alternatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gemmule_lab.report.line_chart import Axes, Line
from gemmule_lab.studies import pictures as draw
from gemmule_lab.studies.pictures import Picture
from gemmule_lab.studies.records import Rows

EXPERIMENT = "sizes"
DTYPES = "matrix in fp16, or in int8 or int4 codes with one scale; x and y in fp16"
WHICH = {"": "the main kernels", "-more": "the alternatives"}
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
    for temperature in ("warm", "cold"):
        here = rows.where(EXPERIMENT, backend=backend, temperature=temperature).timed()
        if not here:
            continue
        start = f"study-003-{backend}"
        order = {name: index for index, name in enumerate(chief)}
        names = sorted(here.names(), key=lambda name: order.get(name, len(order)))
        first = [name for name in names if name in order] or names[:6]
        for which, chosen in (("", first), ("-more", [n for n in names if n not in first])):
            yield from _one(rows, here, start, (which, temperature), chosen)
        lines = [line for pair in ALTERNATIVES if (line := _ratio(here, *pair)) is not None]
        below = draw.subtitle(
            here,
            DTYPES,
            "times as fast as the plain form; above 1 it pays",
            temperature=temperature,
        )
        words = (f"What was tried beside the plain kernels, {temperature}", below)
        axes = Axes("n, of an n x n matrix", "times as fast")
        yield from draw.line_charts(f"{start}-alternatives-{temperature}", lines, axes, words)


def _one(
    rows: Rows, here: Rows, start: str, kind: tuple[str, str], names: Sequence[str]
) -> Iterator[Picture]:
    """Yield run times and bandwidths of some kernels."""
    which, temperature = kind
    chosen = Rows((row for row in here if row.name in names), here.environments)
    order = {name: index for index, name in enumerate(names)}
    title = f"Matrix times vector in halves and codes, {WHICH[which]}"
    below = draw.subtitle(here, DTYPES, "us of one product", temperature=temperature)
    words = (f"{title}: run time, {temperature}", below)
    axes = Axes("n, of an n x n matrix", "us", log_y=True)
    times = sorted(draw.lines_of(chosen, draw.microseconds), key=lambda line: order[line.name])
    yield from draw.line_charts(f"{start}-times{which}-{temperature}", times, axes, words)
    fact = "GB/s: matrix, vector and result once each"
    below = draw.subtitle(here, DTYPES, fact, temperature=temperature)
    words = (f"{title}: bandwidth, {temperature}", below)
    axes = Axes("n, of an n x n matrix", "GB/s")
    rates = sorted(draw.lines_of(chosen, draw.figure("gbs")), key=lambda line: order[line.name])
    backend = here[0].backend
    marks = draw.ceiling_marks(rows, backend) if rates else []
    yield from draw.line_charts(f"{start}-rates{which}-{temperature}", rates, axes, words, marks)


def _ratio(here: Rows, tried: str, plain: str) -> Line | None:
    times = [
        {int(row.case["n"]): row.us for row in here.where(name=name).timed()}
        for name in (tried, plain)
    ]
    points = [(float(n), times[1][n] / us) for n, us in sorted(times[0].items()) if n in times[1]]
    return (
        Line(f"{tried} / {plain.removeprefix(tried.split()[0] + ' ')}", points) if points else None
    )
