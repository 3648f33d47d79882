"""Products of doubles by a kernel for bytes: integers, their residues, and the Chinese remainder.

Each row of A and each column of B is scaled by a power of two and rounded to integers, so that
their product stays below half the product M of some coprime moduli of at most 256. The product of
the residues modulo one of these is one of bytes, exact; together they tell the product of the
integers, which is scaled back.

What is rounded away is small beside a line's norm, not beside each number. So first the sizes of
some steps are multiplied as float8, which says what the sum of absolute products is at least; tiles
of C for which that is too little, and lines that are not finite or beyond 2^400, are left to a
kernel that multiplies doubles. All of it is decided on the device. C goes by panels, so that the
workspace stays bounded.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gemmule.backends.cuda import launch_args, tensor_maps
from gemmule.backends.cuda.composed import Composed
from gemmule.backends.cuda.launch import CudaBackend, Launcher
from gemmule.backends.cuda.starter import Start, built
from gemmule.backends.cuda.starter import starter as starter_of
from gemmule.core.canonical import Call
from gemmule.core.choice import Choice
from gemmule.core.operand import View
from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Params, Step

SOURCE = Path(__file__).with_suffix(".cu")
MODULI = (256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193)
PLACE = 256  # what places in the workspace are multiples of
ROWS = 8192  # of C, and half as many columns, are computed in one go; a multiple of 2 TILE
MOST_BYTES = 1 << 32  # of the residues of such rows, fewer where the sums are long
TILE, GROUP, CHUNK = 128, 64, 512  # as in the kernels
HEIGHT, WIDTH = 128, 256  # tiles of the products of residues
DEEP, RING = 16, 4  # steps of a stage of doubles, and stages, of residues as well
SHARE = 0.48  # of the bound of a sum of doubles, which integers may take; 3 % is float8's error
PIECE = 42  # bits of a number by which sums of multiples of residues are exact in doubles
_LINE, _PART, _THREADS, _MOST_BLOCKS = 32, 32, 256, 2**31 - 1
_MEASURE, _TAKE = struct.Struct("<4Q5qd"), struct.Struct("<4Q7q")
_JUDGE, _COMBINE = struct.Struct("<4Q6qd"), struct.Struct("<4Q8q54d")


@dataclass(frozen=True, slots=True)
class Side:
    """A factor: how many lines it has along the sum, and elements from line to line and along."""

    lines: int
    step: int
    along: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A product by residues: its factors, C's steps, and where all lies in the workspace."""

    a: Side
    b: Side
    c: tuple[int, int]
    k: int
    moduli: int
    most: int = ROWS

    @property
    def line(self) -> int:
        """Bytes of a line of residues."""
        return _up(self.k, 128)  # each begins where a line of TMA does

    @property
    def every(self) -> int:
        """Of how many groups of steps one is looked at beforehand."""
        return max(1, min(4, -(-self.k // GROUP) // 16))

    @property
    def sample(self) -> int:
        """Bytes of a line of sizes."""
        return math.ceil(math.ceil(self.k / GROUP) / self.every) * GROUP

    @property
    def limit(self) -> int:
        """The most rows of a panel of C, and twice the most columns."""
        fit = MOST_BYTES // (self.moduli * self.line) // (2 * TILE) * 2 * TILE
        return min(self.most, max(fit, 2 * TILE))

    @property
    def rows(self) -> int:
        """Rows of a panel of C."""
        return min(self.limit, self.a.lines)

    @property
    def columns(self) -> int:
        """Columns of a panel of C."""
        return min(self.limit // 2, self.b.lines)

    @property
    def lead(self) -> int:
        """Residues from row to row of a panel of C."""
        return _up(self.columns, 16)

    @property
    def across(self) -> int:
        """Flags of a row of tiles of C."""
        return -(-self.b.lines // TILE)

    def panels(self) -> Iterator[tuple[range, list[range]]]:
        """Yield the rows of C in turn, with the columns of their panels."""
        every = [
            range(c, min(c + self.columns, self.b.lines))
            for c in range(0, self.b.lines, self.columns)
        ]
        for r in range(0, self.a.lines, self.rows):
            yield range(r, min(r + self.rows, self.a.lines)), every

    def places(self) -> dict[str, int]:
        """Return the first byte of each part of the workspace, and its end."""
        rows, columns, chunks = self.a.lines, self.b.lines, -(-self.k // CHUNK)
        live = 4 * sum(1 + len(panels) for _, panels in self.panels())
        bytes_of = {
            "lines_a": rows * _LINE,
            "lines_b": columns * _LINE,
            "live": live,
            "flags": -(-rows // TILE) * self.across,
            "a": self.moduli * self.rows * self.line,
            "b": self.moduli * self.columns * self.line,
            "c": max(self.moduli * self.rows * self.lead, max(rows, columns) * chunks * _PART),
        }
        sampled = _up(rows * self.sample, PLACE) + columns * self.sample
        bytes_of["b"] = max(bytes_of["b"], sampled - _up(bytes_of["a"], PLACE))
        found, at = {}, 0
        for name, size in bytes_of.items():
            found[name] = at
            at += _up(size, PLACE)
        found["sample_a"], found["sample_b"] = (
            found["a"],
            found["a"] + _up(rows * self.sample, PLACE),
        )
        return {**found, "end": at}


def _up(count: int, of: int) -> int:
    return -(-count // of) * of


def plan(problem: Problem, call: Call, moduli: int) -> Plan:
    """Return how a product is computed; of a C by columns the transposed one is."""
    a, b, c = (view.strides[-2:] for view in (call.a, call.b, call.out))
    of_a, of_b = Side(problem.m, *a), Side(problem.n, *b[::-1])
    if problem.layout_out == "col":
        return Plan(of_b, of_a, (c[1], c[0]), problem.k, moduli)
    return Plan(of_a, of_b, (c[0], c[1]), problem.k, moduli)


def size_of(problem: Problem, moduli: int) -> int:
    """Return the bytes of the workspace, whose parts depend on sizes alone."""
    sides = Side(problem.m, 1, 1), Side(problem.n, 1, 1)
    first, second = sides[::-1] if problem.layout_out == "col" else sides
    return Plan(first, second, (1, 1), problem.k, moduli).places()["end"]


def remainders(moduli: int) -> tuple[list[float], list[list[float]]]:
    """Return M, and numbers that are 1 modulo one modulus and 0 modulo the others, in pieces.

    >>> whole, weights = remainders(13)
    >>> int(sum(map(int, whole))) == math.prod(MODULI[:13])
    True
    >>> [sum(map(int, one)) % 255 for one in weights[:3]]
    [0, 1, 0]
    """
    whole = math.prod(MODULI[:moduli])
    ends = [max(whole.bit_length() - PIECE, 0), max(whole.bit_length() - 2 * PIECE, 0), 0]

    def pieces(number: int) -> list[float]:
        found = []
        for end in ends:
            found.append(float(number >> end << end))
            number &= (1 << end) - 1
        return found

    weights = (whole // m * pow(whole // m, -1, m) for m in MODULI[:moduli])
    return pieces(whole), [pieces(one) for one in weights]


def largest_norm(k: int, moduli: int) -> float:
    """Return the largest norm of a line before it is rounded: products stay below M / 2."""
    return math.sqrt(math.prod(MODULI[:moduli]) / 2) * (1 - 2.0**-10) - math.sqrt(k) / 2


def _blocks(count: int) -> tuple[int, int, int]:
    return max(1, min(count, _MOST_BLOCKS)), 1, 1


def _step(name: str, blocks: int, threads: int = _THREADS) -> Step:
    return Step(name, _blocks(blocks), (threads, 1, 1))


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its struct, without addresses, and which places it is given."""

    step: Step
    packed: bytes
    at: tuple[tuple[str, int], ...]
    maps: tuple[tensor_maps.Shape, ...] = ()
    ends_with: str = ""  # alpha and beta


@dataclass(frozen=True, slots=True)
class Sampled:
    """A product of sizes, a launch of another rung."""

    rows: range
    columns: range


def launches(p: Plan, units: int) -> Iterator[Launch | Sampled]:
    """Yield what a product starts, in turn."""
    at = p.places()
    yield from _measured(p, "a", p.a)
    yield from _measured(p, "b", p.b)
    live = at["live"]
    lives: dict[tuple[int, int], int] = {}
    for rows, panels in p.panels():
        of_rows = live
        for number, columns in enumerate(panels):
            live = lives[rows.start, columns.start] = of_rows + 4 * (1 + number)
            yield Sampled(rows, columns)
            yield _judged(p, rows, columns, (of_rows, live))
        lives[rows.start, -1], live = of_rows, live + 4
    for rows, panels in p.panels():
        yield _taken(p, "a", p.a, rows, lives[rows.start, -1])
        for columns in panels:
            alive = lives[rows.start, columns.start]
            yield _taken(p, "b", p.b, columns, alive)
            yield _multiplied(p, rows, columns, alive, units)
            yield _combined(p, rows, columns)
    sizes = p.a.lines, p.b.lines, p.k, 1
    packed = launch_args.GEMM.pack(
        0, 0, 0, 0, *sizes, p.a.step, p.a.along, 0, p.b.along, p.b.step, 0, *p.c, 0, 1, 0
    )
    blocks = _blocks(-(-p.a.lines // TILE) * p.across)
    operands = (("A", 0), ("B", 0), ("C", 0), ("work", at["flags"]))
    name = f"recompute<{_flat(p.a)}, {_flat(p.b)}>"
    of_lines = sum((TILE * (DEEP + 4) if s.along == 1 else DEEP * (TILE + 4)) for s in (p.a, p.b))
    step = Step(name, blocks, (_THREADS, 1, 1), RING * 8 * of_lines)
    yield Launch(step, packed, operands, (), "2d")


def _flat(side: Side) -> str:
    """Tell a kernel whether a factor's lines lie along the sum."""
    return "true" if side.along == 1 else "false"


def _measured(p: Plan, name: str, side: Side) -> Iterator[Launch]:
    at, chunks = p.places(), -(-p.k // CHUNK)
    live = (at["flags"] - at["live"]) // 4 if name == "a" else 0
    most = largest_norm(p.k, p.moduli)
    packed = _MEASURE.pack(0, 0, 0, 0, side.lines, p.k, side.step, side.along, live, most)
    places = (
        (name.upper(), 0),
        ("work", at["c"]),
        ("work", at[f"lines_{name}"]),
        ("work", at["live"]),
    )
    blocks = -(-side.lines * chunks // 8) if side.along == 1 else -(-side.lines // 32) * chunks
    yield Launch(_step(f"measure<{_flat(side)}>", blocks), packed, places)
    yield Launch(_step("settle", -(-max(side.lines, live) // _THREADS)), packed, places)
    packed = _TAKE.pack(0, 0, 0, 0, side.lines, p.k, side.step, side.along, p.sample, 0, p.every)
    places = (
        (name.upper(), 0),
        ("work", at[f"lines_{name}"]),
        ("work", at[f"sample_{name}"]),
        ("", 0),
    )
    yield Launch(_step(f"take<{_flat(side)}, 0>", _tiles(side.lines, p.sample)), packed, places)


def _tiles(lines: int, width: int) -> int:
    return -(-lines // 16) * -(-width // 128)


def _taken(p: Plan, name: str, side: Side, lines: range, live: int) -> Launch:
    at = p.places()
    most = p.rows if name == "a" else p.columns
    packed = _TAKE.pack(
        0, 0, 0, 0, len(lines), p.k, side.step, side.along, p.line, most * p.line, 1
    )
    places = (
        (name.upper(), 8 * lines.start * side.step),
        ("work", at[f"lines_{name}"] + lines.start * _LINE),
        ("work", at[name]),
        ("work", live),
    )
    return Launch(
        _step(f"take<{_flat(side)}, {p.moduli}>", _tiles(len(lines), p.line)), packed, places
    )


def _flag(p: Plan, rows: range, columns: range) -> int:
    """Return where the first flag of a panel lies."""
    return p.places()["flags"] + rows.start // TILE * p.across + columns.start // TILE


def _lines(p: Plan, rows: range, columns: range) -> tuple[tuple[str, int], tuple[str, int]]:
    at = p.places()
    return (
        ("work", at["lines_a"] + rows.start * _LINE),
        ("work", at["lines_b"] + columns.start * _LINE),
    )


def _judged(p: Plan, rows: range, columns: range, live: tuple[int, int]) -> Launch:
    flags, at = _flag(p, rows, columns), p.places()
    of_rows, own = (place - flags for place in live)
    share = SHARE * p.k * 2.0**-53
    sizes = len(rows), len(columns), p.lead, p.across
    packed = _JUDGE.pack(0, 0, 0, 0, *sizes, own, of_rows, share)
    places = (*_lines(p, rows, columns), ("work", flags), ("work", at["c"]))
    tiles = -(-len(rows) // TILE) * -(-len(columns) // TILE)
    return Launch(_step("judge", tiles), packed, places)


def _multiplied(p: Plan, rows: range, columns: range, live: int, units: int) -> Launch:
    at, line, count = p.places(), p.line, p.moduli
    planes = p.rows * line, p.columns * line, p.rows * p.lead
    sizes = len(rows), p.lead, p.k, count
    steps = line, 1, planes[0], 1, line, planes[1], p.lead, 1, planes[2]
    packed = launch_args.GEMM.pack(0, 0, 0, 0, *sizes, *steps, 1, 0)
    shapes = (
        tensor_maps.Shape(0, 1, (line, len(rows), count), (line, planes[0]), (128, HEIGHT, 1)),
        tensor_maps.Shape(1, 1, (line, len(columns), count), (line, planes[1]), (128, WIDTH, 1)),
        tensor_maps.Shape(2, 1, (p.lead, len(rows), count), (p.lead, planes[2]), (128, 16, 1)),
    )
    blocks = min(units, -(-len(rows) // HEIGHT) * -(-p.lead // WIDTH) * count)
    smem = RING * (HEIGHT + WIDTH) * 128 + 8 * 2 * 16 * 128
    name = f"multiply_residues<{HEIGHT}, {WIDTH}, {RING}>"
    step = Step(name, (blocks, 1, 1), (384, 1, 1), smem)
    places = ("work", at["a"]), ("work", at["b"]), ("work", at["c"]), ("work", live)
    return Launch(step, packed, places, shapes)


def _combined(p: Plan, rows: range, columns: range) -> Launch:
    at, (whole, weights) = p.places(), remainders(p.moduli)
    every = [piece for one in weights for piece in one]
    every += [0.0] * (3 * len(MODULI) - len(every))
    total = float(math.prod(MODULI[: p.moduli]))
    sizes = len(rows), len(columns), p.lead, p.rows * p.lead
    flags = _flag(p, rows, columns) - at["c"], p.across
    numbers = *whole, 1 / total, *every
    packed = _COMBINE.pack(0, 0, 0, 0, *sizes, *p.c, *flags, *numbers, 1, 0)
    element = rows.start * p.c[0] + columns.start * p.c[1]
    places = (*_lines(p, rows, columns), ("C", 8 * element), ("work", at["c"]))
    blocks = -(-len(rows) // 32) * -(-len(columns) // 128)
    step = Step(f"combine<{p.moduli}>", (blocks, 1, 1), (_THREADS, 1, 1))
    return Launch(step, packed, places, (), "2d")


@dataclass(frozen=True, slots=True)
class Told:
    """What a product asks for: its launches on a device of 132 multiprocessors."""

    launches: tuple[str, ...]
    rung: str
    source: str


def told(problem: Problem, call: Call, params: Params, rung: CudaRung, digest: str) -> Told:
    """Return what a product asks for; digest: of the kernels' text."""
    every = tuple(map(repr, launches(plan(problem, call, params["moduli"]), 132)))
    return Told(every, rung.name, digest)


class ByResidues(Composed):
    """A product of doubles; its start is told of alpha and beta."""

    def __init__(
        self,
        problem: Problem,
        call: Call,
        rung: CudaRung,
        params: Params,
        most: int = ROWS,
    ) -> None:
        super().__init__(problem, call)
        self.call, self.rung = call, rung
        self.plan = replace(plan(problem, call, params["moduli"]), most=most)
        self.turned = problem.layout_out == "col"

    def scale(self, alpha: complex, beta: complex) -> tuple[tuple[float, float]]:
        """Return alpha and beta."""
        return ((alpha.real, beta.real),)

    def workspace_bytes(self, ordinal: int) -> int:
        """Return the bytes a start needs."""
        return self.plan.places()["end"]

    def load(self, ordinal: int) -> Start:
        """Return `starter`'s function, everything loaded on a device."""
        units = CudaBackend().machine(f"cuda:{ordinal}").units
        every = [self._loaded(one, ordinal) for one in launches(self.plan, units)]
        turned = self.turned

        def start(
            stream: int, a: int, b: int, result: int, work: int, scale: tuple[float, float] = (1, 0)
        ) -> None:
            if turned:
                a, b = b, a
            begins = {"A": a, "B": b, "C": result, "work": work, "": 0}
            for launch, places, scaled in every:
                given = (begins[name] + offset for name, offset in places)
                launch(stream, *given, *((scale,) if scaled else ()))

        return start

    def _loaded(
        self, one: Launch | Sampled, ordinal: int
    ) -> tuple[Start, tuple[tuple[str, int], ...], bool]:
        if isinstance(one, Sampled):
            return self._sampled(one, ordinal)
        maps = tensor_maps.Maps(one.maps) if one.maps else None
        kernels = built(SOURCE, one.step, one.packed, ordinal, maps)
        return starter_of(kernels, "4Q", one.ends_with), one.at, bool(one.ends_with)

    def _sampled(
        self, one: Sampled, ordinal: int
    ) -> tuple[Start, tuple[tuple[str, int], ...], bool]:
        """Return what starts the product of sizes of a panel."""
        p, at = self.plan, self.plan.places()
        rows, columns, k = len(one.rows), len(one.columns), p.sample
        float8 = "float8_e5m2"
        made = Problem("matmul", rows, columns, k, a=float8, b=float8, layout_b="col")
        views = (
            View((rows, k), (k, 1)),
            View((k, columns), (1, k)),
            View((rows, columns), (p.lead, 1)),
        )
        call = replace(self.call, problem=made, a=views[0], b=views[1], out=views[2], outer=())
        params = self.rung.check_params(made, {})
        machine = CudaBackend().machine(f"cuda:{ordinal}")
        choice = Choice(call, made, self.rung, params, machine, "of bytes")
        places = (
            ("work", at["sample_a"] + one.rows.start * k),
            ("work", at["sample_b"] + one.columns.start * k),
            ("work", at["c"]),
            ("", 0),
        )
        return Launcher(choice).starter(ordinal), places, False
