"""A record of builds: which cubin the pinned compiler makes of which inputs.

One compiler makes the same cubin of the same text, names and options. A line under
``evidence/built/<folder>.<rung>.jsonl`` holds, for a variant, a digest of all these inputs and the
digest of the cubin. Where the inputs here have that digest, the cubin need not be built to compare
it with a proof; else it is. Lines are facts of a build, no proofs: those are beside them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gemmule.storage import evidence, lines

SCHEMA = 1
FOLDER = "built"
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Built:
    """One build: the variant's name, the digest of its inputs and of the cubin, SHA-256 in hex."""

    variant: str
    inputs: str
    cubin: str


def path_of(rung: tuple[str, str], root: Path | None = None) -> Path:
    """Return the file of a rung, (folder, name); root: the evidence folder."""
    base = evidence.folder() if root is None else root
    return base / FOLDER / f"{'.'.join(rung)}.jsonl"


@functools.lru_cache(maxsize=1024)
def cubins(path: Path) -> dict[str, str]:
    """Return the cubin's digest by the inputs' digest; lines that are none of ours are skipped.

    Read once a process; `forget` reads again.
    """
    return {
        one.inputs: one.cubin
        for one in lines.read_records(path, SCHEMA, Built)
        if _DIGEST.fullmatch(one.inputs) and _DIGEST.fullmatch(one.cubin)
    }


def forget() -> None:
    """Read the files again."""
    cubins.cache_clear()


def write(path: Path, builds: Iterable[Built]) -> None:
    """Replace a rung's file by these builds; OSError where it cannot be written."""
    lines.write_records(path, SCHEMA, sorted(builds, key=lambda one: one.variant))
    forget()
