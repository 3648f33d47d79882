"""What CUDA rungs share: C++ names of dtypes and instances, grids, signatures, the best choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gemmule.core import device_model, registry
from gemmule.core.device_model import Terms
from gemmule.core.problem import COMPLEX, FLOAT8, HALVES, ITEMSIZE, Problem
from gemmule.core.rung import (
    Machine,
    Params,
    Signature,
    Step,
    Suggestion,
    floats,
    integers,
    same,
)
from gemmule.storage.models import numbers

CTYPE = {
    "float64": "double", "float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16",
    "int8": "signed char", "uint8": "unsigned char", "int16": "short", "uint16": "unsigned short",
    "int32": "int", "uint32": "unsigned int", "int64": "long long", "uint64": "unsigned long long",
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float8_e8m0fnu": "e8m0",
    "complex64": "complex64", "complex128": "complex128",
}  # fmt: skip

# Every float dtype and the mixes a product may meet, and every integer product.
ALL_SIGNATURES: tuple[Signature, ...] = (
    *floats("float32", "float64", "float16", "bfloat16"),
    *integers(),
)

# The float dtypes of streamed matrices and their mixes, and 8-bit integers.
STREAMED_SIGNATURES: tuple[Signature, ...] = (
    *floats("float16", "bfloat16", "float32", "float64"),
    *(s for s in integers() if s[2] == "int32"),
)
# float8 matrices by every float but float64, whose results float32 holds.
FLOAT8_SIGNATURES: tuple[Signature, ...] = tuple(
    (a, b, out)
    for a in FLOAT8
    for b, outs in (
        *((b, ("float32", "bfloat16", "float16")) for b in FLOAT8),
        *((b, (b, "float32")) for b in HALVES),
        ("float32", ("float32",)),
    )
    for out in outs
)
COMPLEX_SIGNATURES: tuple[Signature, ...] = same(*COMPLEX)
CLUSTER_ARCHS = ("sm_90a", "sm_100a", "sm_120a")  # whose blocks may form clusters


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def type_arguments(problem: Problem) -> str:
    """Return the C++ types of A, of x or B, and of the result, as template arguments."""
    return ", ".join(CTYPE[t] for t in (problem.a, problem.b, problem.out))


def instance(kernel: str, *arguments: object) -> str:
    """Return the C++ name of a kernel's instance, for these template arguments.

    >>> instance("streamed", "float, float", 128, True)
    'streamed<float, float, 128, true>'
    """
    words = (str(one).lower() if isinstance(one, bool) else str(one) for one in arguments)
    return f"{kernel}<{', '.join(words)}>"


def flat(kernel: str, blocks: int, threads: int | tuple[int, int], **more: Any) -> Step:
    """Return a launch of blocks in a row, of threads in a row or a rectangle; more: of the Step."""
    x, y = (threads, 1) if isinstance(threads, int) else threads
    return Step(kernel, (blocks, 1, 1), (x, y, 1), **more)


def modelled(
    rung: str,
    terms: Callable[[Problem, Params, Machine], Terms],
    choices: Callable[[Problem, Machine], Iterable[Params]] | None = None,
) -> dict[str, Any]:
    """Return what a rung says of its time: its terms, and that the quickest choice by them is best.

    rung: ``folder/name``, whose coefficients count. choices: the parameter sets worth comparing for
    a problem, none where the rung stands back; all that are declared where it says nothing.
    """

    def seconds(problem: Problem, params: Params, machine: Machine) -> float:
        return device_model.seconds(numbers(machine, rung), terms(problem, params, machine))

    def every(problem: Problem, machine: Machine) -> Iterable[Params]:
        folder, name = rung.split("/")
        return registry.rung_in(folder, "cuda", name).space(problem)

    compared = choices or every

    def suggest(problem: Problem, machine: Machine) -> Suggestion | None:
        some = compared(problem, machine)
        found = [Suggestion(params, seconds(problem, params, machine)) for params in some]
        return min(found, key=lambda one: one.expected_s, default=None)

    said = {"terms": terms, "counts_with": rung, "seconds": seconds, "suggest": suggest}
    return {**said, "choices": compared}


def lies(problem: Problem) -> str:
    """Tell whether rows begin at whole 16 bytes, and where not, whether elements are small."""
    if problem.alignment == 16:
        return "aligned"
    return "unaligned" if ITEMSIZE[problem.a] > 2 else "unaligned halves"


def starts_early(machine: Machine) -> bool:
    """Tell whether the device starts a kernel before the one it depends on has ended."""
    return machine.arch >= "sm_9" or machine.arch.startswith("sm_1")


def accumulator(problem: Problem) -> str:
    """Return the dtype name of the running sum, as args.cuh's AccOf chooses it."""
    own = ("float64", "int32", "int64", "uint64", *COMPLEX)
    return problem.out if problem.out in own else "float32"
