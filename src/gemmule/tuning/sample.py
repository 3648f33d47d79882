"""The sample that a device model is fitted to: random products, each measured several ways.

Products follow from a seed and their number. Of each the rungs that take it are verified and timed
by the tuner's own session, cold and in turns: the parameters that each suggests for itself, then
some beside. What was measured is a row on disk before the next product begins, so that a run that
was ended goes on where it was; a row counts as long as no source of its rung has changed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from gemmule import backends
from gemmule.backends.cuda import starter
from gemmule.choose import eligible
from gemmule.core.device_model import DeviceModel
from gemmule.core.problem import (
    BYTES,
    FLOAT4,
    FLOAT4_DTYPE,
    FLOATS,
    HALVES,
    Problem,
    QuantSpec,
    check_problem,
)
from gemmule.core.registry import all_rungs
from gemmule.core.rung import CudaRung, Machine, Params, Rung
from gemmule.errors import DeviceError
from gemmule.oracle.problems import float4_spec, make_problem
from gemmule.quant.float4 import GROUP_SIZES
from gemmule.storage import lines, models
from gemmule.storage.sources import rung_digest
from gemmule.storage.tuned import problem_of
from gemmule.timing.clock import Entry
from gemmule.tuning.compiling import Compilers, Kernels
from gemmule.tuning.fit import Timed
from gemmule.tuning.operands import Place, place_of
from gemmule.tuning.outcomes import Candidate, Failure, same
from gemmule.tuning.session import Session
from gemmule.tuning.space import HOPELESS, candidates
from gemmule.tuning.trials import smaller
from gemmule.tuning.tuner import MOST_DISTURBED, disturbed

Told: TypeAlias = Callable[[str, int, int], None]

SCHEMA = 1
OTHERS, OTHERS_WAYS, OTHERS_SEED = 300, 24, 1 << 41  # products that a model tells of beside
WAYS = 8  # of each product
BLOCKS = 3
AHEAD = 48  # products whose kernels are compiled while one is measured
LONGEST_SIDE = 17  # by its logarithm to base 2
MOST_BYTES = {"cpu": 1 << 25, "cuda": 1 << 28}  # random numbers come from the host
MOST_FLOPS = {"cpu": 500 << 25, "cuda": 500 << 30}
SECONDS = {"cpu": 0.05, "cuda": 0.02}  # of timing a way
MOST_SETS = {"cpu": 256, "cuda": 1024}  # of operands; more of small ones take longer than times
MOST_COPIED = {"cpu": 1 << 26, "cuda": 1 << 40}  # bytes of all sets: fresh pages take longer still
PRODUCTS = {"cpu": 24, "cuda": 200}
# No product, and no further way of one, begins later, unless so many are asked for; rates count.
LONGEST_S = {"cpu": 2.8, "cuda": 240.0}


@dataclass(frozen=True, slots=True)
class Way:
    """A row on disk: one product by a rung and parameters, `seconds` None where it did not run."""

    problem: Problem
    folder: str
    rung: str
    digest: str
    params: Mapping[str, int | float | str | bool]
    seconds: float | None
    why: str = ""


def draw(backend: str, seed: int) -> Iterator[Problem]:
    """Yield random products without end, the same for the same seed.

    Sides are drawn evenly by their logarithms, half of them whole multiples of 64. Of five products
    two are by a vector, two by a few columns or many, and one is of codes; behind each five a GPU
    has one of experts, which other random numbers draw.
    """
    rng, others = (random.Random(n) for n in (seed, seed ^ 1 << 40))  # noqa: S311  no secret
    plain = (one for one in _drawn(rng, backend) if _is_small(one, backend))
    experts = (one for one in _of_experts(others) if _is_small(one, backend))
    while True:
        yield from itertools.islice(plain, 5)
        if backend == "cuda":
            yield next(experts)


def _drawn(rng: random.Random, backend: str) -> Iterator[Problem]:
    while True:
        op = rng.choice(("matvec", "matvec", "matmul", "matmul", "codes"))
        m, n = _side(rng), _side(rng)
        if op == "codes":
            problem = _of_codes(rng, backend, m, n)
        elif op == "matvec":
            dtype = rng.choice(FLOATS)
            layout = rng.choice(("row", "col"))
            problem = make_problem("matvec", m, n, 1, (dtype,) * 3, layout_a=layout)
        else:
            a, out = rng.choice([*((t, t) for t in FLOATS), *((t, "int32") for t in BYTES)])
            layouts = {"layout_b": rng.choice(("row", "col"))}
            k, columns = n, _columns(rng)
            problem = make_problem("matmul", m, columns, k, (a, a, out), **layouts)
        yield problem


def _of_experts(rng: random.Random) -> Iterator[Problem]:
    """Yield grouped products: one expert or up to 256, a token or 16384, halves and codes.

    Weights of halves lie mostly along the sum, as `torch.nn.Linear` keeps them.
    """
    while True:
        experts, tokens = 2 ** rng.randint(0, 8), round(2 ** rng.uniform(0, 14))
        k, n = (math.ceil(2 ** rng.uniform(7, 13) / 128) * 128 for _ in range(2))
        dtype, coded = rng.choice(HALVES), rng.random() < 0.4
        how: dict[str, Any] = {"layout_b": "row" if rng.random() < 0.25 else "col"}
        weights = dtype
        if coded:
            weights, how = rng.choice(("uint4", "uint8", FLOAT4_DTYPE)), {}
            spec = QuantSpec(
                8, rng.choice((32, 64, 128)), rng.random() < 0.5, "row", "float16", False
            )
            if weights == "uint4":
                spec = replace(spec, bits=4)
            elif weights == FLOAT4_DTYPE:
                spec = float4_spec(rng.randrange(2))
            how["quant"] = spec
        yield make_problem("grouped", tokens, n, k, (dtype, weights, dtype), batch=experts, **how)


def _is_small(problem: Problem, backend: str) -> bool:
    """Tell whether a product can be asked for (sums of bytes end with int32) and takes little.

    All matrices of experts have to be there, those that no token chooses as well.
    """
    try:
        check_problem(problem)
    except ValueError:
        return False
    experts = problem.batch if problem.op == "grouped" else 1
    held = experts * replace(problem, batch=1).compulsory_bytes
    small = max(held, problem.compulsory_bytes) <= MOST_BYTES[backend]
    return small and problem.compulsory_bytes >= 1 << 10 and problem.flops <= MOST_FLOPS[backend]


def _side(rng: random.Random) -> int:
    size = round(2 ** rng.uniform(0, LONGEST_SIDE))
    return size if rng.random() < 0.5 else math.ceil(size / 64) * 64


def _columns(rng: random.Random) -> int:
    return rng.randint(2, 16) if rng.random() < 0.5 else round(2 ** rng.uniform(4, 12))


def _of_codes(rng: random.Random, backend: str, m: int, n: int) -> Problem:
    """Return a product of codes, in the order that the fast rungs of a back end read.

    A third of the matrices are transposed; on a GPU a fifth of the codes are floats of 4 bits.
    """
    m, n = (max(256, math.ceil(size / 256) * 256) for size in (m, n))
    bits, group = rng.choice((4, 8)), rng.choice((-1, 32, 64, 128))
    codes, scales, zeros, turned = (
        f"uint{bits}",
        "float16",
        rng.random() < 0.5,
        rng.random() < 1 / 3,
    )
    if backend == "cuda" and rng.random() < 0.2:
        scales, form = rng.choice(tuple(FLOAT4.items()))
        codes, bits, group, zeros = FLOAT4_DTYPE, 4, GROUP_SIZES[form], False
    layout = "mma16" if backend == "cuda" else "row"
    spec = QuantSpec(bits, group, zeros, layout, scales, turned)
    x = rng.choice((*HALVES, "float32"))
    op, columns = ("matvec", 1) if rng.random() < 0.4 else ("matmul", _columns(rng))
    sizes = (m, n, 1) if op == "matvec" else (m, columns, n)
    layout_b = "row" if op == "matvec" else rng.choice(("row", "col"))
    return make_problem(op, *sizes, (codes, x, x), quant=spec, layout_b=layout_b)


def expected(machine: Machine, model: DeviceModel) -> Iterator[Timed]:
    """Yield what a model expects of products of no sample, by the quickest ways.

    A fit to few products is held by them at sizes that these have not met.
    """
    here = replace(machine, model=model)
    for problem in itertools.islice(draw(machine.backend, OTHERS_SEED), OTHERS):
        ways = []
        for rung in all_rungs(machine.backend):
            if rung.seconds is None or rung.refusal(problem) or not eligible(rung, problem):
                continue
            compared = rung.space(problem) if rung.choices is None else rung.choices(problem, here)
            for params in compared:
                ways.append(Timed(problem, rung, params, rung.seconds(problem, params, here)))
        yield from sorted(ways, key=lambda way: way.seconds)[:OTHERS_WAYS]


def path_of(machine: Machine) -> Path:
    """Return the file of a device's sample, beside its model."""
    return models.path_of(machine.name, machine.arch, machine.units).with_suffix(".jsonl")


def read(path: Path, backend: str) -> list[tuple[Way, Timed | None]]:
    """Return the rows of a file that still count, and what was timed in each."""
    rungs = {(rung.folder, rung.name): rung for rung in all_rungs(backend)}
    found = []
    for way in lines.read_records(path, SCHEMA, Way):
        rung = rungs.get((way.folder, way.rung))
        if rung is None or way.digest != rung_digest(rung):
            continue
        try:
            problem = problem_of(asdict(way.problem))
        except ValueError:
            continue
        params = next((one for one in rung.space(problem) if one == way.params), None)
        timed = None
        if way.seconds is not None and params is not None and 0 < way.seconds < 3600:
            timed = Timed(problem, rung, params, way.seconds)
        found.append((way, timed))
    return found


class Sampler:
    """Measures products on one device and keeps the rows; not for use from several threads."""

    def __init__(self, device: str, *, place: Place | None = None, seed: int = 0) -> None:
        backend = backends.get("cpu" if device == "cpu" else "cuda")
        self.backend, self.machine = backend, backend.machine(device)
        self.place = place_of(device, self.machine.cache_bytes) if place is None else place
        self.seed, self.path = seed, path_of(self.machine)
        self.rows = read(self.path, self.machine.backend)
        self.lost = ""  # what ended the device's context

    def timed(self) -> list[Timed]:
        """Return all rows that were timed."""
        return [row for _, row in self.rows if row is not None]

    def drawn(self, products: int) -> list[Problem]:
        """Return the first products of the seed."""
        some = draw(self.machine.backend, self.seed)
        return [next(some) for _ in range(products)]

    def measure(
        self,
        problems: Sequence[Problem],
        told: Told,
        only: str | None = None,
        longest_s: float = math.inf,
    ) -> None:
        """Measure what is not known of these products yet, by all rungs or by one.

        longest_s: no product, and no further way of one, is begun later than this.
        """
        end = time.monotonic() + longest_s
        known = {_key(way.problem, way.folder, way.rung, way.params) for way, _ in self.rows}
        waiting: deque[tuple[int, Problem, list[Candidate], list[Future[None]]]] = deque()

        def begun() -> Iterator[tuple[int, Problem, list[Candidate], list[Future[None]]]]:
            for index, problem in enumerate(problems):
                missing = [
                    one
                    for one in self._ways(problem, only)
                    if _key(problem, one.rung.folder, one.rung.name, one.params) not in known
                ]
                needed = (kernels for one in missing for kernels in self._kernels(problem, one))
                yield index, problem, missing, [compilers.ask(one) for one in needed]

        coming = begun()
        with Compilers() as compilers:
            while not self.lost:
                waiting.extend(itertools.islice(coming, AHEAD - len(waiting)))
                if not waiting:
                    break
                index, problem, missing, compiled = waiting.popleft()
                told(problem.describe(), index, len(problems))
                if missing and time.monotonic() < end:
                    wait(compiled)
                    self._keep(problem, missing, end)

    def _kernels(self, problem: Problem, way: Candidate) -> Iterator[Kernels]:
        """Yield what a way compiles, at its own size and at that which it is verified at.

        What goes wrong here is met again when it is measured.
        """
        if isinstance(way.rung, CudaRung):
            for one in (problem, smaller(problem)):
                with contextlib.suppress(Exception):
                    steps = way.rung.steps(one, way.params, self.machine)
                    yield starter.compiled_by(way.rung, steps, self.machine.arch)

    def _ways(self, problem: Problem, only: str | None) -> list[Candidate]:
        """Return what to measure of a product: each rung's own choice, then others on a GPU.

        The quickest is expected to be so first; on a CPU formulas hold for a rung's choice alone.
        """
        machine = self.machine
        own = [
            Candidate(rung, rung.check_params(problem, found.params), found.expected_s)
            for rung in all_rungs(machine.backend)
            if rung.refusal(problem) is None and eligible(rung, problem)
            if self.backend.proved(rung, problem, machine)
            if (found := rung.suggest(problem, machine)) is not None
        ]
        own.sort(key=lambda one: one.expected_s or math.inf)
        if own and machine.backend == "cuda":
            others, _ = candidates(problem, machine, own[0], seed=self.seed)
            own += [one for one in others if not any(same(one, mine) for mine in own)]
        most = HOPELESS * (own[0].expected_s or math.inf) if own else 0.0
        ways = [one for one in own if (one.expected_s or math.inf) <= most][:WAYS]
        return [one for one in ways if only in (None, f"{one.rung.folder}/{one.rung.name}")]

    def _keep(self, problem: Problem, ways: Sequence[Candidate], end: float) -> None:
        """Time some ways in turns and write their rows."""
        backend = self.machine.backend
        try:
            copied = MOST_COPIED[backend] // max(problem.compulsory_bytes, 1)
            most = max(2, min(MOST_SETS[backend], copied))
            session = Session(problem, self.machine, self.place, self.seed, most)
        except (DeviceError, MemoryError) as error:  # no room for it now, or no device any more
            self.lost = str(error) if isinstance(error, DeviceError) and error.restart else ""
            return
        entries: list[Entry] = []
        for way in ways:
            if entries and time.monotonic() > end:
                break  # a later run measures the rest
            found = session.admit(way)
            if isinstance(found, Failure):
                self._add(problem, way.rung, way.params, None, f"{type(found).__name__}")
            else:
                entries.append(found)
            if session.lost:  # the ways behind it would all fail
                break
        self.lost = session.lost
        if entries and not self.lost:
            limit = SECONDS[backend] * len(entries)
            samples = session.race(
                entries, limit, min_blocks=BLOCKS, precision=0.01, seed=self.seed
            )
            for entry in entries:
                way, found_s = entry.about, samples[entry.name]
                if disturbed(found_s) <= MOST_DISTURBED:  # else a later run measures it
                    self._add(problem, way.rung, way.params, found_s.median)
        lines.write_records(self.path, SCHEMA, (way for way, _ in self.rows))

    def _add(
        self, problem: Problem, rung: Rung, params: Params, seconds: float | None, why: str = ""
    ) -> None:
        way = Way(problem, rung.folder, rung.name, rung_digest(rung), dict(params), seconds, why)
        timed = None if seconds is None else Timed(problem, rung, params, seconds)
        self.rows.append((way, timed))


def _key(problem: Problem, folder: str, rung: str, params: Params) -> object:
    return problem, folder, rung, tuple(sorted(params.items()))
