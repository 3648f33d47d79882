"""The table of peers, and which of them may be timed on a problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gemmule.core.problem import Problem
from gemmule_lab.peers import cpu_float, cpu_quantized, eigen, ggml, gpu_float, gpu_quantized
from gemmule_lab.peers.peer import Absence, Peer, check

TABLES = (
    cpu_float.PEERS,
    eigen.PEERS,
    cpu_quantized.PEERS,
    ggml.PEERS,
    gpu_float.PEERS,
    gpu_quantized.PEERS,
)


def all_peers(backend: str = "cpu") -> tuple[Peer, ...]:
    """Return the table of peers of a back end, installed or not."""
    return tuple(peer for table in TABLES for peer in table if peer.backend == backend)


def named(names: Sequence[str], backend: str = "cpu") -> tuple[Peer, ...]:
    """Return the peers of these names; ValueError for a name that none has on this back end."""
    known = {peer.name: peer for peer in all_peers(backend)}
    for name in names:
        if name not in known:
            raise ValueError(
                f"no peer is called {name!r} on {backend}; there are: {', '.join(known)}."
            )
    return tuple(known[name] for name in names)


def select(
    problem: Problem,
    backend: str = "cpu",
    *,
    peers: Sequence[Peer] | None = None,
    checked: Callable[[Peer, Problem], str | None] = check,
) -> tuple[tuple[Peer, ...], tuple[Absence, ...]]:
    """Return the peers that may be timed on `problem`, and the others with the reason for each.

    Every returned peer has been checked on operands of the problem's kind (see `check`).
    """
    present, absences = [], []
    for peer in all_peers(backend) if peers is None else peers:
        absent = peer.absent()
        refused = None if absent else peer.refuses(problem)
        reason = absent or refused or checked(peer, problem)
        if reason is None:
            present.append(peer)
        else:
            absences.append(Absence(peer.name, reason, refused is not None))
    return tuple(present), tuple(absences)
