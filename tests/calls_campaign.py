"""Random calls of the public functions, a campaign that is kept as data.

``python tests/calls_campaign.py [--cases N] [--device cpu] [--workers W] [--seed S] [--record]``
is ``gemmule verify --cases N`` whose outcome goes on record: every operation, dtype, layout, view,
batch and quantisation, sizes from 0, operands of each library that is there, each result judged.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time

from campaign_record import keep
from gemmule.lab.verify import on_device
from gemmule.lab.verify.random_products import Choice
from gemmule.lab.verify.workers import Tally, run_trials


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; return 1 where a call was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--record", action="store_true", help="keep the outcome in the evidence")
    given = parser.parse_args(arguments)
    libraries = on_device.present() if given.device != "cpu" else ("own",)
    begun = time.monotonic()
    choice = Choice(None, None, given.device, libraries)
    tally = run_trials(choice, given.cases, given.seed, given.workers)
    bad = _told(tally)
    said = f"{tally.done:,} calls, {tally.refused:,} refused, {bad} bad, seed {given.seed}"
    sys.stdout.write(f"{said}, {time.monotonic() - begun:.0f} s, {', '.join(libraries)}\n")
    if given.record:
        device = given.device.partition(":")[0]
        keep(
            f"random calls: {device}",
            tally.done,
            bad,
            f"python tests/calls_campaign.py --cases {given.cases} --device {device} "
            f"--seed {given.seed}",
            f"{tally.refused:,} refused as documented; operands of {', '.join(libraries)}; largest "
            f"error over its bound {tally.worst_ratio:.3f}",
            device=device != "cpu",
        )
    return int(bad > 0 or tally.done < given.cases)


def _told(tally: Tally) -> int:
    """Print what was bad and return how many calls were."""
    for number, trial, outcome in tally.bad:
        sys.stdout.write(f"case {number}: {trial}: {outcome}\n")
    for death in tally.deaths:
        sys.stdout.write(f"{death}\n")
    return tally.wrong + tally.raised + len(tally.deaths)


if __name__ == "__main__":
    sys.exit(main())
