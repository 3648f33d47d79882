"""The records of the lab: a ceiling, an environment, one timed row, and how rows are made."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gemmule.core.problem import Problem
from gemmule.timing.sampler import Ratio, Samples

TEMPERATURES = ("cold", "warm")
KINDS = ("rung", "peer")
MOST_BLOCKS = 64  # whose times a row keeps; of more, as many quantiles
# How the flags begin of rows that say more about other programs than about the code.
TAKEN_AWAY, OTHERS = "the CPU was taken away", "other programs used"


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A limit measured on a device: the best of several ways to reach it.

    name: ``read``, ``copy``, ``fma float32``, ...; value in `unit` (``GB/s`` or ``GFLOP/s``);
    `shape` names the way that won, `tried` holds what every way gave. `measured` counts how often
    the ceiling was taken (more than once when a row rose above it).
    """

    name: str
    value: float
    unit: str
    shape: str
    threads: int
    tried: Mapping[str, float] = field(default_factory=dict)
    measured: int = 1


@dataclass(frozen=True, slots=True)
class Environment:
    """Where and with what rows were measured. `id` is the digest of everything else.

    caches: bytes by name (``L1``, ``L2``), those of all processors together.
    """

    device: str
    backend: str
    cpu: str
    gpus: tuple[str, ...]
    system: str
    python: str
    versions: Mapping[str, str]
    commit: str | None
    threads: int
    clocks: Mapping[str, str]
    ceilings: Mapping[str, Ceiling]
    data: str = "normal random"
    timestamp: str = ""
    caches: Mapping[str, int] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Sixteen hexadecimal digits that name this environment."""
        record = dataclasses.asdict(self)
        if not self.caches:  # as it was before they were kept
            del record["caches"]
        text = json.dumps(record, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one call in microseconds over `n` blocks."""

    median: float
    q1: float
    q3: float
    min: float
    n: int


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times as fast as a peer, with the interval of the given confidence."""

    value: float
    low: float
    high: float
    pairs: int
    confidence: float
    verdict: str


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation on one problem, timed.

    gbs: 10^9 compulsory bytes a second; tflops: 10^12 operations a second, 2 m n k being the count;
    percent_of_ceiling: of the measured read ceiling, None where no DRAM ceiling applies (warm
    rows). speedups: over each peer of the same run. error_ratio: largest error over the oracle's
    bound. bytes_saved: against the same matrix in float32. proof: digest of the rung's evidence.
    flags: what a reader has to know (``above the read ceiling by 12 %``). named: the rung was asked
    for by its name. blocks_us: time of one call in each block.
    """

    environment: str
    problem: Problem
    name: str
    kind: str
    temperature: str
    times_us: Times
    gbs: float
    tflops: float
    params: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    percent_of_ceiling: float | None = None
    speedups: Mapping[str, Speedup] = field(default_factory=dict)
    error_ratio: float | None = None
    bytes_saved: int = 0
    proof: str | None = None
    mode: str = ""
    flags: tuple[str, ...] = ()
    stopped: str = ""
    clock: str = ""
    group: str = ""
    named: bool = False
    blocks_us: tuple[float, ...] = ()

    @property
    def disturbed(self) -> bool:
        """Whether other programs were at work while it was timed, so that no claim rests on it."""
        return any(flag.startswith((TAKEN_AWAY, OTHERS)) for flag in self.flags)

    @property
    def key(self) -> str:
        """What makes two rows of different files the same measurement."""
        parts = [dataclasses.asdict(self.problem), self.kind, self.name, dict(self.params)]
        return json.dumps([*parts, self.temperature, self.group], sort_keys=True)


def times_of(samples: Samples) -> Times:
    """Return the statistics of samples in microseconds."""
    median, q1, q3 = samples.median * 1e6, samples.q1 * 1e6, samples.q3 * 1e6
    return Times(median, q1, q3, samples.best * 1e6, samples.n)


def times_of_us(values: Sequence[float]) -> Times:
    """Return the statistics of times in microseconds, each of one call."""
    q1, median, q3 = (float(q) for q in np.quantile(values, (0.25, 0.5, 0.75)))
    return Times(median, q1, q3, min(values), len(values))


def blocks_us(samples: Samples) -> tuple[float, ...]:
    """Return the time of one call in each block, to four digits; of many blocks, quantiles."""
    found = np.asarray(samples.seconds) * 1e6
    if len(found) > MOST_BLOCKS:
        found = np.quantile(found, np.linspace(0, 1, MOST_BLOCKS))
    return tuple(float(f"{us:.4g}") for us in found)


def speedup_of(time_ratio: Ratio) -> Speedup:
    """Return the speed-up over a peer from ``ratio(ours, peer)``, a ratio of times."""
    up = time_ratio.inverse()
    return Speedup(up.value, up.low, up.high, up.pairs, up.confidence, time_ratio.verdict)


def disturbed(samples: Samples) -> tuple[str, ...]:
    """Return the flag of samples more than half of whose blocks lost the CPU to another process."""
    hit = sum(int(note.get("preempted", 0)) > 0 for note in samples.notes)
    if 2 * hit <= samples.n:
        return ()
    return (f"{TAKEN_AWAY} during {hit} of {samples.n} blocks",)


def throttled(samples: Samples) -> tuple[str, ...]:
    """Return the flag of samples during which a GPU throttled, by the reasons that NVML gives."""
    reasons = {int(note["throttle"]) for note in samples.notes if note.get("throttle")}
    # 1: idle between blocks; 4: the power limit, the normal state of a busy tensor core.
    serious = sorted(reason for reason in reasons if reason & ~0x5)
    if not serious:
        return ()
    words = ", ".join(f"{reason:#x}" for reason in serious)
    return (f"clocks lowered (NVML reasons {words})",)


def bytes_saved(problem: Problem) -> int:
    """Return the bytes the matrix takes less than it would in float32 (negative: more)."""
    entries = problem.batch if not problem.shared_a else 1
    return entries * (problem.m * problem.reduction * 4 - problem.matrix_bytes)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a benchmark entry before it is timed; see `Row`.

    against: the entries over which a rung's speed-ups are; None: all that are no rungs. shown:
    whether it has a row; what multiplies other numbers stands in the ratios alone. named: the
    rung was asked for by its name.
    """

    problem: Problem
    kind: str
    temperature: str
    params: Mapping[str, Any] = field(default_factory=dict)
    error_ratio: float | None = None
    proof: str | None = None
    mode: str = ""
    group: str = ""
    against: tuple[str, ...] | None = None
    shown: bool = True
    named: bool = False


def make_row(
    environment: Environment,
    facts: Facts,
    samples: Samples,
    speedups: Mapping[str, Speedup] | None = None,
) -> Row:
    """Return the row of one benchmark entry, whose name is the row's.

    Only cold rows get a share of the read ceiling.
    """
    problem, times = facts.problem, times_of(samples)
    gbs = problem.compulsory_bytes / times.median * 1e-3
    read = environment.ceilings.get("read")
    cold = facts.temperature == "cold"
    return Row(
        environment=environment.id,
        problem=problem,
        name=samples.name,
        kind=facts.kind,
        temperature=facts.temperature,
        times_us=times,
        gbs=gbs,
        tflops=problem.flops / times.median * 1e-6,
        params=dict(facts.params),
        percent_of_ceiling=100 * gbs / read.value if read is not None and cold else None,
        speedups=dict(speedups or {}),
        error_ratio=facts.error_ratio,
        bytes_saved=bytes_saved(problem),
        proof=facts.proof,
        mode=facts.mode,
        flags=(*disturbed(samples), *throttled(samples)),
        stopped=samples.stopped,
        clock=samples.clock,
        group=facts.group,
        named=facts.named,
        blocks_us=blocks_us(samples),
    )
