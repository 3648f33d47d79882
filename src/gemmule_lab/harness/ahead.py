"""Compile ahead: kernels of the products of codes to come, by threads, while others are measured.

A random product of codes mostly meets a kernel that was compiled before; the first hundred do not,
and the compiler takes half a second for each. It lets go of Python's lock, so threads do.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from gemmule.backends.cuda.arrays import form_of
from gemmule.backends.cuda.launch import CudaBackend
from gemmule.backends.cuda.starter import kernels
from gemmule.choose import choose
from gemmule.core.canonical import Call, Options, canonical
from gemmule.core.operand import Form, c_strides
from gemmule.core.problem import QuantSpec
from gemmule.core.rung import CudaRung
from gemmule.quant.cuda.fragment_order import LAYOUT
from gemmule_lab.harness.products import Product

AHEAD = 96  # products


def prepared(
    drawn: Iterable[Product], prepare: Callable[[Product], object], count: int = AHEAD
) -> Iterator[Product]:
    """Yield products in their order, each when a thread has prepared it, so many of them ahead.

    What a preparation raises is left to the product itself, which fails by the same.
    """
    waiting = deque[tuple[Product, Future[object]]]()
    pool = ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) - 1))
    try:
        for product in drawn:
            waiting.append((product, pool.submit(prepare, product)))
            if len(waiting) > count:
                yield _first(waiting)
        while waiting:
            yield _first(waiting)
    finally:
        pool.shutdown(cancel_futures=True)


def _first(waiting: deque[tuple[Product, Future[object]]]) -> Product:
    product, done = waiting.popleft()
    wait([done])
    return product


class Compiler:
    """Compiles what the default choice for a product of codes runs on a device, once for all."""

    def __init__(self, device: str) -> None:
        self._machine = CudaBackend().machine(device)
        self._one_at_a_time = defaultdict[object, threading.Lock](threading.Lock)

    def __call__(self, product: Product) -> None:
        """Compile the product's kernels; raises as making its plan would."""
        choice = choose(call_of(product), self._machine)
        if not isinstance(choice.rung, CudaRung):
            return
        steps = choice.rung.steps(choice.problem, choice.params, choice.machine)
        with self._one_at_a_time[(choice.rung, *(step.kernel for step in steps))]:
            kernels(choice.rung, steps, choice.machine.arch)


def call_of(product: Product) -> Call:
    """Return the call of a product of codes on a GPU, as its operands would make it."""
    form, other = product.form, product.other_shape
    symmetric = form.group_size in (None, -1)
    spec = QuantSpec(form.bits or 4, form.group_size, not symmetric, LAYOUT, form.scales, False)
    matrix = Form(product.shape, (0, 0), f"uint{form.bits}", 16, spec)
    strides = c_strides(other[::-1])[::-1]
    return canonical(product.op, matrix, form_of(0, other, strides, form.dtype), None, Options())
