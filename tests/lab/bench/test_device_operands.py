"""What a bench on a GPU judges of a result, and what that catches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from emulated_driver import emulated
from gemmule_lab.bench import suites
from gemmule_lab.harness import device_operands
from gemmule_lab.harness.device_operands import device_sets, judge, judge_ends
from gemmule_lab.harness.operands import OperandSet
from gemmule_lab.harness.products import FORMATS, Product


class Placed:
    """A host array that is asked for as one on a device."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def to_host(self) -> np.ndarray[Any, Any]:
        return self.array


def judged(op: str, group: int, width: int, wrong_at: int | None = None) -> float:
    rng = np.random.default_rng(3)
    Q = gm.quantize(rng.standard_normal((96, 256), np.float32), bits=4, group_size=group)
    inner, outer = (96, 256) if op == "vecmat" else (256, 96)
    shape = (inner, width) if op == "matmul" else (inner,)
    x = rng.standard_normal(shape, np.float32)
    operands = (x, Q) if op == "vecmat" else (Q, x)
    plan = gm.plan(op, *operands)
    out = plan(*operands)
    assert out.shape[0] == outer
    if wrong_at is not None:
        out[wrong_at] += 0.25
    return judge_ends(op, OperandSet(Q, Placed(x), Placed(out)), plan)


@pytest.mark.parametrize(("op", "width"), [("matvec", 1), ("vecmat", 1), ("matmul", 5)])
@pytest.mark.parametrize("group", [32, -1])
def test_right_results_pass_and_a_wrong_end_does_not(op: str, width: int, group: int) -> None:
    assert 0 < judged(op, group, width) <= 1
    for at in (0, -1):
        with pytest.raises(ArithmeticError, match="int4"):
            judged(op, group, width, wrong_at=at)


def test_a_transposed_matrix_of_codes_is_multiplied_and_judged_beside_its_floats(
    limit: Any,
) -> None:
    limit(device_operands, MOST_SETS=1)
    product = Product("matmul", "int4 g32 x bfloat16", (96, 160), 5, transposed=True)
    with emulated(seed=1):
        sets = device_sets(product)
        (one,), plan = sets.items, sets.plan()
        assert (one.a.shape, one.b.shape, one.out.shape) == ((160, 96), (96, 5), (160, 5))
        assert device_operands.in_floats(sets).items[0].a.shape == (160, 96)
        plan(one.a, one.b, out=one.out)
        assert 0 < judge_ends("matmul", one, plan) <= 1
        del sets, one, plan


def test_weights_are_measured_beside_what_they_replace_both_ways_and_by_any_width() -> None:
    products = suites.CUDA_SUITES["replaced"].products
    assert len(products) == len(set(products))
    for bits, group, turned in ((4, 128, False), (8, 128, False), (4, 32, False), (4, 128, True)):
        form = f"int{bits} g{group} x bfloat16, scales float16"
        widths = {p.width for p in products if (p.format, p.transposed) == (form, turned)}
        assert {64, 128, 4096} <= widths, (form, turned)


def test_the_suite_meets_every_group_of_its_peer_at_one_and_at_sixteen_columns() -> None:
    products = suites.CUDA_SUITES["quantised"].products
    assert len(products) == len(set(products))
    for group in (32, 64, 128, 256):
        forms = [p for p in products if p.format == f"int4 g{group} x bfloat16"]
        assert {1, 16} <= {p.width for p in forms}
        assert {4096, 8192, 16384} == {p.shape[0] for p in forms}
    assert all(FORMATS[product.format].bits for product in products)


@pytest.mark.parametrize(
    ("shape", "width"), [((1, 70), 9), ((3, 30), 5)], ids=["run as its transpose", "as asked"]
)
def test_any_element_of_a_float_product_is_judged(shape: tuple[int, int], width: int) -> None:
    with emulated(seed=1):
        one = device_sets(Product("matmul", "float32", shape, width)).items[0]
        plan = gm.plan("matmul", one.a, one.b)
        plan(one.a, one.b, out=one.out)
        choice = plan.choice
        arithmetic = choice.rung.arithmetic(choice.problem)
        given = ("matmul", one, choice.problem, arithmetic, choice.params)
        assert 0 < judge(*given) <= 1
        result = one.out.to_host().copy()
        result[-1, -1] += 0.25
        wrong = replace(one, out=Placed(result))
        try:
            said = str(judge("matmul", wrong, *given[2:]))
        except ArithmeticError as error:
            said = str(error)
        assert "are wrong" in said
        del one, plan, choice, wrong, given  # before the device goes


@pytest.mark.parametrize("form", ["float32", "int8 codes", "int4 g32 x float16"])
def test_cold_sets_lie_in_memory_of_their_own(limit: Any, form: str) -> None:
    """What rotates is read from memory only where no two sets are the same bytes."""
    limit(device_operands, MOST_SETS=3)
    with emulated(seed=1):
        sets = device_sets(Product("matvec", form, (40, 64)))
        assert len(sets.items) == 3
        for part in ("a", "b", "out"):
            held = [getattr(one, part) for one in sets.items]
            codes = [getattr(one, "codes", one) for one in held]
            assert len({one.pointer for one in codes}) == 3, part
        del sets, held, codes
