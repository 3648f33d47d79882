"""Other projects' tests of products as a campaign that is kept as data.

``python tests/external_campaign.py [--record]`` runs what `tests/external` drives (NumPy's and
SciPy's own tests, published cases) and counts the tests and the calls that this package answered,
and sweeps gemv and gemm over the sizes, steps and scalars of netlib's BLAS testers (dblat2 and
dblat3; Dongarra, Du Croz, Duff, Hammarling), whose measure of error and threshold it takes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import gemmule as gm
from campaign_record import keep

Array = np.ndarray[Any, Any]

SIZES, STEPS = (0, 1, 2, 3, 5, 9), (1, 2, -1, -2)
ALPHAS, BETAS = (0.0, 1.0, 0.7), (0.0, 1.0, 0.9)
DTYPES = ("float32", "float64", "complex64", "complex128")
THRESHOLD = 16.0  # of the testers: errors in units of roundoff times the sum of magnitudes
SUITES = {
    "test_numpy_suite.py": "NumPy's own tests of matmul, dot, inner, matvec, vecmat",
    "test_scipy_blas.py": "SciPy's own tests of gemv and gemm",
    "test_published_cases.py": "cases published by other projects",
}


class Case(NamedTuple):
    """One call of the sweep: `turned` operands are transposes of stored ones."""

    op: str
    dtype: str
    sizes: tuple[int, ...]
    turned: tuple[bool, bool]
    steps: tuple[int, int]
    alpha: float
    beta: float


def cases() -> Iterator[Case]:
    """Yield the whole sweep."""
    scalars = list(itertools.product(ALPHAS, BETAS))
    for dtype, (alpha, beta) in itertools.product(DTYPES, scalars):
        for m, n in itertools.product(SIZES, repeat=2):
            for turned, x_step, y_step in itertools.product((False, True), STEPS, STEPS):
                steps = (x_step, y_step)
                yield Case("gemv", dtype, (m, n), (turned, False), steps, alpha, beta)
        for sizes in itertools.product(SIZES, repeat=3):
            for turned_a, turned_b in itertools.product((False, True), repeat=2):
                yield Case("gemm", dtype, sizes, (turned_a, turned_b), (1, 1), alpha, beta)


def is_right(case: Case, rng: np.random.Generator) -> bool:
    """Multiply, and judge as the testers do; with beta = 0 the result begins as NaN."""
    left, right, result = _operands(case, rng)
    wide = [one.astype(np.clongdouble) for one in (left, right, result)]
    product = wide[0] @ wide[1]
    size = abs(case.alpha) * (abs(wide[0]) @ abs(wide[1]))
    truth = case.alpha * product
    if case.beta:
        truth, size = truth + case.beta * wide[2], size + abs(case.beta * wide[2])
    getattr(gm, case.op)(left, right, result, alpha=case.alpha, beta=case.beta)
    error = abs(result.astype(np.clongdouble) - truth)
    return bool((error <= THRESHOLD * np.finfo(case.dtype).eps * size).all())


def _operands(case: Case, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    def numbers(*shape: int) -> Array:
        parts = rng.uniform(-0.5, 0.5, (2, *shape))
        whole = parts[0] + 1j * parts[1] if case.dtype.startswith("c") else parts[0]
        return np.asarray(whole).astype(case.dtype)

    def stepped(length: int, step: int) -> Array:
        return numbers(length * abs(step))[:: abs(step)][:: 1 if step > 0 else -1]

    def matrix(rows: int, columns: int, turned: bool) -> Array:  # stored by columns, padded by one
        stored = numbers(rows, columns + 1) if turned else numbers(columns, rows + 1)
        return stored[:, :-1] if turned else stored[:, :-1].T

    if case.op == "gemv":
        m, n = case.sizes
        left, right = matrix(m, n, case.turned[0]), stepped(n, case.steps[0])
        result = stepped(m, case.steps[1])
    else:
        m, n, k = case.sizes
        left, right = matrix(m, k, case.turned[0]), matrix(k, n, case.turned[1])
        result = matrix(m, n, False)
    if not case.beta:
        result[...] = np.nan
    return left, right, result


def sweep(every: int = 1) -> tuple[int, list[Case]]:
    """Run every so-manieth case of the sweep; return how many ran and those that were wrong."""
    rng, chosen = np.random.default_rng(1), list(itertools.islice(cases(), 0, None, every))
    return len(chosen), [case for case in chosen if not is_right(case, rng)]


class Counts:
    """A plugin of pytest: outcomes and answered calls of each file."""

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self._file = ""

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._file = item.path.name

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = Path(report.nodeid.split("::")[0]).name
        if report.skipped:
            self.skipped[name] += 1
        elif report.failed:
            self.failed[name] += 1
        elif report.when == "call":
            self.passed[name] += 1

    def pytest_sessionstart(self) -> None:
        from external import adapters

        plain = adapters.Driver._ours

        def counted(driver: adapters.Driver, name: str, *operands: Any, **options: Any) -> Any:
            self.answered[self._file] += 1
            return plain(driver, name, *operands, **options)

        setattr(adapters.Driver, "_ours", counted)  # noqa: B010 - a method replaced for a count


def main(arguments: list[str] | None = None) -> int:
    """Run everything; return 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="keep the outcome in the evidence")
    given = parser.parse_args(arguments)
    command = "python tests/external_campaign.py"
    counts = Counts()
    folder = Path(__file__).parent / "external"
    pytest.main(["-q", "-p", "no:cacheprovider", str(folder)], plugins=[counts])
    found = []
    for file, what in SUITES.items():
        ran, bad = counts.passed[file] + counts.failed[file], counts.failed[file]
        skipped = counts.skipped[file]
        detail = f"{skipped} skipped, each with its reason" if skipped else "none skipped"
        if counts.answered[file]:
            detail = f"{counts.answered[file]:,} calls answered by this package; {detail}"
        found.append((f"suites of others: {what}", ran, bad, detail))
    ran, wrong = sweep()
    for case in wrong[:20]:
        sys.stdout.write(f"wrong: {case}\n")
    detail = "gemv and gemm of 4 dtypes, error below 16 units, results unread where beta is 0"
    found.append(("suites of others: netlib's sweep of sizes and scalars", ran, len(wrong), detail))
    for what, ran, bad, detail in found:
        sys.stdout.write(f"{what}: {ran:,} ran, {bad} bad; {detail}\n")
        if given.record:
            keep(what, ran, bad, command, detail)
    return int(any(bad or not ran for _, ran, bad, _ in found))


if __name__ == "__main__":
    sys.exit(main())
