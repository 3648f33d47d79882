"""Fitting a device model: a rung's coefficients to times measured on the device.

Terms overlap, so that a time is not linear in its coefficients; all of these are positive, and what
counts are relative errors. So the squares of the logarithms of modelled over measured times are
made small over the logarithms of the coefficients, from the known ones on, by the method of
Levenberg and Marquardt. A small pull towards where it began keeps what the sample says little of;
what it says nothing of stays. What another device measured, or the known coefficients expect, may
stand beside the sample, for sizes that it has not met.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmule.core import device_model
from gemmule.core.device_model import TOGETHER, DeviceModel, Numbers
from gemmule.core.host_rates import PLAUSIBLE, HostRates, plausible
from gemmule.core.problem import Problem
from gemmule.core.rung import Machine, Params, Rung
from gemmule.storage import models

Floats: TypeAlias = NDArray[np.float64]
Predict: TypeAlias = Callable[[Floats], tuple[Floats, Floats]]

STEP = 1e-2  # of a logarithm, for the Jacobian
PULL = 0.02  # of a logarithm's error, for each that a coefficient is moved by
FAR = 0.5  # of a logarithm; more counts by its own logarithm
MOST_STEPS, LONGEST_STEP, FARTHEST = 40, 1.0, math.log(30.0)
ENOUGH = 1e-3  # of the squares; where a step gains less, it is the last
SCATTERED, SCATTER = 2, 0.25  # further beginnings, and how far around the first end they lie
HELD_OUT = 4  # each so many problems one is not fitted to
WITHIN = 0.9  # share of the products not fitted to, by which an error is told
FEWEST = 8  # products of a rung from which it is fitted
BESIDE = 16  # measured products that what is known from elsewhere counts as
LEAST_S = 1e-9
PULL_OF_RATES = 0.1  # they were measured one by one: stronger


@dataclass(frozen=True, eq=False)
class Timed:
    """One measurement: how long a product takes by a rung with its parameters.

    machine: where, if not on the one whose model is fitted.
    """

    problem: Problem
    rung: Rung
    params: Params
    seconds: float
    machine: Machine | None = None

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
        mean, worst = f"{self.mean:.1%} in the mean of {self.products}", f"{self.worst:.0%}"
        return f"{mean} products, {worst} in the worst hundredth"


def least_squares(
    predict: Predict,
    start: Floats,
    measured: Floats,
    pull: float = PULL,
    weights: Floats | float = 1.0,
) -> Floats:
    """Return positive coefficients by which `predict` is nearest to what was measured.

    Nearest by the squares of logarithms of their ratios, of which large ones count less: what was
    disturbed must not bend the rest. A coefficient that moves none stays. `predict` returns times,
    and by how much they grow with each coefficient.
    """
    counts = np.sqrt(np.broadcast_to(weights, measured.shape))
    held = pull * math.sqrt(float(counts @ counts))

    def residuals(at: Floats) -> tuple[Floats, Floats]:
        """Return what is made small, and its slopes."""
        here = start * np.exp(at)
        modelled, slopes = predict(here)
        modelled = np.maximum(modelled, LEAST_S)
        apart = np.log(modelled / measured)
        weight = counts / (np.sqrt(1 + (apart / FAR) ** 2) * modelled)
        steep = np.vstack([slopes * weight[:, None] * here, held * np.eye(len(at))])
        return np.concatenate([counts * FAR * np.arcsinh(apart / FAR), held * at]), steep

    def descended(at: Floats) -> tuple[float, Floats]:
        (here, slope), damping = residuals(at), 1e-2
        for _ in range(MOST_STEPS):
            normal, wanted = slope.T @ slope, slope.T @ here
            while damping < 1e8:
                damped = normal + damping * np.diag(np.diag(normal))
                step = np.clip(np.linalg.solve(damped, -wanted), -LONGEST_STEP, LONGEST_STEP)
                there = np.clip(at + step, -FARTHEST, FARTHEST)
                beyond, steep = residuals(there)
                if beyond @ beyond < here @ here:
                    break
                damping *= 4
            else:
                break
            gain = 1 - (beyond @ beyond) / (here @ here)
            at, here, slope, damping = there, beyond, steep, max(damping / 8, 1e-9)
            if gain < ENOUGH:
                break
        return float(here @ here), at

    rng, found = np.random.default_rng(0), [descended(np.zeros(len(start)))]
    for _ in range(SCATTERED):  # waves and overlaps make valleys of their own
        found.append(descended(found[0][1] + rng.uniform(-SCATTER, SCATTER, len(start))))
    best = min(found, key=lambda one: one[0])[1]
    return np.asarray(start * np.exp(best), np.float64)


def modelled(machine: Machine, model: DeviceModel, row: Timed) -> float:
    """Return how long the model says that a measured product takes."""
    if row.rung.seconds is None:
        return math.nan
    return row.rung.seconds(row.problem, row.params, replace(machine, model=model))


def compared(machine: Machine, rows: Iterable[Timed]) -> list[Timed]:
    """Return the rows whose parameters plans compare: others are measured, and never chosen."""
    known: dict[tuple[str, Problem], list[Params]] = {}
    found = []
    for row in rows:
        choices, key = row.rung.choices, (row.name, row.problem)
        if choices is not None and key not in known:
            known[key] = list(choices(row.problem, machine))
        if choices is None or row.params in known[key]:
            found.append(row)
    return found


def fitted(
    machine: Machine,
    model: DeviceModel,
    rows: Iterable[Timed],
    only: str | None = None,
    beside: Iterable[Timed] = (),
) -> DeviceModel:
    """Return the model with the coefficients of each rung fitted to those of its rows that count.

    only: of this rung, ``folder/name``, and of no other. beside: what else is known of rungs, which
    counts as much as `BESIDE` measured products of each.
    """
    owners, others = _by_owner(compared(machine, rows)), _by_owner(beside)
    found = {}
    for owner in {**owners, **others}:
        mine, more = owners.get(owner, []), others.get(owner, [])
        name = (mine or more)[0].name
        if only in (None, owner, name) and problems_of([*mine, *more]) >= FEWEST:
            found[owner] = _fitted_one(machine, model.numbers[owner], mine, more)
    return replace(model, numbers={**model.numbers, **found})


def _by_owner(rows: Iterable[Timed]) -> dict[str, list[Timed]]:
    """Return those that are told by terms, by the rung whose coefficients they count with."""
    owners: dict[str, list[Timed]] = {}
    for row in rows:
        if row.rung.terms is not None:
            owners.setdefault(row.rung.counts_with, []).append(row)
    return owners


def _fitted_one(
    machine: Machine, own: Numbers, mine: Sequence[Timed], more: Sequence[Timed]
) -> Numbers:
    rows = [*mine, *more]
    weights = np.ones(len(rows))
    weights[len(mine) :] = min(1.0, BESIDE / max(problems_of(more), 1))
    places = [(row, row.machine or machine) for row in rows]
    terms = [row.rung.terms(row.problem, row.params, at) for row, at in places if row.rung.terms]
    names = sorted({name for one in terms for place in one for name in place})
    amounts = np.zeros((max(map(len, terms)), len(terms), len(names)))
    columns = {name: column for column, name in enumerate(names)}
    for row, one in enumerate(terms):
        for place, some in enumerate(one):
            for name, amount in some.items():
                amounts[place, row, columns[name]] = amount
    moving = [column for column in range(len(names)) if amounts[:, :, column].any()]
    names, amounts = [names[column] for column in moving], amounts[:, :, moving]

    def predict(values: Floats) -> tuple[Floats, Floats]:
        alone, *together = amounts @ values
        longest = np.sum(np.power(together, TOGETHER), axis=0) ** (1 / TOGETHER)
        shares = np.power(together / np.maximum(longest, LEAST_S), TOGETHER - 1)
        return alone + longest, amounts[0] + np.sum(shares[:, :, None] * amounts[1:], axis=0)

    start = np.array([own[name] for name in names])
    measured = np.array([row.seconds for row in rows])
    values = map(float, least_squares(predict, start, measured, weights=weights))
    found = {**own, **dict(zip(names, values, strict=True))}
    sound = all(device_model.plausible(name, value) for name, value in found.items())
    return found if sound else own


def held_out(rows: Iterable[Timed], fold: int = HELD_OUT - 1) -> tuple[list[Timed], list[Timed]]:
    """Return the rows to fit to and those to judge by: no problem is among both.

    fold: which of every `HELD_OUT` problems is judged.
    """
    order: dict[Problem, int] = {}
    parts: tuple[list[Timed], list[Timed]] = ([], [])
    for row in rows:
        place = order.setdefault(row.problem, len(order))
        parts[place % HELD_OUT == fold].append(row)
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
    """Return what choices by a model lose on products that were measured several ways.

    Chosen is among rows of which the model says something; the best is that of all rows.
    """
    by_problem: dict[Problem, list[Timed]] = {}
    for row in rows:
        by_problem.setdefault(row.problem, []).append(row)
    lost = []
    for some in by_problem.values():
        known = [(model(row), row.seconds) for row in some]
        told = [(expected, seconds) for expected, seconds in known if expected > 0]
        if told and len(known) > 1:
            lost.append(min(told)[1] / min(seconds for _, seconds in known) - 1)
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
    machine: Machine,
    rows: Sequence[Timed],
    only: str | None = None,
    day: str = "",
    beside: Iterable[Timed] = (),
) -> Judged:
    """Fit the model of a machine to a sample, and judge it by a quarter of the sample's products.

    It has the errors that it was found to have there; of a rung not measured it says nothing. Where
    choices by the fitted coefficients lose more than by the known ones, those stay. beside: as
    `fitted` has it.
    """
    begin, known = models.of(machine), set(compared(machine, rows))
    fit, judge = held_out(rows)
    model = fitted(machine, begin, fit, only, beside)

    def by(some: DeviceModel) -> Model:
        return lambda row: modelled(machine, some, row) if row in known else math.nan

    before, after = loss(judge, by(begin)), loss(judge, by(model))
    if after.mean > before.mean:
        model, after = begin, before
    told = errors(judge, by(model))
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

    def times(values: Floats) -> Floats:
        here = with_rates(machine, rates_of(values))
        found = (row.rung.suggest(row.problem, here) for row in fit)
        return np.array([0.0 if one is None else one.expected_s for one in found])

    def predict(values: Floats) -> tuple[Floats, Floats]:
        here, more = times(values), np.diag(values * math.expm1(STEP))
        slopes = [(times(values + one) - here) / one.sum() for one in more]
        return here, np.transpose(slopes)

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
