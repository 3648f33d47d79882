"""CUDA rungs under compute-sanitizer: memory, races, uninitialised reads, barriers.

Each tool watches one child process, `gemmule.lab.sanitized`, which runs a sample of every rung's
proof; its log is parsed, and tools that found nothing are recorded with the keys of the variants
they watched.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemmule import evidence
from gemmule.errors import DeviceError
from gemmule.lab.verify_cuda import Outcome, slug
from gemmule.rung import Rung
from gemmule.store import write_atomically

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SHOWN_LINES = 24
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)\b", re.M)
_HOMES = ("CUDA_HOME", "CUDA_PATH")


@dataclass(frozen=True, slots=True)
class Report:
    """What one tool found. errors is None when it gave no summary; `text` says what went wrong."""

    tool: str
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
    folders = [os.environ[name] for name in _HOMES if os.environ.get(name)]
    for folder in (*folders, "/usr/local/cuda"):
        candidate = Path(folder) / "bin" / "compute-sanitizer"
        if os.access(candidate, os.X_OK):
            return candidate
    found = shutil.which("compute-sanitizer")
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
    rungs: Sequence[Rung], tools: Sequence[str] = TOOLS, *, ordinal: int = 0, limit_s: float = 1800
) -> list[Report]:
    """Run the tools side by side, each over all the rungs, and return their reports in order.

    limit_s: a tool that needs longer is stopped and reported as having no summary. DeviceError
    where compute-sanitizer is absent or does not support the device.
    """
    program = find_sanitizer()
    with ThreadPoolExecutor(len(tools)) as pool:
        return list(pool.map(lambda tool: _run(program, tool, rungs, ordinal, limit_s), tools))


def _run(program: Path, tool: str, rungs: Sequence[Rung], ordinal: int, limit_s: float) -> Report:
    with tempfile.TemporaryDirectory(prefix="gemmule-sanitize-") as folder:
        log, results = Path(folder) / "log", Path(folder) / "results.jsonl"
        command = [
            str(program), "--tool", tool, "--log-file", str(log), "--print-limit", "20",
            sys.executable, "-m", "gemmule.lab.sanitized", str(ordinal), str(results),
            *(f"{rung.folder}/{rung.name}" for rung in rungs),
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
            said, status = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired:
            said, status = f"stopped after {limit_s:.0f} s", -1
        text = log.read_text(errors="replace") if log.is_file() else ""
        outcomes = _outcomes(results)
    if "Device not supported" in text + said:
        raise DeviceError(
            "compute-sanitizer says that it does not support this device. Run it where the driver "
            "allows debugging: not under some sandboxes and virtual GPUs."
        )
    # A program that fails on its own is no clean run, whatever the tool's summary says.
    errors = errors_in(text) if status == 0 or errors_in(text) else None
    shown = [line for line in (text + said).splitlines() if line.strip()][:SHOWN_LINES]
    return Report(tool, errors, outcomes, "\n".join(shown))


def _outcomes(path: Path) -> tuple[Outcome, ...]:
    if not path.is_file():
        return ()
    return tuple(Outcome(**json.loads(line)) for line in path.read_text().splitlines())


def write(root: Path, reports: Sequence[Report]) -> Path | None:
    """Merge the clean tools' records into ``<root>/<gpu>/sanitized.jsonl``; drop the others'.

    One line for each tool and variant. Returns the file, or None when nothing ran on a device.
    """
    device = next((o.device for report in reports for o in report.outcomes if o.device), None)
    if device is None:
        return None
    path = root / slug(device) / "sanitized.jsonl"
    records = {_name(record): record for record in read(path)}
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    for report in reports:
        for one in report.outcomes:
            record = {
                "schema": evidence.SCHEMA, "tool": report.tool, "folder": one.folder,
                "rung": one.rung, "variant": one.variant, "key": one.key, "device": one.device,
                "date": today, "cases": one.cases,
            }  # fmt: skip
            records.pop(_name(record), None)
            if report.clean:
                records[_name(record)] = record
    lines = "".join(json.dumps(records[name]) + "\n" for name in sorted(records))
    if not write_atomically(path, lines.encode()):
        raise OSError(f"{path} cannot be written.")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """Return the well-formed records of a file; none where it is absent or too large."""
    if not path.is_file() or path.stat().st_size > evidence.MAX_FILE_BYTES:
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line) if len(line) <= evidence.MAX_LINE_BYTES else None
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict) or record.get("schema") != evidence.SCHEMA:
            continue
        if all(isinstance(record.get(part), str) for part in _PARTS):
            found.append(record)
    return found


_PARTS = ("tool", "folder", "rung", "variant")


def _name(record: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(record[part]) for part in _PARTS)
