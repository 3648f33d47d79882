"""A rank's share of a matvec over several GPUs, in one launch: multiply, send, gather.

The kernel is a rung's own, compiled with PEERS: its blocks send each finished sum to every rank
instead of storing it, and a few blocks more, the last of the grid, wait for the words of all ranks
and write the whole result. Nothing is called between the ranks, so the launch may be captured.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gemmule import backends
from gemmule.backends.cuda import driver, launch_args
from gemmule.backends.cuda.starter import kernels, loaded, whole_starter
from gemmule.choose import eligible
from gemmule.core.canonical import Options, canonical
from gemmule.core.operand import Form
from gemmule.core.problem import COMPLEX, Problem
from gemmule.core.registry import cuda_rungs
from gemmule.core.rung import CudaRung, Machine, Step
from gemmule.sharded.rows import Rows, Seat

GATHERING = 32  # blocks at most; they wait beside those that multiply
_EACH = 4  # words that a thread waits for at a time


class PeerProduct:
    """``A x`` of this rank's rows A, the whole result on every rank.

    a, x: the forms of the rows and of the vector. All ranks give the same `rows` and the same
    columns; dtypes too. ValueError or TypeError where no kernel takes the rows.
    """

    def __init__(
        self, a: Form, x: Form, rows: Rows, seat: Seat, machine: Machine, rung: str | None = None
    ) -> None:
        some = a._replace(shape=(max(a.shape[0], 1), *a.shape[1:]))  # a rank without rows gathers
        call = canonical("matvec", some, x, None, Options())
        problem = call.problem
        self.rung, params = _chosen(problem, machine, rung)
        (alone,) = self.rung.steps(problem, params, machine)
        row_blocks = alone.grid[0] if a.shape[0] else 0
        self.dtype, self.rows = problem.out, rows
        gathering = gather_blocks(rows.words(self.dtype), alone)
        self.step = replace(
            alone,
            grid=(row_blocks + gathering, 1, 1),
            defines=(*alone.defines, f"PEERS={seat.room}"),
        )
        quantized = problem.quant is not None
        packed = launch_args.pack(problem, call)
        self.template = packed + seat.pack(rows, self.dtype, row_blocks)
        self.out_at = len(packed) + seat.out_at
        self._places = struct.Struct("<5Q" if quantized else "<2Q")
        self._arch, self._starts = machine.arch, dict[int, Callable[[int, bytes], None]]()

    def packed(self, operands: tuple[int, ...], out: int) -> bytes:
        """Return the kernel's struct: addresses of A (of a quantised one's parts), x and result."""
        packed = bytearray(self.template)
        self._places.pack_into(packed, 0, *operands)
        struct.pack_into("<Q", packed, self.out_at, out)
        return bytes(packed)

    def load(self, ordinal: int) -> Callable[[int, bytes], None]:
        """Return what starts the kernel on a device, compiling and loading it once."""
        found = self._starts.get(ordinal)
        if found is None:
            module = kernels(self.rung, (self.step,), self._arch)
            ready = loaded(module, (self.step,), self.template, ordinal)
            found = self._starts[ordinal] = whole_starter(ready)
        return found

    def start(self, operands: tuple[int, ...], out: int, ordinal: int, stream: int) -> None:
        """Launch on a stream; nothing waits for it here."""
        begin = self.load(ordinal)
        with driver.on_device(ordinal):
            begin(stream, self.packed(operands, out))


def gather_blocks(words: int, step: Step) -> int:
    """Return how many blocks gather, whole clusters of them."""
    threads, cluster = step.block[0] * step.block[1], step.cluster[0]
    wanted = min(GATHERING, max(1, -(-words // (threads * _EACH))))
    return -(-wanted // cluster) * cluster


def _chosen(problem: Problem, machine: Machine, name: str | None) -> tuple[CudaRung, Any]:
    """Return the quickest proved rung that sends, or the named one, with its parameters.

    What is sent comes in words of 4 bytes and of reals: no complex numbers.
    """
    proved = backends.get("cuda").proved
    found = []
    for rung in cuda_rungs() if problem.out not in COMPLEX else ():
        if not rung.sends or name not in (None, rung.name) or rung.refusal(problem) is not None:
            continue
        suggestion = rung.suggest(problem, machine)
        if suggestion and (name or (eligible(rung, problem) and proved(rung, problem, machine))):
            params = rung.check_params(problem, suggestion.params)
            found.append((suggestion.expected_s, rung, params))
    if not found:
        able = ", ".join(rung.name for rung in cuda_rungs() if rung.sends)
        raise TypeError(
            f"no kernel sends the results of {problem.describe()} to other GPUs"
            f"{f' by rung {name!r}' if name else ''}; those that do are {able}. Use rows in row "
            "order (quantised ones in layout mma16), or DTensor."
        )
    _, rung, params = min(found, key=lambda one: one[0])
    return rung, params
