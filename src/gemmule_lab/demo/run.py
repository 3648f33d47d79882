"""The main job on real input: a model's weights, in five number formats, checked and measured.

The weight matrix of every linear layer is multiplied by a vector from both sides and by a block of
64 columns, in float32, float16, bfloat16, int8 and int4. Every element of every result is judged by
the oracle. Then each distinct shape is timed beside NumPy (and PyTorch where it is installed), its
matrices rotating past the caches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmule.core.problem import numpy_dtype
from gemmule_lab.ceilings.cold import rotating_bytes
from gemmule_lab.demo.model import Weights
from gemmule_lab.harness.bench import Measurement
from gemmule_lab.harness.host import HostBench, judged, sets_needed
from gemmule_lab.harness.operands import OperandSet, Sets, host_sets, in_format
from gemmule_lab.harness.products import OPS, Product
from gemmule_lab.peers.peer import Absence
from gemmule_lab.peers.registry import named
from gemmule_lab.records import results
from gemmule_lab.records.rows import Environment, Row
from gemmule_lab.verify.check import result_shape

Array: TypeAlias = NDArray[Any]

FORMATS = ("float32", "float16", "bfloat16", "int8", "int4")
OTHERS = 8  # different right-hand operands of a shape
COLUMNS = 64  # of the matmul's right operand: a small batch of tokens
PEERS = ("numpy", "torch", "torch int8pack", "torch int4pack")


@dataclass(frozen=True, slots=True)
class Part:
    """All matrices of one shape."""

    shape: tuple[int, int]
    names: tuple[str, ...]
    matrices: tuple[NDArray[np.float32], ...]

    @property
    def label(self) -> str:
        """Shape and count, for people."""
        return f"{self.shape[0]} x {self.shape[1]} ({len(self.names)})"


@dataclass(slots=True)
class Outcome:
    """What the demo found. `worst_ratio`: largest error over its bound.

    path: the file to which rows go as they come; None: to none. left: what was not measured, why.
    """

    products: int = 0
    elements: int = 0
    worst_ratio: float = 0.0
    wrong: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    absent: list[Absence] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    path: Path | None = None

    def take(self, rows: Sequence[Row], absent: Sequence[Absence]) -> None:
        """Keep what a measurement gave, on disk too."""
        self.rows += rows
        self.absent += absent
        if self.path is not None:
            results.append(self.path, rows)


def parts_of(weights: Weights) -> list[Part]:
    """Return the matrices by shape, smallest shape first."""
    by_shape: dict[tuple[int, int], list[str]] = {}
    for name, matrix in weights.matrices.items():
        by_shape.setdefault((matrix.shape[0], matrix.shape[1]), []).append(name)
    return [
        Part(shape, tuple(names), tuple(weights.matrices[name] for name in names))
        for shape, names in sorted(by_shape.items(), key=lambda item: item[0][0] * item[0][1])
    ]


def other_operand(product: Product, seed: int) -> Array:
    """Return what a matrix is multiplied with: normal numbers in the dtype of its format."""
    numbers = np.random.default_rng(seed).standard_normal(product.other_shape, np.float32)
    return numbers.astype(numpy_dtype(product.form.dtype))


def verify(parts: Sequence[Part], formats: Sequence[str], outcome: Outcome) -> Iterator[str]:
    """Multiply every matrix in every format by every operation, judging each element.

    Yields a label after each matrix and format. Wrong results are collected, not raised.
    """
    for part, name in itertools.product(parts, formats):
        for seed, (label, matrix) in enumerate(zip(part.names, part.matrices, strict=True)):
            converted = in_format(matrix, name)
            for op in OPS:
                other = other_operand(Product(op, name, part.shape, COLUMNS), seed)
                operands = OperandSet(converted, other, None).operands(op)
                try:
                    ratio = judged(op, *operands)
                except ArithmeticError as error:
                    outcome.wrong.append(f"{label}, {name}: {error}")
                else:
                    outcome.worst_ratio = max(outcome.worst_ratio, ratio)
                outcome.products += 1
                outcome.elements += int(np.prod(result_shape(op, *operands)))
            yield f"{label}, {name}"


def measurements(part: Part, formats: Sequence[str]) -> Iterator[Measurement]:
    """Yield what is timed of one shape: every format by every operation.

    As many copies of the matrices are made as it takes to rotate past the caches.
    """
    for name in formats:
        converted = [in_format(matrix, name) for matrix in part.matrices]
        for op in OPS:
            sets = _rotating(Product(op, name, part.shape, COLUMNS), converted)
            plain = None
            if name != "float32":
                plain = _rotating(Product(op, "float32", part.shape, COLUMNS), part.matrices)
            yield Measurement(f"{part.label}, {op}, {name}", sets, plain=plain)


def _rotating(product: Product, matrices: Sequence[Any]) -> Sets:
    """Return operand sets, each at addresses of its own, so that no cache has seen it."""
    others = [other_operand(product, seed) for seed in range(OTHERS)]
    turn = sets_needed(matrices[0].nbytes + others[0].nbytes)
    copies = [deepcopy(matrices[index % len(matrices)]) for index in range(turn.sets)]
    return host_sets(product, copies, others, cold=turn.cold)


def measure(
    parts: Sequence[Part],
    formats: Sequence[str],
    environment: Environment,
    outcome: Outcome,
    seconds: float,
) -> Iterator[str]:
    """Time every shape in every format; yields a label after each. Rows go to the outcome."""
    bench = HostBench(seconds, peers=named(PEERS), cold_bytes=rotating_bytes(environment.ceilings))
    for part in parts:
        for one in measurements(part, formats):
            outcome.take(*bench.measure(one, environment))
            yield one.group


def steps(parts: Sequence[Part], formats: Sequence[str]) -> tuple[int, int]:
    """Return how many labels `verify` and `measure` yield."""
    matrices = sum(len(part.names) for part in parts)
    return matrices * len(formats), len(parts) * len(formats) * len(OPS)
