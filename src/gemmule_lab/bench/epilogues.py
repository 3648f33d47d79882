"""``gemmule bench --suite epilogues``: products with an epilogue, beside the plain ones.

A case is a product and what follows it. The plain product, the one with the epilogue and what a
user of PyTorch writes are captured into graphs over several sets of operands and timed by turns.
Rows of our result are compared with doubles before anything is timed.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gemmule as gm
from gemmule.backends.cpu import epilogue as on_host
from gemmule_lab.bench.grouped import clock, written
from gemmule_lab.harness.bench import in_turns
from gemmule_lab.records.results import geomean
from gemmule_lab.records.rows import times_of_us
from gemmule_lab.report.render import print_table
from gemmule_lab.report.tables import Column, TableData, significant, table_of

SCHEMA = 1
ROUNDS, SEED, CHECKED, SETS_BYTES, MOST_SETS = 15, 0, 32, 256e6, 12
WORST = 10  # cases of a hunt that are shown
PLAIN, OURS, PEER = "gemmule, plain", "gemmule", "torch"
BYTES = ("int8", "float8_e4m3fn")  # by scales of rows and columns into bfloat16


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A product of operands of a dtype, and its epilogue: an activation, and operands' names."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    activation: str | None = None
    operands: tuple[str, ...] = ("bias",)
    batch: int = 1

    @property
    def out(self) -> str:
        """The result's dtype."""
        return "bfloat16" if self.dtype in BYTES else self.dtype

    def title(self) -> str:
        """Return a line for people."""
        size = f"{self.m} x {self.n}, {self.dtype}, sums of {self.k}"
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{batch}{size}: {' '.join((*self.operands, self.activation or ''))}".rstrip()


_SQUARE = (4096, 4096, 4096)
CASES = (
    *(Case(*_SQUARE, activation=how) for how in (None, "relu", "gelu", "gelu_tanh", "silu")),
    *(Case(*_SQUARE, operands=(one,)) for one in ("residual", "C")),
    Case(*_SQUARE, activation="silu", operands=("gate",)),
    Case(*_SQUARE, activation="gelu", operands=("bias", "residual")),
    Case(*_SQUARE, "float32", "gelu"),
    Case(1024, 1024, 1024, activation="relu", batch=16),
    Case(1024, 1024, 1024, activation="gelu", batch=16),
    *(Case(m, 8192, 8192, dtype) for dtype in BYTES for m in (64, 1024)),
    *(Case(1024, 8192, 8192, dtype, "gelu") for dtype in BYTES),
)
_HOWS = (None, "relu", "gelu", "gelu_tanh", "silu")
_PARTS = (("bias",), ("residual",), ("C",), ("gate",), ("bias", "residual"))


class Operands:
    """Tensors of a case, as many sets as leave the L2, and ways to multiply them."""

    def __init__(self, case: Case, ordinal: int | None) -> None:
        import torch

        place = torch.device("cpu") if ordinal is None else torch.device("cuda", ordinal)
        self.case, self.place = case, place
        torch.manual_seed(SEED)
        lead = (case.batch,) if case.batch > 1 else ()
        shapes = ((*lead, case.m, case.k), (*lead, case.k, case.n), (*lead, case.m, case.n))
        item = 1 if case.dtype in BYTES else 4 if case.dtype == "float32" else 2
        nbytes = case.batch * (case.m * case.k + case.k * case.n + case.m * case.n) * item
        count = max(1, min(MOST_SETS, round(SETS_BYTES / nbytes)))
        self.sets = [self._set(shapes, getattr(torch, case.dtype)) for _ in range(count)]
        self.scales = {}
        if case.dtype in BYTES:
            sizes = {"scale_a": (case.m, 1), "scale_b": (1, case.n)}
            made = {name: torch.rand(size, device=self.place) / 64 for name, size in sizes.items()}
            self.scales = {**made, "out_dtype": case.out}

    def _set(self, shapes: tuple[tuple[int, ...], ...], dtype: Any) -> tuple[Any, Any, Any]:
        import torch

        def normal(shape: tuple[int, ...]) -> Any:
            return torch.randn(shape, device=self.place)

        a, b = normal(shapes[0]), normal(shapes[1][:-2] + shapes[1][:-3:-1])
        if dtype is torch.int8:
            a, b = (20 * one for one in (a, b))
        elif dtype is not torch.float8_e4m3fn:
            b = b / self.case.k**0.5
        out = getattr(torch, self.case.out)
        given = {name: normal(shapes[2]).to(out) for name in self.case.operands if name != "bias"}
        if "bias" in self.case.operands:
            given["bias"] = normal(shapes[2][-1:]).to(out)
        epilogue = gm.Epilogue(**given, activation=self.case.activation)
        return a.to(dtype), b.to(dtype).transpose(-1, -2), epilogue

    def ways(self) -> dict[str, Callable[[int], Any]]:
        """Return who multiplies: a name, and the call of a set."""
        sets, more = self.sets, self.scales

        def ours(i: int, *, finished: bool = True) -> Any:
            a, b, epilogue = sets[i % len(sets)]
            return gm.matmul(a, b, **more, **({"epilogue": epilogue} if finished else {}))

        return {PLAIN: lambda i: ours(i, finished=False), OURS: ours, PEER: self.theirs}

    def theirs(self, i: int) -> Any:
        """Return what PyTorch makes of a set, by one operation after the other."""
        import torch

        a, b, epilogue = self.sets[i % len(self.sets)]
        bias, out = epilogue.bias, getattr(torch, self.case.out)
        if self.case.dtype == "int8":
            found = torch._int_mm(a, b) * self.scales["scale_a"] * self.scales["scale_b"]
            found = found.to(out) if bias is None else (found + bias).to(out)
        elif self.case.dtype in BYTES:
            scales = self.scales["scale_a"], self.scales["scale_b"]
            found = torch._scaled_mm(a, b, *scales, bias=bias, out_dtype=out)
        elif bias is not None and a.ndim == 2:
            found = torch.addmm(bias, a, b)
        else:
            found = a @ b if bias is None else a @ b + bias
        found = found if epilogue.C is None else found + epilogue.C
        functions = torch.nn.functional
        how = self.case.activation
        if how == "gelu_tanh":
            found = functions.gelu(found, approximate="tanh")
        elif how is not None:
            found = getattr(functions, how)(found)
        found = found if epilogue.gate is None else found * epilogue.gate
        return found if epilogue.residual is None else found + epilogue.residual

    def check(self, found: Any) -> None:
        """Raise ArithmeticError where the first rows are beyond a bound of the first set's."""
        a, b, epilogue = self.sets[0]
        first = (slice(0, 1),) * (a.ndim - 2) + (slice(0, CHECKED),)
        left, right = a[first].double(), b[first[:-1]].double()
        if self.scales:
            left, right = left * self.scales["scale_a"][:CHECKED], right * self.scales["scale_b"]
        given = {
            name: (one if name == "bias" else one[first]).double().cpu().numpy()
            for name, one in epilogue.operands().items()
        }
        sums, sizes = ((x @ y).cpu().numpy() for x, y in ((left, right), (left.abs(), right.abs())))
        right_one = on_host.finished(sums, (1.0, 1.0), given, self.case.activation)
        u = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[self.case.out]
        of_sums = 2.0**-11 if self.case.dtype == "float8_e4m3fn" else 2.0**-22
        bound = 2 * u * (1 + abs(right_one)) + of_sums * sizes * abs(given.get("gate", 1.0))
        off = abs(found[first].double().cpu().numpy() - right_one)
        if not (off <= bound).all():
            raise ArithmeticError(f"wrong by {off.max():.3g}: {self.case.title()}")

    def told(self) -> str:
        """Return who applies the epilogue."""
        if self.scales:
            return "the kernel that scales"
        a, b, epilogue = self.sets[0]
        return gm.plan("matmul", a, b, epilogue=epilogue).explain().rpartition(", by ")[2]


def measured(case: Case, ordinal: int | None) -> list[dict[str, Any]]:
    """Return a record for each way of a case, all timed by turns; ordinal: None on the host."""
    given, clocks = Operands(case, ordinal), {}
    for name, call in given.ways().items():
        found = call(0)
        if name == OURS:
            given.check(found)
        clocks[name] = clock(call, ordinal, max(2, len(given.sets)))
    samples, about = in_turns(clocks, ROUNDS, seed=SEED), dataclasses.asdict(case)
    about |= {"schema": SCHEMA, "by": given.told()}
    return [
        {**dataclasses.asdict(times_of_us(times)), "samples": len(times)} | {**about, "name": name}
        for name, times in samples.items()
    ]


def show(ordinal: int, out: Path) -> dict[str, Any]:
    """Measure, print, write and return every case."""
    found = [measured(case, ordinal) for case in CASES]
    print_table(table("epilogues", found))
    return written([*itertools.chain(*found)], ordinal, out, "epilogues")


def random_cases(seed: int) -> Iterator[Case]:
    """Yield cases whose sizes are drawn evenly by their logarithms, of 16 to 8192."""
    draw = random.Random(seed)  # noqa: S311  no secret
    while True:
        m, n, k = (8 * round(2 ** draw.uniform(1.0, 10.0)) for _ in range(3))
        dtype = draw.choice(("bfloat16", "bfloat16", "float16", "float32", *BYTES))
        batch = draw.choice((1, 1, 1, 8)) if dtype not in BYTES and m * n * k < 1 << 31 else 1
        if dtype in BYTES:  # as PyTorch's products want them
            m, n, k = (max(32, size // 16 * 16) for size in (m, n, k))
        if m * n * k < (1 << 34 if dtype == "float32" else 1 << 37):
            yield Case(m, n, k, dtype, draw.choice(_HOWS), draw.choice(_PARTS), batch)


def hunt(
    ordinal: int, out: Path, seed: int, seconds: float, products: int | None = None
) -> dict[str, Any]:
    """Measure random cases for so long, print the worst beside PyTorch, write all."""
    end = time.monotonic() + seconds
    found: list[list[dict[str, Any]]] = []
    for case in itertools.islice(random_cases(seed), products):
        if found and time.monotonic() >= end:
            break
        found.append(measured(case, ordinal))
    worst = sorted(found, key=lambda one: _of(one, PEER) / _of(one, OURS))
    mean = geomean(_of(one, PEER) / _of(one, OURS) for one in found)
    title = f"{len(found)} products with epilogues, {mean:.2f} x the speed of {PEER} in the mean"
    print_table(table(title, worst[:WORST]))
    return written([*itertools.chain(*found)], ordinal, out, f"epilogues-hunt-{seed}")


def _of(case: list[dict[str, Any]], name: str) -> float:
    return next(float(one["median"]) for one in case if one["name"] == name)


def case_of(record: dict[str, Any]) -> Case:
    """Return the case of a record."""
    fields = {field.name: record[field.name] for field in dataclasses.fields(Case)}
    return Case(**{**fields, "operands": tuple(fields["operands"])})


def table(title: str, found: list[list[dict[str, Any]]]) -> TableData:
    """Return a row for each case, of the records of each."""
    columns: tuple[Column[list[dict[str, Any]]], ...] = (
        ("product: epilogue", lambda one: case_of(one[0]).title(), False),
        ("plain, us", lambda one: significant(_of(one, PLAIN)), True),
        ("with it, us", lambda one: significant(_of(one, OURS)), True),
        ("more", lambda one: f"{100 * (_of(one, OURS) / _of(one, PLAIN) - 1):+.0f} %", True),
        ("speed of PyTorch's", lambda one: f"{_of(one, PEER) / _of(one, OURS):.2f}", True),
        ("by", lambda one: str(one[0]["by"]), False),
    )
    return table_of(title, found, columns)
