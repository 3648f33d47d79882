"""Which CUDA rungs automatic plans would choose if every rung were proved.

`gemmule.plan.choose` leaves unproved rungs out, so an edit that spoils a proof would silently plan
a slower rung. Here the same choice is made without that condition, over fixed problems and all
architectures: what it picks has to be proved before a release.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence

from gemmule.choose import eligible
from gemmule.core.problem import FLOAT4_DTYPE, Problem
from gemmule.core.registry import cuda_rungs
from gemmule.core.rung import CudaRung, Machine, Rung, Signature
from gemmule.oracle.problems import make_problem
from gemmule.storage.atomic import MAX_BYTES
from gemmule.storage.evidence import variant_of
from gemmule.storage.tuned import SHIPPED, problem_of
from proofs import proofs

# Before asynchronous copies, with them, with wgmma and clusters, with clusters alone.
ARCHS = ("sm_75", "sm_80", "sm_90a", "sm_120a")
LAYOUTS = ("row", "col", "strided")
MATVEC_SHAPES = (
    (64, 64),
    (1024, 1024),
    (4096, 4096),
    (16384, 16384),
    (64, 65536),
    (65536, 64),
    (4095, 4097),
    (4096, 14336),
)
MATMUL_SHAPES = (
    (64, 64, 64),
    (1024, 1024, 1024),
    (4096, 4096, 4096),
    (8192, 16, 8192),
    (1023, 1025, 1027),
)
# One quantisation of each kind that plans tell apart; each costs as much as a dtype.
QUANT_SHAPES = ((4096, 4096), (1000, 4104))
QUANT_COLUMNS = 4
EXPERTS = 64


def chosen_rung(problem: Problem, machine: Machine) -> Rung | None:
    """Return the rung an automatic plan would run were all proved; None when no rung takes it."""
    return _best(_takers(problem), problem, machine)


def _takers(problem: Problem) -> list[CudaRung]:
    """Return the rungs that an automatic plan may choose, whatever the architecture."""
    return [r for r in cuda_rungs() if r.refusal(problem) is None and eligible(r, problem)]


def _best(takers: Sequence[CudaRung], problem: Problem, machine: Machine) -> Rung | None:
    takers = [rung for rung in takers if rung.runs_on(machine.arch)]
    ranked = [
        (found.expected_s, rung) for rung in takers if (found := rung.suggest(problem, machine))
    ]
    if ranked:
        return min(ranked, key=lambda pair: pair[0])[1]
    return takers[0] if takers else None


def problems() -> Iterator[Problem]:
    """Yield the fixed problems of every signature that some CUDA rung declares."""
    rungs = cuda_rungs()  # 4-bit floats go to a GPU once each rung that takes them is proved
    plain = dict.fromkeys((r.op, s) for r in rungs if not r.quantized for s in r.signatures)
    coded = dict.fromkeys(
        (r.op, s) for r in rungs if r.quantized for s in r.signatures if FLOAT4_DTYPE not in s
    )
    for op, signature in plain:
        yield from _plain(op, signature)
    for op, signature in coded:
        yield from _quantized(op, signature)


def _plain(op: str, signature: Signature) -> Iterator[Problem]:
    if op == "matvec":
        for (m, n), layout in itertools.product(MATVEC_SHAPES, LAYOUTS):
            yield make_problem(op, m, n, 1, signature, layout_a=layout)
        return
    for (m, n, k), layout, layout_b in itertools.product(MATMUL_SHAPES, LAYOUTS[:2], LAYOUTS[:2]):
        experts = EXPERTS if op == "grouped" else 1
        options = {"layout_a": layout, "layout_b": layout_b, "batch": experts}
        yield make_problem(op, m, n, k, signature, **options)


def _quantized(op: str, signature: Signature) -> Iterator[Problem]:
    for (m, inner), quant in itertools.product(QUANT_SHAPES, proofs.quant_specs(signature)):
        if op == "grouped":
            yield make_problem(op, m, 4096, inner, signature, batch=EXPERTS, quant=quant)
            continue
        n, k = (inner, 1) if op == "matvec" else (QUANT_COLUMNS, inner)
        yield make_problem(op, m, n, k, signature, quant=quant)


@functools.cache
def needed() -> Mapping[tuple[str, str, str], str]:
    """Return the variants that default plans choose, (folder, rung, variant): one problem each.

    Shipped tuning results choose rungs too. It takes seconds, and is found once a process.
    """
    found: dict[tuple[str, str, str], str] = {}
    machines = [proofs.proof_machine(arch) for arch in ARCHS]
    for problem in problems():
        takers = _takers(problem)
        for machine in machines:
            rung = _best(takers, problem, machine)
            if rung is not None:
                words = f"{problem.describe()} on {machine.arch}"
                found.setdefault((rung.folder, rung.name, variant_of(problem)), words)
    for path in sorted(SHIPPED.glob("*.json")):
        record = json.loads(path.read_bytes()[:MAX_BYTES])
        if (record["folder"], record["rung"]) in {(r.folder, r.name) for r in cuda_rungs()}:
            name = (record["folder"], record["rung"], variant_of(problem_of(record["fields"])))
            found.setdefault(name, f"shipped: {record['problem']}")
    return found
