"""What a wheel carries of the evidence: proofs and margins for plans, studies to be shown.

Hatchling runs this as a build hook. Each file is packed, and `gemmule.storage.lines` unpacks it
where the plain file is not there: by gzip what plans wait for; by xz, which takes a third less
room, what people look at. The proofs of all rungs on one GPU become one file. Medians of studies
have six digits here, figures four and other times three, or as many more as pages show, which is a
third of the size: the records themselves, and the rest of the evidence, stay in the repository.
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:  # nothing is built here
    BuildHookInterface = object


STUDY, EXPERIMENT = b'"line":"study"', re.compile(rb'"experiment":"([^"]*)"')


def packed(evidence: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (path below the folder of the evidence, content) of all that a wheel carries.

    Of a study that several devices measured, the file with the most experiments, and of those the
    largest, which is the one that is shown.
    """

    def experiments(path: Path) -> tuple[int, int]:
        content = path.read_bytes()
        return len({*EXPERIMENT.findall(content)}), len(content)

    studies = sorted(evidence.glob("*/study-*.jsonl"), key=experiments)
    shown = {path.name: path for path in studies}.values()
    for device in sorted(path for path in evidence.iterdir() if path.is_dir()):
        proofs = sorted((device / "verified").glob("*.jsonl"))
        if proofs:
            yield _packed(device.name, "verified.jsonl", *proofs)
        known = (path for path in shown if path.parent == device)
        for path in sorted([*device.glob("margins*.jsonl"), *known]):
            yield _packed(device.name, path.name, path)


def shortened(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a study, as JSON has it, with fewer digits of its times and figures.

    >>> times = {"median": 12345.67801, "q1": 12345.1203, "q3": 12345.67841, "min": 9.87654, "n": 5}
    >>> shortened({"times_us": times, "figures": {"gbs": 12.3456}})["times_us"]
    {'median': 12345.7, 'q1': 12345.0, 'q3': 12346.0, 'min': 9.88, 'n': 5}
    """
    row["figures"] = {name: _rounded(value, 4) for name, value in row["figures"].items()}
    if times := row["times_us"]:
        for name, least in (("median", 6), ("q1", 3), ("q3", 3), ("min", 3)):
            times[name] = _rounded(times[name], least)
        # in the order that readers require
        times["q1"] = min(times["q1"], times["median"])
        times["q3"] = max(times["q3"], times["median"])
        times["min"] = min(times["min"], times["q1"])
    return row


def _shortened(line: bytes) -> bytes:
    return json.dumps(shortened(json.loads(line)), separators=(",", ":")).encode() + b"\n"


def _rounded(value: float, least: int) -> float:
    """Return a number with as few digits as leave alone what `gemmule_lab.report` says of it."""

    def shown(number: float) -> str:
        if number >= 100:
            return f"{number:.0f}"
        return f"{number:.1f}" if number >= 10 else f"{number:.3g}"

    rounded = (float(f"{value:.{digits}g}") for digits in range(least, 17))
    return next((one for one in rounded if shown(one) == shown(value)), value)


def _packed(device: str, name: str, *paths: Path) -> tuple[str, bytes]:
    whole = b"".join(path.read_bytes() for path in paths)
    if name.startswith("study-"):  # but for descriptions of machines, which have a digest
        lines = whole.splitlines(keepends=True)
        whole = b"".join(_shortened(line) if STUDY in line else line for line in lines)
        return f"{device}/{name}.xz", lzma.compress(whole, preset=9 | lzma.PRESET_EXTREME)
    return f"{device}/{name}.gz", gzip.compress(whole, 9, mtime=0)


class EvidenceHook(BuildHookInterface):  # type: ignore[misc]  # Any where hatchling is absent
    """Adds the packed evidence to a wheel."""

    folder: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Pack the files; an editable installation reads those of the tree."""
        if version == "editable":
            return
        self.folder = Path(tempfile.mkdtemp(prefix="gemmule-evidence-"))
        for name, content in packed(Path(self.root) / "evidence"):
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            build_data["force_include"][str(path)] = f"gemmule/evidence/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the packed files once they are in the wheel."""
        if self.folder is not None:
            shutil.rmtree(self.folder)
