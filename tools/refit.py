"""Fit the shipped time models again to what was measured of their devices, and tell their worth.

    PYTHONPATH=src python tools/refit.py [--write] [rung …]

Rungs as in ``matmul/cublas``, or the beginnings of their names; by default all. Printed is what
choices lose against the quickest way measured, on products that the model was not fitted to (each
quarter in turn), by the shipped coefficients and by the fitted ones, as plans choose, with the
worst products; and of each product of a bar what a plan takes, and what would be quicker. With
``--write`` the shipped files get the coefficients fitted to all of them, and the errors found.
Needs no GPU: the sample is ``evidence/<device>/measured_*.jsonl.xz`` of each model's device.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gemmule.choose import known_best
from gemmule.core.canonical import Call
from gemmule.core.choice import Choice
from gemmule.core.device_model import DeviceModel
from gemmule.core.operand import View
from gemmule.core.problem import Problem
from gemmule.core.registry import all_rungs
from gemmule.core.rung import Machine
from gemmule.storage import models
from gemmule.storage.decode import decode
from gemmule.storage.evidence import slug
from gemmule.tuning import fit
from gemmule.tuning.fit import Timed

ROOT = Path(__file__).parents[1]
WORST = 10
NAMED = "named"  # what the products of bars are marked with: always fitted to, judged apart
LATEST = "measured_sample"  # by `gemmule tune --device-model` itself, of present kernels
# Of other files: kernels of two have changed since; the third was given bytes that are no numbers,
# for which it has a slow way.
UNSOUND = ("grouped/streamed_codes", "grouped/wgmma_codes", "matmul/complex_parts")


@dataclass(frozen=True, eq=False)
class Sample:
    """What was measured of a device: of random products, and of those of bars."""

    drawn: list[Timed]
    named: list[Timed]


def sample(folder: Path) -> Sample:
    """Return what a folder tells: every way of every product, by the median of its times."""
    rungs = {f"{rung.folder}/{rung.name}": rung for rung in all_rungs("cuda")}
    found = Sample([], [])
    for path in sorted(folder.glob("measured_*.jsonl.xz")):
        unsound = () if path.name.startswith(LATEST) else UNSOUND
        with lzma.open(path, "rt", encoding="utf-8") as rows:
            for row in map(json.loads, rows):
                problem = decode(Problem, row["problem"], "a problem")
                into = found.named if row.get("drawn") == NAMED else found.drawn
                for way in row["ways"]:
                    if way["rung"] in rungs and way["rung"] not in unsound and way["seconds"]:
                        seconds = statistics.median(way["seconds"])
                        into.append(Timed(problem, rungs[way["rung"]], way["params"], seconds))
    return found


def machine_of(model: DeviceModel) -> Machine:
    """Return the device that a model is about, as its terms count with it."""
    kind = ("cuda", model.device, model.arch, model.units, model.read_bytes_per_s)
    return Machine(*kind, 50 << 20, 227 << 10, clock_hz=model.clock_hz, model=model)


def kind_of(problem: Problem) -> str:
    """Return the class of products that a loss is told of."""
    if problem.quant is not None:
        return f"{problem.op} of codes"
    few = problem.op == "matmul" and problem.n <= 16
    return (
        f"{problem.op}, {problem.layout_a}"
        if problem.op == "matvec"
        else problem.op + few * " by few"
    )


def elsewhere(machine: Machine) -> Iterator[Timed]:
    """Yield what was measured of other devices' random products, for sizes that its own lacks."""
    for model, _ in models.shipped():
        if model.device != machine.name:
            other = machine_of(model)
            here = replace(other, model=None)
            for row in fit.compared(other, sample(ROOT / "evidence" / slug(model.device)).drawn):
                yield replace(row, machine=here)


def refitted(
    machine: Machine, rows: Sequence[Timed], beside: Sequence[Timed], names: Sequence[str]
) -> DeviceModel:
    """Return the machine's model with the coefficients of the named rungs fitted to all rows."""
    model, every = models.of(machine), [*rows, *beside]
    owners = {row.rung.counts_with for row in every if row.name.startswith(tuple(names or [""]))}
    mine, more = (  # all that share them
        [row for row in some if row.rung.counts_with in owners] for some in (rows, beside)
    )
    return fit.fitted(replace(machine, model=None), model, mine, None, more)


Priced = dict[Timed, float]


def priced(machine: Machine, rows: Sample, names: Sequence[str]) -> tuple[Priced, Priced]:
    """Return what shipped coefficients expect of what plans compare, and what others do.

    The others: of drawn products those fitted to the rest, of named ones those fitted to all.
    """
    model, shipped, fresh = models.of(machine), {}, {}
    beside = list(elsewhere(machine))
    folds = [(*fit.held_out(rows.drawn, fold), rows.named) for fold in range(fit.HELD_OUT)]
    for known, held, named in [*folds, (rows.drawn, rows.named, rows.named)]:
        other = refitted(machine, [*known, *named], beside, names)
        for row in fit.compared(machine, held):
            shipped[row] = fit.modelled(machine, model, row)
            fresh[row] = fit.modelled(machine, other, row)
    return shipped, fresh


@dataclass(frozen=True, eq=False)
class Taken:
    """What a plan takes of the ways of a product, and the quickest of them all."""

    way: Timed
    best: Timed

    @property
    def lost(self) -> float:
        """By which share it takes longer."""
        return self.way.seconds / self.best.seconds - 1

    def words(self, price: Priced) -> str:
        """Return it for people."""
        told = f"{self.lost:6.0%} {self.way.problem.describe()}: {_words(self.way, price)}"
        return told if self.lost == 0 else f"{told}; best {_words(self.best, price)}"


def _words(way: Timed, price: Priced) -> str:
    expected = f"expected {price[way] * 1e6:.1f} us" if way in price else "never compared"
    params = ", ".join(map(str, way.params.values()))
    return f"{way.name}({params}) took {way.seconds * 1e6:.1f} us, {expected}"


def taken(machine: Machine, rows: Iterable[Timed], price: Priced) -> Iterator[Taken]:
    """Yield what plans take of each product that was measured several ways."""
    by_problem: dict[Problem, list[Timed]] = {}
    for row in rows:
        by_problem.setdefault(row.problem, []).append(row)
    for problem, ways in by_problem.items():
        quickest: dict[str, Timed] = {}
        for way in sorted((one for one in ways if one in price), key=price.__getitem__):
            quickest.setdefault(way.name, way)
        if not quickest or len(ways) == 1:
            continue
        nothing = View((), ())
        call = Call(problem.op, problem, nothing, nothing, nothing, ())
        ranked = [
            Choice(call, problem, way.rung, way.params, machine, "", price[way])
            for way in quickest.values()
        ]
        name = known_best(ranked, machine).rung.name
        way = next(one for one in quickest.values() if one.rung.name == name)
        yield Taken(way, min(ways, key=lambda one: one.seconds))


def told(found: Sequence[Taken], price: Priced) -> Iterator[str]:
    """Yield what choices lose, by class, and the worst of them."""
    by_kind: dict[str, list[float]] = {}
    for one in found:
        by_kind.setdefault(kind_of(one.way.problem), []).append(one.lost)
    for kind, lost in [*sorted(by_kind.items()), ("all", [one.lost for one in found])]:
        loss = fit.Loss(len(lost), float(np.mean(lost)), float(np.quantile(lost, 0.99)))
        yield f"  {kind:18} {loss.words()}"
    for one in sorted(found, key=lambda one: one.lost, reverse=True)[:WORST]:
        yield one.words(price)


def text_of(model: DeviceModel, before: str) -> str:
    """Return the shipped file with other coefficients and errors, a line for each rung."""
    record = json.loads(before)
    record |= {"errors": dict(sorted(model.errors.items()))}
    plain = {name: json.dumps(one, separators=(",", ":")) for name, one in record.items()}
    rungs = (
        f'"{rung}":'
        + json.dumps({k: float(f"{v:.3g}") for k, v in sorted(own.items())}, separators=(",", ":"))
        for rung, own in sorted(model.numbers.items())
    )
    plain["numbers"] = "{\n" + ",\n".join(rungs) + "}"
    return "{\n" + ",\n".join(f'"{name}":{one}' for name, one in plain.items()) + "\n}\n"


def rewritten(machine: Machine, rows: Sample, price: Priced, names: Sequence[str]) -> Path:
    """Write a machine's shipped file anew, fitted to all rows, with the errors of these prices."""
    found = fit.errors((row for row in rows.drawn if row in price), price.__getitem__)
    chosen = tuple(names or [""])
    errors = {name: round(one, 3) for name, one in found.items() if name.startswith(chosen)}
    made = refitted(machine, [*rows.drawn, *rows.named], list(elsewhere(machine)), names)
    made = replace(made, errors={**made.errors, **errors})
    file = models.SHIPPED / f"{slug(machine.name)}.json"
    file.write_text(text_of(made, file.read_text(encoding="utf-8")), encoding="utf-8")
    return file


def main() -> None:
    """Judge every shipped model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rungs", nargs="*")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    for model, _ in models.shipped():
        machine, rows = machine_of(model), sample(ROOT / "evidence" / slug(model.device))
        before, after = priced(machine, rows, given.rungs)
        ways = len(rows.drawn) + len(rows.named)
        print(
            f"{model.device}: {fit.problems_of([*rows.drawn, *rows.named])} products, {ways} ways"
        )
        for words, price in (
            ("shipped, which most of these were fitted to:", before),
            ("fitted to the others:", after),
        ):
            print(words, *told(list(taken(machine, rows.drawn, price)), price), sep="\n")
            if rows.named:
                print("products of bars, shortest loss last:")
                some = sorted(taken(machine, rows.named, price), key=lambda one: -one.lost)
                print(*(one.words(price) for one in some), sep="\n")
        if given.write:
            print("wrote", rewritten(machine, rows, after, given.rungs))


if __name__ == "__main__":
    main()
