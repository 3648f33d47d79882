"""What every command is made by, and the options that several have, with the same words in each.

A command returns what it found: with ``--json`` that goes to standard output, its words elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from gemmule_lab.cli import SectionedCommand, WrongResultError

Command = Callable[..., Any]
Option = Callable[[Command], Command]

RESULTS = Path("results")
OPS = ("matvec", "vecmat", "matmul")
MOST_LETTERS = 40  # of choices that stand beside an option's name
RUNGS = Path(__file__).parents[2] / "gemmule" / "rungs"


def command(section: str, words: str) -> Callable[[Command], click.Command]:
    """Return a decorator that makes a function a command of a section of ``gemmule --help``.

    words: its line there. A folder that it is given to write to is tried before it starts.
    """

    def decorate(function: Command) -> click.Command:
        @functools.wraps(function)
        def answering(as_json: bool, **given: Any) -> None:
            for name in ("out", "into", "evidence"):
                if isinstance(given.get(name), Path) and not given.get("resume"):
                    check_folder(given[name], f"--{name}")
            wrong = None
            with redirect_stdout(sys.stderr) if as_json else nullcontext():
                try:
                    found = function(**given)
                except WrongResultError as error:
                    wrong, found = error, error.found
            if as_json:
                click.echo(json.dumps(plain(found), allow_nan=False, ensure_ascii=False))
            if wrong is not None:
                raise wrong

        told = "Print what was found as JSON; words go to standard error."
        option = click.option("--json", "as_json", is_flag=True, help=told)
        make = click.command(cls=SectionedCommand, section=section, short_help=words)
        made: click.Command = make(option(answering))
        return made

    return decorate


def plain(found: Any) -> Any:
    """Return what JSON can say: dataclasses as objects, paths as strings, no number as null."""
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        return {one.name: plain(getattr(found, one.name)) for one in dataclasses.fields(found)}
    if isinstance(found, Mapping):
        keys = ((key if isinstance(key, str) else _joined(key)) for key in found)
        return dict(zip(keys, map(plain, found.values()), strict=True))
    if isinstance(found, float):
        return found if math.isfinite(found) else None
    if found is None or isinstance(found, bool | int | str):
        return found
    if isinstance(found, Sequence | set | frozenset):
        return [plain(one) for one in found]
    return str(found)


def _joined(key: Any) -> str:
    return " x ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def check_folder(folder: Path, option: str) -> None:
    """Make a folder, write to it and leave all as it was; ValueError where that fails."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        raise ValueError(
            f"{option} {folder} cannot be written to ({why}); name another folder."
        ) from None
    finally:
        for one in missing:
            if one.is_dir():
                one.rmdir()


def complete(*words: str) -> Callable[..., list[str]]:
    """Return what completes an option by words that are no fixed choice."""
    return lambda ctx, param, incomplete: [one for one in words if one.startswith(incomplete)]


def rung_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a rung, of the operation and back end that stand before it."""
    op = ctx.params.get("op") or ("quantized" if ctx.params.get("bits") else "*")
    named = ctx.params.get("backend") or ctx.params.get("device")
    folders = RUNGS.glob(f"{op}/{str(named).partition(':')[0] if named else '*'}")
    names = {path.stem for folder in folders for path in folder.glob("[!_]*.py")}
    return sorted(name for name in names if name.startswith(incomplete))


def peers(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a peer of the device that stands before it."""
    from gemmule_lab.peers.registry import all_peers

    backend = str(ctx.params.get("device") or "cpu").partition(":")[0]
    return [peer.name for peer in all_peers(backend) if peer.name.startswith(incomplete)]


def matrix_files(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the name of a file, which may go on with the name of a matrix in it."""
    return [CompletionItem(incomplete, type="file")]


class Whole(click.IntRange):
    """A whole number in a range."""

    name = "whole number"


class Number(click.FloatRange):
    """A number in a range, in which NaN is not: it compares with no bound."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; click's error for NaN as for one outside the range."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is no number in the range {self._describe_range()}.", param, ctx)
        return number


def one(name: str, kind: Any, default: Any, words: str | None = None, **more: Any) -> Option:
    """Return an option with a default that is told, of a type or of some choices."""
    told = default is not None
    more |= _of(name, kind, words or "")
    return click.option(name, default=default, show_default=told, **more)


def some(name: str, variable: str, words: str, kind: Any = None, **more: Any) -> Option:
    """Return an option that may be repeated, of a type or of some choices."""
    return click.option(name, variable, multiple=True, **more | _of(name, kind, words))


def _of(name: str, kind: Any, words: str) -> dict[str, Any]:
    """Return what click is told of an option's type; many choices stand in its words."""
    if not isinstance(kind, Sequence):
        return {"type": kind, "help": words}
    if len("|".join(kind)) <= MOST_LETTERS:
        return {"type": click.Choice(kind), "help": words}
    told = f"{words} One of {', '.join(kind)}.".strip()
    return {"type": click.Choice(kind), "help": told, "metavar": name.lstrip("-").upper()}


def flag(name: str, words: str) -> Option:
    """Return an option without a value."""
    return click.option(name, is_flag=True, help=words)


def path(*names: str, words: str) -> Option:
    """Return an option that names a file to write."""
    return click.option(*names, type=click.Path(path_type=Path), help=words)


def device(default: str = "cpu") -> Option:
    """Return ``--device``; by the default ``cuda`` of a command that is about a GPU alone."""
    known = "cuda or cuda:<index>." if default == "cuda" else "cpu, cuda or cuda:<index>."
    return one("--device", str, default, known, shell_complete=complete("cpu", "cuda", "cuda:1"))


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
    more = {"shell_complete": rung_names}
    without = some("--except", "without", "Not this rung; repeatable.", **more)
    return some("--rung", "names", "Only this rung; repeatable.", **more)(without(command))


def workers(words: str, default: int | None = None) -> Option:
    """Return ``--workers``: how many processes work side by side."""
    return one("--workers", Whole(1, 64), default, words)
