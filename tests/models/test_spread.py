"""Quantised layers under FSDP2 and tensor parallelism, on a mesh of processes that talk by gloo."""

from __future__ import annotations

import multiprocessing
import socket

import spread


def test_layers_shared_out_by_two_processes() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([spread.__name__])  # so that PyTorch is imported once
    ranks = [
        context.Process(target=spread.rank_of, args=(rank, port)) for rank in range(spread.WORLD)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0] * spread.WORLD, "each says why on stderr"
