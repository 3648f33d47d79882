"""What a GPU is served of the products that people ask for: which rung, and who proved it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gemmule.choose import choose
from gemmule.core import architectures
from gemmule.core.canonical import Call, Options, canonical
from gemmule.core.choice import Choice
from gemmule.core.grouped import grouped
from gemmule.core.operand import Form
from gemmule.core.problem import QuantSpec
from gemmule.core.rung import CudaRung, Machine
from gemmule.storage import evidence, first_use

SIZE, COLUMNS, EXPERTS = 4096, 16, 8
FLOATS = ("float32", "float16", "bfloat16")
PLAIN = (*((dtype, dtype) for dtype in FLOATS), ("float64", "float64"), ("int8", "int8"))
CODES = tuple((f"uint{bits}", dtype) for bits in (4, 8) for dtype in FLOATS)
HERE, ELSEWHERE = "proved on this architecture", "proved on another, checked here at first use"
LIBRARY, NOT = "the vendor's library", "not served"


@dataclass(frozen=True, slots=True)
class Served:
    """One product on one device. product: in words; choice: None where nothing computes it."""

    product: str
    choice: Choice | None
    reason: str = ""

    @property
    def how(self) -> str:
        """Return `HERE`, `ELSEWHERE`, `LIBRARY` or `NOT`."""
        if self.choice is None:
            return NOT
        rung, problem = self.choice.rung, self.choice.problem
        if not isinstance(rung, CudaRung):
            return LIBRARY
        covers = evidence.covers(rung, problem, self.choice.machine.arch)
        return HERE if covers else ELSEWHERE


def products() -> Iterator[tuple[str, Call]]:
    """Yield the usual products, named: of each op and dtype one, codes in both layouts."""
    options, square = Options(), (SIZE, SIZE)
    for a, b in PLAIN:
        matrix, x = Form.packed(square, a), Form.packed((SIZE,), b)
        yield f"A x, {a}", canonical("matvec", matrix, x, None, options)
        yield f"x A, {a}", canonical("vecmat", x, matrix, None, options)
        for columns, what in ((COLUMNS, "A B by few columns"), (SIZE, "A B")):
            other = Form.packed((SIZE, columns), b)
            yield f"{what}, {a}", canonical("matmul", matrix, other, None, options)
    for code, dtype in CODES:
        for layout in ("row", "mma16"):
            codes = _codes(square, code, layout)
            named = f"{code[1:]} weights ({layout}) by {dtype}"
            x, batch = Form.packed((SIZE,), dtype), Form.packed((SIZE, COLUMNS), dtype)
            yield f"A x, {named}", canonical("matvec", codes, x, None, options)
            yield f"x A, {named}", canonical("vecmat", x, codes, None, options)
            yield f"A B, {named}", canonical("matmul", codes, batch, None, options)
    for dtype in FLOATS:
        tokens, ends = Form.packed((64, SIZE), dtype), Form.packed((EXPERTS,), "int32")
        weights = Form.packed((EXPERTS, SIZE, SIZE), dtype)
        yield f"experts, {dtype}", grouped(tokens, weights, ends, None, options)


def _codes(shape: tuple[int, int], code: str, layout: str) -> Form:
    spec = QuantSpec(int(code[4:]), 128, False, layout, "float16", False)
    return Form(shape, (0, 0), code, 16, spec)


def served(machine: Machine) -> Iterator[Served]:
    """Yield what a device is served, product by product; it need not be here."""
    for product, call in products():
        try:
            yield Served(product, choose(call, machine))
        except TypeError as error:
            yield Served(product, None, str(error))


def compiled_for(machine: Machine) -> tuple[str, str]:
    """Return in words what kernels are compiled for on a device, and what else to do, if any."""
    arch = machine.arch
    if not architectures.is_ptx(arch):
        like = architectures.like(arch)
        words = "" if like == arch else f"; it takes the rungs of {like}"
        return f"{machine.name} is {arch}: kernels are compiled for it{words}", ""
    words = f"{machine.name}: kernels are compiled as PTX ({arch}), which the driver translates"
    if machine.name.endswith(f" as sm_{architectures.number(arch)}"):
        return words, "GEMMULE_ARCH says so; unset it for the chip's own kernels"
    return words, "a newer nvidia-cuda-nvrtc may know this chip"


def who_proved(found: list[Served]) -> str:
    """Return who proved what is chosen on a device whose architecture has no proof of it."""
    choices = [one.choice for one in found if one.choice is not None and one.how == ELSEWHERE]
    devices = sorted({first_use.provers(one.rung, one.problem) for one in choices})
    done = {one.rung.name for one in choices if "; checked" in first_use.in_words(one)}
    rungs = list(dict.fromkeys(one.rung.name for one in choices))
    words = [f"{name} (checked here)" if name in done else name for name in rungs]
    return f"proved on {' and '.join(devices)}, checked here at first use: {', '.join(words)}"
