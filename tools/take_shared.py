"""``python tools/take_shared.py ARCHIVE``: check what a user shared of a GPU, and add it here.

`gemmule verify --share` wrote the archive. It is read by a reader that refuses whatever the command
would not have written (`gemmule_lab.records.shared`), told in one line, and kept under
``evidence/<gpu>/shared/<digest>/``, files as text. No rung is chosen for what stands there: it says
what others saw, and where to look.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from gemmule.storage import evidence
from gemmule_lab.records import results, shared

FOLDER = "shared"


def take(archive: Path, root: Path) -> Path:
    """Add an archive to the evidence; return its folder there. ValueError for one that is refused.

    The same archive twice is one folder; FileExistsError then.
    """
    found = shared.read(archive)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()[:12]
    place = root / evidence.slug(found.judged.device) / FOLDER / digest
    place.mkdir(parents=True)
    for name, content in shared.members(found).items():
        (place / name).write_bytes(content)
    rows = found.bench.rows
    for key, one in found.bench.environments.items():
        results.append(place / shared.BENCH, [one, *(r for r in rows if r.environment == key)])
    return place


if __name__ == "__main__":
    for given in sys.argv[1:]:
        print(shared.in_words(shared.read(Path(given))))
        print(f"added as {take(Path(given), evidence.folder())}")
