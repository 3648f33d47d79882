"""Named sets of products to measure: which operations, formats and sizes; operands made lazily."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import gemmule as gm
from gemmule.lab.bench import Bench, Operands, sets_needed
from gemmule.problem import numpy_dtype
from gemmule.rung import ladder

OPS = ("matvec", "vecmat", "matmul")
FORMATS = ("float64", "float32", "float16", "bfloat16", "int8", "int4")
BITS = {"int8": 8, "int4": 4}
GROUP_SIZE = 128
BLOCK_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Suite:
    """What a suite measures: each operation in each format on each (rows, columns).

    every_rung: all rungs of the ladder that take the problem, not the automatic choice alone.
    """

    title: str
    ops: tuple[str, ...]
    formats: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    every_rung: bool = False


def _squares(*sizes: int) -> tuple[tuple[int, int], ...]:
    return tuple((size, size) for size in sizes)


SUITES = {
    "quick": Suite("a first look", OPS, ("float32", "float16", "int4"), _squares(1024, 4096)),
    "cpu": Suite("sizes and formats", OPS, FORMATS, _squares(256, 512, 1024, 2048, 4096, 8192)),
    "model": Suite(
        "layers of a language model of 7 billion weights", ("matvec", "matmul"),
        ("float32", "float16", "bfloat16", "int8", "int4"),
        ((4096, 4096), (11008, 4096), (4096, 11008), (32000, 4096)),
    ),
    "ladder": Suite(
        "every rung", OPS, ("float32", "int4"), _squares(2048), every_rung=True
    ),
}  # fmt: skip


def count(suite: Suite) -> int:
    """Return how many products a suite measures."""
    return len(suite.ops) * len(suite.formats) * len(suite.shapes)


def benches(suite: Suite, seed: int = 0) -> Iterator[Bench]:
    """Yield the products of a suite, operands made when each is asked for."""
    for shape in suite.shapes:
        for name in suite.formats:
            for op in suite.ops:
                yield _bench(suite, op, shape, name, seed)


def _bench(suite: Suite, op: str, shape: tuple[int, int], name: str, seed: int) -> Bench:
    rng = np.random.default_rng(seed)
    first = _operands(op, shape, name, rng)
    turn = sets_needed(sum(int(operand.nbytes) for operand in first))
    sets = [first, *(_operands(op, shape, name, rng) for _ in range(turn.sets - 1))]
    group = f"{shape[0]} x {shape[1]}, {op}, {name}"
    rungs: tuple[str | None, ...] = (None,)
    if suite.every_rung:
        rungs = _rungs(op, sets[0])
    return Bench(group, op, sets, "cold" if turn.cold else "warm", rungs=rungs)


def _operands(op: str, shape: tuple[int, int], name: str, rng: np.random.Generator) -> Operands:
    matrix: Any = rng.standard_normal(shape, np.float32)
    size = {"matvec": (shape[1],), "vecmat": (shape[0],), "matmul": (shape[1], BLOCK_COLUMNS)}[op]
    other: Any = rng.standard_normal(size, np.float32)
    if name in BITS:
        matrix = gm.quantize(matrix, bits=BITS[name], group_size=GROUP_SIZE)
    else:
        matrix, other = (v.astype(numpy_dtype(name)) for v in (matrix, other))
    return (other, matrix) if op == "vecmat" else (matrix, other)


def _rungs(op: str, operands: Operands) -> tuple[str | None, ...]:
    """Return the rungs of the CPU ladder that take these operands as they are."""
    problem = gm.plan(op, *operands).problem
    folder = "quantized" if problem.quant is not None else op
    takers = [rung.name for rung in ladder(folder, "cpu") if rung.refusal(problem) is None]
    return tuple(dict.fromkeys(takers))


def narrowed(
    suite: Suite, ops: Sequence[str], formats: Sequence[str], sizes: Sequence[int]
) -> Suite:
    """Return the suite with the given operations, formats and square sizes in place of its own."""
    return Suite(
        suite.title,
        tuple(ops) or suite.ops,
        tuple(formats) or suite.formats,
        _squares(*sizes) or suite.shapes,
        suite.every_rung,
    )
