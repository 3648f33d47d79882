"""What a number format does to the model's work: sentences embedded, and the nearest one found.

Every format embeds the same sentences; its vectors are held against those of float32, and so is
which sentence each finds nearest to every other. Formats are timed in one run, block by block, so
that a busy moment hits all; NumPy multiplies by the float32 weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gemmule as gm
from gemmule.timing.clock import HostClock, entry_over
from gemmule.timing.sampler import Budget, Samples, ratio, sample
from gemmule_lab.demo.embeddings import Floats, SentenceModel
from gemmule_lab.harness.operands import in_format
from gemmule_lab.records.rows import Speedup, speedup_of

FORMATS = ("float32", "int8", "int4")
SENTENCES = 160
ALONE = 16  # sentences that are also embedded one by one
EXAMPLES = 3
# Seconds, and blocks at least and at most, for all sentences at once and one by one.
TOGETHER_BUDGET, ALONE_BUDGET = (25.0, 7, 15), (10.0, 10, 400)


@dataclass(frozen=True, slots=True)
class Embedded:
    """What one format did. layer_bytes: of the weights of all linear layers.

    all_s: to embed all sentences at once; one_s: one alone; all_over, one_over: how many times as
    fast as float32 that is. cosine, least: of the vectors with those of float32, the mean and the
    least. agreeing: how many sentences have the same nearest one as by float32. nearest: of each
    sentence its nearest one's number.
    """

    format: str
    layer_bytes: int
    all_s: float
    one_s: float
    all_over: Speedup
    one_over: Speedup
    cosine: float
    least: float
    agreeing: int
    nearest: tuple[int, ...]


def chosen(texts: Sequence[str], count: int = SENTENCES) -> list[str]:
    """Return so many of the texts, spread evenly."""
    return list(texts[:: max(1, len(texts) // count)][:count])


def nearest(vectors: Floats) -> NDArray[np.intp]:
    """Return, for each of the unit vectors, the number of the other one with the largest cosine."""
    cosines = gm.matmul(vectors, vectors.T)
    np.fill_diagonal(cosines, -np.inf)
    found: NDArray[np.intp] = cosines.argmax(1)
    return found


def compare(bert: SentenceModel, texts: Sequence[str]) -> list[Embedded]:
    """Embed the texts in every format and hold each against float32, the first."""
    bert.embed(texts[:2])
    layers = {name: formats_of(bert.tensors[f"{name}.weight"]) for name in bert.seen}
    ways = {form: {name: forms[form] for name, forms in layers.items()} for form in FORMATS}
    vectors = {form: _embedded(bert, one, texts) for form, one in ways.items()}
    together = _timed(bert, ways, [texts], TOGETHER_BUDGET)
    alone = _timed(bert, ways, [[text] for text in chosen(texts, ALONE)], ALONE_BUDGET)
    right, found = vectors["float32"], []
    neighbours = {form: nearest(one) for form, one in vectors.items()}
    for form in FORMATS:
        cosines, near = (vectors[form] * right).sum(1), neighbours[form]
        nbytes = sum(weight.nbytes for weight in ways[form].values())
        medians = together[form].median, alone[form].median
        ratios = (ratio(one[form], one["float32"]) for one in (together, alone))
        first, second = map(speedup_of, ratios)
        same = int((near == neighbours["float32"]).sum())
        alike = float(cosines.mean()), float(cosines.min()), same, tuple(map(int, near))
        told = (form, nbytes, *medians, first, second, *alike)
        found.append(Embedded(*told))
    return found


def formats_of(weight: Floats) -> dict[str, Any]:
    """Return a layer's weight in every format."""
    return {form: in_format(weight, form) for form in FORMATS}


def _embedded(bert: SentenceModel, layers: Mapping[str, Any], texts: Sequence[str]) -> Floats:
    bert.layers = dict(layers)
    return bert.embed(texts)


def _timed(
    bert: SentenceModel,
    ways: Mapping[str, Mapping[str, Any]],
    batches: Sequence[Sequence[str]],
    budget: tuple[float, int, int],
) -> Mapping[str, Samples]:
    """Return what embedding one batch took in each way, the batches taking turns."""
    entries = [
        entry_over(form, [functools.partial(_embedded, bert, one, batch) for batch in batches])
        for form, one in ways.items()
    ]
    return sample(entries, HostClock(), Budget(*budget))


def examples(texts: Sequence[str], found: Sequence[Embedded]) -> list[tuple[str, str, str]]:
    """Return sentences with their nearest by float32 and by the last format.

    One on which the two disagree is the last, where there is one.
    """
    right, other = found[0].nearest, found[-1].nearest
    differing = [i for i in range(len(texts)) if right[i] != other[i]][:1]
    agreeing = [i for i in range(len(texts)) if right[i] == other[i]]
    agreeing = agreeing[: EXAMPLES - len(differing)]
    return [(texts[i], texts[right[i]], texts[other[i]]) for i in (*agreeing, *differing)]
