"""Compiling ahead: products keep their order, and are given as their operands would be."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import replace

import pytest

from emulated_driver import emulated
from gemmule.backends.cuda.launch import CudaBackend
from gemmule_lab.harness.ahead import call_of, needed, prepared
from gemmule_lab.harness.device_operands import device_sets
from gemmule_lab.harness.products import Product

SOME = [Product("matvec", "int4", (300 + number, 64)) for number in range(20)]


def test_products_keep_their_order_and_each_is_prepared_before_it_comes() -> None:
    asked: dict[Product, Future[None]] = {}

    def ask(product: Product) -> list[Future[None]]:
        asked[product] = Future()
        if len(asked) > 3:  # each is done three later, and then those behind it
            asked[SOME[len(asked) - 4]].set_result(None)
        if product == SOME[-1]:
            [one.set_result(None) for one in asked.values() if not one.done()]
        return [asked[product]]

    found = []
    for product in prepared(iter(SOME), ask, count=5):
        assert asked[product].done()
        found.append(product)
    assert found == SOME


def test_no_more_is_drawn_than_is_to_be_ahead() -> None:
    begun: list[Product] = []

    def ask(product: Product) -> list[Future[None]]:
        begun.append(product)
        return []

    coming = prepared(itertools.cycle(SOME), ask, count=3)
    assert [next(coming), next(coming)] == SOME[:2]
    coming.close()
    assert len(begun) == 5


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


def test_what_the_default_choice_runs_is_what_is_compiled() -> None:
    product = Product("matmul", "int4 g64 x bfloat16, scales float16", (256, 256), 3)
    with emulated(seed=1) as driver:
        ((_, kernels, arch, _),) = needed(product, CudaBackend().machine("cuda"))
        assert not driver.launches
        sets = device_sets(product, warm=True)
        plan = sets.plan()
        machine = plan.choice.machine
        steps = plan.rung.steps(plan.problem, plan.params, machine)
        assert (set(kernels), arch) == ({step.kernel for step in steps}, machine.arch)
        del sets, plan


def test_what_cannot_be_chosen_asks_for_nothing() -> None:
    with emulated(seed=1):
        machine = replace(CudaBackend().machine("cuda"), arch="sm_10")
        assert needed(SOME[0], machine) == []
