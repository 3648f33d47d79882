"""What a user sends of a GPU: an archive of what was checked and measured there, and its reader.

Four files by fixed names, each with a reader that checks every line. They name the device, the
versions of packages and the time; no host, no user, no path. The reader trusts nothing: an archive
of another form, a file too large, or a line that is none of ours is refused whole.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gemmule.storage import first_use, lines
from gemmule.storage.atomic import MAX_BYTES
from gemmule.storage.first_use import Checked
from gemmule_lab.records import results
from gemmule_lab.records.results import Results
from gemmule_lab.records.rows import Environment, Row

SCHEMA = 1
JUDGED, CHECKS, BENCH, MODEL = "judged.jsonl", "checks.jsonl", "bench.jsonl", "model.json"
LIMITS = {JUDGED: MAX_BYTES, CHECKS: 1 << 20, BENCH: 4 << 20, MODEL: MAX_BYTES}
NEEDED = frozenset({JUDGED, CHECKS, BENCH})
MOST_ARCHIVE_BYTES = 4 << 20
# A fixed time of each file: when it was packed is nobody's matter, and the archive is the same.
WRITTEN = (2026, 1, 1, 0, 0, 0)
_FOLDERS = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][^\\/\s:'\"]+)+[\\/]")
_BROKEN = (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError)
_WORD = re.compile(r"[\w .,:;()+/@=<>%-]{0,200}")


@dataclass(frozen=True, slots=True)
class Judged:
    """Random products on a device, judged by the oracle: how many, and what was wrong."""

    device: str
    arch: str
    version: str
    date: str
    seed: int
    cases: int
    wrong: int
    raised: int
    refused: int
    worst_ratio: float


@dataclass(frozen=True, slots=True)
class Shared:
    """What is in an archive. model: the coefficients fitted on the device, None where none were."""

    judged: Judged
    checks: tuple[Checked, ...]
    bench: Results
    model: Mapping[str, Any] | None = None


def pack(path: Path, shared: Shared) -> None:
    """Write an archive; FileExistsError where there is one, ValueError where it would be refused.

    What could name a machine but its GPU and its processor is left away.
    """
    with tempfile.TemporaryDirectory(prefix="gemmule-share-") as folder:
        place = Path(folder)
        lines.write_records(place / JUDGED, SCHEMA, [shared.judged])
        bare = [replace(one, wrong=_FOLDERS.sub("", one.wrong)) for one in shared.checks]
        lines.write_records(place / CHECKS, first_use.SCHEMA, bare)
        results.append(place / BENCH, _nameless(shared.bench))
        if shared.model is not None:
            (place / MODEL).write_text(json.dumps(shared.model), encoding="utf-8")
        with zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED) as archive:
            for one in sorted(place.iterdir()):
                archive.writestr(zipfile.ZipInfo(one.name, WRITTEN), one.read_bytes(), 8)
    try:
        read(path)
    except ValueError:
        path.unlink()
        raise


def _nameless(bench: Results) -> list[Environment | Row]:
    """Return environments without the system's own name and the commit, and rows that name them."""
    found: list[Environment | Row] = []
    for key, one in bench.environments.items():
        system = one.system.partition("-")[0]
        bare = replace(one, system=system, commit=None, clocks={"driver": _driver(one)})
        found.append(bare)
        rows = (row for row in bench.rows if row.environment == key)
        found += [replace(row, environment=bare.id) for row in rows]
    return found


def _driver(environment: Environment) -> str:
    return environment.clocks.get("driver", "unknown")


def read(path: Path) -> Shared:
    """Read and check an archive; ValueError says what in it is not as `pack` writes it."""
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
    return found


def _contents(path: Path) -> dict[str, bytes]:
    """Return the files of an archive, none larger than it may be."""
    if path.stat().st_size > MOST_ARCHIVE_BYTES:
        raise ValueError(f"{path} has more than {MOST_ARCHIVE_BYTES:,} bytes.")
    with zipfile.ZipFile(path) as archive:
        names = [one.filename for one in archive.infolist()]
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
        texts = (one.system, one.cpu, one.device, one.python, *one.gpus, *one.versions.values())
        if one.commit is not None or not all(_WORD.fullmatch(text) for text in texts):
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
    return printable and len(one.wrong) <= 400 and _FOLDERS.search(one.wrong) is None


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
        return _WORD.fullmatch(value) is not None and _FOLDERS.search(value) is None
    return value is None or isinstance(value, bool | int | float)


def in_words(shared: Shared) -> str:
    """Return what an archive holds, in one line."""
    judged, wrong = shared.judged, sum(1 for one in shared.checks if one.wrong)
    return (
        f"{judged.device} ({judged.arch}), gemmule {judged.version}, {judged.date}: "
        f"{judged.cases:,} random products, {judged.wrong} wrong, {judged.raised} raised; "
        f"{len(shared.checks)} kernels checked, {wrong} wrong; {len(shared.bench.rows)} rows; "
        f"{'with' if shared.model is not None else 'without'} a time model"
    )


def members(shared: Shared) -> dict[str, bytes]:
    """Return the files of an archive that was read, as they are kept among the evidence."""
    listed = {
        JUDGED: [{"schema": SCHEMA, **dataclasses.asdict(shared.judged)}],
        CHECKS: [{"schema": first_use.SCHEMA, **dataclasses.asdict(c)} for c in shared.checks],
    }
    found = {
        name: "".join(f"{json.dumps(one)}\n" for one in some).encode()
        for name, some in listed.items()
    }
    if shared.model is not None:
        found[MODEL] = json.dumps(shared.model, indent=1).encode()
    return found
