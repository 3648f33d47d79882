"""all-MiniLM-L6-v2 in NumPy: WordPiece, six transformer layers, a mean over the tokens.

Its linear layers multiply by whatever stands for their weights, float32 or quantised; so one
network tells what a number format does to what the model is for.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule_lab.demo import model

Floats = NDArray[np.float32]

MODULES = (
    "argparse bisect calendar collections configparser contextlib csv datetime decimal difflib "
    "email.message enum fractions functools heapq http.client inspect itertools json logging os "
    "pathlib random shutil socket statistics string subprocess tarfile tempfile textwrap threading "
    "typing unittest urllib.request zipfile"
)
HEADS, LAYERS, MOST_TOKENS = 12, 6, 256


def sentences() -> Iterator[str]:
    """Yield the plain sentences of Python's own docstrings, in the order of MODULES."""
    seen = set()
    for module in map(importlib.import_module, MODULES.split()):
        public = [thing for _, thing in sorted(vars(module).items()) if callable(thing)]
        for text in (inspect.getdoc(thing) or "" for thing in (module, *public)):
            for part in re.split(r"\n\s*\n|(?<=[.!?])\s+(?=[A-Z])", text):
                line = " ".join(part.split())
                plain = re.fullmatch(r"[A-Z][a-z]*( [\w,;'()/-]+)+[.!?]", line)
                if plain and 40 <= len(line) <= 200 and line not in seen:
                    seen.add(line)
                    yield line


class SentenceModel:
    """The network. layers: what replaces weights, by the layer's name; None, its float32 ones.

    seen: each layer's inputs, a row for a token, of the texts embedded last.
    """

    def __init__(self, tensors: Mapping[str, Floats], vocabulary: Sequence[str]) -> None:
        self.tensors = tensors
        self.ids = {piece: number for number, piece in enumerate(vocabulary)}
        self.layers: dict[str, Any] = {}
        self.seen: dict[str, Floats] = {}

    def tokens(self, text: str) -> list[int]:
        """Return the WordPiece numbers of a text: of each word the longest piece, then the next."""
        found = [self.ids["[CLS]"]]
        for word in re.findall(r"[^\W_]+|[^\w\s]|_", text.lower()):
            pieces, start = [], 0
            while start < len(word):
                ends = range(len(word), start, -1)
                tries = (("##" * (start > 0) + word[start:end], end) for end in ends)
                known = ((piece, end) for piece, end in tries if piece in self.ids)
                piece, start = next(known, ("[UNK]", len(word)))
                pieces.append(self.ids[piece])
            found += pieces
        return [*found[: MOST_TOKENS - 1], self.ids["[SEP]"]]

    def embed(self, texts: Sequence[str]) -> Floats:
        """Return unit vectors (texts, 384); the tokens of all texts share each linear layer."""
        numbers = [self.tokens(text) for text in texts]
        ends = np.cumsum([len(one) for one in numbers])
        spans = [slice(end - len(one), end) for one, end in zip(numbers, ends, strict=True)]
        tables = ("word", "position", "token_type")
        names = (f"embeddings.{table}_embeddings.weight" for table in tables)
        words, places, kinds = (self.tensors[name] for name in names)
        x = words[np.concatenate(numbers)] + np.concatenate([places[: len(one)] for one in numbers])
        x = self._norm(x + kinds[0], "embeddings.LayerNorm")
        for index in range(LAYERS):
            x = self._layer(x, f"encoder.layer.{index}.", spans)
        y = np.stack([x[span].mean(0) for span in spans])
        unit: Floats = y / np.linalg.norm(y, axis=1, keepdims=True)
        return unit

    def _linear(self, x: Floats, name: str) -> Floats:
        self.seen[name] = x
        weight = self.layers.get(name, self.tensors[f"{name}.weight"])
        y: Floats = x @ weight.T
        y += self.tensors[f"{name}.bias"]
        return y

    def _norm(self, x: Floats, name: str) -> Floats:
        x = x - x.mean(-1, keepdims=True)
        x /= np.sqrt((x * x).mean(-1, keepdims=True) + 1e-12)
        scaled: Floats = x * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]
        return scaled

    def _layer(self, x: Floats, at: str, spans: Sequence[slice]) -> Floats:
        x = x + self._linear(self._attended(x, at, spans), f"{at}attention.output.dense")
        x = self._norm(x, f"{at}attention.output.LayerNorm")
        wide = self._linear(x, f"{at}intermediate.dense")
        wide *= 0.5 + 0.5 * erf(wide / np.sqrt(np.float32(2)))
        return self._norm(x + self._linear(wide, f"{at}output.dense"), f"{at}output.LayerNorm")

    def _attended(self, x: Floats, at: str, spans: Sequence[slice]) -> Floats:
        q, k, v = (
            self._linear(x, f"{at}attention.self.{name}").reshape(len(x), HEADS, -1).swapaxes(0, 1)
            for name in ("query", "key", "value")
        )
        context = np.empty_like(x)
        for span in spans:
            scores = q[:, span] @ k[:, span].swapaxes(1, 2) / np.sqrt(np.float32(q.shape[2]))
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
            context[span] = (scores @ v[:, span]).swapaxes(0, 1).reshape(-1, x.shape[1])
        return context


def erf(x: Floats) -> Floats:
    """Return the error function within 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    factors = np.array(
        [1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592, 0], np.float32
    )
    tail = np.polyval(factors, 1 / (1 + np.float32(0.3275911) * abs(x))) * np.exp(-x * x)
    found: Floats = np.copysign(1 - tail, x)
    return found


def load_model() -> SentenceModel:
    """Return the model, from the cache or downloaded; `model.Unreachable` where it is not."""
    return SentenceModel(*model.contents())
