"""Measurements of a machine on disk: one small JSON file each, below a folder of the cache.

A file that is corrupt, too large or of another schema is as good as absent; so is every file where
``GEMMULE_TUNE=0`` ignores what is stored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemmule.settings import cache_folder, tuning_enabled
from gemmule.storage.atomic import small_file, write_atomically

SCHEMA = 1


def path_of(folder: str, *names: str | int) -> Path:
    """Return the file of a machine with these names and numbers."""
    digest = hashlib.sha256(json.dumps([SCHEMA, *names]).encode()).hexdigest()
    return cache_folder() / folder / f"{digest}.json"


def read(path: Path) -> dict[str, Any] | None:
    """Return what a file holds, or None; its fields are not checked."""
    if not tuning_enabled():
        return None
    try:
        record = json.loads(small_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    known = isinstance(record, dict) and record.get("schema") == SCHEMA
    return record if known else None


def save(path: Path, record: Mapping[str, Any]) -> Path | None:
    """Replace a file; return it, or None where the cache cannot be written."""
    data = json.dumps({"schema": SCHEMA, **record}, indent=1).encode()
    return path if write_atomically(path, data) else None
