"""Compile ahead: kernels of the products of codes to come, while others are measured.

A random product of codes mostly meets a kernel that was compiled before; the first hundred do not,
and the compiler takes half a second for each.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait

from gemmule.backends.cuda.arrays import form_of
from gemmule.backends.cuda.launch import CudaBackend
from gemmule.backends.cuda.starter import compiled_by
from gemmule.choose import choose
from gemmule.core.canonical import Call, Options, canonical
from gemmule.core.operand import Form, c_strides
from gemmule.core.problem import QuantSpec
from gemmule.core.rung import CudaRung, Machine
from gemmule.quant.cuda.fragment_order import LAYOUT
from gemmule.tuning.compiling import Compilers, Kernels
from gemmule_lab.harness.products import Product

AHEAD = 96  # products


def compiled(drawn: Iterable[Product], device: str) -> Iterator[Product]:
    """Yield products in their order, each when processes beside have compiled its kernels."""
    machine = CudaBackend().machine(device)
    with Compilers() as compilers:
        yield from prepared(drawn, lambda one: [compilers.ask(k) for k in needed(one, machine)])


def prepared(
    drawn: Iterable[Product],
    ask: Callable[[Product], Sequence[Future[None]]],
    count: int = AHEAD,
) -> Iterator[Product]:
    """Yield products in order, each when what was asked for it is done; `count` are ahead of it."""
    waiting = deque[tuple[Product, Sequence[Future[None]]]]()
    for product in drawn:
        waiting.append((product, ask(product)))
        if len(waiting) > count:
            yield _first(waiting)
    while waiting:
        yield _first(waiting)


def _first(waiting: deque[tuple[Product, Sequence[Future[None]]]]) -> Product:
    product, asked = waiting.popleft()
    wait(asked)
    return product


def needed(product: Product, machine: Machine) -> list[Kernels]:
    """Return what the default choice for a product of codes compiles; nothing where none is made.

    The product itself will say what is wrong with it.
    """
    with contextlib.suppress(ValueError, TypeError, RuntimeError):
        choice = choose(call_of(product), machine)
        if isinstance(choice.rung, CudaRung):
            steps = choice.rung.steps(choice.problem, choice.params, choice.machine)
            return [compiled_by(choice.rung, steps, choice.machine.arch)]
    return []


def call_of(product: Product) -> Call:
    """Return the call of a product of codes on a GPU, as its operands would make it."""
    form, other = product.form, product.other_shape
    symmetric = form.group_size in (None, -1)
    spec = QuantSpec(form.bits or 4, form.group_size, not symmetric, LAYOUT, form.scales, False)
    matrix = Form(product.shape, (0, 0), f"uint{form.bits}", 16, spec)
    strides = c_strides(other[::-1])[::-1]
    return canonical(product.op, matrix, form_of(0, other, strides, form.dtype), None, Options())
