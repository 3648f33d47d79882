"""Random products of DTensors and of quantised shards, on meshes of 2, 2 x 2 and 4 gloo processes.

``python tests/dtensor_campaign.py [--cases N] [--jobs J] [--seed S] [--record]``. Each case is
judged beside the whole operands' product, dense ones by exact integers, with gradients in four of
ten; whatever fits where it lies may send no message. A case that is wrong, or a process that hangs,
ends the run. Jobs are meshes side by side, each with its share of the cases and a seed of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import secrets
import sys
import time
from typing import Any

import dtensor_checks as checks
from campaign_record import keep
from dtensor_checks import WORLD, dist, free_port, init_device_mesh, torch

PATIENCE_S = 600.0  # of one process for the others, at each hundred cases


def rank_of(rank: int, port: int, cases: int, seed: int) -> None:
    """Run every case as one process of the mesh."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("down", "across"))
    line = init_device_mesh("cpu", (WORLD,))
    for op, left, right, wanted in checks.QUIET:
        checks.quiet_product(op, left, right, wanted, line)
    checks.quiet_shards(line)
    rng, begin = random.Random(seed), time.monotonic()
    for case in range(1, cases + 1):
        if rng.random() < 0.6:
            checks.random_product(rng, rng.choice([line, square]))
        else:
            checks.random_shards(rng, rng.choice([line, square["down"], square["across"]]))
        if rank == 0 and case % 100 == 0:
            sys.stdout.write(f"{case} cases, {time.monotonic() - begin:.0f} s\n")
            sys.stdout.flush()
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; return 1 where a case was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--jobs", type=int, default=1, help="meshes of four processes at once")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args(arguments)
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    share = -(-given.cases // given.jobs)
    ranks = []
    for job in range(given.jobs):
        port = free_port()
        ranks += [
            context.Process(target=rank_of, args=(rank, port, share, seed + job))
            for rank in range(WORLD)
        ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(PATIENCE_S + share)
    bad = any(process.exitcode for process in ranks)
    sys.stdout.write(f"seed {seed}: {'WRONG, see above' if bad else 'all right'}\n")
    for process in ranks:
        process.kill()
    if given.record:
        keep(
            "products of DTensors and quantised shards",
            share * given.jobs,
            int(bad),
            f"python tests/dtensor_campaign.py --cases {given.cases} --jobs {given.jobs} "
            f"--seed {seed}",
            "random placements on gloo meshes of 2, 2 x 2 and 4, uneven shards, gradients",
        )
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
