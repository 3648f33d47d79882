"""Compiling ahead: products keep their order, and are given as their operands would be."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from emulated_driver import emulated
from gemmule_lab.harness import ahead
from gemmule_lab.harness.ahead import Compiler, call_of, prepared
from gemmule_lab.harness.device_operands import device_sets
from gemmule_lab.harness.products import Product

SOME = [Product("matvec", "int4", (300 + number, 64)) for number in range(20)]


def test_products_keep_their_order_and_each_is_prepared_before_it_comes() -> None:
    done: list[Product] = []
    slow = threading.Event()

    def prepare(product: Product) -> None:
        if product == SOME[0]:
            slow.wait(0.05)  # others overtake it
        done.append(product)
        if product == SOME[3]:
            raise ValueError("the product itself will say so")

    found = []
    for product in prepared(iter(SOME), prepare, count=5):
        assert product in done
        found.append(product)
    assert found == SOME


def test_no_more_is_drawn_than_is_to_be_ahead_and_what_waits_is_dropped_at_the_end() -> None:
    begun: list[Product] = []
    coming = prepared(itertools.cycle(SOME), begun.append, count=3)
    assert [next(coming), next(coming)] == SOME[:2]
    coming.close()
    assert len(begun) <= 5


@pytest.mark.parametrize("form", ["int4 g32", "int8 g128"])
@pytest.mark.parametrize(("op", "width"), [("matvec", 1), ("matmul", 5), ("matmul", 40)])
def test_a_product_to_come_is_what_its_operands_make(form: str, op: str, width: int) -> None:
    for shape in ((256, 264), (300, 257)):  # 16 bytes and 2 from column to column
        product = Product(op, f"{form} x bfloat16, scales float16", shape, width)
        with emulated(seed=1):
            sets = device_sets(product, warm=True)
            plan = sets.plan()
            assert call_of(product) == plan.choice.call
            del sets, plan


def test_what_the_default_choice_runs_is_what_is_compiled(fault: Callable[..., Any]) -> None:
    built: list[Any] = []

    def kept(sound: Callable[..., Any], *given: Any) -> Any:
        built.append(sound(*given))
        return built[-1]

    fault(ahead, "kernels", kept)
    product = Product("matmul", "int4 g64 x bfloat16, scales float16", (256, 256), 3)
    with emulated(seed=1) as driver:
        Compiler("cuda")(product)
        assert not driver.launches
        sets = device_sets(product, warm=True)
        plan = sets.plan()
        ours = {
            step.kernel for step in plan.rung.steps(plan.problem, plan.params, plan.choice.machine)
        }
        assert [set(one.symbols) for one in built] == [ours]
        del sets, plan
