"""Agreement of a process group on the host, before its GPUs work together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from gemmule.errors import PeerError

T = TypeVar("T")


def together(group: Any, doing: str, step: Callable[[], T]) -> tuple[T, ...]:
    """Run a step on every rank of a group, and return what each rank's gave.

    Where it fails on one (out of memory, say), that rank raises its error, and every other raises
    PeerError with the rank and its words. Nobody is left waiting for a rank that gave up.
    """
    error: Exception | None = None
    mine: Any = None
    try:
        mine = step()
    except Exception as failed:  # whatever it was, the others have to know
        error = failed
    told = None if error is None else f"{type(error).__name__}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (told, mine), group=group)
    if error is not None:
        raise error
    for rank, (failure, _) in enumerate(everyone):
        if failure is not None:
            raise PeerError(f"{doing}: rank {rank} failed: {failure}", rank=rank)
    return tuple(result for _, result in everyone)
