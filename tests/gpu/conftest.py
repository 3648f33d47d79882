"""These tests need a CUDA device; without one each is skipped with the reason.

Those that fill the device have it for themselves, whatever processes pytest is spread over.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmule.backends.cuda import driver
from gemmule.errors import DeviceError

# Else JAX, once one test has used it, holds three quarters of the GPU's memory to the end, and
# whatever needs the whole GPU is skipped.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

WHOLE_BYTES = 60 << 30
"""Free memory that a test of the whole GPU needs: products of 2^31 float64 results, and a truth."""


def missing() -> str | None:
    try:
        return None if driver.device_count() else "no CUDA device"
    except DeviceError as error:
        return str(error)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "/gpu/" in item.path.as_posix()]
    reason = missing() if here else None
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif item.get_closest_marker("whole_gpu"):
            item.add_marker(pytest.mark.timeout(1200))  # with the wait for the tests beside it


@pytest.fixture(autouse=True)
def share_of_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wait for tests that have the GPU for themselves; such a test waits for all others.

    Who waits for the whole GPU holds the gate, so that others cannot go on sharing it meanwhile.
    """
    whole = request.node.get_closest_marker("whole_gpu") is not None
    folder = Path(tempfile.gettempdir())
    with (folder / "gemmule-gpu-gate").open("w") as gate, (folder / "gemmule-gpu").open("w") as gpu:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(gpu, fcntl.LOCK_EX if whole else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        if whole:
            free_bytes, _ = driver.memory_bytes(0)
            if free_bytes < WHOLE_BYTES:
                pytest.skip(
                    f"needs {WHOLE_BYTES >> 30} GiB of the GPU's memory, {free_bytes >> 30} are "
                    "free: a smaller GPU, or other processes hold the rest"
                )
        yield
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # what one process keeps, the others lack
