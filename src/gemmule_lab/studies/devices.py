"""Which benches a study can have here, the environments of their rows, and where rows go."""

from __future__ import annotations

from pathlib import Path

from gemmule.backends.cpu.threads import thread_count
from gemmule.errors import DeviceError
from gemmule.storage.evidence import slug
from gemmule_lab.ceilings.device import measure_ceilings
from gemmule_lab.harness.host import HostBench
from gemmule_lab.records.environment import capture_environment
from gemmule_lab.records.rows import Environment
from gemmule_lab.studies.grid import Bench
from gemmule_lab.studies.harness import CpuBench, GpuBench
from gemmule_lab.studies.runner import shortened

CEILING_SECONDS = {"cpu": 3.0, "cuda": 4.0}


def benches(only: str | None) -> tuple[list[Bench], str]:
    """Return the GPU's bench, where there is a GPU, and the CPU's; and why there is no GPU.

    only: ``"cpu"`` or ``"cuda"`` for one of them; DeviceError where that one is not there.
    """
    found: list[Bench] = []
    missing = ""
    if only != "cpu":
        try:
            found.append(GpuBench())
        except (DeviceError, ImportError) as error:
            if only == "cuda":
                raise
            missing = str(error)
    if only != "cuda":
        found.append(CpuBench())
    return found, missing


def environment_of(bench: Bench) -> Environment:
    """Return what rows of a bench depend on, its ceilings measured now."""
    seconds = CEILING_SECONDS[bench.backend]
    if bench.backend == "cpu":
        return shortened(HostBench().environment(seconds))
    measured = measure_ceilings(max_seconds=seconds, store=False)
    threads, gpus = thread_count(), (bench.device,)
    return shortened(
        capture_environment(
            bench.device, bench.backend, ceilings=measured, threads=threads, gpus=gpus
        )
    )


def path_of(number: str, folder: Path, evidence: Path | None, benches_here: list[Bench]) -> Path:
    """Return the file of a study: in `folder`, or under the device's name in `evidence`."""
    if evidence is None:
        return folder / f"study-{number}.jsonl"
    return evidence / slug(benches_here[0].device) / f"study-{number}.jsonl"
