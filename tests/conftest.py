"""What every test process does first, and last."""

import fcntl
import gc
import importlib.util
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

# Most of what tests make lives long: syntax trees, compiled kernels, tables of cases.
gc.set_threshold(100_000, 20, 50)


@pytest.fixture(scope="module", autouse=True)
def _older_objects_are_no_garbage() -> None:
    """Look for garbage once a file; what survives, millions of objects, is never looked at again.

    PyTorch, JAX and what Numba compiled make a collection cost most of a second.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Spare what still lives pytest's five last collections, each of most of a second."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let one worker import everything first, where no module is compiled to bytecode yet.

    Each of them compiled the same thousands of modules of PyTorch and JAX, for nine seconds.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None or _is_compiled("torch"):
        return (yield)
    path = Path(tempfile.gettempdir()) / f"gemmule-imports-{run}"
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)  # with the others, once the first is through
        try:
            return (yield)
        finally:
            path.unlink(missing_ok=True)


def _is_compiled(module: str) -> bool:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return True
    return Path(importlib.util.cache_from_source(found.origin)).is_file()
