"""Random calls of the public functions, a campaign that is kept as data.

``python tests/calls_campaign.py [--cases N] [--device cpu] [--op OP] [--seed S] [--record]`` is
``gemmule verify --cases N`` whose outcome goes on record: every operation, dtype, layout, view,
batch and quantisation, sizes from 0, operands of each library that is there, each result judged.
``--seconds`` ends it earlier, ``--add`` counts it together with the runs on record, and ``--into``
keeps it in a file of its own, for `campaign_record` of another machine. On a CPU workers run with
an allocator that spoils memory as it is freed: a use after free shows, also at their end.
"""

from __future__ import annotations

import argparse
import math
import os
import secrets
import sys
import time
from pathlib import Path

from campaign_record import FILE, keep
from gemmule_lab.verify import on_device
from gemmule_lab.verify.random_products import OPS, Choice
from gemmule_lab.verify.workers import Tally, run_trials

SPOILING = {"PYTHONMALLOC": "malloc", "MALLOC_PERTURB_": "255"}


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; return 1 where a call was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--op", choices=sorted(set(OPS)), help="of one operation alone")
    parser.add_argument("--workers", type=int, default=max(os.cpu_count() or 1, 2))
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--record", action="store_true", help="keep the outcome in the evidence")
    parser.add_argument("--add", action="store_true", help="--record, with the runs kept so far")
    parser.add_argument("--into", type=Path, default=FILE, help="--add, to this file of lines")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no call later")
    given = parser.parse_args(arguments)
    libraries = on_device.present() if given.device != "cpu" else ("own",)
    if given.device == "cpu":
        os.environ.update(SPOILING)  # of the workers, which are processes
    begun = time.monotonic()
    choice = Choice(given.op, None, given.device, libraries)
    tally = run_trials(choice, given.cases, given.seed, given.workers, seconds=given.seconds)
    bad = _told(tally)
    said = f"{tally.done:,} calls, {tally.refused:,} refused, {bad} bad, seed {given.seed}"
    sys.stdout.write(f"{said}, {time.monotonic() - begun:.0f} s, {', '.join(libraries)}\n")
    if given.record or given.add or given.into != FILE:
        device = given.device.partition(":")[0]
        alone = f" --op {given.op}" if given.op else ""
        keep(
            f"random calls: {device}" + (f", {given.op}" if given.op else ""),
            tally.done,
            bad,
            f"python tests/calls_campaign.py --cases {tally.done} --device {device} "
            f"--seed {given.seed}{alone}",
            f"{tally.refused / max(tally.done, 1):.1%} refused as documented; operands of "
            f"{', '.join(libraries)}; largest error over its bound {tally.worst_ratio:.3f}",
            file=given.into,
            device=device != "cpu",
            add=not given.record,
        )
    return int(bad > 0 or (tally.done < given.cases and given.seconds == math.inf))


def _told(tally: Tally) -> int:
    """Print what was bad and return how many calls were."""
    for number, trial, outcome in tally.bad:
        sys.stdout.write(f"case {number}: {trial}: {outcome}\n")
    for death in tally.deaths:
        sys.stdout.write(f"{death}\n")
    return tally.wrong + tally.raised + len(tally.deaths)


if __name__ == "__main__":
    sys.exit(main())
