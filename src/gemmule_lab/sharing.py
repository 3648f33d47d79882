"""Gathering what a user sends of a GPU: random products judged, kernels checked, a short bench."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmule import backends
from gemmule.core.rung import Machine
from gemmule.storage import first_use, measured
from gemmule.storage.atomic import small_file
from gemmule_lab import served
from gemmule_lab.harness.products import Product
from gemmule_lab.progress import tracked
from gemmule_lab.records import results, shared
from gemmule_lab.records.environment import version_of
from gemmule_lab.records.results import Results

if TYPE_CHECKING:
    from gemmule_lab.verify.workers import Tally

SIZES, FORMATS, SECONDS = (1024, 4096), ("float16", "float32"), 0.3
CEILING_SECONDS = 8.0
MODELS = "models"  # the folder of the cache with what `gemmule tune --device-model` fitted


def share(
    path: Path, device: str, tally: Tally, seed: int, bench: Callable[[str], Results] | None = None
) -> shared.Shared:
    """Check and measure what an archive holds beside judged products, and write it to `path`.

    FileExistsError where there is a file; bench: what measures, else `short_bench`.
    """
    if path.exists():
        raise FileExistsError(f"{path} is there already. Name another file, or remove it.")
    machine = backends.get("cuda").machine(device)
    judged = shared.Judged(
        machine.name,
        machine.arch,
        version_of("gemmule") or "unknown",
        dt.datetime.now(dt.UTC).date().isoformat(),
        seed,
        tally.done,
        tally.wrong,
        tally.raised,
        tally.refused,
        tally.worst_ratio,
    )
    checks = check_kernels(machine, device)
    found = shared.Shared(judged, checks, (bench or short_bench)(device), model_of(machine))
    shared.pack(path, found)
    return shared.read(path)


def check_kernels(machine: Machine, device: str) -> tuple[first_use.Checked, ...]:
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
