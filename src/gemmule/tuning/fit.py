"""Fitting a device model: a rung's coefficients to times measured on the device.

Formulas have maxima and square roots, so they are not linear in their coefficients; all of these
are positive, and what counts are relative errors. So the squares of the logarithms of modelled over
measured times are made small over the logarithms of the coefficients, from the known ones on, by
the method of Levenberg and Marquardt with a Jacobian of differences. A small pull towards where it
began keeps what the sample says little of; what it says nothing of stays. Whole numbers in a model
are counts and limits of choices, not fitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmule.core import device_model
from gemmule.core.device_model import DeviceModel, Numbers
from gemmule.core.host_rates import PLAUSIBLE, HostRates, plausible
from gemmule.core.problem import Problem
from gemmule.core.rung import Machine, Params, Rung
from gemmule.storage import models

Floats: TypeAlias = NDArray[np.float64]

STEP = 1e-2  # of a logarithm, for the Jacobian
PULL = 0.02  # of a logarithm's error, for each that a coefficient is moved by
FAR = 0.5  # of a logarithm; more counts by its own logarithm
MOST_STEPS, LONGEST_STEP, FARTHEST = 40, 1.0, math.log(30.0)
ENOUGH = 1e-3  # of the squares; where a step gains less, it is the last
SCATTERED, SCATTER = 2, 0.25  # further beginnings, and how far around the first end they lie
HELD_OUT = 4  # each so many problems one is not fitted to
WITHIN = 0.9  # share of the products not fitted to, by which an error is told
FEWEST = 8  # products of a rung from which it is fitted
LEAST_S = 1e-9
PULL_OF_RATES = 0.1  # they were measured one by one: stronger


@dataclass(frozen=True, eq=False)
class Timed:
    """One measurement: how long a product takes by a rung with its parameters."""

    problem: Problem
    rung: Rung
    params: Params
    seconds: float

    @property
    def name(self) -> str:
        """Folder and rung."""
        return f"{self.rung.folder}/{self.rung.name}"


@dataclass(frozen=True, slots=True)
class Loss:
    """What choices lose against the best measured of each product: a share, on so many of them."""

    products: int
    mean: float
    worst: float  # of the worst hundredth

    def words(self) -> str:
        """Return it for people."""
        return f"{self.mean:.1%} in the mean of {self.products}, {self.worst:.0%} of the worst 1 %"


def least_squares(
    predict: Callable[[Floats], Floats], start: Floats, measured: Floats, pull: float = PULL
) -> Floats:
    """Return positive coefficients by which `predict` is nearest to what was measured.

    Nearest by the squares of logarithms of their ratios, of which large ones count less: what was
    disturbed must not bend the rest. A coefficient that moves none stays.
    """

    def residuals(at: Floats) -> Floats:
        modelled = np.maximum(predict(start * np.exp(at)), LEAST_S)
        apart = FAR * np.arcsinh(np.log(modelled / measured) / FAR)
        return np.concatenate([apart, pull * math.sqrt(len(measured)) * at])

    def slopes(at: Floats, here: Floats, which: Iterable[int]) -> Floats:
        found = np.zeros((len(here), len(at)))
        for i in which:
            beside = at.copy()
            beside[i] += STEP
            found[:, i] = (residuals(beside) - here) / STEP
        return found

    def descended(at: Floats) -> tuple[float, Floats]:
        here, damping = residuals(at), 1e-2
        for _ in range(MOST_STEPS):
            slope = slopes(at, here, moving)[:, moving]
            normal, wanted = slope.T @ slope, slope.T @ here
            while damping < 1e8:
                damped = normal + damping * np.diag(np.diag(normal))
                step = np.clip(np.linalg.solve(damped, -wanted), -LONGEST_STEP, LONGEST_STEP)
                there = at.copy()
                there[moving] = np.clip(there[moving] + step, -FARTHEST, FARTHEST)
                beyond = residuals(there)
                if beyond @ beyond < here @ here:
                    break
                damping *= 4
            else:
                break
            gain = 1 - (beyond @ beyond) / (here @ here)
            at, here, damping = there, beyond, max(damping / 8, 1e-9)
            if gain < ENOUGH:
                break
        return float(here @ here), at

    origin, count = np.zeros(len(start)), len(measured)
    first = slopes(origin, residuals(origin), range(len(start)))[:count]
    moving = [i for i in range(len(start)) if np.abs(first[:, i]).max(initial=0.0) > STEP]
    if not moving:
        return start
    rng, found = np.random.default_rng(0), [descended(origin)]
    for _ in range(SCATTERED):  # waves and maxima make valleys of their own
        at = found[0][1].copy()
        at[moving] += rng.uniform(-SCATTER, SCATTER, len(moving))
        found.append(descended(at))
    best = min(found, key=lambda one: one[0])[1]
    return np.asarray(start * np.exp(best), np.float64)


class _Read(dict[str, Numbers]):
    """Coefficients that remember of which rungs they were read."""

    def __init__(self, trees: Mapping[str, Numbers]) -> None:
        super().__init__(trees)
        self.read: list[str] = []

    def __getitem__(self, rung: str) -> Numbers:
        self.read.append(rung)
        return super().__getitem__(rung)


def modelled(machine: Machine, model: DeviceModel, row: Timed) -> float:
    """Return how long the model says that a measured product takes."""
    if row.rung.seconds is None:
        return math.nan
    return row.rung.seconds(row.problem, row.params, replace(machine, model=model))


def counted_with(machine: Machine, model: DeviceModel, row: Timed) -> list[str]:
    """Return the rungs whose coefficients the formula of a row reads, its own first."""
    numbers = _Read(model.numbers)
    modelled(machine, replace(model, numbers=numbers), row)
    return sorted(set(numbers.read), key=lambda name: (name != row.name, name))


def fitted(
    machine: Machine, model: DeviceModel, rows: Sequence[Timed], only: str | None = None
) -> DeviceModel:
    """Return the model with the coefficients of each rung fitted to its rows.

    only: of this rung, ``folder/name``, and of no other. A rung that counts with another's
    coefficients beside its own is fitted after that one.
    """
    owners: dict[str, list[Timed]] = {}
    depth: dict[str, int] = {}
    for row in rows:
        if row.rung.seconds is None:
            continue
        read = counted_with(machine, model, row)
        owners.setdefault(read[0], []).append(row)
        depth[read[0]] = max(depth.get(read[0], 0), len(read))
    for owner in sorted(owners, key=lambda name: (depth[name], name)):
        mine = owners[owner]
        if only in (None, owner, mine[0].name) and problems_of(mine) >= FEWEST:
            model = _fitted_one(machine, model, owner, mine)
    return model


def _fitted_one(
    machine: Machine, model: DeviceModel, owner: str, rows: Sequence[Timed]
) -> DeviceModel:
    tree = model.numbers[owner]
    places = [path for path, value in device_model.leaves(tree) if type(value) is float]
    start = np.array([value for _, value in device_model.leaves(tree) if type(value) is float])

    def with_numbers(values: Floats) -> DeviceModel:
        known = dict(zip(places, map(float, values), strict=True))
        own = device_model.changed(tree, lambda path, value: known.get(path, value))
        return replace(model, numbers={**model.numbers, owner: own})

    def predict(values: Floats) -> Floats:
        here = replace(machine, model=with_numbers(values))
        formulas = [(row, row.rung.seconds) for row in rows]
        return np.array([f(row.problem, row.params, here) for row, f in formulas if f is not None])

    measured = np.array([row.seconds for row in rows])
    found = with_numbers(least_squares(predict, start, measured))
    sound = all(device_model.plausible(p, v) for p, v in device_model.leaves(found.numbers[owner]))
    return found if sound else model


def held_out(rows: Iterable[Timed]) -> tuple[list[Timed], list[Timed]]:
    """Return the rows to fit to and those to judge by: no problem is among both."""
    order: dict[Problem, int] = {}
    parts: tuple[list[Timed], list[Timed]] = ([], [])
    for row in rows:
        place = order.setdefault(row.problem, len(order))
        parts[place % HELD_OUT == HELD_OUT - 1].append(row)
    return parts


Model: TypeAlias = Callable[[Timed], float]


def errors(rows: Iterable[Timed], model: Model) -> dict[str, float]:
    """Return for each rung which share of a time nine of ten modelled ones are within."""
    apart: dict[str, list[float]] = {}
    for row in rows:
        expected = model(row)
        if expected > 0:
            apart.setdefault(row.name, []).append(abs(math.log(expected / row.seconds)))
    return {name: float(np.expm1(np.quantile(some, WITHIN))) for name, some in apart.items()}


def loss(rows: Iterable[Timed], model: Model) -> Loss:
    """Return what choices by a model lose on products that were measured several ways."""
    by_problem: dict[Problem, list[Timed]] = {}
    for row in rows:
        by_problem.setdefault(row.problem, []).append(row)
    lost = []
    for some in by_problem.values():
        known = [(model(row), row.seconds) for row in some]
        known = [(expected, seconds) for expected, seconds in known if expected > 0]
        if len(known) > 1:
            lost.append(min(known)[1] / min(seconds for _, seconds in known) - 1)
    if not lost:
        return Loss(0, 0.0, 0.0)
    return Loss(len(lost), float(np.mean(lost)), float(np.quantile(lost, 0.99)))


@dataclass(frozen=True)
class Judged:
    """A fitted model, and what it is worth on products that it was not fitted to."""

    model: Any
    errors: Mapping[str, float]
    before: Loss
    after: Loss


def judged(
    machine: Machine, rows: Sequence[Timed], only: str | None = None, day: str = ""
) -> Judged:
    """Fit the model of a machine to a sample, and judge it by a quarter of the sample's products.

    It has the errors that it was found to have there; of a rung not measured it says nothing.
    """
    begin = models.of(machine)
    fit, judge = held_out(rows)
    model = fitted(machine, begin, fit, only)
    told = errors(judge, lambda row: modelled(machine, model, row))
    model = replace(
        model,
        device=machine.name,
        arch=machine.arch,
        units=machine.units,
        read_bytes_per_s=machine.read_bytes_per_s,
        clock_hz=machine.clock_hz or model.clock_hz,
        errors={name: round(value, 4) for name, value in {**begin.errors, **told}.items()},
        origin="measured here",
        measured=day,
    )
    before = loss(judge, lambda row: modelled(machine, begin, row))
    after = loss(judge, lambda row: modelled(machine, model, row))
    return Judged(model, told, before, after)


def suggested(machine: Machine, rates: HostRates, row: Timed) -> float:
    """Return what a CPU rung expects of its own parameters at these rates, nan beside others."""
    found = row.rung.suggest(row.problem, with_rates(machine, rates))
    if found is None or row.rung.check_params(row.problem, found.params) != row.params:
        return math.nan
    return found.expected_s


def with_rates(machine: Machine, rates: HostRates) -> Machine:
    """Return the CPU with other rates."""
    return replace(machine, rates=rates, read_bytes_per_s=rates.read, call_s=rates.call)


def judged_rates(machine: Machine, rows: Sequence[Timed]) -> Judged:
    """Fit a CPU's rates to a sample, and judge them by a quarter of its products.

    All rungs count with the same rates. Where choices by the fitted ones lose more than by the
    measured ones, or where no machine has such, the measured ones stay.
    """
    begin = machine.rates
    fit, judge = held_out(row for row in rows if suggested(machine, begin, row) > 0)
    names = tuple(PLAUSIBLE)

    def rates_of(values: Floats) -> HostRates:
        known: dict[str, Any] = dict(zip(names, map(float, values), strict=True))
        return replace(begin, **known)

    def predict(values: Floats) -> Floats:
        here = with_rates(machine, rates_of(values))
        found = (row.rung.suggest(row.problem, here) for row in fit)
        return np.array([0.0 if one is None else one.expected_s for one in found])

    found = begin
    if problems_of(fit) >= FEWEST:
        start = np.array([getattr(begin, name) for name in names])
        seconds = np.array([row.seconds for row in fit])
        found = rates_of(least_squares(predict, start, seconds, PULL_OF_RATES))
    before = loss(judge, lambda row: suggested(machine, begin, row))
    after = loss(judge, lambda row: suggested(machine, found, row))
    if plausible(found) or after.mean > before.mean:
        found, after = begin, before
    told = errors(judge, lambda row: suggested(machine, found, row))
    return Judged(found, told, before, after)


def problems_of(rows: Iterable[Timed]) -> int:
    """Return how many products rows are about."""
    return len({row.problem for row in rows})
