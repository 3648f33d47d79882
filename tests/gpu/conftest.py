"""These tests need a CUDA device; without one each is skipped with the reason."""

from __future__ import annotations

import pytest

from gemmule.backends.cuda import driver
from gemmule.errors import DeviceError


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
