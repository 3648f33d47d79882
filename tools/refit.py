"""Fit the shipped time models again to what was measured of a device, and tell what they are worth.

    PYTHONPATH=src python tools/refit.py [--write] [rung …]

Rungs as in ``matmul/cublas``, or the beginnings of their names; by default all. Printed is what
choices lose against the quickest way measured, on products that the model was not fitted to (each
quarter in turn), by the shipped coefficients and by the fitted ones, and the worst products. With
``--write`` the shipped file gets the coefficients fitted to all of them, and the errors found.
Needs no GPU: the sample is ``evidence/<device>/measured_*.jsonl.xz`` of all the model's devices.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from gemmule.core.device_model import DeviceModel
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
# Bytes a second that reads reach on the devices measured, as the terms count with it.
READ = {"nvidia-h100-80gb-hbm3": 3.19e12, "nvidia-h200": 4.70e12}
# Their kernels have changed since the sample was taken.
CHANGED = ("grouped/streamed_codes", "grouped/wgmma_codes")


def sample(path: Path, on: Machine | None = None) -> list[Timed]:
    """Return what a file tells: every way of every product, by the median of its times."""
    rungs = {f"{rung.folder}/{rung.name}": rung for rung in all_rungs("cuda")}
    rungs = {name: rung for name, rung in rungs.items() if name not in CHANGED}
    found = []
    with lzma.open(path, "rt", encoding="utf-8") as rows:
        for row in map(json.loads, rows):
            problem = decode(Problem, row["problem"], "a problem")
            for way in row["ways"]:
                if way["rung"] in rungs and way["seconds"]:
                    seconds = statistics.median(way["seconds"])
                    found.append(Timed(problem, rungs[way["rung"]], way["params"], seconds, on))
    return found


def samples(model: DeviceModel, names: Sequence[str]) -> dict[str, list[Timed]]:
    """Return what was measured of the devices that a model is for, by their folders."""
    found: dict[str, list[Timed]] = {}
    for path in sorted(ROOT.glob("evidence/*/measured_*.jsonl.xz")):
        folder = path.parent.name
        if folder.startswith(tuple(map(slug, names))):
            on = replace(machine_of(model), read_bytes_per_s=READ[folder])
            found.setdefault(folder, []).extend(sample(path, on))
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


def refitted(machine: Machine, rows: Sequence[Timed], names: Sequence[str]) -> DeviceModel:
    """Return the machine's model with the coefficients of the named rungs fitted to rows."""
    model = models.of(machine)
    owners = {row.rung.counts_with for row in rows if row.name.startswith(tuple(names or [""]))}
    chosen = [row for row in rows if row.rung.counts_with in owners]  # all that share them
    return fit.fitted(replace(machine, model=None), model, chosen)


Priced = list[tuple[Timed, float]]


def priced(machine: Machine, rows: Sequence[Timed], names: Sequence[str]) -> tuple[Priced, Priced]:
    """Return what shipped coefficients expect of each way, and those fitted to other products."""
    shipped, fresh = [], []
    for fold in range(fit.HELD_OUT):
        known, held = fit.held_out(rows, fold)
        model = refitted(machine, known, names)
        shipped += [(row, fit.modelled(machine, models.of(machine), row)) for row in held]
        fresh += [(row, fit.modelled(machine, model, row)) for row in held]
    return shipped, fresh


def told(some: Priced) -> Iterable[str]:
    """Yield what choices lose, by class, and the worst of them."""
    price = dict(some).__getitem__
    by_kind: dict[str, list[Timed]] = {}
    by_problem: dict[Problem, list[Timed]] = {}
    for row, expected in some:
        if expected > 0:
            by_kind.setdefault(kind_of(row.problem), []).append(row)
            by_problem.setdefault(row.problem, []).append(row)
    for kind, mine in sorted(by_kind.items()):
        yield f"  {kind:18} {fit.loss(mine, price).words()}"
    every = (row for mine in by_kind.values() for row in mine)
    yield f"  {'all':18} {fit.loss(every, price).words()}"
    lost = []
    for ways in by_problem.values():
        one, best = min(ways, key=price), min(ways, key=lambda row: row.seconds)
        words = (
            f"{w.name} {price(w) * 1e6:.1f} us, took {w.seconds * 1e6:.1f}" for w in (one, best)
        )
        lost.append((one.seconds / best.seconds, one.problem.describe(), "; best ".join(words)))
    for times, product, both in sorted(lost, reverse=True)[:WORST]:
        yield f"  {times:.2f} {product}: {both}"


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


def main() -> None:
    """Judge every shipped model that a sample is on record of."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rungs", nargs="*")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    for model, names in models.shipped():
        machine, by_device = machine_of(model), samples(model, names)
        rows = [row for some in by_device.values() for row in some]
        before, after = priced(machine, rows, given.rungs)
        for folder, some in by_device.items():
            print(f"{folder}: {fit.problems_of(some)} products, {len(some)} ways")
            for words, prices in (
                ("shipped, which some of these were fitted to:", before),
                ("fitted to the others:", after),
            ):
                known = dict(prices)
                print(words, *told([(row, known[row]) for row in some]), sep="\n")
        if given.write:
            known = dict(after)
            errors = fit.errors(known, known.__getitem__)
            made = replace(
                refitted(machine, rows, given.rungs),
                errors={
                    **model.errors,
                    **{
                        name: round(one, 3)
                        for name, one in errors.items()
                        if not given.rungs or name.startswith(tuple(given.rungs))
                    },
                },
            )
            file = models.SHIPPED / f"{slug(model.device)}.json"
            file.write_text(text_of(made, file.read_text(encoding="utf-8")), encoding="utf-8")
            print("wrote", file)


if __name__ == "__main__":
    main()
