"""``python tools/redigest.py``: tell shipped tuned entries that their rungs' sources may stay.

An entry in ``src/gemmule/tuned`` holds a digest of its rung's sources and counts for nothing once
one of them is edited. Run this after an edit that leaves the machine code and the geometry as they
were (``python -m proofs --check`` says so): a moved import, a comment, a formatted line.
After any other edit the choice has to be measured again with ``gemmule tune --into``.
"""

from __future__ import annotations

import json
from pathlib import Path

from gemmule.core.registry import all_rungs
from gemmule.storage.atomic import MAX_BYTES, replace_text
from gemmule.storage.sources import rung_digest
from gemmule.storage.tuned import SHIPPED, shipped_fault


def update(folder: Path) -> list[Path]:
    """Write the present digests into the entries of `folder`; return those that changed.

    SystemExit for an entry that names no rung of ours, or is at fault in more than its digest.
    """
    changed = []
    for path in sorted(folder.glob("*.json")):
        text = path.read_text("utf-8")
        if len(text) > MAX_BYTES:
            raise SystemExit(f"{path} is no entry: it is larger than {MAX_BYTES:,} bytes.")
        record = json.loads(text)
        name = (record["folder"], record["rung"])
        rungs = {(r.folder, r.name): r for r in all_rungs(record["device"]["backend"])}
        if name not in rungs:
            raise SystemExit(f"{path}: no rung is called {'/'.join(name)}; remove the entry.")
        record["digest"] = rung_digest(rungs[name])
        fresh = json.dumps(record, indent=1)
        if fresh != text:
            replace_text(path, fresh)
            changed.append(path)
        if fault := shipped_fault(path):
            raise SystemExit(f"{fault}. Its digest is right: remove it, or tune again.")
    return changed


if __name__ == "__main__":
    print("\n".join(f"wrote {path}" for path in update(SHIPPED)) or "all digests are right")
