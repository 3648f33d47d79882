"""Random grouped products, a campaign that is kept as data.

``python tests/grouped_campaign.py [--cases N] [--seed S] [--device cpu] [--rung R] [--record]``
draws up to 300 experts and 5,000 tokens, every float dtype and codes, offsets even, skewed, in one
group or in a few, indices, weights and gates, all layouts and views, and judges each result by the
oracle. On many cores set OPENBLAS_NUM_THREADS=1: each process is busy by itself.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
import secrets
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from campaign_record import keep
from gemmule_lab.verify import random_grouped

CHUNK = 50


def judged(
    seed: int, begin: int, end: int, device: str, rung: str | None
) -> list[tuple[str, float]]:
    """Return what is wrong with each case of a part, or "", and its error over its bound."""
    logging.getLogger("gemmule").setLevel(logging.ERROR)
    found = []
    for number in range(begin, end):
        trial = random_grouped.draw(seed, number, device, rung)
        try:
            verdict = random_grouped.run(trial)
        except Exception as error:  # whatever a legal call raises is the finding
            found.append((f"{trial}: {type(error).__name__}: {error}", 0.0))
            continue
        found.append(("" if verdict.ok else f"{trial}: {verdict.text}", verdict.ratio))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; return 1 where a case was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rung")
    parser.add_argument("--workers", type=int, default=max(os.cpu_count() or 1, 2))
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--record", action="store_true", help="keep the outcome in the evidence")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end no later")
    given = parser.parse_args(arguments)
    begun, worst, done, wrong = time.monotonic(), 0.0, 0, list[str]()
    with ProcessPoolExecutor(given.workers) as pool:
        starts = iter(range(0, given.cases, CHUNK))
        under_way: set[Future[list[tuple[str, float]]]] = set()
        while True:
            late = time.monotonic() - begun > given.seconds
            for first in (
                () if late else itertools.islice(starts, 2 * given.workers - len(under_way))
            ):
                last = min(first + CHUNK, given.cases)
                under_way.add(
                    pool.submit(judged, given.seed, first, last, given.device, given.rung)
                )
            if not under_way:
                break
            ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for text, ratio in itertools.chain.from_iterable(part.result() for part in ended):
                done, worst = done + 1, max(worst, 0.0 if text else ratio)
                wrong += [text] if text else []
    sys.stdout.write("".join(f"{text}\n" for text in wrong[:5]))
    seconds = time.monotonic() - begun
    sys.stdout.write(f"{done:,} cases, {len(wrong)} wrong, seed {given.seed}, {seconds:.0f} s\n")
    if given.record:
        keep(
            f"random grouped products: {given.device.partition(':')[0]}",
            done,
            len(wrong),
            f"python tests/grouped_campaign.py --cases {done} --seed {given.seed}"
            + (f" --device {given.device}" if given.device != "cpu" else ""),
            "up to 300 experts and 5,000 tokens, by offsets and indices, weighted, through a gate; "
            f"largest error over its bound {worst:.3f}",
            device=given.device != "cpu",
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
