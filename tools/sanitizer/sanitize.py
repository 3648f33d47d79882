"""CUDA rungs under compute-sanitizer: memory, races, uninitialised reads, barriers.

Each tool watches child processes, each of which runs a sample of the proofs of a few variants of a
rung; its log is parsed, and where a tool found nothing it is recorded with the keys of the variants
that it watched, as soon as they are through. Run as a module, this file is that child:
``ORDINAL RESULTS FOLDER/RUNG VARIANT ...`` writes one JSON line for each variant to RESULTS.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from gemmule.core.rung import CudaRung
from gemmule.errors import DeviceError
from gemmule.storage import lines
from gemmule.storage.evidence import SCHEMA
from gemmule_lab.processes import environment_of_child, in_toolkit, python_module
from proofs import proof_lines
from proofs.device import CHUNK, Outcome, chunks, verify_rung

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SHOWN_LINES = 24
MODULE = "sanitizer.sanitize"  # which is the child as well
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)\b", re.M)


@dataclass(frozen=True, slots=True)
class Report:
    """What one tool found in a few variants of a rung.

    errors is None when it gave no summary; `text` says what went wrong.
    """

    tool: str
    rung: str
    errors: int | None
    outcomes: tuple[Outcome, ...]
    text: str

    @property
    def clean(self) -> bool:
        """Whether the tool finished, found nothing, and every result was right as well."""
        return (
            self.errors == 0 and bool(self.outcomes) and not any(o.failures for o in self.outcomes)
        )


def find_sanitizer() -> Path:
    """Return compute-sanitizer's path; DeviceError, saying how to get it, where there is none."""
    found = in_toolkit("compute-sanitizer") or shutil.which("compute-sanitizer")
    if found is None:
        raise DeviceError(
            "compute-sanitizer was not found on PATH, in CUDA_HOME or in /usr/local/cuda. It comes "
            "with the CUDA toolkit (package cuda-sanitizer): install that on the machine with the "
            "GPU, or add its folder to PATH."
        )
    return Path(found)


def errors_in(log: str) -> int | None:
    """Return how many errors or hazards a log's summaries count, None when it has no summary.

    >>> errors_in("========= ERROR SUMMARY: 2 errors\\n")
    2
    """
    counts = [int(number) for number in _SUMMARY.findall(log)]
    return sum(counts) if counts else None


def sanitize(
    rungs: Sequence[CudaRung],
    tools: Sequence[str] = TOOLS,
    *,
    ordinal: int = 0,
    limit_s: float = 1800,
    workers: int = 1,
    report: Callable[[Report], None] = lambda found: None,
) -> list[Report]:
    """Run each tool over each rung, a few variants a process, `workers` processes at a time.

    limit_s: a process that needs longer is stopped and reported as having no summary. report is
    called with each as soon as it is there, from one thread at a time. DeviceError where
    compute-sanitizer is absent or does not support the device.
    """
    program = find_sanitizer()
    size = max(1, min(CHUNK, sum(len(rung.signatures) for rung in rungs) // workers))
    tasks = [  # tool by tool: a rung's kernels are compiled once and then found in the cache
        (tool, rung, names) for tool in tools for rung in rungs for names in chunks(rung, size=size)
    ]
    found = []
    with ThreadPoolExecutor(workers) as pool:
        futures = [
            pool.submit(_run, program, tool, rung, names, ordinal, limit_s)
            for tool, rung, names in tasks
        ]
        try:
            for future in as_completed(futures):
                found.append(future.result())
                report(found[-1])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def _run(
    program: Path, tool: str, rung: CudaRung, names: frozenset[str], ordinal: int, limit_s: float
) -> Report:
    with tempfile.TemporaryDirectory(prefix="gemmule-sanitize-") as folder:
        log, results = Path(folder) / "log", Path(folder) / "results.jsonl"
        name = f"{rung.folder}/{rung.name}"
        watch = [str(program), "--tool", tool, "--log-file", str(log), "--print-limit", "20"]
        given = [str(ordinal), str(results), name, *sorted(names)]
        command = [*watch, *python_module(MODULE, *given)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=limit_s,
                env=environment_of_child(MODULE),
            )
            said, status = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired:
            said, status = f"stopped after {limit_s:.0f} s", -1
        text = log.read_text(errors="replace") if log.is_file() else ""
        outcomes = tuple(lines.read_records(results, SCHEMA, Outcome))
    if "Device not supported" in text + said:
        raise DeviceError(
            "compute-sanitizer says that it does not support this device. Run it where the driver "
            "allows debugging: not under some sandboxes and virtual GPUs."
        )
    # A program that fails on its own is no clean run, whatever the tool's summary says.
    errors = errors_in(text) if status == 0 or errors_in(text) else None
    shown = [line for line in (text + said).splitlines() if line.strip()][:SHOWN_LINES]
    return Report(tool, name, errors, outcomes, "\n".join(shown))


def write(root: Path, reports: Sequence[Report]) -> Path | None:
    """Merge clean records into ``<root>/<gpu>/sanitized.jsonl``; drop those that are not clean."""
    found = (
        (report.tool, one, {"cases": one.cases, "shapes": one.shapes}, report.clean)
        for report in reports
        for one in report.outcomes
    )
    return proof_lines.record(root, "sanitized.jsonl", found)


def main(arguments: Sequence[str]) -> None:
    """Run the samples of a rung's variants and write what was found."""
    ordinal, results, name, *variants = arguments
    folder, _, rung = name.partition("/")
    found = verify_rung(folder, rung, int(ordinal), few=True, only=frozenset(variants))
    lines.write_records(Path(results), SCHEMA, found)


if __name__ == "__main__":
    main(sys.argv[1:])
