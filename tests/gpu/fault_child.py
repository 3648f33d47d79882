"""What a child process of the fault tests begins with; its argument is the number of the variant.

``right`` prints after a right product, ``typed`` after the error that was to come, ``planted`` runs
a kernel of the test's own.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import gemmule as gm
from gemmule.backends.cuda import driver, nvrtc
from gemmule.backends.cuda.starter import loaded, whole_starter
from gemmule.core.rung import Step

variant = int(sys.argv[1])
rng = np.random.default_rng(variant)
A = rng.integers(-3, 4, (50 + variant, 70)).astype(np.float32)
x = rng.integers(-3, 4, 70).astype(np.float32)


def right(device: str = "cuda") -> None:
    """Compute a product and see that it is right."""
    rung = None if device == "cpu" else "thread_per_row"
    assert np.array_equal(gm.matvec(A, x, rung=rung, device=device), A @ x)
    print("right", flush=True)


def typed(
    call: Callable[..., object], kind: type[Exception], *words: str, restart: bool = False
) -> None:
    """See that `call` raises an error of this kind that says these words."""
    with pytest.raises(kind) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert getattr(caught.value, "restart", False) == restart, str(caught.value)
    print("typed", flush=True)


def planted(source: str, name: str, smem: int = 0) -> None:
    """Build, load and start a kernel as the back end does with a rung's."""
    path = Path(os.environ["GEMMULE_CACHE"]) / "planted.cu"
    path.write_text(source)
    module, _ = nvrtc.build(path, (name,), driver.device_info(0).arch)
    word, step = struct.pack("<Q", 8), Step(name, (1, 1, 1), (32, 1, 1), smem)
    with driver.on_device(0):
        whole_starter(loaded(module, (step,), word, 0))(0, word)
