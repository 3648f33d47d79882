"""Operands of a tuning run: random codes as a problem says, and many copies of a set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulated_driver import emulated
from gemmule.core.problem import Problem
from gemmule.oracle.problems import make_problem
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.stack import QuantizedStack
from gemmule.tuning import operands
from gemmule.tuning.operands import DeviceMemory, random_operands
from gemmule.tuning.sample import draw

OF_CODES = [p for p in islice(draw("cuda", 3), 120) if p.quant and p.compulsory_bytes < 1 << 21]
FLOATS = make_problem("matmul", 7, 5, 9, ("float16",) * 3, layout_b="col")


def codes_of(host: operands.Host) -> QuantizedMatrix:
    found = host.b.matrix if isinstance(host.b, QuantizedStack) else host.a
    assert isinstance(found, QuantizedMatrix)
    return found


@pytest.mark.parametrize("problem", OF_CODES, ids=Problem.describe)
def test_random_codes_are_as_the_problem_says(problem: Problem) -> None:
    spec, host = problem.codes, random_operands(problem, 1)
    found, grouped = codes_of(host), problem.op == "grouped"
    shape = (problem.batch * problem.n if grouped else problem.m, problem.reduction)
    assert found.shape == shape
    assert found.transposed == spec.transposed
    assert found.layout == spec.layout
    assert (found.bits, found.group_size or -1) == (spec.bits, spec.group_size or -1)
    assert str(found.scales.dtype) == spec.scale_dtype
    plain = found.to(layout="row")
    QuantizedMatrix.from_parts(  # refuses parts that do not fit each other
        plain.codes,
        plain.scales,
        plain.zeros,
        shape=plain.stored_shape,
        bits=plain.bits,
        group_size=plain.group_size,
    )


def test_a_large_matrix_of_codes_repeats_its_first_rows(limit: Callable[..., None]) -> None:
    limit(operands, SOME_CODES=5 * 256)
    problem = next(p for p in OF_CODES if p.op == "matvec" and p.m > 64 and p.n < 2048)
    plain = codes_of(random_operands(problem, 1)).to(layout="row")
    count = max(1, 5 * 256 // plain.stored_shape[1] | 1)
    assert len(plain.codes) > count
    for part in (plain.codes, plain.scales):
        np.testing.assert_array_equal(part[count:], part[:-count])


def parts_of(operand: Any) -> list[Any]:
    held = operand.array
    held = held.matrix if isinstance(held, QuantizedStack) else held
    if not isinstance(held, QuantizedMatrix):
        return [held]
    return [one for one in (held.codes, held.scales, held.zeros, held.perm) if one is not None]


def check_copies(host: operands.Host) -> None:
    place = DeviceMemory(0)
    for part in host.parts():
        copies = [parts_of(one) for one in place.copies(part, 6)]
        assert len(copies) == 6
        for same in zip(*copies, strict=True):
            pointers = sorted(one.pointer for one in same)
            assert min(np.diff(pointers)) >= same[0].nbytes
            assert len({pointer % 256 for pointer in pointers}) == 1
            assert len({(one.shape, one.strides, one.to_host().tobytes()) for one in same}) == 1


@pytest.mark.parametrize("op", ["matmul", "grouped", "floats"])
def test_copies_hold_the_same_at_like_addresses(op: str, own_cache: Path) -> None:
    problem = next((one for one in OF_CODES if one.op == op), FLOATS)
    with emulated():
        check_copies(random_operands(problem, 1))


def test_operands_begin_as_allocators_have_it_unless_the_problem_says_worse() -> None:
    odd = make_problem("matmul", 64, 9, 64, ("float32",) * 3)  # 4 bytes by its strides alone
    for problem, begins in ((odd, {0}), (replace(odd, n=64, alignment=4), {4})):
        assert problem.alignment == 4
        found = (part.array for part in random_operands(problem, 1).parts())
        assert {one.__array_interface__["data"][0] % 64 for one in found} == begins
