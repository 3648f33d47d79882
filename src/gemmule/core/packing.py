"""How a rung packs one operand on its own, once for many products of it.

Some rungs begin with passes that write each operand to memory in the form that their product reads.
What a pass leaves of an operand depends on nothing else of the product, so it may be kept
(`gemmule.prepare`): the product then runs the passes over the other operand alone, or none.
Tensor maps show TMA an operand, or what a pass has made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gemmule.core.problem import Problem

SIDES = ("left", "right")  # on which an operand stands: of the canonical product A, or B


class Ready(NamedTuple):
    """What a prepared operand brings: for which rungs it was packed, and the bytes that it holds.

    side: where it may stand. planes: its batch entries. own: bytes of the array itself; packed:
    beside it.
    """

    side: str
    rungs: tuple[str, ...]
    planes: int
    own: int
    packed: int


def check_sides(op: str, names: tuple[str, str], ready: tuple[Ready | None, Ready | None]) -> None:
    """Raise ValueError where a prepared operand stands on the side that it was not packed for."""
    for name, side, one in zip(names, SIDES, ready, strict=True):
        if one is None or (one.side == side and name != "x"):
            continue
        if name == "x":
            what, way = "a vector", "Give the array itself."
        else:
            what = f"the {side} operand"
            way = f"Prepare it with side={side!r}, or give the array itself."
        raise ValueError(
            f"{name} was prepared to stand on the {one.side} of matrix products, but is {what} of "
            f"this {op}. {way}"
        )


class Move(NamedTuple):
    """Bytes that a product reads in its workspace at `to`; a pass over one operand leaves them
    at `at` in its own."""

    at: int
    to: int
    nbytes: int


def _no_moves(problem: Problem, operand: str) -> tuple[Move, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor map that a kernel takes behind its struct, so that TMA can move tiles of an operand.

    operand: ``a``, ``b`` or ``c`` of a matmul, not strided. box: the elements that one copy moves,
    along the unit stride, then along the other axis. Batches are the map's third dimension; a
    shared operand has one plane. Tiles lie in shared memory with the 128-byte swizzle. packed_at:
    bytes into the workspace to a copy in the same order, whose rows (or columns) begin at multiples
    of 16 bytes; None: the map is of the operand itself.
    """

    operand: str
    box: tuple[int, int]
    packed_at: int | None = None


@dataclass(frozen=True, slots=True)
class HalvesMap(TensorMap):
    """A map of halves at `packed_at`: two planes an entry, lines along the reduction."""


@dataclass(frozen=True, slots=True)
class LinesMap(TensorMap):
    """A map of a copy at `packed_at`, lines along the reduction however the operand lies."""


@dataclass(frozen=True, slots=True)
class SumsMap(TensorMap):
    """A map of `planes` float32 results at `packed_at`, one behind another in C's order."""

    planes: int = 1


@dataclass(frozen=True, slots=True)
class Packing:
    """What lets the first `passes` steps of a CUDA rung run over one operand alone.

    Told that the other one has no rows (m = 0, or n = 0), they touch it not, and write the packed
    operand to the beginning of the workspace, where tensor maps with a `packed_at` show it. The
    steps behind them read no more of the workspace than those maps and what lies from
    ``begins(problem)`` on, of which ``moves(problem, "a")`` and ``(…, "b")`` come from the passes.
    is_copy: the packed operand is the operand, in the same order, lines at multiples of 16 bytes.
    """

    passes: int
    begins: Callable[[Problem], int]
    moves: Callable[[Problem, str], tuple[Move, ...]] = _no_moves
    is_copy: bool = False


class HostPacked(NamedTuple):
    """One matrix on the host as a CPU rung reads it, beside the matrix itself.

    memory: what was made of the matrix; at: the address where that begins. notes: two
    numbers that the rung wants to know of the elements besides.
    """

    array: Any
    memory: Any
    at: int
    notes: tuple[int, int] = (0, 0)


HostBind = Callable[[Problem, Mapping[str, Any], tuple[bool, bool]], Callable[..., None]]


@dataclass(frozen=True, slots=True)
class HostPacking:
    """How a CPU rung packs one operand alone, and multiplies what was packed.

    ``pack(problem, operand, array)`` makes of A (``"a"``) or B (``"b"``) what products of any size
    of the other one read, or None where they better read the array. ``bind(problem, params,
    ready)`` is the rung's `bind` for operands of which those that are `ready`, of A and of B, come
    as `HostPacked`. Rungs with one `pack` share what it makes.
    """

    pack: Callable[[Problem, str, Any], HostPacked | None]
    bind: HostBind
