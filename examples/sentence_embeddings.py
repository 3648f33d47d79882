"""Sentence embeddings of a real model, its linear layers in 8 and 4 bits, against float32.

``python examples/sentence_embeddings.py [number of sentences]`` runs all-MiniLM-L6-v2 in NumPy:
WordPiece, six transformer layers, a mean over the tokens. For each way to quantise the layers it
prints the mean and the least cosine to the embeddings of float32, over sentences of Python's own
documentation. What layers are given is gathered over 100 other sentences: the importance of a
column is the mean square of its inputs; for gptq it is their second moments.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np

import gemmule as gm
from gemmule_lab.demo.embeddings import load_model, sentences

INT4 = (("rtn", False), ("mse", False), ("hqq", False), ("hqq", True), ("gptq", True))
WAYS = [(8, -1, "rtn", False), (8, 64, "rtn", False)]
WAYS += [(4, size, *way) for size, way in itertools.product((64, 32), INT4)]


def main(count: int = 250) -> None:
    bert, texts = load_model(), list(sentences())
    chosen = texts[:: len(texts) // count][:count]
    others = [text for text in texts if text not in set(chosen)]
    bert.embed(others[:: len(others) // 100][:100])
    seen = {name: x.T @ x / len(x) for name, x in bert.seen.items()}
    right = bert.embed(chosen)
    print(f"{len(chosen)} sentences, {len(seen)} layers")
    print("bits group method importance  error  cosine  least")
    for bits, size, method, weigh in WAYS:
        for name in seen:
            W, known = bert.tensors[f"{name}.weight"], {}
            if weigh:
                gptq = method == "gptq"
                known = {"hessian": seen[name]} if gptq else {"importance": seen[name].diagonal()}
            bert.layers[name] = gm.quantize(W, bits, size, method=method, **known)
        cosine = (bert.embed(chosen) * right).sum(1)
        error = np.mean([Q.error for Q in bert.layers.values()])
        print(f"{bits:4} {size:5} {method:6} {'yes' if weigh else 'no':10} {error:6.4f}", end=" ")
        print(f"{cosine.mean():7.5f} {cosine.min():6.4f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
