"""Ctrl-C at random moments of first and of later products, a campaign that is kept as data.

``python tests/interrupts_campaign.py [--tries N] [--seed S] [--record] [KIND ...]`` starts a
process for each try, which is interrupted once at a random moment of its products. It has to end in
KeyboardInterrupt, or to have finished before, and the same products have to be right afterwards.
Kinds: ``import`` (code is on disk and is loaded), ``compile`` (nothing is on disk),
``later`` (products that were made before), and ``long`` (a product of files that takes seconds,
mostly in a BLAS). How long the slowest took to end is told.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import math
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from campaign_record import keep

KINDS = ("import", "compile", "later", "long")
LIMIT_S = 120
CHILD = """
import os, signal, sys, tempfile, threading, time
import numpy as np
import gemmule as gm

# A shell starts what runs in the background with Ctrl-C ignored, and Python leaves that so.
signal.signal(signal.SIGINT, signal.default_int_handler)
kind, share, seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
rng = np.random.default_rng(1)
A, x = rng.integers(-3, 4, (256, 192)), rng.integers(-3, 4, 192)
halves = A.astype(np.float16), x.astype(np.float16)
codes = gm.quantize(A.astype(np.float32), bits=8, group_size=-1)

def of_files(folder):
    from pathlib import Path
    from gemmule_lab.files.multiply import Job, blocks, multiply
    path = Path(folder, "big.npy")
    if not path.exists():
        np.save(path, rng.integers(-3, 4, (3000, 3000)).astype(float))
    big = np.load(path, mmap_mode="r")
    job = Job("matmul", big, big)
    return multiply(job, np.empty(job.shape), blocks(job))

def products(times=1):
    if kind == "long" and times > 1:
        with tempfile.TemporaryDirectory() as folder:
            yield from of_files(folder)
    for _ in range(times):
        yield gm.matvec(*halves)
        yield gm.vecmat(x.astype(np.int8)[:192], A.astype(np.int8).T)
        yield gm.matvec(codes, x.astype(np.float32))

truth = [A @ x, A @ x, codes.dequantize("float64") @ x]
if kind in ("later", "long"):
    list(products())
begun = time.perf_counter()
if share >= 0:
    def send():
        global sent
        sent = time.perf_counter()
        os.kill(os.getpid(), signal.SIGINT)
    timer = threading.Timer(share * seconds, send)
happened = "finished"
try:
    if share >= 0:
        timer.start()
    list(products(300 if kind in ("later", "long") else 1))
    took = time.perf_counter() - begun
    if share >= 0:
        timer.join()
        time.sleep(0.05)
except KeyboardInterrupt:
    happened, took = "interrupted", time.perf_counter() - sent
for found, wanted in zip(products(), truth):
    assert np.abs(found - wanted).max() <= 1e-3 * (1 + np.abs(wanted).max()), "wrong"
print(happened, took)
"""


def tried(kind: str, share: float, seconds: float, cache: str) -> tuple[str, str]:
    """Return what one process said, and its last error."""
    with tempfile.TemporaryDirectory() as own:
        environment = {**os.environ, "GEMMULE_CACHE": own if kind == "compile" else cache}
        command = [sys.executable, "-c", CHILD, kind, str(share), str(seconds)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return "", f"hung for {LIMIT_S} s"
    error = done.stderr.strip().splitlines()
    return (done.stdout.strip(), "") if done.returncode == 0 else ("", (error or ["died"])[-1])


def campaign(
    kind: str, tries: int, seed: int, until: float = math.inf, jobs: int = 1
) -> tuple[collections.Counter[str], list[str], float]:
    """Return how often each thing happened, what must not be, and the longest way to an end."""
    counts: collections.Counter[str] = collections.Counter()
    bad, rng, slowest = [], random.Random(f"{seed} {kind}"), 0.0
    with tempfile.TemporaryDirectory() as cache:
        tried(kind, -1, 1, cache)  # fills the cache
        seconds = float(tried(kind, -1, 1, cache)[0].split()[1])
        shares = [rng.random() for _ in range(tries)]

        def one(number: int) -> tuple[int, str, str] | None:
            if time.monotonic() > until:
                return None
            return number, *tried(kind, shares[number], seconds, cache)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for number, said, error in filter(None, pool.map(one, range(tries))):
                what, _, took = said.partition(" ")
                counts[what or "broken"] += 1
                slowest = max(slowest, float(took)) if what == "interrupted" else slowest
                if error:
                    bad.append(f"{kind} {number} of seed {seed}: {error}")
    if not counts["interrupted"]:
        bad.append(f"{kind}: no signal arrived")
    return counts, bad, slowest


def main() -> int:
    """Run the campaign and print a table; 1 where a process was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no try later")
    parser.add_argument("--jobs", type=int, default=1, help="tries side by side")
    parser.add_argument("--record", action="store_true", help="keep the outcome in the evidence")
    given = parser.parse_args()
    faults, until = 0, time.monotonic() + given.seconds
    for kind in given.kinds or KINDS:
        counts, bad, slowest = campaign(kind, given.tries, given.seed, until, given.jobs)
        faults += len(bad)
        shown = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
        shown += f", the slowest {slowest:.1f} s after the signal"
        sys.stdout.write("".join(f"{line}\n" for line in [*bad[:10], f"{kind}: {shown}"]))
        if given.record:
            tries = sum(counts.values())
            again = f"python tests/{Path(__file__).name} --tries {tries} --seed {given.seed} {kind}"
            keep(f"interrupts: {kind}", tries, len(bad), again, shown)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
