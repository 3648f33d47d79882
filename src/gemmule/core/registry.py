"""The ladder read from its folders: ``rungs/<folder>/<backend>/<name>.py``.

The directory is the registry: each such file holds one module-level ``RUNG``, and beside a CUDA
rung lies ``<name>.cu``. Nothing else names a rung. A module whose name begins with an underscore is
shared code, not a rung.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import string
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Self

from gemmule.core import fork
from gemmule.core.rung import BACKENDS, RUNGS_FOLDER, CudaRung, DeviceRung, LibraryRung, Rung


@functools.cache
def rung_in(folder: str, backend: str, name: str) -> Rung:
    """Return the rung of a module of the ladder, which its folder describes."""
    module = importlib.import_module(f"gemmule.rungs.{folder}.{backend}.{name}")
    rung: Rung = module.RUNG
    if rung.backend != backend:
        raise TypeError(
            f"{module.__name__} holds a {type(rung).__name__}; its folder is {backend}."
        )
    op = rung.op if folder == "quantized" else "matvec" if folder == "vecmat" else folder
    coded = folder == "quantized" or rung.quantized  # a grouped rung says so itself
    return replace(rung, name=name, folder=folder, op=op, quantized=coded)


def kernels_in(folder: str, name: str) -> CudaRung:
    """Return a rung whose kernels another one launches."""
    rung = rung_in(folder, "cuda", name)
    if not isinstance(rung, CudaRung):
        raise TypeError(f"{rung.name} has no kernels of its own.")
    return rung


@functools.cache
def all_rungs(backend: str, folders: tuple[str, ...] = ("*",)) -> tuple[Rung, ...]:
    """Return every rung of a back end, read from the directory, in ladder order.

    folders: only of these ladders; modules of others are not imported.
    """
    found = []
    with fork.WHOLE:
        for folder in folders:
            for path in sorted(RUNGS_FOLDER.glob(f"{folder}/{backend}/*.py")):
                if not path.stem.startswith("_"):
                    found.append(rung_in(path.parent.parent.name, backend, path.stem))
    order = {rung: place for op in LADDERS for place, rung in enumerate(_on(op, found))}
    return tuple(sorted(found, key=lambda rung: (LADDERS.index(rung.folder), order[rung])))


def rungs_for(backend: str, op: str, *, quantized: bool) -> tuple[Rung, ...]:
    """Return the rungs of a back end that compute ``op``: a matvec, a matmul, a grouped product.

    Nothing else is imported: the first product of a process waits for these alone.
    """
    folders = ("matvec", "vecmat") if op == "matvec" else (op,)
    if quantized and op != "grouped":
        folders = ("quantized",)
    rungs = all_rungs(backend, folders)
    return tuple(rung for rung in rungs if rung.op == op and rung.quantized == quantized)


def cuda_rungs() -> tuple[CudaRung, ...]:
    """Return every CUDA rung with kernels of its own, in ladder order."""
    return tuple(rung for rung in all_rungs("cuda") if isinstance(rung, CudaRung))


def device_rungs() -> tuple[DeviceRung, ...]:
    """Return every CUDA rung, also those that call a library, in ladder order."""
    kinds = (CudaRung, LibraryRung)
    return tuple(rung for rung in all_rungs("cuda") if isinstance(rung, kinds))


def in_order(rungs: Iterable[Rung], op: str) -> Iterator[tuple[str, Rung]]:
    """Yield a ladder's rungs with their numbers: each step, what branches off it, the next step.

    ValueError where a rung comes after one that is not on the ladder, where rungs name each other
    in a circle, or where a ladder begins, or a line goes on, in two ways.
    """
    placed = list(rungs)
    on_it = {rung.name: rung for rung in placed}
    first = [r for r in placed if r.after is None and not r.branch]
    first = [
        r for r in first if r.folder == op
    ] or first  # another ladder's first rung stands aside
    if len(first) > 1:
        raise ValueError(
            f"{' and '.join(sorted(r.name for r in first))} both begin the ladder; "
            "say of one what it comes after, or why it is a branch."
        )
    begin = first[0].name if first else ""
    following: dict[str, list[Rung]] = {}
    for rung in sorted(placed, key=lambda r: (not r.vendor, r.name)):
        if rung.after is not None and rung.after not in on_it:
            raise ValueError(f"rung {rung.folder}/{rung.name} comes after unknown {rung.after!r}.")
        if rung.name != begin:
            following.setdefault(rung.after or begin, []).append(rung)

    def line(rung: Rung, number: str) -> Iterator[tuple[str, Rung]]:
        for step in itertools.count(1):
            beyond = following.pop(rung.name, [])
            onward = [r for r in beyond if r.after and not r.branch]
            if len(onward) > 1:
                raise ValueError(
                    f"{' and '.join(r.name for r in onward)} both continue {rung.name}; "
                    "say of one why it is a branch."
                )
            alone = step == 1 and not onward  # a branch of one rung needs no count
            here = number if number and alone else f"{number}{step}"
            yield here, rung
            branches = (r for r in beyond if r not in onward)
            for letter, branch in zip(string.ascii_lowercase, branches, strict=False):
                yield from line(branch, here + letter)
            if not onward:
                return
            rung = onward[0]

    found = list(line(on_it[begin], "")) if begin else []
    if len(found) < len(placed):
        circle = sorted(set(on_it) - {rung.name for _, rung in found})
        raise ValueError(f"rungs name each other in a circle: {', '.join(circle)}.")
    yield from found


class Ladder(tuple[Rung, ...]):
    """Rungs from the simplest to the fastest: a tuple that shows itself as a list or a table.

    The steps of the main line are numbered 1, 2, 3, ...; each adds one idea to the step before and
    is faster. A branch that leaves step 2 has the number 2a, its further steps 2a2, 2a3, ...
    """

    numbers: dict[str, str]

    def __new__(cls, numbered: Iterable[tuple[str, Rung]] = ()) -> Self:
        """Make a ladder of numbers and rungs, in order."""
        numbered = tuple(numbered)
        made = super().__new__(cls, (rung for _, rung in numbered))
        made.numbers = {rung.name: number for number, rung in numbered}
        return made

    @property
    def steps(self) -> tuple[Rung, ...]:
        """The rungs of the main line, without the branches."""
        return tuple(rung for rung in self if self.numbers[rung.name].isdecimal())

    def branch(self, rung: Rung) -> str:
        """Return why a rung leaves the line of the one before it; empty for a step of a line."""
        if not rung.branch and rung.after is None and rung not in self.steps:
            return f"a rung of the {rung.folder} ladder, which reads this order too"
        return rung.branch

    def __repr__(self) -> str:
        widths = [
            max(map(len, words), default=0) for words in (self.numbers.values(), self.numbers)
        ]
        return "\n".join(
            f"{self.numbers[r.name]:<{widths[0]}}  {r.name:<{widths[1]}}  {r.idea}" for r in self
        )

    def _repr_html_(self) -> str:
        """Return a table of numbers, names and ideas, for notebooks."""
        from html import escape

        cells = (
            f"<tr><td>{self.numbers[r.name]}</td><th>{r.name}</th><td>{escape(r.idea)}</td></tr>"
            for r in self
        )
        return f"<table>{''.join(cells)}</table>"


OPS = ("matvec", "vecmat", "matmul", "quantized")
LADDERS = (*OPS, "grouped")  # the last: products whose matrices are known on the device only


def ladder(op: str, backend: str = "cpu") -> Ladder:
    """Return the rungs of one operation on one back end, from the simplest to the fastest.

    op: ``"matvec"``, ``"vecmat"``, ``"matmul"``, ``"quantized"`` or ``"grouped"``; backend:
    ``"cpu"`` or ``"cuda"``. The vecmat ladder holds the rungs that read a row-major matrix across
    its rows. Printed, each rung has its number and its idea: 1, 2, 3 are the main line, 2a a branch
    that leaves step 2 (another memory order, another shape, an alternative that loses); ``.steps``
    is the main line alone. Loading a ladder imports the rungs' modules but compiles nothing.
    ValueError for other names.

    >>> from gemmule.core.registry import ladder
    >>> [rung.name for rung in ladder("matmul", "cpu").steps][:3]
    ['triple_loop', 'loop_order', 'cache_blocks']
    """
    if op not in LADDERS:
        raise ValueError(f"op is {op!r}; it must be one of {', '.join(LADDERS)}.")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}.")
    return _on(op, all_rungs(backend))


def _on(op: str, rungs: Iterable[Rung]) -> Ladder:
    return Ladder(in_order((rung for rung in rungs if _stands_on(rung, op)), op))


def _stands_on(rung: Rung, op: str) -> bool:
    if op in ("quantized", "grouped") or rung.folder in ("quantized", "grouped"):
        return rung.folder == op
    if op == "vecmat":
        return rung.op == "matvec" and "col" in rung.layouts
    return rung.op == op and (op != "matvec" or "row" in rung.layouts)
