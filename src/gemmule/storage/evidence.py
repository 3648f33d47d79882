"""Records of what real GPUs proved (``evidence/<gpu>/``), and the keys that tie them to code.

A record says that one *variant* of a rung (a set of kernel instances, compiled by the pinned NVRTC
for one architecture) gave right results on a real device. Its key is the SHA-256 of the cubin
together with the launch geometry over a fixed list of problems, so comments, names and unrelated
header additions leave it alone, and any edit that changes the machine code or the geometry does
not. Continuous integration compares (`tools/proofs`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gemmule.core.epilogue import FUNCTIONS
from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, LibraryRung, Rung, Signature
from gemmule.storage import lines

SCHEMA = 1
PACKAGE = Path(__file__).parents[1]
PINNED_NVRTC = "13.0.88"
# Below a device's folder: one file a rung, so that work on several rungs does not collide; and the
# file that held the proofs of all rungs, which `write_evidence` of the lab takes apart.
FOLDER, SINGLE_FILE = "verified", "verified.jsonl"


@dataclass(frozen=True, slots=True)
class Record:
    """One proof: rung, variant, architecture, key, and what was run on which device."""

    folder: str
    rung: str
    variant: str
    arch: str
    key: str
    device: str
    date: str
    cases: int
    worst_ratio: float


def folder(package: Path = PACKAGE) -> Path:
    """Return the evidence folder: the package's own copy, else the source tree's."""
    packaged = package / "evidence"
    return packaged if packaged.is_dir() else package.parents[1] / "evidence"


def slug(device: str) -> str:
    """Return a device's name as its folder's: ``NVIDIA H200`` is ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "unknown"


def read(root: Path | None = None) -> Iterator[Record]:
    """Yield every well-formed record under `root`; others are skipped."""
    base = folder() if root is None else root
    for gpu in sorted(base.glob("*")):
        yield from read_device(gpu)


def read_device(gpu: Path) -> Iterator[Record]:
    """Yield the well-formed records of one device's folder: each rung's, then the single file's.

    Of two records of one variant the later counts: a single file is gone after each proof, so one
    that is there came since.
    """
    for path in (*sorted((gpu / FOLDER).glob("*.jsonl")), gpu / SINGLE_FILE):
        yield from read_file(path)


def proof_file(gpu: Path, rung: tuple[str, str]) -> Path:
    """Return the file of a rung's proofs, (folder, name), in a device's folder."""
    return gpu / FOLDER / f"{'.'.join(rung)}.jsonl"


def read_file(path: Path) -> Iterator[Record]:
    """Yield the well-formed records of one file; none where it is absent or too large."""
    return lines.read_records(path, SCHEMA, Record, _is_sound)


MAX_TEXT = 1000


def _is_sound(record: Record) -> bool:
    """Tell whether every field is what this package could have written."""
    texts = (getattr(record, name) for name in _TEXTS)
    # What was above its bound was wrong.
    return (
        all(0 < len(text) <= MAX_TEXT and text.isprintable() for text in texts)
        and 0 < record.cases < 2**63
        and 0 <= record.worst_ratio <= 1
    )


_TEXTS = ("folder", "rung", "variant", "arch", "key", "device", "date")
WITH_BIAS = ",bias"  # ends the name of a variant whose kernels add a bias
SCALED = ",scaled"  # and of one whose kernels apply scales
FINISHED = {name: f",{name.lower()} epilogue" for name in FUNCTIONS.values()}  # or an epilogue


def variant_named(signature: Signature) -> str:
    """Return the name of the variant of a rung that takes these dtypes."""
    return ",".join(signature)


def variant_of(problem: Problem) -> str:
    """Return the name of the variant that computes a problem."""
    return variant_named((problem.a, problem.b, problem.out))


@functools.cache
def proved_variants() -> frozenset[tuple[str, str, str]]:
    """Return (folder, rung, variant) of every record."""
    return frozenset(_provers())


@functools.cache
def _provers() -> dict[tuple[str, str, str], dict[str, str]]:
    """Return the devices that proved each variant, by their architecture: one device of each."""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for one in read():
        found.setdefault((one.folder, one.rung, one.variant), {})[one.arch] = one.device
    return found


def proved_on(rung: Rung, problem: Problem, end: str = "") -> dict[str, str]:
    """Return the devices that proved what computes a problem: one for each architecture.

    end: of the variant's name, where kernels do more than the product.
    """
    return _provers().get((rung.folder, rung.name, variant_of(problem) + end), {})


def covers(rung: Rung, problem: Problem, arch: str) -> bool:
    """Tell whether a device of an architecture proved what computes a problem; BLAS needs none."""
    return not isinstance(rung, CudaRung) or arch in proved_on(rung, problem)


def is_proved(
    rung: Rung, problem: Problem, arch: str, *, bias: bool = False, end: str = ""
) -> bool:
    """Tell whether a real GPU proved the variant of the rung that computes `problem`.

    bias: and the one that adds a bias to it, on this architecture; end: of the name of one that
    scales or has an epilogue, alone. A record of one architecture stands for the algorithm on all
    that the rung runs on; where a device's own has none, `gemmule.tuning.first_use` checks the
    plain product there. A library's rung is for all of them.
    """
    name = (rung.folder, rung.name, variant_of(problem) + end)
    if isinstance(rung, CudaRung | LibraryRung) and not rung.runs_on(arch):
        return False
    if bias and arch not in proved_on(rung, problem, WITH_BIAS):
        return False
    wanted = {name, (*name[:2], name[2] + WITH_BIAS)} if bias else {name}
    return isinstance(rung, CudaRung | LibraryRung) and wanted <= proved_variants()
