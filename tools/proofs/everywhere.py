"""Building every kernel of CUDA rungs for architectures on which nothing was proved.

The tests build one kernel of a rung for each listed architecture, and a few for the others; here
all variants are built with all their kernels, at some minutes of processor time an architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from gemmule.backends.cuda import nvrtc
from gemmule.core import architectures
from gemmule.core.rung import CudaRung
from gemmule.errors import CompileError
from proofs import proofs


@dataclass(frozen=True, slots=True)
class Built:
    """What came of one variant; fault: empty where it compiles without spills beyond those told."""

    arch: str
    name: str
    kernels: int
    fault: str


def named(text: str) -> tuple[str, ...]:
    """Return architectures by their numbers, as the compiler here has them: ``75,121`` or ``all``.

    ValueError for one that it does not know.
    """
    known = nvrtc.known_architectures()
    numbers = [str(one) for one in known] if text == "all" else text.split(",")
    unknown = [one for one in numbers if not one.isdecimal() or int(one) not in known]
    if unknown:
        raise ValueError(
            f"--archs has {unknown[0]!r}; NVRTC {nvrtc.compiler_version()} knows "
            f"{', '.join(map(str, known))}, and 'all' names them all."
        )
    return tuple(architectures.target(int(one), known) for one in numbers)


def build(rungs: Sequence[CudaRung], arch: str, workers: int = 2) -> Iterator[Built]:
    """Build all variants of the rungs that run on an architecture; yield what came of each."""
    machine = proofs.proof_machine(arch)
    number = architectures.number(arch)
    machine = replace(machine, shared_bytes=architectures.SHARED_BYTES.get(number, 48 << 10))
    todo = (
        (rung, variant)
        for rung in rungs
        if rung.runs_on(arch)
        for variant in proofs.variants(rung, machine)
    )
    with ThreadPoolExecutor(workers) as pool:  # NVRTC lets go of the GIL
        yield from pool.map(lambda pair: _built(pair[0], pair[1], arch), todo)


def _built(rung: CudaRung, variant: proofs.Variant, arch: str) -> Built:
    name = f"{rung.folder}/{rung.name}/{variant.name}"
    fault = ""
    try:
        _, report = nvrtc.build(rung.source_path, variant.kernels, arch, variant.defines)
        spilled = sum(one.spill_bytes for one in nvrtc.resources(report))
        if spilled and not rung.spills:
            fault = f"{spilled:,} bytes of registers spill"
    except CompileError as error:
        fault = str(error)
    return Built(arch, name, len(variant.kernels), fault)
