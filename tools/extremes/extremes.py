"""What only a GPU can show of a rung: the same bits in 100 runs, and more than 2^31 elements.

Reruns: every dtype of A once, at a middle size. One digest of the result, or a rung that declares
`unordered`. Beyond 2^31: one product over a matrix that large, and one over a batch of three where
the rung takes batches. It is zero but for a few elements, most of them in its last row, so that an
offset which loses bits reads a zero in their place or finds one of them elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from extremes.giant import BATCH, multiply_giant, sides_of
from gemmule.core.problem import Problem
from gemmule.core.registry import cuda_rungs
from gemmule.core.rung import CudaRung, Signature
from gemmule.oracle.inputs import make_inputs
from proofs import proof_lines, proofs
from proofs.apart import Task, each_apart
from proofs.device import awkward, narrow

RUNS = 100
MIDDLE = 1  # of verify_cuda.awkward: 1030 x 2056, or 130 x 129 x 264
GIANT_DTYPES = ("float16", "int8", "uint8", "uint4", "bfloat16", "float32", "float8_e4m3fn")
RERUNS, GIANT, GIANT_BATCH = "reruns", "beyond 2^31", f"beyond 2^31, batch of {BATCH}"


@dataclass(frozen=True, slots=True)
class Found:
    """What one check found of one variant. `wrong` says what is wrong, or is empty."""

    check: str
    folder: str
    rung: str
    variant: str
    key: str
    device: str
    figures: Mapping[str, int | bool] = field(default_factory=dict)
    wrong: str = ""


def watched(rungs: Sequence[CudaRung] | None = None) -> list[CudaRung]:
    """Return the rungs (of some, default all) that are checked: not those of grouped products.

    A product of theirs has many matrices, none of them giant, and takes offsets besides.
    """
    return [rung for rung in rungs or cuda_rungs() if rung.folder != "grouped"]


def found_of(
    check: str, variant: proofs.Variant, device: str, figures: Mapping[str, int], wrong: str
) -> Found:
    """Return what a check found of a variant on a device, with the variant's present key."""
    rung, key = variant.rung, proofs.key(variant)
    return Found(check, rung.folder, rung.name, variant.name, key, device, figures, wrong)


def of_each_dtype(rung: CudaRung) -> Iterator[proofs.Variant]:
    """Yield the first variant of every dtype of A."""
    seen = set()
    for signature in proofs.signatures(rung):
        if signature[0] not in seen:
            seen.add(signature[0])
            yield proofs.variant_of(rung, signature)


def middle_problem(rung: CudaRung, signature: Signature) -> Problem:
    """Return a problem of middle size that the rung takes, else its largest of the proofs."""
    quants = list(proofs.quant_specs(signature)) if rung.quantized else [None]
    taken = [p for q in quants if rung.refusal(p := awkward(rung, signature, q, MIDDLE)) is None]
    if taken:
        return taken[0]
    return max(proofs.fixed_problems(rung, signature), key=lambda p: p.m * p.reduction)


def digests(rung: CudaRung, signature: Signature, run: Callable[..., Any], runs: int) -> set[str]:
    """Return the distinct digests of `runs` results over the same operands."""
    problem = middle_problem(rung, signature)
    kind = "integers" if problem.out.startswith(("int", "uint")) else "normal"
    inputs = make_inputs(problem, kind, 5, accumulator=narrow(rung.arithmetic(problem)))
    params = rung.check_params(problem, None)
    found = set()
    for _ in range(runs):
        inputs.poison()
        found.add(hashlib.sha256(run(rung, inputs, params).tobytes()).hexdigest())
    return found


def reruns(rung: CudaRung, ordinal: int = 0, runs: int = RUNS) -> Iterator[Found]:
    """Run each dtype `runs` times on a device."""
    from proofs.device_runner import DeviceRunner

    runner = DeviceRunner(ordinal)
    for variant in of_each_dtype(rung):
        count = len(digests(rung, proofs.signature_of(variant), runner.run, runs))
        ordered = not rung.arithmetic(middle_problem(rung, proofs.signature_of(variant))).unordered
        wrong = f"{runs} runs gave {count} results" if ordered and count > 1 else ""
        figures = {"runs": runs, "results": count, "ordered": ordered}
        yield found_of(RERUNS, variant, runner.machine.name, figures, wrong)
    runner.close()


def giants(rung: CudaRung, ordinal: int = 0) -> Iterator[Found]:
    """Multiply by a matrix of more than 2^31 elements, and by a batch of as many, on a device."""
    from gemmule.backends.cuda import driver

    by_dtype = {variant.name.split(",")[0]: variant for variant in of_each_dtype(rung)}
    variant = next(by_dtype[dtype] for dtype in GIANT_DTYPES if dtype in by_dtype)
    device = driver.device_info(ordinal).name
    for batch in (1, BATCH) if rung.batched else (1,):
        wrong = multiply_giant(rung, proofs.signature_of(variant), batch, ordinal)
        check = GIANT if batch == 1 else GIANT_BATCH
        rows, columns = sides_of(rung, proofs.signature_of(variant), batch)
        yield found_of(check, variant, device, {"elements": rows * columns}, wrong)


def of_rung(folder: str, name: str, ordinal: int = 0) -> list[Found]:
    """Return what all checks find of one rung, in this process."""
    rung = next(r for r in cuda_rungs() if (r.folder, r.name) == (folder, name))
    return [*reruns(rung, ordinal), *giants(rung, ordinal)]


def of_all(
    rungs: Sequence[CudaRung],
    *,
    ordinal: int = 0,
    workers: int = 8,
    report: Callable[[list[Found]], None] = lambda found: None,
) -> list[Found]:
    """Check rungs, each in a process of its own; one that dies is reported as wrong."""
    results: list[Found] = []

    def keep(task: Task, found: list[Found] | Exception) -> None:
        if isinstance(found, Exception):
            found = [Found("all", task[0], task[1], "", "", "", wrong=repr(found))]
        results.extend(found)
        report(found)

    each_apart(of_rung, [(r.folder, r.name, ordinal) for r in rungs], workers, keep)
    return results


def write(root: Path, found: Sequence[Found]) -> Path | None:
    """Merge what passed into ``<root>/<gpu>/extremes.jsonl``; what failed loses its line."""
    checks = ((one.check, one, one.figures, not one.wrong) for one in found)
    return proof_lines.record(root, "extremes.jsonl", checks)
