"""The demo's second half, on a GPU: a Llama's layer and the model's, by 1 to 512 tokens.

Each weight is multiplied in bfloat16, and in int8 and int4 by bfloat16, as a server does it: one
token of one sequence, some of several sequences, a prompt. Beside them in the same run stand
PyTorch's products of the same weights in bfloat16 (cuBLAS), its own packed ones, and ours in
bfloat16. Operands rotate past the L2, calls are replays of captured graphs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
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
PEERS = ("torch", "torch int4pack")
PACKED = "torch int4pack"
NO_TIME = "there was no time for it"
NOTE = (
    "A dot is all products of a layer by so many tokens, each colour a number format of the "
    "weights. To the right of 1× gemmule is faster than what the sentence names."
)
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
    """A transformer layer's linear parts: rows and columns of a weight, and how many there are.

    short: its title in a chart.
    """

    title: str
    short: str
    weights: tuple[tuple[tuple[int, int], int], ...]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The distinct shapes."""
        return [shape for shape, _ in self.weights]


LLAMA = Layer(  # q and o; k and v; gate and up; down
    "a layer of a Llama of 8 billion weights",
    "Llama 8B",
    (((4096, 4096), 2), ((1024, 4096), 2), ((14336, 4096), 2), ((4096, 14336), 1)),
)
MODEL = Layer(
    "a layer of the sentence model",
    "sentence model",
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
            outcome.left.append((product.title, NO_TIME))
            continue
        try:
            outcome.take(*bench.measure(measurement(bench, product), environment))
        except ArithmeticError as error:
            outcome.wrong.append(f"{product.title}: {error}")
        except (RuntimeError, MemoryError, ValueError) as error:
            outcome.left.append((product.title, str(error)))


def left_in_words(left: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each reason: which product was not measured, or how many."""
    reasons: dict[str, list[str]] = {}
    for title, reason in left:
        reasons.setdefault(reason, []).append(title)
    return [
        f"{titles[0] if len(titles) == 1 else f'{len(titles)} products'}: {reason}"
        for reason, titles in reasons.items()
    ]


@dataclass(frozen=True, slots=True)
class Sum:
    """All weights of a layer by so many tokens in one format: our time, and over `other`'s.

    parts: of each shape title, format, the ratio in the run that timed both, and if it is sure.
    packed: over PyTorch's own packed int4 products, where those were timed.
    """

    layer: Layer
    tokens: int
    format: str
    us: float
    ratio: float | None
    other: str
    parts: tuple[tuple[str, str, Speedup, bool], ...]
    packed: float | None


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
            found.append(_sum(layer, tokens, name, [first[title] for title in titles]))
    return found


def _sum(layer: Layer, tokens: int, name: str, ours: Sequence[Row]) -> Sum:
    each = [
        (count * row.times_us.median, shape, row)
        for (shape, count), row in zip(layer.weights, ours, strict=True)
    ]
    us = sum(time_us for time_us, _, _ in each)

    def over(other: str | None) -> float | None:
        if other is None or any(other not in row.speedups for row in ours):
            return None
        return sum(time_us * row.speedups[other].value for time_us, _, row in each) / us

    other = next((one for one in AGAINST if over(one) is not None), None)
    parts = [] if other is None else [(row.speedups[other], shape, row) for _, shape, row in each]
    titled = tuple(
        (f"{m} x {n} by {_tokens(tokens)}", name, one, is_sure(row, one))
        for one, (m, n), row in parts
    )
    names = (over(other), AGAINST.get(other or "", ""))
    return Sum(layer, tokens, name, us, *names, titled, over(PACKED))


def _tokens(tokens: int) -> str:
    return f"{tokens} token{'s' * (tokens > 1)}"


def sentences(device: str, found: Sequence[Sum]) -> tuple[str, ...]:
    """Return what to remember of a GPU: its layers by format and tokens, then what loses."""
    told: list[str] = []
    for layer in dict.fromkeys(one.layer for one in found):
        mine = [one for one in found if one.layer is layer and one.ratio is not None]
        parts = [
            f"{name} {_by_tokens([(o.tokens, o.ratio or 0.0) for o in some])}"
            for name in reversed(FORMATS)
            if (some := [one for one in mine if one.format == name])
        ]
        if parts:
            where = f"On {device}" if not told else "And"
            told.append(f"{where} {layer.title}, against {_others(mine)}: {'; '.join(parts)}.")
        packed = [(one.tokens, one.packed) for one in mine if one.packed is not None]
        if packed:
            told.append(f"Its int4 against PyTorch's own packed int4: {_by_tokens(packed)}.")
    raced = [part for one in found for part in one.parts]
    if raced:
        told.append(losses(raced, _others(found)))
    return tuple(told)


def _by_tokens(ratios: Sequence[tuple[int, float]]) -> str:
    """Return ratios in words: ``3.23x by 1 token, 2.19x by 16``."""
    words = [f"{times_of(ratio)} by {tokens}" for tokens, ratio in ratios]
    return ", ".join([f"{words[0]} token{'s' * (ratios[0][0] > 1)}", *words[1:]])


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
    title = f"All products of a layer: our time, and how many times as fast as {_others(found)}"
    return TableData(title, ("layer", "tokens", *FORMATS), body, (False, *[True] * 4))


def _others(found: Sequence[Sum]) -> str:
    return " and ".join(dict.fromkeys(one.other for one in found if one.other))


def story(device: str, rows: Sequence[Row]) -> Story | None:
    """Return what a page tells of a GPU: sentences, a chart of the layers, the table.

    None where no layer was measured whole.
    """
    found = sums(rows)
    lines: dict[str, dict[str, tuple[float, float, float]]] = {}
    for one in found:
        if one.ratio is not None:
            title = f"{one.layer.short}, {_tokens(one.tokens)}"
            lines.setdefault(title, {})[one.format] = (one.ratio, one.ratio, one.ratio)
    if not lines:
        return None
    caption = f"All products of a layer on {device}: how many times as fast as {_others(found)}"
    dots = Dots(caption, "", lines, list(FORMATS), "slower ← 1 → faster; logarithmic axis")
    data = table(found)
    return Story(sentences(device, found), Figure(dots, data), NOTE, (data,))
