"""SciPy's tests of gemv and gemm, driven against this package.

They bind the BLAS functions while their module is imported, so ours stand in ``_fblas`` during an
import of its own. Nothing of SciPy's source is kept here.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from external.adapters import PLANTED, Driver

fblas = pytest.importorskip("scipy.linalg._fblas", exc_type=ImportError)
PREFIXES = {"s": np.float32, "d": np.float64, "c": np.complex64, "z": np.complex128}


def load(driver: Driver) -> Any:
    """Import SciPy's test module anew, with our functions in the place of BLAS's."""
    spec = importlib.util.find_spec("scipy.linalg.tests.test_blas")
    if spec is None or spec.loader is None:
        pytest.skip("this SciPy is installed without its tests", allow_module_level=True)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for prefix, dtype in PREFIXES.items():
            for name in ("gemv", "gemm"):
                monkeypatch.setattr(fblas, prefix + name, driver.blas(name, dtype))
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


DRIVER = Driver()
blas = load(DRIVER)


class Counted:
    @pytest.fixture(autouse=True)
    def _count(self) -> Iterator[None]:
        before = DRIVER.answered
        yield
        assert DRIVER.answered > before, "the test never called this package"


class TestGemv(Counted):
    test_gemv = blas.TestFBLAS2Simple.test_gemv


class TestGemm(Counted):
    test_gemm = blas.TestFBLAS3Simple.test_gemm


@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.parametrize("name", ["gemv", "gemm"])
def test_planted_bugs_are_caught(plant: str, name: str) -> None:
    driver = Driver()
    driver.products = {key: PLANTED[plant](f) for key, f in driver.products.items()}
    module = load(driver)
    suite = module.TestFBLAS2Simple() if name == "gemv" else module.TestFBLAS3Simple()
    for dtype in PREFIXES.values():
        with pytest.raises(AssertionError):
            getattr(suite, f"test_{name}")(driver.blas(name, dtype), dtype)
