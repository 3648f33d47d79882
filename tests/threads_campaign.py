"""Eight threads in random public calls, first compilations and caches included: a campaign by seed.

``python tests/threads_campaign.py [--seconds T] [--threads N] [--seed S] [--record]`` runs rounds
of a minute, each in a new process with an empty cache, so that threads compile, plan and write the
cache side by side. Every result is judged by integers that are exact in its dtype, or by the bits
of the same call before. A round that ends by a signal, or in which a thread makes no call for
`HANG_S`, counts its threads as bad.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gemmule as gm
import scalars_campaign
from campaign_record import keep
from gemmule import backends
from gemmule.core.caches import forget_plans
from gemmule.core.registry import all_rungs
from gemmule.storage import tuned
from products import ARRANGEMENTS, assert_same, exact, small

ROUND_S, HANG_S = 60.0, 180.0
POOLS = ("blas", "own")
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "complex64")
SHAPES = (1, 2, 7, 16, 33, 60)
# A matrix of codes that all threads share, and what any of them got from it.
MATRIX = gm.quantize(small(np.random.default_rng(1), (48, 60)), bits=8, group_size=-1)
VECTOR = small(np.random.default_rng(2), (60,), "float32")
Rng = np.random.Generator


def operands(rng: Rng, op: str) -> tuple[Any, Any, str]:
    """Return two operands of a product as they may lie, and their dtype."""
    m, n, k = (int(SHAPES[i]) for i in rng.integers(len(SHAPES), size=3))
    shapes = {"matvec": ((m, k), (k,)), "vecmat": ((k,), (k, m)), "matmul": ((m, k), (k, n))}[op]
    dtype = DTYPES[rng.integers(len(DTYPES))]
    ways = [ARRANGEMENTS[name] for name in scalars_campaign.LAID]
    a, b = (ways[rng.integers(len(ways))](small(rng, shape, dtype)) for shape in shapes)
    return a, b, dtype


def product(rng: Rng) -> None:
    """Call a function, now and then by the name of a rung."""
    op = ("matvec", "vecmat", "matmul")[rng.integers(3)]
    a, b, dtype = operands(rng, op)
    rungs = [one.name for one in gm.ladder("matmul" if op == "matmul" else "matvec", "cpu")]
    named = rungs[rng.integers(len(rungs))] if rng.random() < 0.5 else None
    try:
        result = getattr(gm, op)(a, b, rung=named)
    except (TypeError, ValueError):
        if named is None:
            raise
        return  # a rung may refuse dtypes and layouts
    assert_same(result, exact(op, a, b), dtype)


def planned(rng: Rng) -> None:
    """Make a plan and call it twice, the second time into a result."""
    a, b, dtype = operands(rng, "matmul")
    plan, truth = gm.plan("matmul", a, b), exact("matmul", a, b)
    assert_same(plan(a, b), truth, dtype)
    out = np.full(truth.shape, 7, a.dtype)
    assert plan(a, b, out=out) is out
    assert_same(out, truth, dtype)


def scaled(rng: Rng) -> None:
    """Call gemv or gemm with random scalars."""
    signatures = scalars_campaign.SIGNATURES + scalars_campaign.ON_HOST
    case = scalars_campaign.draw(rng, signatures, scalars_campaign.LAID)
    with np.errstate(all="ignore"):
        fault = scalars_campaign.wrong(case, scalars_campaign.on_host(case))
    assert not fault, f"{case}: {fault}"


def tuned_choice(rng: Rng) -> None:
    """Store a tuned choice, let plans be made anew, and call what was tuned."""
    a, b, dtype = operands(rng, "matvec")
    plan = gm.plan("matvec", a, b)
    able = [r for r in all_rungs("cpu") if r.refusal(plan.problem) is None]
    rung = able[rng.integers(len(able))]
    params = list(rung.space(plan.problem))
    choice = tuned.Tuned(rung, params[rng.integers(len(params))], 1e-6, "2026-11-22")
    tuned.save(backends.get("cpu").machine("cpu"), plan.problem, choice)
    forget_plans()
    assert_same(gm.matvec(a, b), exact("matvec", a, b), dtype)


def coded(rng: Rng) -> None:
    """Multiply the shared matrix of codes, and one of this thread's own, saved and loaded."""
    assert gm.matvec(MATRIX, VECTOR).tobytes() == RESULT
    mine = gm.quantize(rng.standard_normal((16, 64)), bits=4, group_size=32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.safetensors"
        mine.save(path)
        loaded = type(mine).load(path, mmap=False)
    x = rng.standard_normal(64, np.float32)
    assert gm.matvec(loaded, x).tobytes() == gm.matvec(mine, x).tobytes()


def met_at_once(rng: Rng) -> None:
    """Multiply a matrix of codes that other threads may be the first to multiply just now.

    All but the first are replaced now and then: that one meets its products to the end of a round,
    when those of many other forms have come between.
    """
    place = rng.integers(len(SHARED))
    if SHARED[place] is None or (place > 0 and rng.random() < 0.4):
        bits, n = (4, 8)[rng.integers(2)], int(rng.integers(1, 300))
        W = np.abs(small(rng, (int(rng.integers(1, 40)), n), "float32"))
        SHARED[place] = gm.quantize(W, bits=bits, group_size=(-1, 32)[rng.integers(2)])
    matrix = SHARED[place]
    assert matrix is not None
    op = ("matvec", "vecmat")[rng.integers(2)]
    W, (m, n) = matrix.dequantize("float64"), matrix.shape
    x = small(rng, (n if op == "matvec" else m,), "float32")
    y = gm.matvec(matrix, x) if op == "matvec" else gm.vecmat(x, matrix)
    W = W if op == "matvec" else W.T
    bound = (len(x) + 2) * 2.0**-23 * (np.abs(W) @ np.abs(x.astype(np.float64)))
    assert (np.abs(y - W @ x) <= bound).all(), (op, matrix)


SHARED: list[gm.QuantizedMatrix | None] = [None] * 4
RESULT = gm.matvec(MATRIX, VECTOR).tobytes()
CALLS: tuple[Callable[[Rng], None], ...] = (
    *(product, product, planned, scaled, tuned_choice),
    *(coded, met_at_once, met_at_once),
)


def one_round(seed: int, threads: int, seconds: float) -> int:
    """Run the threads in this process; print how many calls were made and were wrong."""
    end, calls = time.monotonic() + seconds, [0] * threads
    wrong: collections.Counter[str] = collections.Counter()
    last = [time.monotonic()] * threads

    def work(which: int) -> None:
        rng = np.random.default_rng([seed, which])
        while time.monotonic() < end:
            call = CALLS[rng.integers(len(CALLS))]
            try:
                call(rng)
            except Exception as error:  # whatever it is, it must not be
                wrong[call.__name__] += 1
                print(f"{call.__name__}, seed {seed}: {error!r}", file=sys.stderr, flush=True)
            calls[which] += 1
            last[which] = time.monotonic()

    running = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(threads)]
    for thread in running:
        thread.start()
    while any(thread.is_alive() for thread in running):
        time.sleep(0.2)
        stuck = [time.monotonic() - at > HANG_S for at in last]
        if any(s and t.is_alive() for s, t in zip(stuck, running, strict=True)):
            faulthandler.dump_traceback()
            os._exit(3)
    print(sum(calls), sum(wrong.values()), flush=True)
    return 0


def rounds(seed: int, threads: int, seconds: float) -> tuple[int, int]:
    """Return the calls and the bad ones of as many rounds as the time takes."""
    calls = bad = number = 0
    left = seconds
    while left > 0:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--threads", str(threads), "--round"]
            command += [str(min(left, ROUND_S)), "--seed", str(seed + number)]
            done = subprocess.run(
                command,
                env={**os.environ, "GEMMULE_CACHE": cache, "GEMMULE_POOL": POOLS[number % 2]},
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
        left, number = left - ROUND_S, number + 1
        if done.returncode:
            bad += threads
            print(f"round {number} ended with {done.returncode}", flush=True)
            continue
        made, wrong = (int(word) for word in done.stdout.split())
        calls, bad = calls + made, bad + wrong
        print(f"round {number}: {made} calls, {wrong} wrong", flush=True)
    return calls, bad


def main() -> int:
    """Run the campaign; 1 where a call was wrong, hung or crashed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--round", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--record", action="store_true", help="keep the outcome in the evidence")
    given = parser.parse_args()
    if given.round is not None:
        return one_round(given.seed, given.threads, given.round)
    print(f"seed {given.seed}", flush=True)
    calls, bad = rounds(given.seed, given.threads, given.seconds)
    if given.record:
        keep(
            "calls by threads side by side",
            calls,
            bad,
            f"python tests/threads_campaign.py --seconds {given.seconds:g} --threads "
            f"{given.threads} --seed {given.seed}",
            f"{given.threads} threads for {given.seconds / 60:g} minutes: first compilations, "
            "plans, rungs by name, scalars, tuned choices, files of codes, matrices of codes that "
            "threads are the first to multiply at once",
        )
    print(f"{calls} calls, {bad} wrong, hung or crashed", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
