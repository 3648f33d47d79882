"""``python tools/rebuild.py [RUNG ...]``: build kernels, and put on record which cubins they make.

``python -m proofs --check`` asks for the cubin of every proved variant; a build that is on
record under ``evidence/built`` it need not repeat. Run this after an edit of kernels or of headers:
only rungs whose inputs changed are built. What a kernel of each rung compiles to for every
architecture (`compiled`) is brought up to date too. Nothing here proves anything: a cubin that no
GPU proved is as stale as before.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compiled
from gemmule.core.rung import CudaRung
from gemmule.storage import built, evidence
from proofs import proofs


def update(names: Sequence[str], root: Path) -> Iterator[Path]:
    """Bring the records of the named rungs (none: of all) up to date; yield the files that changed.

    SystemExit unless NVRTC here is the pinned one.
    """
    if not proofs.is_pinned():
        raise SystemExit(f"the cubins of NVRTC {evidence.PINNED_NVRTC} are the keys of proofs.")
    rungs = proofs.kernel_rungs(names)
    kept = {built.path_of((rung.folder, rung.name), root): rung for rung in rungs}
    changed = {path: rung for path, rung in kept.items() if not _is_current(path, rung)}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # NVRTC lets go of the GIL
        variants = [one for rung in changed.values() for one in proofs.variants(rung)]
        list(pool.map(proofs.key, variants))
    for path, rung in changed.items():
        proofs.remember([rung], root)
        yield path
    for path in (root / built.FOLDER).glob("*.jsonl"):
        if not names and path not in kept:
            path.unlink()
            yield path


def _is_current(path: Path, rung: CudaRung) -> bool:
    wanted = {proofs.inputs_digest(variant) for variant in proofs.variants(rung)}
    return set(built.cubins(path)) == wanted


if __name__ == "__main__":
    named = sys.argv[1:]
    for changed in itertools.chain(update(named, evidence.folder()), compiled.update(named)):
        print(f"wrote {changed}", flush=True)
