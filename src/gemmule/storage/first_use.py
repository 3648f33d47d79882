"""What a device found when it checked kernels that no GPU of its architecture had proved.

A line a check: which variant of a rung, the digest of its code, and whether its results were right.
`gemmule.tuning.first_use` checks and writes; back ends ask what failed, and never choose it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gemmule.core.choice import Choice
from gemmule.core.problem import Problem
from gemmule.core.rung import Machine, Rung
from gemmule.settings import cache_folder
from gemmule.storage import evidence, lines

SCHEMA = 1
FOLDER = "first_use"
Name = tuple[str, str, str]  # folder, rung, variant


@dataclass(frozen=True, slots=True)
class Checked:
    """One check. code: SHA-256 of the cubin, in hex; wrong: what was wrong, empty where nothing.

    made_of: a digest of the rung's sources, the compiler and the driver; what failed counts while
    they are the same.
    """

    folder: str
    rung: str
    variant: str
    code: str
    made_of: str
    wrong: str
    date: str

    @property
    def name(self) -> Name:
        """Return folder, rung and variant."""
        return self.folder, self.rung, self.variant


def path_of(machine: Machine) -> Path:
    """Return the file of a device."""
    return cache_folder() / FOLDER / f"{evidence.slug(f'{machine.name} {machine.arch}')}.jsonl"


def known(machine: Machine) -> dict[tuple[Name, str], Checked]:
    """Return the checks made on a device, by variant and code; what is added there is known too."""
    return _known(path_of(machine))


@functools.cache
def _known(path: Path) -> dict[tuple[Name, str], Checked]:
    return {(one.name, one.code): one for one in lines.read_records(path, SCHEMA, Checked)}


def forget() -> None:
    """Read the files again."""
    _known.cache_clear()


def keep(machine: Machine, one: Checked, *, lasting: bool = True) -> bool:
    """Note a check for this process and, if lasting, for later ones; tell whether those will know.

    What other processes wrote meanwhile stays.
    """
    key, path = (one.name, one.code), path_of(machine)
    known(machine)[key] = one
    if not lasting:
        return False
    there = {(c.name, c.code): c for c in lines.read_records(path, SCHEMA, Checked)}
    try:
        lines.write_records(path, SCHEMA, (there | {key: one}).values())
    except OSError:
        return False
    return True


def provers(rung: Rung, problem: Problem) -> str:
    """Return the devices that proved what computes a problem, in words."""
    return ", ".join(dict.fromkeys(evidence.proved_on(rung, problem).values())) or "no device"


def in_words(choice: Choice, code: str | None = None) -> str:
    """Return who proved a choice's kernels and what they gave on its device.

    Empty where a device of its architecture proved them. code: the digest of the kernels' code,
    where it is known; else any of theirs counts.
    """
    rung, problem, machine = choice.rung, choice.problem, choice.machine
    if evidence.covers(rung, problem, machine.arch):
        return ""
    mine = (rung.folder, rung.name, evidence.variant_of(problem))
    checks = (one for one in known(machine).values() if one.name == mine and not one.wrong)
    dates = [one.date for one in checks if code in (None, one.code)]
    here = f"checked on this device, {max(dates)}" if dates else "not checked on this device"
    return f"proved on {provers(rung, problem)}; {here}"


def failed(machine: Machine, name: Name, made_of: Callable[[], str]) -> bool:
    """Tell whether a variant's kernels, as they are built now, were wrong on a device."""
    wrong = [one for one in known(machine).values() if one.name == name and one.wrong]
    return any(one.made_of == made_of() for one in wrong)
