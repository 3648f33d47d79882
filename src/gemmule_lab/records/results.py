"""Results on disk: a log of what ``gemmule bench`` and the demo measured; means of ratios."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from gemmule.core.problem import DTYPES, FLOAT4_DTYPE, ITEMSIZE, Problem
from gemmule_lab.records import log
from gemmule_lab.records.rows import KINDS, TEMPERATURES, Environment, Row

QUANTISED = ("uint4", FLOAT4_DTYPE)  # stored two to a byte, so no dtype of its own
CODES = ("uint8", *QUANTISED)
LAYOUTS = ("row", "col", "strided")

Results: TypeAlias = log.Log[Row]


def append(path: Path, items: Iterable[Environment | Row]) -> None:
    """Append environments and rows to a results file, creating it and its folder if need be."""
    log.append(path, "row", items)


def replace(path: Path, items: Iterable[Environment | Row]) -> None:
    """Replace a results file, all of it or nothing."""
    log.replace(path, "row", items)


def read(path: Path) -> Results:
    """Read and check a results file; ValueError as `gemmule_lab.records.log.read` raises it."""
    return log.read(path, "row", Row, _check)


def _check(row: Row) -> None:
    if row.kind not in KINDS or row.temperature not in TEMPERATURES:
        raise ValueError(
            f"kind {row.kind!r}, temperature {row.temperature!r}; they must be one of "
            f"{', '.join(KINDS)} and of {', '.join(TEMPERATURES)}."
        )
    log.check_times(row.times_us)
    _check_problem_fields(row.problem)


def _check_problem_fields(problem: Problem) -> None:
    if problem.op not in ("matvec", "matmul"):
        raise ValueError(f"op is {problem.op!r}; it must be 'matvec' or 'matmul'.")
    if min(problem.m, problem.n, problem.k, problem.batch) < 0:
        raise ValueError("a size of the problem is negative.")
    if problem.a not in DTYPES + QUANTISED or {problem.b, problem.out} - set(DTYPES):
        raise ValueError(f"unknown dtypes {problem.a}, {problem.b}, {problem.out}.")
    if {problem.layout_a, problem.layout_b, problem.layout_out} - set(LAYOUTS):
        raise ValueError(f"a layout is none of {', '.join(LAYOUTS)}.")
    spec = problem.quant
    # Quantised to 8 bits the matrix is called uint8, as a plain one of bytes is.
    if (problem.a in QUANTISED and spec is None) or (spec is not None and problem.a not in CODES):
        raise ValueError(f"A of dtype {problem.a} does not go with quantisation {spec}.")
    if spec is not None:
        size = spec.group_size
        if not 1 <= spec.bits <= 16 or (size is not None and size != -1 and size < 1):
            raise ValueError(f"quantisation to {spec.bits} bits in groups of {size} is none.")
        if spec.scale_dtype not in ITEMSIZE:
            raise ValueError(f"scale_dtype {spec.scale_dtype!r} is unknown.")


def geomean(values: Iterable[float]) -> float:
    """Return the geometric mean, the right one for ratios; ValueError unless all are positive.

    >>> geomean([0.5, 2.0])
    1.0
    """
    numbers = list(values)
    if not numbers or min(numbers) <= 0:
        raise ValueError(f"the geometric mean needs one or more positive values, not {numbers}.")
    return math.exp(math.fsum(math.log(v) for v in numbers) / len(numbers))
