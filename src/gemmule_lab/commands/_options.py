"""Options that several commands have, with the same words and limits in each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

Command = Callable[..., Any]
Option = Callable[[Command], Command]

RESULTS = Path("results")
OPS = ("matvec", "vecmat", "matmul")


class Number(click.FloatRange):
    """A number in a range, in which NaN is not: it compares with no bound."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; click's error for NaN as for one outside the range."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is no number in the range {self._describe_range()}.", param, ctx)
        return number


def one(name: str, kind: Any, default: Any, words: str | None = None) -> Option:
    """Return an option with a default that is told, of a type or of some choices."""
    kind = click.Choice(kind) if isinstance(kind, Sequence) else kind
    return click.option(
        name, type=kind, default=default, show_default=default is not None, help=words
    )


def some(name: str, variable: str, words: str, kind: Any = None) -> Option:
    """Return an option that may be repeated, of a type or of some choices."""
    kind = click.Choice(kind) if isinstance(kind, Sequence) else kind
    return click.option(name, variable, multiple=True, type=kind, help=words)


def flag(name: str, words: str) -> Option:
    """Return an option without a value."""
    return click.option(name, is_flag=True, help=words)


def path(*names: str, words: str) -> Option:
    """Return an option that names a file to write."""
    return click.option(*names, type=click.Path(path_type=Path), help=words)


def device(default: str = "cpu") -> Option:
    """Return ``--device``; by the default ``cuda`` of a command that is about a GPU alone."""
    known = "cuda or cuda:<index>." if default == "cuda" else "cpu, cuda or cuda:<index>."
    return one("--device", str, default, known)


def check_device(name: str) -> None:
    """Raise ValueError for the name of no device."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device is {name!r}; it must be cpu, cuda or cuda:<index>.")


def check_peers(names: tuple[str, ...], backend: str) -> None:
    """Raise ValueError for the name of no peer on a back end."""
    from gemmule_lab.peers.registry import all_peers

    known = [peer.name for peer in all_peers(backend)]
    for name in names:
        if name not in known:
            listed = ", ".join(known)
            raise ValueError(f"--peer is {name!r}; on {backend} it must be one of {listed}.")


def ordinal_of(name: str) -> int:
    """Return a GPU's number; DeviceError, saying what is missing, before any work is done."""
    from gemmule import backends
    from gemmule.backends.cuda.arrays import ordinal_named

    backends.get("cuda").machine(name)
    return ordinal_named(name)


def folder(*names: str, **given: Any) -> Option:
    """Return an option that names a folder."""
    return click.option(*names, type=click.Path(path_type=Path, file_okay=False), **given)


def file(*names: str, **given: Any) -> Option:
    """Return an option that names a file that is there."""
    kind = click.Path(path_type=Path, exists=True, dir_okay=False)
    return click.option(*names, type=kind, **given)


def out(words: str) -> Option:
    """Return ``--out``, the folder of what a command writes."""
    return folder("--out", default=RESULTS, show_default=True, help=words)


def seconds(low: float, high: float, words: str, default: float | None = None) -> Option:
    """Return ``--seconds``, by default so many."""
    return one("--seconds", Number(low, high), default, words)


def ops(words: str) -> Option:
    """Return ``--op``, which may be repeated."""
    return some("--op", "ops", words, OPS)


def rungs(command: Command) -> Command:
    """Add ``--rung`` and ``--except``: which CUDA rungs a command is about."""
    without = some("--except", "without", "Not this rung; repeatable.")
    return some("--rung", "names", "Only this rung; repeatable.")(without(command))


def workers(words: str, default: int | None = None) -> Option:
    """Return ``--workers``: how many processes work side by side."""
    return one("--workers", click.IntRange(1, 64), default, words)
