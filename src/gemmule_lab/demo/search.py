"""What a number format does to the model's work: sentences embedded, and the nearest one found.

Every format embeds the same sentences; its vectors are held against those of float32, and so is
which sentence each finds nearest to every other. Times are taken in turns, one format after the
other, so that a busy moment hits all.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gemmule as gm
from gemmule_lab.demo.embeddings import Floats, SentenceModel
from gemmule_lab.harness.operands import in_format

FORMATS = ("float32", "int8", "int4")
SENTENCES = 160
TURNS = 3
ALONE = 16  # sentences that are also embedded one by one
EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Embedded:
    """What one format did. layer_bytes: of the weights of all linear layers.

    all_s: to embed all sentences at once; one_s: the median of embedding one alone. cosine, least:
    of the vectors with those of float32, the mean and the least. agreeing: how many sentences have
    the same nearest one as by float32. nearest: of each sentence its nearest one's number.
    """

    format: str
    layer_bytes: int
    all_s: float
    one_s: float
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
    vectors, all_s = _in_turns(bert, ways, lambda: bert.embed(texts), TURNS)
    # Turn by turn another sentence, the same for every format.
    alone = (text for text in itertools.cycle(chosen(texts, ALONE + 1)) for _ in ways)
    _, one_s = _in_turns(bert, ways, lambda: bert.embed([next(alone)]), ALONE)
    right, found = vectors["float32"], []
    neighbours = {form: nearest(one) for form, one in vectors.items()}
    for form in FORMATS:
        cosines = (vectors[form] * right).sum(1)
        found.append(
            Embedded(
                form,
                sum(weight.nbytes for weight in ways[form].values()),
                all_s[form],
                one_s[form],
                float(cosines.mean()),
                float(cosines.min()),
                int((neighbours[form] == neighbours["float32"]).sum()),
                tuple(int(index) for index in neighbours[form]),
            )
        )
    return found


def formats_of(weight: Floats) -> dict[str, Any]:
    """Return a layer's weight in every format."""
    return {form: in_format(weight, form) for form in FORMATS}


def _in_turns(
    bert: SentenceModel,
    ways: Mapping[str, Mapping[str, Any]],
    embed: Callable[[], Floats],
    turns: int,
) -> tuple[dict[str, Floats], dict[str, float]]:
    """Return what each way embeds, and the median of its seconds; the first turn is for warmth."""
    vectors: dict[str, Floats] = {}
    seconds: dict[str, list[float]] = {form: [] for form in ways}
    for turn in range(turns + 1):
        for form, layers in ways.items():
            bert.layers = dict(layers)
            start = time.perf_counter()
            vectors[form] = embed()
            if turn:
                seconds[form].append(time.perf_counter() - start)
    return vectors, {form: float(np.median(times)) for form, times in seconds.items()}


def examples(texts: Sequence[str], found: Sequence[Embedded]) -> list[tuple[str, str, str]]:
    """Return sentences with their nearest by float32 and by the last format.

    One on which the two disagree is the last, where there is one.
    """
    right, other = found[0].nearest, found[-1].nearest
    differing = [i for i in range(len(texts)) if right[i] != other[i]][:1]
    agreeing = [i for i in range(len(texts)) if right[i] == other[i]]
    agreeing = agreeing[: EXAMPLES - len(differing)]
    return [(texts[i], texts[right[i]], texts[other[i]]) for i in (*agreeing, *differing)]
