"""Other projects' test suites, driven against this package."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

SUITES = (
    "numpy._core.tests.test_multiarray",
    "numpy._core.tests.test_ufunc",
    "scipy.linalg.tests.test_blas",
)


def pytest_configure(config: pytest.Config) -> None:
    """Know the marks that the suites use: unknown ones are errors while a module is imported."""
    for suite in SUITES:
        for mark in sorted(_marks(suite)):
            config.addinivalue_line("markers", f"{mark}: a mark of {suite}")


def _marks(suite: str) -> set[str]:
    try:
        spec = importlib.util.find_spec(suite)
    except ImportError:
        return set()
    if spec is None or spec.origin is None:
        return set()
    return set(re.findall(r"pytest\.mark\.(\w+)", Path(spec.origin).read_text(encoding="utf-8")))
