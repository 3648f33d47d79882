"""What a wheel carries of the evidence: proofs and margins for plans, studies to be shown.

Hatchling runs this as a build hook. Each file is packed, and `gemmule.storage.lines` unpacks it
where the plain file is not there: by gzip what plans wait for; by xz, which takes a third less
room, what people look at. The proofs of all rungs on one GPU become one file. Times and figures of
studies have six digits here, which is half the size and more than any page shows: the records
themselves, and the rest of the evidence, stay in the repository.
"""

from __future__ import annotations

import gzip
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
LONG = re.compile(rb"-?\d+\.\d{6,}(?:e[-+]?\d+)?")


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


def shortened(found: re.Match[bytes]) -> bytes:
    """Return a number of JSON with six digits.

    >>> LONG.sub(shortened, b'{"us":12.345678901,"ns":1.5}')
    b'{"us":12.3457,"ns":1.5}'
    """
    return repr(float(f"{float(found.group()):.6g}")).encode()


def _packed(device: str, name: str, *paths: Path) -> tuple[str, bytes]:
    whole = b"".join(path.read_bytes() for path in paths)
    if name.startswith("study-"):  # but for descriptions of machines, which have a digest
        lines = whole.splitlines(keepends=True)
        whole = b"".join(LONG.sub(shortened, x) if STUDY in x else x for x in lines)
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
