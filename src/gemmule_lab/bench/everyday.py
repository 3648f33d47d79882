"""What CPU users meet before large products: small ones, halves, small groups, a busy machine.

Each case is timed in turns with what it is judged by, over one set of operands: NumPy's float32 for
small products as calls are written (no result given, planned and not), PyTorch for bfloat16,
groups of 128 for smaller groups, and beside busy processes a bare loop of the same processor time.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

import gemmule as gm
from gemmule.backends.cpu.atomics import now_ns
from gemmule.backends.cpu.intrinsics import store
from gemmule.backends.cpu.jit import kernel
from gemmule.backends.cpu.threads import thread_count
from gemmule.core.problem import numpy_dtype
from gemmule.timing.clock import HostClock, entry_over
from gemmule.timing.sampler import Budget, Ratio
from gemmule_lab.bench.session import measured_environment
from gemmule_lab.harness.bench import Bench, race
from gemmule_lab.harness.host import judged
from gemmule_lab.harness.operands import drawn
from gemmule_lab.peers.cpu_float import to_torch
from gemmule_lab.peers.peer import module_missing
from gemmule_lab.progress import say, tracked
from gemmule_lab.records import log, results
from gemmule_lab.records.rows import Environment, Facts, Row, speedup_of, times_of_us
from gemmule_lab.report.render import print_table
from gemmule_lab.report.tables import TableData, in_words, significant, speedup_text

Call = Callable[[], Any]
_put = store("int64", "int64")

SMALL = (
    *(("matvec", "float32", n) for n in (64, 384)),
    *(("vecmat", "float32", n) for n in (64, 384)),
    *(("matmul", "float32", n) for n in (16, 64)),
    *(("matmul", half, n) for half in ("bfloat16", "float16") for n in (16, 64, 128, 256)),
)
SIDES = (512, 1024, 2048)  # of bfloat16 beside PyTorch
GROUPS, CODED, COLUMNS = (16, 32, 128), (2048, 4096), 512
BUSY = (1024, 4096)  # float32 A x
CALLS, TURNS, BUSY_S = 2000, 4, 20.0
LATE = "99th percentile over that of {}"
BARE = "a bare loop of the same processor time"


def start(bench: Bench, seconds: float, out: Path) -> Path:
    """Measure every case, `seconds` each, into a file of its own; print a table."""
    environment = measured_environment(bench, 2 * seconds)
    path, rows = log.fresh(out, "everyday"), list[Row]()
    results.append(path, [environment])
    try:
        count = len(SMALL) + len(SIDES) * _with_torch() + 4 + len(BUSY)
        for one in tracked(_cases(environment, seconds), count, "measuring"):
            results.append(path, one)
            rows += one
            say(f"{one[0].group}: {in_words(one)}")
    finally:
        print_table(table(rows))
        click.echo(f"wrote {path}")
    return path


def table(rows: Sequence[Row]) -> TableData:
    """Return a line for each of ours and each that it stands beside."""
    body = [
        (row.group, row.name, significant(row.times_us.median), f"{1e3 * row.tflops:.0f}", *beside)
        for row in rows
        if row.kind == "rung"
        for beside in ((speedup_text(s), name) for name, s in row.speedups.items())
    ]
    header = ("case", "ours", "us", "GFLOP/s", "times as fast", "as")
    return TableData("everyday", header, tuple(body), (False, False, True, True, True, False))


def _cases(environment: Environment, seconds: float) -> Iterator[list[Row]]:
    for op, dtype, n in SMALL:
        yield small(environment, op, dtype, n, seconds)
    if _with_torch():
        for n in SIDES:
            yield beside_torch(environment, n, seconds)
    for bits in (4, 8):
        for activations in (None, "int8"):
            yield groups(environment, bits, activations, seconds)
    for n in BUSY:
        yield beside_busy(environment, n)


def _with_torch() -> bool:
    return module_missing("torch") is None


def _timed(
    environment: Environment, ours: dict[str, tuple[Call, Facts]], peer: str, call: Call, s: float
) -> list[Row]:
    facts = next(iter(ours.values()))[1]
    about = Facts(facts.problem, "peer", "warm", group=facts.group, shown=False)
    entries = [entry_over(name, [one], told) for name, (one, told) in ours.items()]
    return race(
        [*entries, entry_over(peer, [call], about)],
        HostClock(),
        environment,
        Budget(s, min_block_s=2e-3),
    )


def small(environment: Environment, op: str, dtype: str, n: int, seconds: float) -> list[Row]:
    """Return a small product, unplanned and planned, beside NumPy's float32."""
    rng = np.random.default_rng(n)
    wide = [drawn((n, n), rng), drawn((n, n) if op == "matmul" else (n,), rng)]
    wide = wide[::-1] if op == "vecmat" else wide
    # The same memory where it may be: off 32 bytes a BLAS takes a fifth longer.
    a, b = (one.astype(numpy_dtype(dtype), copy=False) for one in wide)
    plan, function = gm.plan(op, a, b), getattr(gm, op)
    error = judged(op, a, b)
    facts = Facts(plan.problem, "rung", "warm", {}, error, group=f"{op} {n}, {dtype}")
    calls = {"unplanned": lambda: function(a, b), "planned": lambda: plan(a, b)}
    ours = {name: (call, facts) for name, call in calls.items()}
    return _timed(environment, ours, "numpy float32", lambda: wide[0] @ wide[1], seconds)


def beside_torch(environment: Environment, n: int, seconds: float) -> list[Row]:
    """Return bfloat16 matrices beside PyTorch's."""
    import torch

    rng = np.random.default_rng(n)
    a, b = (drawn((n, n), rng).astype(numpy_dtype("bfloat16")) for _ in range(2))
    # Copies: PyTorch's memory begins cache lines, and off them its tiles take nearly twice as long.
    plan, (left, right) = gm.plan("matmul", a, b), (to_torch(a).clone(), to_torch(b).clone())
    facts = Facts(
        plan.problem, "rung", "warm", {}, judged("matmul", a, b), group=f"matmul {n}, bfloat16"
    )
    with torch.inference_mode():
        ours = {plan.rung.name: (lambda: gm.matmul(a, b), facts)}
        return _timed(environment, ours, "torch", lambda: torch.matmul(left, right), seconds)


def groups(
    environment: Environment, bits: int, activations: str | None, seconds: float
) -> list[Row]:
    """Return codes in small groups by many columns, beside the largest of `GROUPS`."""
    rng = np.random.default_rng(bits)
    weights, x = drawn(CODED, rng), drawn((CODED[1], COLUMNS), rng)
    options: dict[str, Any] = {} if activations is None else {"activations": activations}
    words = f"{bits}-bit codes by {COLUMNS} columns, {activations or 'float'} activations"
    made: dict[str, tuple[Call, Facts]] = {}
    for group in GROUPS:
        Q = gm.quantize(weights, bits, group)  # type: ignore[arg-type]
        plan = gm.plan("matmul", Q, x, **options)
        error = judged("matmul", Q, x, **options)
        facts = Facts(plan.problem, "rung", "warm", {}, error, group=words)
        made[f"groups of {group}: {plan.rung.name}"] = functools.partial(plan, Q, x), facts
    *ours, (widest, (call, _)) = made.items()
    return _timed(environment, dict(ours), widest, call, seconds)


# --- beside busy processes ------------------------------------------------------------------------


@kernel
def _bare(out: int, count: int, steps: int) -> int:
    """Time a loop of so many steps `count` times, in nanoseconds."""
    total = 1
    for i in range(count):
        begun = now_ns()
        for j in range(steps):
            total = total * 6364136223846793005 + j
        _put(out, i, now_ns() - begun)
    return total


def bare_times(threads: int, count: int, steps: int) -> list[float]:
    """Return the microseconds of bare loops that as many threads make side by side.

    As a product is done when its last share is, the n-th is as long as the longest of all threads'.
    """
    times = np.zeros((threads, count), np.int64)
    team = [threading.Thread(target=_bare, args=(row.ctypes.data, count, steps)) for row in times]
    for one in team:
        one.start()
    for one in team:
        one.join()
    return [float(ns) * 1e-3 for ns in times.max(0)]


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep so many processors busy with other processes, for the block."""
    code = "while True: sum(range(100_000))"
    children = [subprocess.Popen((sys.executable, "-P", "-c", code)) for _ in range(count)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def _each(call: Call, count: int) -> list[float]:
    """Return the microseconds of calls, one by one."""
    times = []
    for _ in range(count):
        begun = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begun) * 1e-3)
    return times


def beside_busy(environment: Environment, n: int, calls: int = CALLS) -> list[Row]:
    """Return float32 A x beside as many busy processes as processors, and NumPy's.

    The loop takes the least time that a product of ours took, on as many threads. Turns are long,
    as who has slept runs for a slice before others are run.
    """
    rng, threads = np.random.default_rng(n), thread_count()
    A, x = drawn((n, n), rng), drawn((n,), rng)
    plan, error = gm.plan("matvec", A, x), judged("matvec", A, x)
    least = min(_each(lambda: gm.matvec(A, x), calls // 4))
    steps = int(least * 1e-3 / min(bare_times(1, 20, 1_000_000)) * 1e9)
    block, end = calls // TURNS, time.perf_counter() + BUSY_S
    ours, numpy, bare = list[float](), list[float](), list[float]()
    with busy_processes(threads):
        while len(ours) < calls and (time.perf_counter() < end or not numpy):
            ours += _each(lambda: gm.matvec(A, x), block)
            bare += bare_times(threads, block, steps)
            numpy += _each(lambda: A @ x, max(1, block // 20))
    facts = Facts(
        plan.problem, "rung", "warm", {}, error, group=f"matvec {n}, float32, busy machine"
    )
    return [busy_row(environment, facts, plan.rung.name, ours, {BARE: bare, "numpy": numpy})]


def busy_row(
    environment: Environment,
    facts: Facts,
    name: str,
    ours: Sequence[float],
    others: dict[str, Sequence[float]],
) -> Row:
    """Return the row of calls timed one by one, with ratios of medians and of late ones."""
    speedups = {}
    for other, theirs in others.items():
        for words, share in ((other, 0.5), (LATE.format(other), 0.99)):
            value = float(np.quantile(ours, share) / np.quantile(theirs, share))
            speedups[words] = speedup_of(Ratio(value, value, value, len(theirs), 0.5))
    times, problem = times_of_us(ours), facts.problem
    rates = problem.compulsory_bytes / times.median * 1e-3, problem.flops / times.median * 1e-6
    about = environment.id, problem, name, "rung", "warm", times, *rates
    return Row(*about, speedups=speedups, error_ratio=facts.error_ratio, group=facts.group)
