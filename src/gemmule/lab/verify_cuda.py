"""Verifying CUDA rungs on a real device against the oracle, and writing down what was proved.

Every rung runs in a child process of its own: a kernel that faults takes its CUDA context with it,
and must not take the others.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gemmule import evidence
from gemmule.lab import proofs
from gemmule.oracle import Verdict, check
from gemmule.oracle_inputs import make_inputs
from gemmule.oracle_problems import edge_problems, make_problem, nonfinite_cases
from gemmule.problem import ITEMSIZE, Problem
from gemmule.rung import Rung, Signature, all_rungs
from gemmule.store import write_atomically

Run = Callable[[Rung, Any, Mapping[str, Any]], Any]


@dataclass(slots=True)
class Outcome:
    """What was found for one variant."""

    folder: str
    rung: str
    variant: str
    key: str
    cases: int = 0
    worst_ratio: float = 0.0
    failures: list[str] = field(default_factory=list)
    device: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """One launch to judge."""

    problem: Problem
    params: Mapping[str, Any]
    kind: str
    view: str
    seed: int


def trials(rung: Rung, signature: Signature, *, few: bool = False) -> Iterator[Trial]:
    """Yield the launches that prove a variant: edge sizes, every parameter set, NaN and Inf.

    few: a sample of them, for sanitizers and the emulator, which run a thousand times slower.
    """
    quants = [None] if not rung.quantized else list(proofs.quant_specs(signature))
    is_integer = signature[2].startswith(("int", "uint"))
    kinds = ("integers",) if is_integer else ("integers", "normal", "cancel")
    views = ("contiguous", "padded", "sliced")
    for q, quant in enumerate(quants):
        problems = [
            p
            for p in edge_problems(
                rung.op, signature, rung.layouts, layouts_b=rung.layouts_b, quant=quant
            )
            if rung.refusal(p) is None
        ]
        step = 1 if quant is None and not few else (5 if not few else max(1, len(problems) // 12))
        for i, packed in enumerate(problems[q % step :: step]):
            problem, view = _seen(rung, packed, views[i // 3 % len(views)])
            params = rung.check_params(problem, None)
            yield Trial(problem, params, kinds[i % len(kinds)], view, i)
        yield from _parameter_trials(rung, signature, quant, few=few)
        if not is_integer and not few:
            sample = _awkward(rung, signature, quant, 0)
            for case in nonfinite_cases(sample) if rung.refusal(sample) is None else ():
                params = rung.check_params(sample, None)
                yield Trial(sample, params, "nonfinite", "contiguous", case.seed)


def _seen(rung: Rung, problem: Problem, view: str) -> tuple[Problem, str]:
    """Return the problem under a view: what begins one element later is aligned to no more."""
    if view != "sliced":
        return problem, view
    types = (problem.b, problem.out) if problem.quant else (problem.a, problem.b, problem.out)
    smallest = min(ITEMSIZE[name] for name in types)
    later = replace(problem, alignment=min(problem.alignment, smallest))
    return (later, view) if rung.refusal(later) is None else (problem, "contiguous")


def _parameter_trials(
    rung: Rung, signature: Signature, quant: Any, *, few: bool
) -> Iterator[Trial]:
    """Yield every declared parameter set at awkward sizes."""
    for which in range(1 if few else 3):
        problem = _awkward(rung, signature, quant, which)
        if rung.refusal(problem) is not None:
            continue
        every = list(rung.space(problem))
        for i, params in enumerate(every[:: max(1, len(every) // 6)] if few else every):
            yield Trial(problem, params, "integers", "contiguous", 1000 + i)


def _awkward(rung: Rung, signature: Signature, quant: Any, which: int) -> Problem:
    """Return a problem of odd sizes in a layout that the rung takes."""
    matvec = ((129, 331, 1), (1030, 2056, 1), (67, 4104, 1))
    matmul = ((67, 45, 131), (130, 129, 264), (40, 200, 520))
    m, n, k = (matvec if rung.op == "matvec" else matmul)[which]
    layout_b = rung.layouts_b[0] if rung.op == "matmul" else "row"
    return make_problem(
        rung.op, m, n, k, signature, layout_a=rung.layouts[which % len(rung.layouts)],
        layout_b=layout_b, quant=quant,
    )  # fmt: skip


def judge_trial(rung: Rung, trial: Trial, run: Run) -> Verdict:
    """Run one trial and judge it."""
    arithmetic = rung.arithmetic(trial.problem)
    inputs = make_inputs(
        trial.problem, trial.kind, trial.seed, trial.view, accumulator=_narrow(arithmetic)
    )
    out = run(rung, inputs, trial.params)
    return check(inputs, arithmetic, trial.params, out)


def _narrow(arithmetic: Any) -> str | None:
    return arithmetic.accumulator if arithmetic.accumulator in ("float16", "bfloat16") else None


def verify_rung(folder: str, name: str, ordinal: int = 0, few: bool = False) -> list[Outcome]:
    """Verify every variant of one rung on a device, in this process."""
    from gemmule.lab.device_runner import DeviceRunner

    rung = next(r for r in all_rungs("cuda") if (r.folder, r.name) == (folder, name))
    runner = DeviceRunner(ordinal)
    outcomes = []
    for variant in proofs.variants(rung):
        signature = tuple(variant.name.split(","))
        outcome = Outcome(
            folder, name, variant.name, proofs.key(variant), device=runner.machine.name
        )
        for trial in trials(rung, (signature[0], signature[1], signature[2]), few=few):
            verdict = judge_trial(rung, trial, runner.run)
            outcome.cases += 1
            outcome.worst_ratio = max(outcome.worst_ratio, verdict.ratio)
            if not verdict.ok:
                outcome.failures.append(f"{trial}: {verdict.text}")
                if len(outcome.failures) >= 3:
                    break
        outcomes.append(outcome)
    runner.close()
    return outcomes


def verify_all(
    rungs: tuple[Rung, ...], *, workers: int | None = None, few: bool = False,
    report: Callable[[list[Outcome]], None] = lambda outcomes: None,
) -> list[Outcome]:  # fmt: skip
    """Verify rungs in child processes, several at once; a rung whose process dies has failed."""
    count = workers or max(1, min(14, (os.cpu_count() or 2) - 2))
    context = multiprocessing.get_context("spawn")
    found: list[Outcome] = []
    pending = list(rungs)
    while pending:
        batch, pending = pending, []
        with ProcessPoolExecutor(count, mp_context=context, max_tasks_per_child=1) as pool:
            futures = {pool.submit(verify_rung, r.folder, r.name, 0, few): r for r in batch}
            for future in as_completed(futures):
                rung = futures[future]
                try:
                    outcomes = future.result()
                except Exception as error:
                    outcomes = [Outcome(rung.folder, rung.name, "all", "", failures=[f"{error!r}"])]
                found += outcomes
                report(outcomes)
    return found


def write_evidence(root: Path, outcomes: list[Outcome]) -> Path:
    """Merge the proofs into ``<root>/<gpu>/verified.jsonl``; failed variants lose their record."""
    device = next((o.device for o in outcomes if o.device), "unknown")
    path = root / _slug(device) / "verified.jsonl"
    records = {(r.folder, r.rung, r.variant): r for r in evidence.read(root)}
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    for o in outcomes:
        records.pop((o.folder, o.rung, o.variant), None)
        if o.cases and not o.failures and proofs.is_pinned():
            records[(o.folder, o.rung, o.variant)] = evidence.Record(
                o.folder, o.rung, o.variant, proofs.PROOF_ARCH, o.key, o.device, today, o.cases,
                round(o.worst_ratio, 4),
            )  # fmt: skip
    lines = [
        json.dumps({"schema": evidence.SCHEMA, **asdict(records[name])}) for name in sorted(records)
    ]
    write_atomically(path, ("\n".join(lines) + "\n").encode())
    return path


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-") or "unknown"
