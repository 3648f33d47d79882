"""The ladder as a table: every rung with its idea, its limits, its arithmetic and its proof."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gemmule import backends
from gemmule.core.problem import FLOAT4_DTYPE, Problem, QuantSpec
from gemmule.core.registry import Ladder, ladder
from gemmule.core.rung import CpuRung, CudaRung, Machine, Rung
from gemmule.errors import DeviceError
from gemmule.oracle.problems import float4_spec
from gemmule.storage import evidence
from gemmule_lab.report import ladder_gains
from gemmule_lab.report.ladder_gains import Gain

# What workspaces of CUDA rungs are computed for where no GPU is present: the H200 of the evidence.
REFERENCE_GPU = Machine("cuda", "NVIDIA H200", "sm_90a", 132, 4.8e12, 50 << 20, 227 << 10)
CODE_LAYOUTS = ("row", "mma16")
FEW = 8  # rows or columns, of examples for rungs that take no square ones


@dataclass(frozen=True, slots=True)
class Row:
    """One rung as strings; sizes in bytes, None where the rung takes no example of ours.

    number: its place on the ladder; gain: over the step before, on record, or why it has none;
    branch: why it is no step of the main line, empty for a step.
    """

    number: str
    rung: str
    technique: str
    idea: str
    gain: str
    branch: str
    dtypes: str
    layouts: str
    workspace_bytes: int | None
    shared_bytes: int | None
    arithmetic: str
    proof: str


def rows(
    op: str, backend: str, size: int, machine: Machine | None = None, *, here: bool = True
) -> list[Row]:
    """Return one row for each rung of `op`, for a square problem of `size`, in ladder order.

    machine: what workspaces and proofs are for; default: the device here. here: tell which rungs
    this machine cannot run; documents, which are for every machine, do not.
    """
    chosen = machine_of(backend) if machine is None else machine
    rungs, run = ladder(op, backend), ladder_gains.newest(backend)
    gained = ladder_gains.gains(op, backend, () if run is None else run.rows)
    return [_row(rung, rungs, gained.get(rung.name), chosen, size, here) for rung in rungs]


def machine_of(backend: str) -> Machine:
    """Return the machine of a back end, or the reference GPU where none is present."""
    try:
        return backends.get(backend).machine(backend)
    except (DeviceError, ImportError):
        return REFERENCE_GPU


def _row(
    rung: Rung, rungs: Ladder, gain: Gain | None, machine: Machine, size: int, here: bool
) -> Row:
    example = next(iter(examples(rung, size)), None)
    workspace = shared = None
    arithmetic = "?"
    if example is not None:
        params = rung.check_params(example, None)
        workspace = 0
        if isinstance(rung, CudaRung):
            workspace = rung.workspace(example, params, machine)
            shared = max((step.smem for step in rung.steps(example, params, machine)), default=0)
        arithmetic = _arithmetic(rung, size)
    place = rungs.numbers[rung.name], rung.name, rung.title, rung.idea
    about = "" if gain is None else str(gain), rungs.branch(rung), _dtypes(rung)
    proof = _proof(rung, machine, size, here)
    return Row(*place, *about, ", ".join(rung.layouts), workspace, shared, arithmetic, proof)


@functools.cache
def examples(rung: Rung, size: int) -> tuple[Problem, ...]:
    """Return problems that the rung takes, in the order it declares its dtypes.

    Square ones, or else such of few columns, or of few rows.
    """
    for m, n in ((size, size), (size, FEW), (FEW, size)):
        taken = [one for one in _problems(rung, m, n, size) if rung.mismatch(one) is None]
        if taken:
            return tuple(taken)
    return ()


def _problems(rung: Rung, m: int, n: int, size: int) -> Iterator[Problem]:
    k = 1 if rung.op == "matvec" else size
    layouts_b = ("row",) if rung.op == "matvec" else rung.layouts_b
    for (a, b, out), layout in itertools.product(rung.signatures, rung.layouts):
        codes = b if rung.op == "grouped" else a
        specs = _quant_specs(codes) if rung.quantized else [None]
        for spec, layout_b in itertools.product(specs, layouts_b):
            plain = Problem(rung.op, m, n, k, a=a, b=b, out=out, quant=spec)
            yield replace(plain, layout_a=layout, layout_b=layout_b)


def _quant_specs(code: str) -> Iterator[QuantSpec]:
    if code == FLOAT4_DTYPE:
        for pick, turned, activations in itertools.product(
            range(2), (False, True), ("float", "int8")
        ):
            yield replace(float4_spec(pick, transposed=turned), activations=activations)
        return
    bits = 4 if code == "uint4" else 8
    options = (CODE_LAYOUTS, (128, -1, None), (False, True), (False, True), ("float", "int8"))
    for layout, group, zeros, turned, activations in itertools.product(*options):
        yield QuantSpec(
            bits, group, zeros, layout, "float16", transposed=turned, activations=activations
        )


def _arithmetic(rung: Rung, size: int) -> str:
    """Say how the rung rounds, over all dtypes that it takes."""
    found = [rung.arithmetic(problem) for problem in examples(rung, size)]
    words = [", ".join(dict.fromkeys(a.accumulator for a in found)) + " sums"]
    rounded = dict.fromkeys(a.inputs for a in found if a.inputs)
    if rounded:
        words.append(f"operands rounded to {', '.join(rounded)}")
    bits = dict.fromkeys(str(a.activations_bits) for a in found if a.activations_bits)
    if bits:
        asked = " where asked for" if any(a.activations_bits is None for a in found) else ""
        words.append(f"vector quantised to {', '.join(bits)} bits{asked}")
    if any(a.unordered for a in found):
        words.append("order varies")
    return ", ".join(words)


def _dtypes(rung: Rung) -> str:
    return ", ".join(dict.fromkeys(a for a, _, _ in rung.signatures))


def _proof(rung: Rung, machine: Machine, size: int, here: bool) -> str:
    reason = rung.available() if here and isinstance(rung, CpuRung) else None
    if reason is not None:
        return f"not here: {reason}"
    if machine.backend == "cpu":
        return "proved by the tests"
    try:
        backend = backends.get(machine.backend)
    except (DeviceError, ImportError):
        return "not checked: no GPU"
    taken = {evidence.variant_of(problem): problem for problem in examples(rung, size)}
    proved = [backend.proved(rung, problem, machine) for problem in taken.values()]
    if all(proved) and proved:
        return "proved"
    return (
        f"proved for {sum(proved)} of {len(proved)} mixes of dtypes" if any(proved) else "unproved"
    )


HEADERS: tuple[str, ...] = (
    *("step", "rung", "technique and idea", "gain on record over the step before", "dtypes of A"),
    *("A lies", "workspace B", "shared B", "arithmetic", "proof"),
)


def show(table_rows: Sequence[Row], title: str) -> None:
    """Print the ladder to the terminal, a few lines a rung, wrapped to its width."""
    from rich.console import Console, Group
    from rich.padding import Padding
    from rich.text import Text

    console = Console()
    console.print(Text(title, style="bold"))
    width = max((len(row.number) for row in table_rows), default=0)
    for row in table_rows:
        head = Text.assemble(
            (f"{row.number:<{width}} {row.rung}", "bold cyan"), f"  {row.technique}"
        )
        if row.branch:
            head.append(f"  (branch: {row.branch})", style="dim")
        console.print(Text(""), head)
        console.print(Padding(Group(*(Text(line) for line in _facts(row))), (0, 0, 0, width + 1)))


def _facts(row: Row) -> list[str]:
    sizes = [] if row.workspace_bytes is None else [f"workspace {row.workspace_bytes:,} B"]
    if row.shared_bytes is not None:
        sizes.append(f"dynamic shared memory {row.shared_bytes:,} B a block")
    gained = [f"{row.gain}, on record"] if row.gain else []
    return [
        row.idea,
        *gained,
        f"A: {row.dtypes}; {row.layouts}",
        "; ".join([row.arithmetic, *sizes, row.proof]),
    ]


def markdown(table_rows: Sequence[Row]) -> str:
    """Return the table as Markdown, for documents."""
    lines = [HEADERS]
    for row in table_rows:
        aside = f" *Branch: {row.branch}.*" if row.branch else ""
        what = f"{row.technique}: {row.idea}{aside}"
        sizes = (row.workspace_bytes, row.shared_bytes)
        told = ("" if size is None else f"{size:,}" for size in sizes)
        first = (row.number, row.rung, what, row.gain, row.dtypes, row.layouts)
        lines.append((*first, *told, row.arithmetic, row.proof))
    head, *rest = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
    rule = "|" + "---|" * len(HEADERS)
    return "\n".join([f"| {head} |", rule, *(f"| {line} |" for line in rest)])
