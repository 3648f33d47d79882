"""The demo's second half, on a GPU: a Llama's layer and the model's, by 1 to 512 tokens.

Each weight is multiplied in bfloat16, and in int8 and int4 by bfloat16, as a server does it: one
token of one sequence, some of several sequences, a prompt. Beside them in the same run stand
PyTorch's products of the same weights in bfloat16 (cuBLAS), its own packed ones, and ours in
bfloat16. Operands rotate past the L2, calls are replays of captured graphs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gemmule.backends.cuda.library import cublas
from gemmule_lab.demo.run import Outcome
from gemmule_lab.demo.story import is_sure, losses, times_of
from gemmule_lab.harness.bench import Measurement
from gemmule_lab.harness.device import DeviceBench
from gemmule_lab.harness.device_operands import in_floats
from gemmule_lab.harness.products import Product
from gemmule_lab.records.rows import Environment, Row, Speedup
from gemmule_lab.report.charts import Dots
from gemmule_lab.report.render import Figure, Story
from gemmule_lab.report.tables import TableData, significant

FORMATS = {
    "bfloat16": "bfloat16",
    "int8": "int8 g128 x bfloat16, scales float16",
    "int4": "int4 g128 x bfloat16, scales float16",
}
TOKENS = (1, 16, 128, 512)
PEERS = ("torch", "torch int4pack", "torch int8pack")
OURS = "gemmule on bfloat16"
# What a format is held against: the first of these that took part, and its name in a sentence.
AGAINST = {
    "torch on bfloat16": "PyTorch in bfloat16",
    "torch": "PyTorch in bfloat16",
    OURS: "our own bfloat16",
}
SECONDS_EACH, SECONDS_ALL = 0.3, 120.0


@dataclass(frozen=True, slots=True)
class Layer:
    """A transformer layer's linear parts: rows and columns of a weight, and how many there are."""

    title: str
    weights: tuple[tuple[tuple[int, int], int], ...]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The distinct shapes."""
        return [shape for shape, _ in self.weights]


LLAMA = Layer(  # q and o; k and v; gate and up; down
    "a layer of a Llama of 8 billion weights",
    (((4096, 4096), 2), ((1024, 4096), 2), ((14336, 4096), 2), ((4096, 14336), 1)),
)
MODEL = Layer(
    "a layer of the sentence model",
    (((384, 384), 4), ((1536, 384), 1), ((384, 1536), 1)),
)


def products() -> Iterator[tuple[Layer, Product]]:
    """Yield what is measured, the larger layer first, and of each all formats by one token."""
    for layer, tokens, name in itertools.product((LLAMA, MODEL), TOKENS, FORMATS.values()):
        for shape in layer.shapes:
            yield layer, Product("matvec" if tokens == 1 else "matmul", name, shape, tokens)


def measurement(bench: DeviceBench, product: Product) -> Measurement:
    """Return a product with what it is held against; of bfloat16 with the vendor's library too."""
    wanted = bench.prepared(product)
    if product.form.bits is not None:
        dense = in_floats(wanted.sets) if wanted.plain is None else wanted.plain
        return replace(wanted, beside={OURS: dense})
    chosen = wanted.sets.plan().rung.name
    if product.op == "matmul" and cublas.missing() is None and chosen != "cublas":
        return replace(wanted, rungs=(None, "cublas"))
    return wanted


def measure(
    bench: DeviceBench, environment: Environment, outcome: Outcome, seconds: float = SECONDS_ALL
) -> Iterator[str]:
    """Measure product after product, for so long; yields what comes next. Rows go to the outcome.

    What fails, or there was no time for, is told in ``outcome.wrong`` and ``outcome.left``.
    """
    end = time.monotonic() + seconds
    for _, product in products():
        yield product.title
        if time.monotonic() >= end:
            outcome.left.append(product.title)
            continue
        try:
            outcome.take(*bench.measure(measurement(bench, product), environment))
        except ArithmeticError as error:
            outcome.wrong.append(f"{product.title}: {error}")
        except (RuntimeError, MemoryError, ValueError) as error:
            outcome.left.append(f"{product.title} ({error})")


@dataclass(frozen=True, slots=True)
class Sum:
    """All weights of a layer by so many tokens in one format: our time, and over `other`'s.

    parts: of each shape title, format, the ratio in the run that timed both, and if it is sure.
    """

    layer: Layer
    tokens: int
    format: str
    us: float
    ratio: float | None
    other: str
    parts: tuple[tuple[str, str, Speedup, bool], ...]


def sums(rows: Sequence[Row]) -> list[Sum]:
    """Return each layer's time by tokens and format, where all of its shapes were measured."""
    first: dict[str, Row] = {}
    for row in rows:
        if row.kind == "rung":
            first.setdefault(row.group, row)  # the automatic choice comes first
    found = []
    for layer, tokens, name in itertools.product((LLAMA, MODEL), TOKENS, FORMATS):
        op = "matvec" if tokens == 1 else "matmul"
        titles = [Product(op, FORMATS[name], shape, tokens).title for shape in layer.shapes]
        if all(title in first for title in titles):
            ours = [first[title] for title in titles]
            found.append(_sum(layer, tokens, name, ours))
    return found


def _sum(layer: Layer, tokens: int, name: str, ours: Sequence[Row]) -> Sum:
    counts = [count for _, count in layer.weights]
    us = sum(count * row.times_us.median for count, row in zip(counts, ours, strict=True))
    other = next((one for one in AGAINST if all(one in row.speedups for row in ours)), None)
    if other is None:
        return Sum(layer, tokens, name, us, None, "", ())
    over = [row.speedups[other] for row in ours]
    theirs = sum(
        count * row.times_us.median * one.value
        for count, row, one in zip(counts, ours, over, strict=True)
    )
    parts = tuple(
        (row.group, name, one, is_sure(row, one)) for row, one in zip(ours, over, strict=True)
    )
    return Sum(layer, tokens, name, us, theirs / us, AGAINST[other], parts)


def sentence(device: str, found: Sequence[Sum]) -> str:
    """Return what to remember of a GPU: the layers by tokens, then what loses."""
    told = []
    for layer in dict.fromkeys(one.layer for one in found):
        mine = [one for one in found if one.layer is layer]
        parts = []
        for tokens in dict.fromkeys(one.tokens for one in mine):
            words = ", ".join(_in_words(one) for one in mine if one.tokens == tokens)
            parts.append(f"by {tokens} token{'s' * (tokens > 1)} {words}")
        others = dict.fromkeys(one.other for one in mine if one.other)
        against = f", against {' and '.join(others)}" if others else ""
        told.append(f"On {device} {layer.title}{against}: {'; '.join(parts)}.")
    raced = [part for one in found for part in one.parts]
    if raced:
        told.append(losses(raced, " and ".join(dict.fromkeys(o.other for o in found if o.other))))
    return " ".join(told) or f"On {device} nothing was measured."


def _in_words(one: Sum) -> str:
    ratio = "" if one.ratio is None else f"{times_of(one.ratio)} "
    return f"{one.format} {ratio}({significant(one.us)} us)"


def table(found: Sequence[Sum]) -> TableData:
    """Return one line for each layer and number of tokens: our time and ratio in each format."""
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for one in found:
        ratio = "" if one.ratio is None else f", {one.ratio:.2f}x"
        cells.setdefault((one.layer.title, one.tokens), {})[one.format] = (
            f"{significant(one.us)} us{ratio}"
        )
    body = tuple(
        (layer, str(tokens), *(line.get(name, "") for name in FORMATS))
        for (layer, tokens), line in cells.items()
    )
    title = "All products of a layer: our time, and times as fast as what it is held against"
    return TableData(title, ("layer", "tokens", *FORMATS), body, (False, *[True] * 4))


def story(device: str, rows: Sequence[Row]) -> Story:
    """Return what a page tells of a GPU: the sentence, a chart of the layers, the table."""
    found = sums(rows)
    lines: dict[str, dict[str, tuple[float, float, float]]] = {}
    for one in found:
        if one.ratio is not None:
            title = f"{one.layer.title}, {one.tokens} token{'s' * (one.tokens > 1)}"
            lines.setdefault(title, {})[one.format] = (one.ratio, one.ratio, one.ratio)
    if not lines:
        raise ValueError("no layer was measured whole on the GPU; what was, is in the file.")
    caption = f"How many times as fast as bfloat16 on {device}, all products of a layer"
    dots = Dots(caption, "", lines, list(FORMATS), "slower ← 1 → faster; logarithmic axis")
    data = table(found)
    return Story(sentence(device, found), Figure(dots, data), (data,))
