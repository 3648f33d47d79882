"""What a user sends of a GPU: random products judged, kernels checked, a short bench, packed.

Up to four files by fixed names. They name the device, the versions of packages and the day; no
host, no user, no folder. The repository's tool `take_shared` reads them, and trusts nothing.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmule import backends
from gemmule.core.rung import Machine
from gemmule.storage import first_use, lines, measured
from gemmule.storage.atomic import small_file
from gemmule.storage.first_use import Checked
from gemmule_lab import served
from gemmule_lab.harness.products import Product
from gemmule_lab.progress import tracked
from gemmule_lab.records import results
from gemmule_lab.records.environment import version_of
from gemmule_lab.records.results import Results
from gemmule_lab.records.rows import Environment, Row

if TYPE_CHECKING:
    from gemmule_lab.verify.workers import Tally

SCHEMA = 1
JUDGED, CHECKS, BENCH, MODEL = "judged.jsonl", "checks.jsonl", "bench.jsonl", "model.json"
# A fixed time of each file: when it was packed is nobody's matter, and the archive is the same.
WRITTEN = (2026, 1, 1, 0, 0, 0)
FOLDERS = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][^\\/\s:'\"]+)+[\\/]")
SIZES, FORMATS, SECONDS = (1024, 4096), ("float16", "float32"), 0.3
CEILING_SECONDS = 8.0
MODELS = "models"  # the folder of the cache with what `gemmule tune --device-model` fitted


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
    """Write an archive; FileExistsError where there is one.

    What could name a machine but its GPU and its processor is left away.
    """
    with tempfile.TemporaryDirectory(prefix="gemmule-share-") as folder:
        place = Path(folder)
        lines.write_records(place / JUDGED, SCHEMA, [shared.judged])
        bare = [replace(one, wrong=FOLDERS.sub("", one.wrong)) for one in shared.checks]
        lines.write_records(place / CHECKS, first_use.SCHEMA, bare)
        results.append(place / BENCH, _nameless(shared.bench))
        if shared.model is not None:
            (place / MODEL).write_text(json.dumps(shared.model), encoding="utf-8")
        with zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED) as archive:
            for one in sorted(place.iterdir()):
                archive.writestr(zipfile.ZipInfo(one.name, WRITTEN), one.read_bytes(), 8)


def _nameless(bench: Results) -> list[Environment | Row]:
    """Return environments without the system's own name and the commit, and rows that name them."""
    found: list[Environment | Row] = []
    for key, one in bench.environments.items():
        system = one.system.partition("-")[0]
        clocks = {"driver": one.clocks.get("driver", "unknown")}
        bare = replace(one, system=system, commit=None, clocks=clocks)
        found.append(bare)
        rows = (row for row in bench.rows if row.environment == key)
        found += [replace(row, environment=bare.id) for row in rows]
    return found


def in_words(shared: Shared) -> str:
    """Return what an archive holds, in one line."""
    judged, wrong = shared.judged, sum(1 for one in shared.checks if one.wrong)
    return (
        f"{judged.device} ({judged.arch}), gemmule {judged.version}, {judged.date}: "
        f"{judged.cases:,} random products, {judged.wrong} wrong, {judged.raised} raised; "
        f"{len(shared.checks)} kernels checked, {wrong} wrong; {len(shared.bench.rows)} rows; "
        f"{'with' if shared.model is not None else 'without'} a time model"
    )


def share(
    path: Path, device: str, tally: Tally, seed: int, bench: Callable[[str], Results] | None = None
) -> Shared:
    """Check and measure what an archive holds beside judged products, and write it to `path`.

    FileExistsError where there is a file; bench: what measures, else `short_bench`.
    """
    if path.exists():
        raise FileExistsError(f"{path} is there already. Name another file, or remove it.")
    machine = backends.get("cuda").machine(device)
    judged = Judged(
        machine.name,
        machine.arch,
        version_of("gemmule") or "unknown",
        lines.today(),
        seed,
        tally.done,
        tally.wrong,
        tally.raised,
        tally.refused,
        tally.worst_ratio,
    )
    checks = check_kernels(machine, device)
    found = Shared(judged, checks, (bench or short_bench)(device), model_of(machine))
    pack(path, found)
    return found


def check_kernels(machine: Machine, device: str) -> tuple[Checked, ...]:
    """Check what the usual products run where nothing proves it on this chip; return all checks."""
    from gemmule.tuning.first_use import passes

    found = [one.choice for one in served.served(machine) if one.how == served.ELSEWHERE]
    for choice in tracked(found, len(found), "checking kernels"):
        if choice is not None:
            passes(choice, device)
    return tuple(first_use.known(machine).values())


def short_bench(device: str) -> Results:
    """Measure the ceilings and a few products, matrices by vectors and by matrices."""
    from gemmule_lab.bench import session
    from gemmule_lab.bench.quiet import Patience
    from gemmule_lab.bench.suites import Suite
    from gemmule_lab.harness.neighbours import processors_in_use

    suite = Suite("a short look", tuple(_products()), name="shared")
    with tempfile.TemporaryDirectory(prefix="gemmule-bench-") as folder:
        told = session.start(
            suite,
            session.bench_of(suite, device, SECONDS),
            Path(folder),
            patience=Patience(0.0, processors_in_use),
            ceiling_seconds=CEILING_SECONDS,
        )
        return results.read(told["file"])


def _products() -> Iterator[Product]:
    """Yield what the short bench times: squares by vectors from both sides, and by matrices."""
    for size, form in itertools.product(SIZES, FORMATS):
        for op in ("matvec", "vecmat"):
            yield Product(op, form, (size, size))
        for columns in (16, None):
            yield Product("matmul", form, (size, size), columns)


def model_of(machine: Machine) -> dict[str, Any] | None:
    """Return the coefficients that were fitted on a device, where they are in the cache."""
    path = measured.path_of(MODELS, machine.name, machine.arch, machine.units)
    try:
        found = json.loads(small_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
