"""Read rates on disk: what no memory does is neither stored nor read, and all else comes back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from gemmule.core.rung import Machine
from gemmule.storage import ceilings

LOW, HIGH = ceilings.PLAUSIBLE
DEVICE = Machine("cuda", "A card", "sm_90", 132, 1e12, 50 << 20)
KNOWN = DEVICE.backend, DEVICE.name, DEVICE.arch, DEVICE.units


@pytest.mark.parametrize("rate", [LOW, HIGH, 3.3e12, math.nextafter(LOW, 1e12)])
def test_a_rate_comes_back(setting: Callable[..., None], tmp_path: Path, rate: float) -> None:
    setting(GEMMULE_CACHE=tmp_path)
    path = ceilings.save(DEVICE, rate)
    assert path is not None
    assert ceilings.read(*KNOWN) == rate
    for at in range(4):  # and is that of no other device
        assert (
            ceilings.read(*KNOWN[:at], *((7,) if at == 3 else ("else",)), *KNOWN[at + 1 :]) is None
        )


@pytest.mark.parametrize(
    "rate", [math.nextafter(LOW, 0), math.nextafter(HIGH, math.inf), 0.0, -LOW, math.inf, math.nan]
)
def test_a_rate_that_no_memory_has(
    setting: Callable[..., None], tmp_path: Path, rate: float
) -> None:
    setting(GEMMULE_CACHE=tmp_path)
    with pytest.raises(ValueError, match="no read rate of a memory"):
        ceilings.save(DEVICE, rate)
    path = ceilings.save(DEVICE, 3e12)
    assert path is not None
    path.write_text(path.read_text().replace(json.dumps(3e12), json.dumps(rate)))
    assert json.loads(path.read_text())["read_bytes_per_s"] != 3e12
    assert ceilings.read(*KNOWN) is None
