"""Making a device model: the sample measured, the coefficients fitted, judged and kept.

On a GPU the coefficients are those of each rung (`gemmule.storage.models`), on a CPU its rates,
which are first measured one by one. Later plans choose by what is kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gemmule.backends.cpu import launch as cpu
from gemmule.core.caches import forget_plans
from gemmule.core.problem import Problem
from gemmule.core.registry import all_rungs
from gemmule.errors import DeviceError
from gemmule.storage import models, rates
from gemmule.storage.lines import today
from gemmule.tuning import fit
from gemmule.tuning.operands import Place
from gemmule.tuning.rates import measure_rates
from gemmule.tuning.sample import LONGEST_S, PRODUCTS, Sampler, Told, expected


@dataclass(frozen=True)
class Made:
    """A device model that was made: what it is worth, on how much, and the file it is kept in."""

    judged: fit.Judged
    rows: int
    products: int
    path: Path | None


def make(
    device: str,
    told: Told,
    *,
    seed: int = 0,
    products: int | None = None,
    beside: Sequence[Problem] = (),
    only: str | None = None,
    place: Place | None = None,
) -> Made:
    """Measure a sample on a device, fit its model to it, and keep that.

    products: how many are drawn from the seed, on a CPU by default what seconds allow; beside:
    further ones. What was measured before is not measured again. only: this rung, by name or
    ``folder/name``, is measured and fitted alone. ValueError for a rung that is not there;
    DeviceError where the device is lost meanwhile.
    """
    backend = "cpu" if device == "cpu" else "cuda"
    name = None if only is None else rung_named(only, backend)
    begun = time.monotonic()
    if backend == "cpu":
        measure_rates(fresh=name is None)
    sampler = Sampler(device, place=place, seed=seed)
    count = PRODUCTS[backend] if products is None else products
    left_s = LONGEST_S[backend] - (time.monotonic() - begun) if products is None else math.inf
    sampler.measure([*beside, *sampler.drawn(count)], told, name, left_s)
    if sampler.lost:
        raise DeviceError(f"the sample ended early, and is kept: {sampler.lost}.", restart=True)
    machine, rows = sampler.machine, sampler.timed()
    if backend == "cpu":
        found = fit.judged_rates(machine, rows)
        names = machine.name, machine.arch, machine.units
        path = rates.save(*names, found.model, {**rates.errors(*names), **found.errors})
        cpu.forget_machine()
    else:
        plain = replace(machine, model=None)
        others = expected(plain, models.of(plain)) if rows else ()
        found = fit.judged(plain, rows, name, today(), others)
        path = models.save(found.model)
    forget_plans()
    return Made(found, len(rows), fit.problems_of(rows), path)


def rung_named(name: str, backend: str) -> str:
    """Return ``folder/name`` of a rung; ValueError where there is none, or several."""
    rungs = [f"{rung.folder}/{rung.name}" for rung in all_rungs(backend)]
    found = [one for one in rungs if name in (one, one.partition("/")[2])]
    if len(found) == 1:
        return found[0]
    words = f"several {backend} rungs are" if found else f"no {backend} rung is"
    raise ValueError(f"{words} called {name!r}; name one of {', '.join(found or rungs)}.")
