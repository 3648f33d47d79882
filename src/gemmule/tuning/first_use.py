"""The check of a rung's kernels on a device whose architecture no record proves them on.

Kernels proved on one architecture are compiled for others from the same source; a device is the
only one to tell what they give there. So the first plan that chooses such kernels multiplies small
integers by them, as the tuner does, and demands the exact result. What they gave is kept beside the
other measurements of the device (`gemmule.storage.first_use`): kernels that were wrong are never
chosen there again, and those that were right are not checked again until their code changes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gemmule import backends
from gemmule.backends.cuda import streams
from gemmule.backends.cuda.starter import kernels, made_of
from gemmule.core.choice import Choice
from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Step
from gemmule.errors import CompileError, DeviceError
from gemmule.storage import evidence, first_use
from gemmule.storage.lines import today
from gemmule.tuning.operands import DeviceMemory, put_all
from gemmule.tuning.trials import Exact, exact, prepared

log = logging.getLogger("gemmule")
MOST_ELEMENTS = 1 << 24  # of a matrix of a product that is checked at its own size
UNCHECKED = "%s is proved on %s and was not checked on %s: %s"


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The kernels of a choice, as `first_use` knows them."""

    choice: Choice
    rung: CudaRung
    name: first_use.Name
    steps: tuple[Step, ...]

    @property
    def proved_on(self) -> str:
        """The devices that proved them, in words."""
        return first_use.provers(self.rung, self.choice.problem)

    def are_those_of(self, other: Choice) -> bool:
        """Tell whether another choice of the rung runs the same code."""
        theirs = self.rung.steps(other.problem, other.params, other.machine)
        return {(s.kernel, s.defines) for s in self.steps} == {
            (s.kernel, s.defines) for s in theirs
        }

    def code(self) -> str:
        """Compile them; return the digest of their code."""
        return kernels(self.rung, self.steps, self.choice.machine.arch).digest()


def passes(choice: Choice, device: str) -> bool:
    """Tell whether a chosen rung may run on a device, which is asked where nothing proves that.

    True, with a line in the log, where it cannot be asked: while a graph is captured, or without
    memory. DeviceError where the check lost the device; the rung is not chosen in the next process.
    """
    mine = _unproved(choice)
    if mine is None:
        return True
    ordinal = int(device.partition(":")[2] or 0)
    try:
        code = mine.code()
    except CompileError as error:
        if not error.log:  # nothing compiles here
            raise
        return _kept(mine, "", str(error))
    found = first_use.known(choice.machine).get((mine.name, code))
    if found is not None and found.made_of == made_of(mine.rung):
        return not found.wrong
    if streams.is_capturing(ordinal):
        return _untold(mine, "a graph was being captured")
    return _asked(mine, code, ordinal)


def _unproved(choice: Choice) -> _Kernels | None:
    """Return a choice's kernels where its device's architecture has no proof of them."""
    rung, problem, machine = choice.rung, choice.problem, choice.machine
    if not isinstance(rung, CudaRung) or problem.outputs * problem.batch == 0:
        return None
    if evidence.covers(rung, problem, machine.arch):
        return None
    name = (rung.folder, rung.name, evidence.variant_of(problem))
    return _Kernels(choice, rung, name, rung.steps(problem, choice.params, machine))


def _asked(mine: _Kernels, code: str, ordinal: int) -> bool:
    """Check kernels on the device and keep what they gave."""
    begin = time.perf_counter()
    try:
        wrong = _complaint(mine, ordinal)
    except _CannotAskError as error:
        return _untold(mine, str(error))
    except DeviceError as error:
        _kept(mine, code, str(error), lasting=error.restart)  # else memory may have been short
        if error.restart:
            raise
        return False
    if not wrong:
        log.info(
            "%s is proved on %s; checked on %s in %.1f s",
            "/".join(mine.name),
            mine.proved_on,
            mine.choice.machine.name,
            time.perf_counter() - begin,
        )
    return _kept(mine, code, wrong)


class _CannotAskError(Exception):
    """Why kernels cannot be checked now."""


def _complaint(mine: _Kernels, ordinal: int) -> str:
    """Return what is wrong with a smaller product of integers by the same kernels, or ``""``."""
    choice = mine.choice
    for smaller in _smaller(choice.problem):
        small = smaller.choice(choice)
        if small is not None and mine.are_those_of(small):
            break
    else:
        raise _CannotAskError("smaller products take other kernels")
    place = DeviceMemory(ordinal)
    with _room():
        operands = put_all(place, smaller.host, copy=False)
    smaller.compute(place, operands, prepared(small, backends.get("cuda")))
    verdict = smaller.judge(small)
    return "" if verdict.ok else verdict.text


@contextmanager
def _room() -> Iterator[None]:
    """Tell of operands that find no room on a device that kernels cannot be checked now."""
    try:
        yield
    except DeviceError as error:
        if error.restart:
            raise
        raise _CannotAskError(str(error)) from None


def _smaller(problem: Problem) -> Iterator[Exact]:
    """Yield products of which one runs the kernels of a problem: a smaller one, and it itself."""
    yield exact(problem, seed=0)
    columns = 1 if problem.op == "matvec" else problem.n
    experts = problem.batch if problem.op == "grouped" else 1
    if max(problem.m, columns * experts) * problem.reduction <= MOST_ELEMENTS:
        yield exact(problem, seed=0, whole=True)


def _untold(mine: _Kernels, reason: str) -> bool:
    log.warning(UNCHECKED, "/".join(mine.name), mine.proved_on, mine.choice.machine.name, reason)
    return True


def _kept(mine: _Kernels, code: str, wrong: str, *, lasting: bool = True) -> bool:
    """Keep the result of a check, for later processes too; return whether the kernels may run."""
    wrong = " ".join(wrong.split())[:400]
    date = today()
    found = first_use.Checked(*mine.name, code, made_of(mine.rung), wrong, date)
    first_use.keep(mine.choice.machine, found, lasting=lasting)
    if wrong:
        log.warning(
            "%s is proved on %s but fails on %s, where it is not used: %s",
            "/".join(mine.name),
            mine.proved_on,
            mine.choice.machine.name,
            wrong,
        )
    return not wrong
