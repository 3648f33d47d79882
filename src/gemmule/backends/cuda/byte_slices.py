"""Products of wide integers by a kernel for bytes: exact modulo 2^64, as the products are.

An integer is a sum of digits of 8 bits with a sign, each times a power of 256. A kernel writes the
digits of each row of A, and of each column of B, one line behind the other, the latter in reverse:
then all products of digits whose powers add up to the same are one product of bytes, along
neighbouring lines. At most eight count, of powers below 256^8. A last kernel adds them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gemmule.backends.cuda.composed import Composed
from gemmule.backends.cuda.launch import CudaBackend, Launcher
from gemmule.backends.cuda.starter import Start, built
from gemmule.backends.cuda.starter import starter as starter_of
from gemmule.core.canonical import Call
from gemmule.core.choice import Choice
from gemmule.core.operand import View
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CudaRung, Params, Step

SOURCE = Path(__file__).with_suffix(".cu")
PLACE = 256  # what places in the workspace are multiples of
MOST_POWERS = 8  # of 256, in a result of 8 bytes
CTYPE = {"int8": "signed char", "uint8": "unsigned char", "int16": "short", "int32": "int"}
CTYPE |= {"uint16": "unsigned short", "uint32": "unsigned", "int64": "i64", "uint64": "u64"}
_DIGITS, _SUMS = struct.Struct("<2Q5q"), struct.Struct("<2Q6q2Q")
_SIDE, _THREADS, _MOST_BLOCKS, _MODULUS = 32, 256, 8192, 2**64


def digits(dtype: str) -> int:
    """Return how many digits hold any number of a dtype: its bytes, and below 8 one more."""
    return min(ITEMSIZE[dtype] + 1, MOST_POWERS)


@dataclass(frozen=True, slots=True)
class Power:
    """Products of digits that count the same: the first lines of A and B, and how many lines."""

    of_a: int
    of_b: int
    lines: int


def powers(problem: Problem) -> tuple[Power, ...]:
    """Return what counts 1, 256, 256^2 and so on in a product."""
    of_a, of_b = digits(problem.a), digits(problem.b)
    found = []
    for power in range(min(of_a + of_b - 1, MOST_POWERS)):
        first, last = max(0, power - of_b + 1), min(power, of_a - 1)
        found.append(Power(first, of_b - 1 - (power - first), last - first + 1))
    return tuple(found)


def line(problem: Problem) -> int:
    """Return the bytes of a line: a digit of each step."""
    return -(-problem.k // 16) * 16


def places(problem: Problem) -> tuple[int, int, int]:
    """Return where the digits of B and the sums lie, and where all ends."""
    of_a, of_b = problem.m * digits(problem.a), problem.n * digits(problem.b)
    a, b = (-(-lines * line(problem) // PLACE) * PLACE for lines in (of_a, of_b))
    return a, a + b, a + b + len(powers(problem)) * plane(problem) * 4


def plane(problem: Problem) -> int:
    """Return the elements of a power's sums, in rows of whole 16 bytes."""
    return -(-problem.m * lead(problem) // (PLACE // 4)) * (PLACE // 4)


def lead(problem: Problem) -> int:
    """Return how many elements of such a plane lie from one row to the next."""
    return -(-problem.n // 4) * 4


def of_bytes(problem: Problem, power: Power) -> Problem:
    """Return the product of bytes that a power is."""
    sizes = problem.m, problem.n, power.lines * line(problem)
    return Problem("matmul", *sizes, a="int8", b="int8", out="int32", layout_b="col")


def _call(problem: Problem, call: Call, power: Power) -> Call:
    made, width = of_bytes(problem, power), line(problem)
    return replace(
        call,
        problem=made,
        a=View((made.m, made.k), (digits(problem.a) * width, 1)),
        b=View((made.k, made.n), (1, digits(problem.b) * width)),
        out=View((made.m, made.n), (lead(problem), 1)),
        outer=(),
    )


def steps(problem: Problem) -> tuple[Step, Step, Step]:
    """Return the launches before and behind the products."""
    made = []
    for rows, dtype, turned in ((problem.m, problem.a, False), (problem.n, problem.b, True)):
        tiles = -(-rows // _SIDE) * -(-line(problem) // _SIDE)
        name = f"take_digits<{CTYPE[dtype]}, {digits(dtype)}, {str(turned).lower()}>"
        made.append(Step(name, (min(tiles, _MOST_BLOCKS), 1, 1), (_THREADS, 1, 1)))
    blocks = min(-(-problem.m * problem.n // _THREADS), _MOST_BLOCKS)
    last = Step(f"add_planes<{len(powers(problem))}>", (blocks, 1, 1), (_THREADS, 1, 1))
    return made[0], made[1], last


def packed(problem: Problem, call: Call) -> tuple[bytes, bytes, bytes]:
    """Return the structs of those launches, without addresses, for alpha 1 and beta 0."""
    a, b, c = (view.strides[-2:] for view in (call.a, call.b, call.out))
    width = line(problem)
    return (
        _DIGITS.pack(0, 0, problem.m, problem.k, width, *a),
        _DIGITS.pack(0, 0, problem.n, problem.k, width, *b[::-1]),
        _SUMS.pack(0, 0, problem.m, problem.n, lead(problem), plane(problem), *c, 1, 0),
    )


@dataclass(frozen=True, slots=True)
class Told:
    """What a product asks for: its launches, and the products of bytes."""

    steps: tuple[Step, ...]
    packed: tuple[str, ...]
    powers: tuple[Power, ...]
    rung: str
    source: str


def told(problem: Problem, call: Call, rung: CudaRung, digest: str) -> Told:
    """Return what a product asks for; digest: of the kernels' text."""
    texts = tuple(one.hex() for one in packed(problem, call))
    return Told(steps(problem), texts, powers(problem), rung.name, digest)


class BySlices(Composed):
    """A product of wide integers; its start is told of alpha and beta modulo 2^64."""

    def __init__(self, problem: Problem, call: Call, rung: CudaRung, params: Params) -> None:
        super().__init__(problem, call)
        self.problem, self.call, self.rung, self.params = problem, call, rung, params

    def scale(self, alpha: complex, beta: complex) -> tuple[tuple[int, int]]:
        """Return alpha and beta modulo 2^64."""
        return ((int(alpha.real) % _MODULUS, int(beta.real) % _MODULUS),)

    def workspace_bytes(self, ordinal: int) -> int:
        """Return the bytes a start needs."""
        return places(self.problem)[2]

    def load(self, ordinal: int) -> Start:
        """Return `starter`'s function, everything loaded on a device."""
        problem, (of_a, of_b, add) = self.problem, self._around(ordinal)
        at_b, at_sums, _ = places(problem)
        multiply = list(self._products(ordinal))

        def start(
            stream: int, a: int, b: int, result: int, work: int, scale: tuple[int, int] = (1, 0)
        ) -> None:
            of_a(stream, a, work, b"", b"")
            of_b(stream, b, work + at_b, b"", b"")
            for launch, left, right, to in multiply:
                launch(stream, work + left, work + at_b + right, work + at_sums + to, 0)
            add(stream, work + at_sums, result, b"", b"", scale)

        return start

    def _around(self, ordinal: int) -> Iterator[Start]:
        """Yield what starts the kernels before the products, and the one behind."""
        structs = packed(self.problem, self.call)
        for step, arguments, end in zip(steps(self.problem), structs, ("", "", "2Q"), strict=True):
            yield starter_of(built(SOURCE, step, arguments, ordinal), "QQ0s0s", end)

    def _products(self, ordinal: int) -> Iterator[tuple[Start, int, int, int]]:
        """Yield what starts each power's product, and where its operands and its sums lie."""
        machine, launches = CudaBackend().machine(f"cuda:{ordinal}"), dict[int, Start]()
        width = line(self.problem)
        for number, power in enumerate(powers(self.problem)):
            if power.lines not in launches:
                made = of_bytes(self.problem, power)
                params = self.rung.check_params(made, self.params)
                call = _call(self.problem, self.call, power)
                choice = Choice(call, made, self.rung, params, machine, "of bytes")
                launches[power.lines] = Launcher(choice).starter(ordinal)
            at = power.of_a * width, power.of_b * width, number * plane(self.problem) * 4
            yield (launches[power.lines], *at)
