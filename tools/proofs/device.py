"""Verifying CUDA rungs on a real device against the oracle, and writing down what was proved.

Every rung runs in a child process of its own: a kernel that faults takes its CUDA context along.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from gemmule.backends.cuda import nvrtc
from gemmule.core.problem import COMPLEX, ITEMSIZE, Problem, QuantSpec
from gemmule.core.registry import device_rungs
from gemmule.core.rung import CudaRung, DeviceRung, Signature
from gemmule.oracle import biased, finished, scaled
from gemmule.oracle.inputs import make_inputs
from gemmule.oracle.judge import Verdict, check
from gemmule.oracle.problems import (
    ALIGNED,
    EXPERTS,
    edge_problems,
    make_problem,
    nonfinite_cases,
)
from gemmule.rungs._cuda.geometry import ceil_div
from gemmule.storage import evidence, lines
from proofs import proofs
from proofs.apart import Task, each_apart

Run = Callable[[DeviceRung, Any, Mapping[str, Any]], Any]
Names = frozenset[str]
Only = Mapping[tuple[str, str], Names]
MOST, FEW, LEAST = 160, 12, 72  # edge problems of a variant, of which a rung has 4 to 22
CHUNK = 4  # variants that one child process verifies
_T = TypeVar("_T")
EVERY = "all"  # the variant of an outcome that stands for the whole rung


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
    shapes: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """One launch to judge."""

    problem: Problem
    params: Mapping[str, Any]
    kind: str
    view: str
    seed: int


def trials(rung: DeviceRung, signature: Signature, *, few: bool = False) -> Iterator[Trial]:
    """Yield the launches that prove a variant: edge sizes, every parameter set, NaN and Inf.

    few: a sample of them, for sanitizers and the emulator, which run a thousand times slower; all
    signatures together meet 40 sizes or more.
    """
    is_integer = signature[2].startswith(("int", "uint"))
    kinds = ("integers",) if is_integer else ("integers", "normal", "cancel")
    views = ("contiguous", "padded", "sliced")
    quants: list[QuantSpec | None] = [None]
    if rung.quantized:
        quants = taken_quants(rung, signature)
        quants = _spread(quants, 3, signature) if few else quants
    problems = list(_edges(rung, signature, quants, few=few))
    for i, packed in enumerate(_spread(problems, _sample(rung) if few else MOST, signature)):
        problem, view = _seen(rung, packed, views[i // 3 % len(views)])
        params = rung.check_params(problem, None)
        yield Trial(problem, params, kinds[i % len(kinds)], view, i)
    yield from _aligned_trials(rung, signature, quants[0], few=few)
    for quant in _spread(quants, 1 if few else 4, signature):
        yield from _parameter_trials(rung, signature, quant, few=few)
    samples = [awkward(rung, signature, quants[0], which) for which in range(3)]
    finite = is_integer or few or signature[2] in COMPLEX  # where the rule for NaN is none
    for sample in [p for p in samples if not finite and rung.refusal(p) is None][:1]:
        params = rung.check_params(sample, None)
        for case in _spread(list(nonfinite_cases(sample)), 40, signature):
            yield Trial(sample, params, "nonfinite", "contiguous", case.seed)


def taken_quants(rung: DeviceRung, signature: Signature) -> list[QuantSpec | None]:
    """Return those of the proofs' quantisations that the rung takes; ValueError if none."""
    every = proofs.quant_specs(signature)
    taken = [q for q in every if rung.refusal(awkward(rung, signature, q, 1)) is None]
    if not taken:
        raise ValueError(f"rung {rung.name} takes none of the quantisations that proofs meet.")
    return [*taken]


def _edges(
    rung: DeviceRung, signature: Signature, quants: list[QuantSpec | None], *, few: bool
) -> Iterator[Problem]:
    """Yield the edge problems that the rung takes; a few: each size with one quantisation only.

    One that wants aligned operands or long sums meets others' sizes with padded rows, or longer.
    """
    of_quant = [
        list(edge_problems(rung.op, signature, rung.layouts, layouts_b=rung.layouts_b, quant=q))
        for q in quants
    ]
    if few:
        of_quant = [[of_quant[i % len(of_quant)][i] for i in range(len(of_quant[0]))]]
    for problem in itertools.chain.from_iterable(of_quant):
        changes: list[dict[str, Any]] = [{}, {"alignment": 16}]
        if rung.op == "grouped":  # whole vectors and groups, at any other size
            whole = {"k": ceil_div(problem.k, 32) * 32, "n": ceil_div(problem.n, 8) * 8}
            changes.append({"alignment": 16, **whole})
        if rung.op == "matmul" and problem.k % 4 and not rung.quantized:
            changes.append({"alignment": 16, "k": ceil_div(problem.k, 4) * 4})
        if 0 < problem.k < 64 and not rung.quantized:
            changes.append({"k": problem.k + 64})
        changed = (replace(problem, **one) if one else problem for one in changes)
        yield from itertools.islice((one for one in changed if rung.refusal(one) is None), 1)


def _sample(rung: DeviceRung) -> int:
    """Return how many edge problems of each variant make 40 sizes and more of the rung.

    Of a quantised one more: it refuses batches and some groups.
    """
    most = max(FEW, LEAST // len(rung.signatures))
    most = 5 * most if rung.op == "grouped" else most  # each size has one number of experts
    if isinstance(rung, CudaRung) and rung.scaled:  # its dtypes begin at the same sizes
        most = 2 * most
    more = (2, 1) if most > 20 else (9, 7) if most > 16 else (7, 6)  # the fewer dtypes, the more
    return most * more[0] // more[1] if rung.quantized else most


def _spread(items: list[_T], most: int, signature: Signature) -> list[_T]:
    """Return at most `most` items, evenly spread; each signature begins elsewhere.

    So a rung's signatures together meet every size and layout, at a bounded cost for each.
    """
    step = max(1, -(-len(items) // most))
    start = sum(map(ord, "".join(signature))) % step
    return items[start::step]


def _seen(rung: DeviceRung, problem: Problem, view: str) -> tuple[Problem, str]:
    """Return the problem under a view: what begins one element later is aligned to no more."""
    if view != "sliced":
        return problem, view
    every = (problem.a, problem.b, problem.out)
    codes = ("uint", "float4", "float8")
    types = [name for name in every if problem.quant is None or not name.startswith(codes)]
    smallest = min(ITEMSIZE[name] for name in types)
    later = replace(problem, alignment=min(problem.alignment, smallest))
    return (later, view) if rung.refusal(later) is None else (problem, "contiguous")


def _parameter_trials(
    rung: DeviceRung, signature: Signature, quant: Any, *, few: bool
) -> Iterator[Trial]:
    """Yield every declared parameter set at awkward sizes."""
    for which in range(1 if few else 3):
        problem = awkward(rung, signature, quant, which)
        if rung.refusal(problem) is not None:
            continue
        every = list(rung.space(problem))
        for i, params in enumerate(every[:: max(1, len(every) // 6)] if few else every):
            yield Trial(problem, params, "integers", "contiguous", 1000 + i)


def _aligned_trials(
    rung: DeviceRung, signature: Signature, quant: QuantSpec | None, *, few: bool
) -> Iterator[Trial]:
    """Yield the aligned problems, packed and padded; a few: all but one, each in one layout."""
    layouts_b = rung.layouts_b if rung.op != "matvec" else ("row",)
    pairs = [(a, b) for a in rung.layouts for b in layouts_b if "strided" not in (a, b)]
    for which, size in enumerate(ALIGNED[rung.op][: -1 if few else None]):
        start = (which + len(signature[0])) % len(pairs)
        batch = 2 if rung.batched and quant is None and which == 0 else 1
        batch = EXPERTS[which] if rung.op == "grouped" else batch
        for a, b in [pairs[start]] if few else pairs:
            options: dict[str, Any] = {"layout_a": a, "layout_b": b, "quant": quant}
            problem = make_problem(rung.op, *size, signature, batch=batch, **options)
            if rung.refusal(problem) is None:
                params = list(rung.space(problem))[-1 if which == 0 else 0]
                view = ("contiguous", "padded")[which % 2]
                yield Trial(problem, params, "integers", view, 2000 + which)


def awkward(rung: DeviceRung, signature: Signature, quant: Any, which: int) -> Problem:
    """Return a problem of odd sizes in a layout that the rung takes."""
    matvec = ((129, 331, 1), (1030, 2056, 1), (67, 4104, 1))
    matmul = ((67, 45, 131), (130, 129, 264), (40, 200, 520))
    grouped = ((67, 45, 131), (130, 136, 288), (40, 200, 544))
    size = {"matvec": matvec, "matmul": matmul, "grouped": grouped}[rung.op][which]
    options: dict[str, Any] = {"layout_a": rung.layouts[which % len(rung.layouts)], "quant": quant}
    options["layout_b"] = rung.layouts_b[0] if rung.op != "matvec" else "row"
    options["batch"] = EXPERTS[which] if rung.op == "grouped" else 1
    return make_problem(rung.op, *size, signature, **options)


def judge_trial(rung: DeviceRung, trial: Trial, run: Run) -> Verdict:
    """Run one trial and judge it."""
    arithmetic = rung.arithmetic(trial.problem)
    inputs = make_inputs(
        trial.problem, trial.kind, trial.seed, trial.view, accumulator=narrow(arithmetic)
    )
    out = run(rung, inputs, trial.params)
    return check(inputs, arithmetic, trial.params, out)


def narrow(arithmetic: Any) -> str | None:
    """Return the accumulator's dtype where it is a half, in which integers must stay exact."""
    return arithmetic.accumulator if arithmetic.accumulator in ("float16", "bfloat16") else None


def trials_of(rung: DeviceRung, variant: proofs.Variant, *, few: bool = False) -> Iterable[Any]:
    """Return the launches that prove a variant, of which one with an epilogue takes some."""
    signature = proofs.signature_of(variant)
    if isinstance(rung, CudaRung) and proofs.scales(variant):
        plain = proofs.plain_of(rung, signature, evidence.SCALED)
        return scaled.some(rung, trials(rung, plain, few=few), signature[2])
    return trials(rung, signature, few=few)


def verify_rung(
    folder: str, name: str, ordinal: int = 0, few: bool = False, only: frozenset[str] | None = None
) -> list[Outcome]:
    """Verify a rung's variants (all, or those named in `only`) on a device, in this process."""
    from proofs.device_runner import DeviceRunner

    rung = next(r for r in device_rungs() if (r.folder, r.name) == (folder, name))
    runner, outcomes = DeviceRunner(ordinal), []
    device = runner.machine.name
    for variant in (one for one in proofs.variants(rung) if only is None or one.name in only):
        given, judged = trials_of(rung, variant, few=few), judge_trial
        if proofs.scales(variant):
            judged = scaled.judge_trial
        hows = proofs.activations(variant)
        if isinstance(rung, CudaRung) and hows:
            given = finished.some(rung, given)
            judged = functools.partial(finished.judge_trial, activations=hows)
        if proofs.adds_bias(variant):
            given, judged = biased.some(rung, given), biased.judge_trial
        outcome = Outcome(folder, name, variant.name, proofs.key(variant), device=device)
        shapes = set()
        for trial in given:
            verdict = judged(rung, trial, runner.run)
            outcome.cases += 1
            shapes.add((trial.problem.m, trial.problem.n, trial.problem.k, trial.problem.batch))
            outcome.worst_ratio = max(outcome.worst_ratio, verdict.ratio)
            if not verdict.ok:
                outcome.failures.append(f"{trial}: {verdict.text}")
                if len(outcome.failures) >= 3:
                    break
        outcome.shapes = len(shapes)
        outcomes.append(outcome)
    runner.close()
    return outcomes


def verify_all(
    rungs: Sequence[DeviceRung],
    *,
    workers: int | None = None,
    few: bool = False,
    ordinal: int = 0,
    only: Only | None = None,
    report: Callable[[list[Outcome]], None] = lambda outcomes: None,
) -> list[Outcome]:
    """Verify rungs in child processes, several at once; a rung whose process dies has failed.

    only: for each (folder, rung) the variants to verify, where not all of them. A process that dies
    takes its whole pool along, so the rungs that were under way then run again, each alone.
    """
    count = workers or max(1, min(14, (os.cpu_count() or 2) - 2))
    named = [(r, None if only is None else only[(r.folder, r.name)]) for r in rungs]
    size = sum(len(r.signatures if n is None else n) for r, n in named) // count
    parts = [(r, part) for r, n in named for part in chunks(r, n, max(1, min(CHUNK, size)))]
    tasks = [(r.folder, r.name, ordinal, few, part) for r, part in parts]
    found: list[Outcome] = []

    def keep(task: Task, made: list[Outcome] | Exception) -> None:
        if isinstance(made, Exception):
            died = isinstance(made, BrokenProcessPool)
            text = "its process died: a crash, or the system killed it" if died else f"{made!r}"
            made = [Outcome(task[0], task[1], EVERY, "", failures=[text])]
        found.extend(made)
        report(made)

    each_apart(verify_rung, tasks, count, keep)
    return found


def chunks(rung: DeviceRung, only: Names | None = None, size: int = CHUNK) -> Iterator[Names]:
    """Yield the names of the rung's variants (or of those in `only`), `size` at a time."""
    every = proofs.names(rung)
    names = [name for name in every if only is None or name in only]
    for start in range(0, len(names), size):
        yield frozenset(names[start : start + size])


def write_evidence(root: Path, outcomes: Sequence[Outcome]) -> Path | None:
    """Merge the proofs into the files of their rungs; failed variants lose their record.

    The files are ``<root>/<gpu>/verified/<folder>.<rung>.jsonl``. Returns that folder, or None when
    no outcome came from a device. ValueError unless NVRTC here is the pinned one: other compilers'
    cubins are no keys.
    """
    device = next((o.device for o in outcomes if o.device), None)
    if device is None:
        return None
    if not proofs.is_pinned():
        raise ValueError(
            f"evidence is keyed by the cubins of NVRTC {evidence.PINNED_NVRTC}; installed is "
            f"{nvrtc.compiler_version()}. Install nvidia-cuda-nvrtc=={evidence.PINNED_NVRTC}."
        )
    gpu = root / evidence.slug(device)
    records = {(r.folder, r.rung, r.variant): r for r in evidence.read_device(gpu)}
    today = lines.today()
    for o in outcomes:
        for name in [n for n in records if n[:2] == (o.folder, o.rung)]:
            if o.variant in (EVERY, name[2]):
                del records[name]
        if o.cases and not o.failures:
            what = o.folder, o.rung, o.variant
            worst = round(o.worst_ratio, 4)
            records[what] = evidence.Record(
                *what, proofs.PROOF_ARCH, o.key, o.device, today, o.cases, worst
            )
    write_records(gpu, records.values(), {(o.folder, o.rung) for o in outcomes})
    return gpu / evidence.FOLDER


def write_records(
    gpu: Path, records: Collection[evidence.Record], touched: Collection[tuple[str, str]]
) -> None:
    """Make `records` the proofs of the `touched` rungs, (folder, name), below a device's folder.

    Where the single file of all rungs lies there, every rung's records move out of it. Other files
    stay as they are, byte for byte; a rung without a record has none. OSError where one cannot be
    written, with the single file still in place.
    """
    single = gpu / evidence.SINGLE_FILE
    rungs = set(touched)
    if single.is_file():
        rungs |= {(r.folder, r.rung) for r in records}
    for rung in sorted(rungs):
        path = evidence.proof_file(gpu, rung)
        mine = sorted((r for r in records if (r.folder, r.rung) == rung), key=lambda r: r.variant)
        if mine:
            lines.write_records(path, evidence.SCHEMA, mine)
        else:
            path.unlink(missing_ok=True)
    single.unlink(missing_ok=True)
