"""Which problems to test: the edges every rung has to survive, and random ones for volume."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gemmule.core.problem import COMPLEX, FLOAT4, FLOAT4_DTYPE, INTEGERS, Problem, QuantSpec
from gemmule.core.rung import Signature, floats, integers, same
from gemmule.oracle.inputs import VIEWS, Case, natural_alignment
from gemmule.oracle.values import placements
from gemmule.quant.float4 import GROUP_SIZES

EDGE_SIZES = (0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
# (m, n, k) of whole tiles and whole vectors: what is left over at other sizes hides a tile that was
# kept too long, and a copy that nobody waited for.
ALIGNED = {
    "matvec": ((64, 64, 1), (128, 1024, 1), (1024, 128, 1)),
    "matmul": ((64, 64, 64), (256, 192, 160), (70, 16, 128), (128, 64, 256)),
    "grouped": ((64, 64, 64), (128, 192, 160), (300, 16, 128), (40, 64, 256)),
}
EXPERTS = (3, 1, 8, 5, 40)  # of the grouped products to test, by turns
ALL_SIGNATURES: tuple[Signature, ...] = (
    *floats("float64", "float32", "float16", "bfloat16"),
    ("float16", "bfloat16", "float32"),
    ("float64", "float32", "float64"),
    ("float32", "float16", "float32"),
    *integers(),
    *same("complex64", "complex128"),
)
_CODES = ("uint4", "uint8", FLOAT4_DTYPE)
QUANTIZED_SIGNATURES: tuple[Signature, ...] = tuple(
    (a, b, b) for a in _CODES for b in ("float32", "float16", "bfloat16")
)
_GROUPS = (None, -1, 3, 16, 32, 128)


def make_problem(op: str, m: int, n: int, k: int, signature: Signature, **options: Any) -> Problem:
    """Return a problem on packed operands: its alignment is what their strides give.

    k is ignored for a matvec. options: other fields of `Problem`.

    >>> make_problem("matvec", 3, 6, 1, ("float16", "float16", "float16")).alignment
    4
    """
    return _made(op, (m, n, 1 if op == "matvec" else k), signature, **options)


# Rungs of the same signatures meet the same problems.
@functools.lru_cache(maxsize=2**15, typed=True)
def _made(op: str, sizes: tuple[int, int, int], signature: Signature, **options: Any) -> Problem:
    a, b, out = signature
    problem = Problem(op, *sizes, a=a, b=b, out=out, **options)
    alignment = natural_alignment(problem)
    return problem if alignment == problem.alignment else replace(problem, alignment=alignment)


def edge_problems(
    op: str,
    signature: Signature,
    layouts: Sequence[str] = ("row",),
    *,
    layouts_b: Sequence[str] = ("row", "col"),
    tiles: Sequence[int] = (),
    quant: QuantSpec | None = None,
) -> Iterator[Problem]:
    """Yield the problems every rung is tested at, small ones first in each group.

    Sizes 0, 1, 2, 3, odd ones, and both sides of 8, 16, 32, 64 and 128; both sides of each of
    `tiles` and of twice it; tall and wide; batches of 2 and 3 with and without shared operands.
    Each size meets several partners. layouts: of A; layouts_b: of B (matmul only).

    Raises ValueError for an unknown op.

    >>> sizes = [(p.m, p.n) for p in edge_problems("matvec", ("float32",) * 3)]
    >>> (0, 33) in sizes, (129, 129) in sizes, (3, 4099) in sizes
    (True, True, True)
    """
    if op not in ALIGNED:
        raise ValueError(f"op is {op!r}; a problem's op must be one of {', '.join(ALIGNED)}.")
    near = {tile * times + side for tile in tiles for times in (1, 2) for side in (-1, 0, 1)}
    sizes = sorted({*EDGE_SIZES, *(size for size in near if size > 0)})
    shapes = _matvec_sizes(sizes) if op == "matvec" else _matmul_sizes(sizes)
    pairs = [(a, b) for a in layouts for b in (layouts_b if op != "matvec" else ("row",))]
    for layout_a, layout_b in pairs:
        options = {"layout_a": layout_a, "layout_b": layout_b, "quant": quant}
        for index, (m, n, k) in enumerate(shapes):
            experts = EXPERTS[index % len(EXPERTS)] if op == "grouped" else 1
            yield make_problem(op, m, n, k, signature, batch=experts, **options)
        if op == "grouped":
            continue
        for (m, n, k), (batch, shared_a, shared_b) in itertools.product(
            ((1, 1, 1), (33, 17, 31), (5, 64, 65), (0, 3, 2)),
            ((2, False, False), (3, True, False), (3, False, True), (0, False, False)),
        ):
            if quant is None or not shared_b:
                shared = {"shared_a": shared_a or quant is not None, "shared_b": shared_b}
                yield make_problem(op, m, n, k, signature, batch=batch, **shared, **options)


def _matvec_sizes(sizes: list[int]) -> list[tuple[int, int, int]]:
    pairs = {(s, s) for s in sizes}
    pairs |= {pair for s in sizes for p in (1, 3, 33, 64) for pair in ((s, p), (p, s))}
    pairs |= {(1000, 3), (3, 1000), (3, 4099), (4099, 1), (1, 4099), (257, 511), (0, 1000)}
    return [(m, n, 1) for m, n in sorted(pairs)]


def _matmul_sizes(sizes: list[int]) -> list[tuple[int, int, int]]:
    triples = {
        triple
        for s in sizes
        for triple in (
            (s, s, s),
            (s, 33, 17),
            (17, s, 33),
            (33, 17, s),
            (1, s, s),
            (s, 1, s),
            (s, s, 1),
        )
    }
    triples |= {(1000, 3, 2), (2, 1000, 3), (3, 2, 1000), (1, 1, 4099), (130, 5, 257), (2, 3, 0)}
    return sorted(triples)


def nonfinite_cases(problem: Problem, view: str = "contiguous") -> Iterator[Case]:
    """Yield the cases that place one NaN or infinity each: every place, every value."""
    for seed in range(len(placements(problem))):
        yield Case(problem, "nonfinite", seed, view)


def random_case(
    rng: np.random.Generator,
    *,
    ops: Sequence[str] = ("matvec", "matmul"),
    signatures: Sequence[Signature] = ALL_SIGNATURES + QUANTIZED_SIGNATURES,
    views: Sequence[str] = VIEWS,
    layouts: Sequence[str] = ("row", "col", "strided"),
    largest: int = 33,
) -> Case:
    """Draw one case: mostly sizes of 0..`largest` and exact integers, now and then longer sums.

    The case holds its own seed, so that its repr reproduces it.

    >>> case = random_case(np.random.default_rng(3))
    >>> case.problem.op in ("matvec", "matmul") and case.problem.m <= 33
    True
    """
    draw = rng.integers
    signature = signatures[int(draw(len(signatures)))]
    op = ops[int(draw(len(ops)))]
    m, n, k, pick, batch_pick, kind_pick, spare = (int(v) for v in draw(0, largest + 1, 7))
    view = views[int(draw(len(views)))]
    if view == "loose" and pick % 3 == 0:  # what the view is about
        m, n, k = (1, n, k) if pick % 2 else (m, 1, k)
    if kind_pick % 20 == 9:  # NaN and infinity meet zeros in the shortest sums
        n, k = n % 3, k % 3
    if pick == 0:  # a longer sum
        n, k = (n * 40, k) if op == "matvec" else (n, k * 10)
    options: dict[str, Any] = {
        "layout_a": layouts[int(draw(len(layouts)))],
        "layout_b": "row" if op == "matvec" else layouts[spare % len(layouts)],
    }
    quantized = signature[0] in _CODES and signature[1] not in INTEGERS
    if quantized:
        options |= {"quant": _random_quant(rng, signature), "layout_a": "row"}
    if batch_pick < 6:  # batches of 2, 3, rarely 0; one operand shared in two cases of three
        options |= {
            "batch": 0 if batch_pick == 5 and spare % 4 == 0 else 2 + batch_pick % 2,
            "shared_a": quantized or batch_pick // 2 == 1,
            "shared_b": not quantized and batch_pick // 2 == 2,
        }
    elif quantized:
        options["shared_a"] = True
    problem = make_problem(op, m, n, k, signature, **options)
    return Case(problem, *values_by(kind_pick, int(draw(1 << 48)), problem), view)


def values_by(pick: int, seed: int, problem: Problem) -> tuple[str, int]:
    """Return the kind and the seed of a problem's values: of ten picks six are exact integers.

    >>> values_by(9, 1000, Problem("matvec", 2, 3)), values_by(2, 1000, Problem("matvec", 2, 3))
    (('nonfinite', 488), ('integers', 1000))
    """
    if problem.out in INTEGERS or pick % 10 < 6:
        return "integers", seed
    kind = ("normal", "scaled", "cancel", "nonfinite")[pick % 10 - 6]
    if kind == "nonfinite":
        return ("normal", seed) if problem.out in COMPLEX else (kind, seed % 512)
    return kind, seed


def float4_spec(
    pick: int, *, transposed: bool = False, has_perm: bool = False, layout: str = "row"
) -> QuantSpec:
    """Return how one of the formats of 4-bit floats is stored."""
    dtype, name = [*FLOAT4.items()][pick]
    return QuantSpec(4, GROUP_SIZES[name], False, layout, dtype, transposed, has_perm)


def _random_quant(rng: np.random.Generator, signature: Signature) -> QuantSpec:
    group, flags, scale = (int(v) for v in rng.integers(0, (len(_GROUPS), 8, 3)))
    if signature[0] == FLOAT4_DTYPE:
        return float4_spec(flags & 1, transposed=bool(flags & 2), has_perm=flags & 4 == 4)
    return QuantSpec(
        bits=4 if signature[0] == "uint4" else 8,
        group_size=_GROUPS[group],
        has_zeros=bool(flags & 1),
        layout="row",
        scale_dtype=("float32", "float16", "bfloat16")[scale],
        transposed=bool(flags & 2),
        has_perm=flags & 4 == 4 and scale == 0,
    )
