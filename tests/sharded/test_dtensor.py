"""Products of DTensors, on meshes of processes that talk by gloo."""

from __future__ import annotations

import multiprocessing

import pytest

pytest.importorskip("torch.distributed.tensor")

from torch.distributed.tensor import Partial, Replicate, Shard

import dtensor_checks
from dtensor_checks import WORLD, free_port, rank_of


def test_products_of_shards() -> None:
    port = free_port()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [dtensor_checks.__name__]
    )  # so that PyTorch is imported once, not four times
    ranks = [context.Process(target=rank_of, args=(rank, port)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0] * WORLD, "each says why on stderr"


def test_a_rule_for_every_index_of_a_product() -> None:
    from gemmule.frameworks.dtensor import indices, rules

    assert indices("matmul", 3, 2) == (["batch0", "m", "k"], ["k", "n"], ["batch0", "m", "n"])
    assert indices("matmul", 1, 3) == (["k"], ["batch0", "k", "n"], ["batch0", "n"])
    assert indices("matmul", 2, 1) == (["m", "k"], ["k"], ["m"])
    assert indices("vecmat", 2, 3) == (["batch0", "k"], ["batch0", "k", "n"], ["batch0", "n"])
    shared = rules("matvec", (4, 3, 5), (1, 5))
    assert ([Shard(0)], [Shard(0), Replicate()]) in shared, "an axis of 1 is not shared out"
    assert ([Partial()], [Shard(2), Shard(1)]) in shared
