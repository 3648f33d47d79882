"""The ladder read from its folders: ``rungs/<folder>/<backend>/<name>.py``.

The directory is the registry: each such file holds one module-level ``RUNG``, and beside a CUDA
rung lies ``<name>.cu``. Nothing else names a rung. A module whose name begins with an underscore is
shared code, not a rung.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import replace
from html import escape

from gemmule.core import fork
from gemmule.core.rung import BACKENDS, RUNGS_FOLDER, CudaRung, DeviceRung, LibraryRung, Rung


@functools.cache
def _load(folder: str, backend: str, name: str) -> Rung:
    module = importlib.import_module(f"gemmule.rungs.{folder}.{backend}.{name}")
    rung: Rung = module.RUNG
    if rung.backend != backend:
        raise TypeError(
            f"{module.__name__} holds a {type(rung).__name__}; its folder is {backend}."
        )
    return replace(rung, name=name, folder=folder)


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
                    found.append(_load(path.parent.parent.name, backend, path.stem))
    return tuple(_in_order(found))


def rungs_for(backend: str, op: str, *, quantized: bool) -> tuple[Rung, ...]:
    """Return the rungs of a back end that compute ``op``, ``"matvec"`` or ``"matmul"``.

    Nothing else is imported: the first product of a process waits for these alone.
    """
    folders = ("matvec", "vecmat") if op == "matvec" else ("matmul",)
    rungs = all_rungs(backend, ("quantized",) if quantized else folders)
    return tuple(rung for rung in rungs if rung.op == op)


def cuda_rungs() -> tuple[CudaRung, ...]:
    """Return every CUDA rung with kernels of its own, in ladder order."""
    return tuple(rung for rung in all_rungs("cuda") if isinstance(rung, CudaRung))


def device_rungs() -> tuple[DeviceRung, ...]:
    """Return every CUDA rung, also those that call a library, in ladder order."""
    kinds = (CudaRung, LibraryRung)
    return tuple(rung for rung in all_rungs("cuda") if isinstance(rung, kinds))


def _in_order(rungs: list[Rung]) -> list[Rung]:
    """Sort so that a rung comes after the one it names in `after`, folder by folder."""
    by_key = {(r.folder, r.name): r for r in rungs}
    order: list[Rung] = []

    def place(rung: Rung, seen: frozenset[str]) -> None:
        if rung in order:
            return
        if rung.name in seen:
            raise ValueError(f"rungs name each other in a circle: {', '.join(sorted(seen))}.")
        earlier = by_key.get((rung.folder, rung.after or ""))
        if rung.after and earlier is None:
            raise ValueError(f"rung {rung.folder}/{rung.name} comes after unknown {rung.after!r}.")
        if earlier is not None:
            place(earlier, seen | {rung.name})
        order.append(rung)

    for rung in rungs:
        place(rung, frozenset())
    return order


class Ladder(tuple[Rung, ...]):
    """Rungs from the simplest to the fastest: a tuple that shows itself in a line or a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Ladder({' -> '.join(rung.name for rung in self)})"

    def _repr_html_(self) -> str:
        """Return a table of names and ideas, for notebooks."""
        cells = (f"<tr><th>{r.name}</th><td>{escape(r.idea)}</td></tr>" for r in self)
        return f"<table>{''.join(cells)}</table>"


OPS = ("matvec", "vecmat", "matmul", "quantized")


def ladder(op: str, backend: str = "cpu") -> Ladder:
    """Return the rungs of one operation on one back end, from the simplest to the fastest.

    op: ``"matvec"``, ``"vecmat"``, ``"matmul"`` or ``"quantized"``; backend: ``"cpu"`` or
    ``"cuda"``. The vecmat ladder holds the rungs that read a row-major matrix across its rows.
    Loading a ladder imports the rungs' modules but compiles nothing. ValueError for other names.

    >>> from gemmule.core.registry import ladder
    >>> [r.name for r in ladder("matmul", "cpu")][:1] != []
    True
    """
    if op not in OPS:
        raise ValueError(f"op is {op!r}; it must be one of {', '.join(OPS)}.")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}.")
    return Ladder(r for r in all_rungs(backend) if _stands_on(r, op))


def _stands_on(rung: Rung, op: str) -> bool:
    if op == "quantized" or rung.quantized:
        return rung.quantized and op == "quantized"
    if op == "vecmat":
        return rung.op == "matvec" and "col" in rung.layouts
    return rung.op == op and (op == "matmul" or "row" in rung.layouts)
