"""``python tools/take_shared.py ARCHIVE``: check what a user shared of a GPU, and add it here.

`gemmule verify --share` wrote the archive (`gemmule_lab.sharing`). The reader trusts nothing: an
archive of another form, a file that is too large, or a line that is none of ours is refused whole.
What is sound is told in one line and kept under ``evidence/<gpu>/shared/<digest>/``. No rung is
chosen for what stands there: it says what others saw, and where to look.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemmule.storage import evidence, first_use, lines
from gemmule.storage.atomic import MAX_BYTES
from gemmule.storage.first_use import Checked
from gemmule_lab.records import results
from gemmule_lab.sharing import (
    BENCH,
    CHECKS,
    FOLDERS,
    JUDGED,
    MODEL,
    SCHEMA,
    Judged,
    Shared,
    in_words,
)

FOLDER = "shared"
LIMITS = {JUDGED: MAX_BYTES, CHECKS: 1 << 20, BENCH: 4 << 20, MODEL: MAX_BYTES}
NEEDED = frozenset({JUDGED, CHECKS, BENCH})
MOST_ARCHIVE_BYTES = 4 << 20
PLAIN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_BROKEN = (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError)
_WORD = re.compile(r"[\w .,:;()'+/@=%-]{0,200}")


def take(archive: Path, root: Path) -> Path:
    """Add an archive to the evidence; return its folder there. ValueError for one that is refused.

    The same archive twice is one folder; FileExistsError then.
    """
    found, contents = read(archive)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()[:12]
    place = root / evidence.slug(found.judged.device) / FOLDER / digest
    place.mkdir(parents=True)
    for name, content in contents.items():
        (place / name).write_bytes(content)
    return place


def read(path: Path) -> tuple[Shared, dict[str, bytes]]:
    """Read and check an archive, and its files; ValueError says what is not as it was packed."""
    try:
        contents = _contents(path)
    except _BROKEN as error:
        raise ValueError(f"{path} is no archive of gemmule verify --share: {error}") from None
    with tempfile.TemporaryDirectory(prefix="gemmule-shared-") as folder:
        place = Path(folder)
        for name, content in contents.items():  # names are ours: none leads elsewhere
            (place / name).write_bytes(content)
        judged = tuple(lines.read_records(place / JUDGED, SCHEMA, Judged, _is_sound))
        checks = tuple(lines.read_records(place / CHECKS, first_use.SCHEMA, Checked, _is_bare))
        bench = results.read(place / BENCH)
    model = _model(contents[MODEL]) if MODEL in contents else None
    _check_whole(path, contents, (judged, checks))
    found = Shared(judged[0], checks, bench, model)
    _check_device(path, found)
    if not all(_is_tree(json.loads(line), depth=8) for line in contents[BENCH].splitlines()):
        raise ValueError(f"{BENCH} in {path} holds more than numbers and plain words.")
    return found, contents


def _contents(path: Path) -> dict[str, bytes]:
    """Return the files of an archive, none larger than it may be."""
    state = path.stat()
    if not stat.S_ISREG(state.st_mode) or state.st_size > MOST_ARCHIVE_BYTES:
        raise ValueError(
            f"{path} is no regular file, or has more than {MOST_ARCHIVE_BYTES:,} bytes."
        )
    with zipfile.ZipFile(path) as archive:
        held = archive.infolist()
        names = [one.filename for one in held]
        if any(one.compress_type not in PLAIN for one in held):  # others may want much memory
            raise ValueError(
                f"{path} is packed in another way than gemmule verify --share does it."
            )
        if len(names) != len(set(names)) or not NEEDED <= set(names) <= set(LIMITS):
            raise ValueError(
                f"{path} holds {names[:8]!r}; it must hold {', '.join(sorted(NEEDED))}, perhaps "
                f"{MODEL}, and nothing else."
            )
        found = {}
        for one in names:
            with archive.open(one) as file:  # which unpacks no more than is asked for
                found[one] = file.read(LIMITS[one] + 1)
            if len(found[one]) > LIMITS[one]:
                raise ValueError(f"{one} in {path} has more than {LIMITS[one]:,} bytes.")
    return found


def _check_whole(
    path: Path, contents: Mapping[str, bytes], read_lines: tuple[tuple[Any, ...], ...]
) -> None:
    """Raise ValueError where a reader skipped a line, or there is not one line of products."""
    for name, found in zip((JUDGED, CHECKS), read_lines, strict=True):
        count = len(contents[name].splitlines())
        if count != len(found):
            raise ValueError(f"{count - len(found)} lines of {name} in {path} are none of ours.")
    if len(read_lines[0]) != 1:
        raise ValueError(f"{JUDGED} in {path} has {len(read_lines[0])} lines; it must have one.")


def _check_device(path: Path, shared: Shared) -> None:
    """Raise ValueError unless all is of one GPU, and nothing names a system or a commit."""
    for one in shared.bench.environments.values():
        if one.backend != "cuda" or one.device != shared.judged.device:
            raise ValueError(
                f"{BENCH} in {path} is of {one.device}, and {JUDGED} of {shared.judged.device}; "
                "an archive is of one GPU."
            )
        if one.commit is not None or "-" in one.system:
            raise ValueError(f"the environment in {path} says more than a shared one may.")
    if shared.bench.torn or not shared.bench.rows:
        raise ValueError(f"{BENCH} in {path} has no rows, or ends within one.")
    model = shared.model
    if model is not None and model.get("device") != shared.judged.device:
        raise ValueError(f"{MODEL} in {path} is not of {shared.judged.device}.")


def _is_sound(one: Judged) -> bool:
    """Tell whether a line of judged products is one that this package could have written."""
    texts = (one.device, one.arch, one.version, one.date)
    counts = (one.seed, one.wrong, one.raised, one.refused)
    return (
        all(len(text) > 0 and _WORD.fullmatch(text) is not None for text in texts)
        and re.fullmatch(r"(sm|compute)_\d{2,3}[af]?", one.arch) is not None
        and all(0 <= count < 2**31 for count in counts)
        and 0 < one.cases < 2**31
        and 0.0 <= one.worst_ratio < 1e300
    )


def _is_bare(one: Checked) -> bool:
    """Tell whether a check's words are short, and name no folder."""
    names = (one.folder, one.rung, one.variant, one.code, one.made_of, one.date)
    printable = all(_WORD.fullmatch(text) is not None for text in names)
    return printable and len(one.wrong) <= 400 and FOLDERS.search(one.wrong) is None


def _model(content: bytes) -> dict[str, Any]:
    """Return a model's numbers; ValueError for what is no tree of numbers and short names."""
    try:
        found = json.loads(content, object_pairs_hook=lines.without_duplicates)
    except (ValueError, RecursionError):
        raise ValueError(f"{MODEL} is no JSON.") from None
    if not isinstance(found, dict) or not _is_tree(found, depth=8):
        raise ValueError(f"{MODEL} holds more than numbers and short names.")
    return found


def _is_tree(value: Any, depth: int) -> bool:
    if isinstance(value, dict):
        names = all(_WORD.fullmatch(name) is not None for name in value)
        return depth > 0 and names and all(_is_tree(one, depth - 1) for one in value.values())
    if isinstance(value, list):
        return depth > 0 and all(_is_tree(one, depth - 1) for one in value)
    if isinstance(value, str):
        return _WORD.fullmatch(value) is not None and FOLDERS.search(value) is None
    return value is None or isinstance(value, bool | int) or math.isfinite(value)


def main() -> None:
    """Tell of each archive what it holds, and add it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("archives", nargs="+", type=Path, metavar="ARCHIVE")
    for given in parser.parse_args().archives:
        try:
            print(in_words(read(given)[0]))
            print(f"added as {take(given, evidence.folder())}")
        except FileExistsError as error:
            raise SystemExit(f"{given} is there already, as {error.filename}") from None
        except ValueError as error:
            raise SystemExit(f"refused: {error}") from None


if __name__ == "__main__":
    main()
