"""The same products in every environment, bit for bit: a campaign that is kept as data.

``python tests/environments_campaign.py [--rounds N] [--seed S] [--record] [ENVIRONMENT ...]`` runs
random products in a plain process, and the same ones in a process of each environment: another
allocator, Python's own checks, other numbers of threads, caches that cannot be written or that
vanish, little memory, signals all the time, and others. Operands are small integers, so that every
order of a sum gives the same bits. Where memory is short a product may end in MemoryError, and has
to be right once there is enough. An environment that cannot be had on a machine is named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from campaign_record import keep

LIMIT_S = 600
NOBODY = 65_534
QUOTAS = "gemmule-environments"
CHILD = Path(__file__).with_name("environment_products.py")


@dataclass(frozen=True)
class Environment:
    """How a process is started: variables, options of Python, and what the child is told to do.

    around: yields what stands before the command, for the cache's folder; LookupError where this
    machine has no such environment. threads: how many a product may have there.
    """

    variables: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    around: Callable[[Path], contextlib.AbstractContextManager[list[str]]] | None = None
    threads: int | None = None


@contextlib.contextmanager
def _somebody(cache: Path) -> Iterator[list[str]]:
    """A user who owns nothing but the cache, and may read the interpreter wherever it lies."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        raise LookupError("only the administrator takes another user's place, by setpriv")
    for path in (cache, *cache.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    reads = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    yield ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *reads]


@contextlib.contextmanager
def _reader(cache: Path) -> Iterator[list[str]]:
    """The same user, who may not write to the cache either."""
    with _somebody(cache) as before:
        for path in sorted(cache.rglob("*")):
            path.chmod(0o500 if path.is_dir() else 0o400)
        cache.chmod(0o500)
        yield before


@contextlib.contextmanager
def _nested_quotas(cache: Path) -> Iterator[list[str]]:
    """A control group of one processor, and one within it that sets no limit, or four."""
    top = Path("/sys/fs/cgroup/cpu")
    second = (Path("/sys/fs/cgroup") / "cgroup.controllers").is_file()
    outer = (Path("/sys/fs/cgroup") if second else top) / QUOTAS
    try:
        (outer / "inner").mkdir(parents=True)
        if second:
            (outer / "cpu.max").write_text("100000 100000")
            (outer / "inner" / "cpu.max").write_text("400000 100000")
        else:  # that version lets none have more than what is around it
            (outer / "cpu.cfs_quota_us").write_text("100000")
    except OSError as error:
        _remove(outer)
        raise LookupError(f"no control group can be made: {error.strerror}") from None
    enter = f'echo $$ > {outer}/inner/cgroup.procs && exec "$@"'
    try:
        yield ["sh", "-c", enter, "sh"]
    finally:
        _remove(outer)


def _remove(outer: Path) -> None:
    for folder in (outer / "inner", outer):
        with contextlib.suppress(OSError):
            folder.rmdir()


SPOILING = {"PYTHONMALLOC": "malloc", "MALLOC_PERTURB_": "255"}
ONE = {"NUMBA_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
MANY = {"OPENBLAS_NUM_THREADS": "8", "OMP_NUM_THREADS": "8", "GEMMULE_POOL": "own"}
ENVIRONMENTS = {
    "memory is spoiled when it is freed": Environment(SPOILING),
    "python -X dev": Environment(options=("-X", "dev")),
    "python -O": Environment(options=("-O",)),
    "one thread": Environment(ONE, threads=1),
    "many threads of its own": Environment(MANY),
    "nested quotas of control groups": Environment(around=_nested_quotas, threads=1),
    "another user": Environment({"HOME": "/nonexistent"}, around=_somebody),
    "a cache that is only read": Environment({"HOME": "/nonexistent"}, around=_reader),
    "a cache that is deleted at every product": Environment(told=("deleted",)),
    "a disk without room": Environment(told=("full",)),
    "little memory": Environment(told=("memory",)),
    "signals all the time": Environment(told=("signals",)),
    "a clock that goes backwards": Environment(told=("clock",)),
}
# What needs no other user, in one process: for the tests.
TOGETHER = Environment(SPOILING, ("-X", "dev", "-O"), ("deleted", "signals", "clock"))


def told_by(environment: Environment, seed: int, count: int, cache: Path) -> dict[str, str]:
    """Return what a process of the environment says of each product; LookupError where none is."""
    variables = {**os.environ, "GEMMULE_CACHE": str(cache), **environment.variables}
    around = environment.around(cache) if environment.around else contextlib.nullcontext([])
    with around as before:
        command = [*before, sys.executable, *environment.options, str(CHILD)]
        try:
            done = subprocess.run(
                [*command, str(seed), str(count), *environment.told],
                env=variables,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"process": f"hung for {LIMIT_S} s"}
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        return {"process": f"ended with {done.returncode}: {last[0]}"}
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    threads = found.pop("threads")
    if environment.threads not in (None, int(threads)):
        found["threads"] = f"{threads}, not {environment.threads}"
    return found


def compared(plain: dict[str, str], found: dict[str, str]) -> list[str]:
    """Return in words what differs from the plain run."""
    names = dict.fromkeys((*plain, *found))
    return [
        f"{name}: {found.get(name, 'nothing')}, plain {plain.get(name, 'nothing')}"
        for name in names
        if found.get(name) != plain.get(name)
    ]


def main() -> int:
    """Run the campaign and print a line for each environment; 1 where one gave something else."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="ENVIRONMENT", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--rounds", type=int, default=3, help="processes of each environment")
    parser.add_argument("--products", type=int, default=100, help="of a process")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--record", action="store_true", help="keep the outcome in the evidence")
    given = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        plain = []
        for number in range(given.rounds):
            warm = Path(folder, "warm")
            plain.append(told_by(Environment(), given.seed + number, given.products, warm))
        for name in given.names or ENVIRONMENTS:
            try:
                bad += _one(name, plain, given, Path(folder))
            except LookupError as error:
                sys.stdout.write(f"{name}: not here, {error}\n")
    return int(bad > 0)


def _one(name: str, plain: list[dict[str, str]], given: argparse.Namespace, folder: Path) -> int:
    """Run the rounds of one environment; print, record and return what was bad."""
    cases, bad = 0, list[str]()
    for number, wanted in enumerate(plain):
        own = folder / f"{number}"
        shutil.copytree(folder / "warm", own)
        try:
            found = told_by(ENVIRONMENTS[name], given.seed + number, given.products, own)
        finally:
            shutil.rmtree(own, ignore_errors=True)
        cases += len(wanted)
        bad += compared(wanted, found)
    sys.stdout.write("".join(f"{name}: {line}\n" for line in bad[:10]))
    sys.stdout.write(f"{name}: {cases} products, {len(bad)} bad\n")
    sys.stdout.flush()
    if given.record:
        again = (
            f"python tests/{Path(__file__).name} --rounds {given.rounds} "
            f"--products {given.products} --seed {given.seed} '{name}'"
        )
        detail = f"the bits of {len(plain)} plain processes"
        keep(f"environments: {name}", cases, len(bad), again, detail)
    return len(bad)


if __name__ == "__main__":
    sys.exit(main())
