"""NumPy's own tests of matmul, dot, inner, matvec and vecmat, driven against this package.

The test modules' ``np`` is replaced by a namespace whose products are ours; a test in which the
package answers no call fails. Nothing of NumPy's source is kept here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from external.adapters import PLANTED, Driver, Patched

arrays = pytest.importorskip("numpy._core.tests.test_multiarray", exc_type=ImportError)
ufuncs = pytest.importorskip("numpy._core.tests.test_ufunc", exc_type=ImportError)

# Tests that cannot reach the package, or are about what it documents not to do.
SKIPPED = {
    "test_matmul_object": "object arrays are a TypeError here",
    "test_matmul_object_type_scalar": "object arrays are a TypeError here",
    "test_matmul_empty": "object arrays are a TypeError here",
    "test_matmul_exception_multiply": "object arrays are a TypeError here",
    "test_matmul_exception_add": "object arrays are a TypeError here",
    "test_matmul_bool": "bool arrays are a TypeError here",
    "test_vecobject": "object arrays are a TypeError here",
    "test_dot_out_result": "calls ndarray.dot, a method that cannot be replaced",
    "test_dot_out_aliasing": "calls ndarray.dot, a method that cannot be replaced",
    "test_huge_vectordot": "needs 18 GB of memory",
    "test_dtype_discovery_fails": "about converting objects that are no arrays",
    "test_inner_type_mismatch": "structured dtypes are a TypeError here",
    "test_inner_scalar_and_vector": "products with scalars are not part of this package",
}


def patch(monkeypatch: pytest.MonkeyPatch, driver: Driver, module: Any, *names: str) -> None:
    functions = {name: getattr(driver, name) for name in names}
    monkeypatch.setattr(module, "np", Patched(np, **functions))
    if module is arrays and "dot" in names:
        monkeypatch.setattr(module, "dot", driver.dot)


class Driven:
    """Patches the module before each test, and counts."""

    module: Any = arrays
    names: tuple[str, ...] = ()

    @pytest.fixture(autouse=True)
    def _drive(
        self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        name = request.node.originalname
        if name in SKIPPED:
            pytest.skip(SKIPPED[name])
        self.driver = Driver()
        patch(monkeypatch, self.driver, self.module, *self.names)
        yield
        assert self.driver.answered > 0, f"{name} never called this package"


class TestMatmul(Driven, arrays.TestMatmul):  # type: ignore[misc]
    names = ("matmul", "matvec", "vecmat")  # its np.dot stays NumPy's, as a second opinion

    def matmul(self, *arguments: Any, **options: Any) -> Any:
        return self.driver.matmul(*arguments, **options)


class TestDot(Driven, arrays.TestDot):  # type: ignore[misc]
    names = ("dot",)


class TestInner(Driven, arrays.TestInner):  # type: ignore[misc]
    names = ("inner",)


class TestMatvecAndVecmat(Driven):
    """The tests of one large class that concern the two functions."""

    module = ufuncs
    names = ("matvec", "vecmat", "matmul")
    suite = ufuncs.TestUfunc()

    def test_matvec(self) -> None:
        self.suite.test_matvec()

    @pytest.mark.parametrize(
        "matrix", [None, np.array([[1 + 1j, 0.5, -0.5j], [0.25, 2j, 0], [4, 0, -1j]])]
    )
    @pytest.mark.parametrize(
        "vec", [np.arange(1.0, 7).reshape(2, 3), np.array([[1, 2j, 3], [4, 5, 6j]])]
    )
    def test_vecmatvec_identity(self, matrix: Any, vec: Any) -> None:
        self.suite.test_vecmatvec_identity(matrix, vec)

    @pytest.mark.parametrize(
        ("name", "shape1", "shape2"),
        [("vecmat", (3,), (3, 1)), ("matvec", (1, 3), (3,)), ("matmul", (1, 3), (3, 1))],
    )
    def test_complex(self, name: str, shape1: Any, shape2: Any) -> None:
        function = getattr(self.driver, name)
        self.suite.test_vecdot_matvec_vecmat_complex(function, shape1, shape2, name == "vecmat")

    @pytest.mark.parametrize("which", ["matvec", "vecmat"])
    def test_out(self, which: str) -> None:
        def func(A: Any, x: Any, **options: Any) -> Any:
            operands = (A, x) if which == "matvec" else (x, A)
            return getattr(self.driver, which)(*operands, **options)

        self.suite.test_matvec_vecmat_out(func)


def plain_tests(suite: type) -> list[str]:
    """Return the tests of a class that take no arguments and are not skipped."""
    return [
        name
        for name, function in inspect.getmembers(suite, inspect.isfunction)
        if name.startswith("test_")
        and name not in SKIPPED
        and list(inspect.signature(function).parameters) == ["self"]
    ]


def survivors(suite: type, names: tuple[str, ...], plant: Callable[..., Any]) -> list[str]:
    """Return the tests that pass although every product is wrong."""
    alive = []
    for test in plain_tests(suite):
        with pytest.MonkeyPatch.context() as monkeypatch:
            driver = Driver()
            driver.products = {name: plant(f) for name, f in driver.products.items()}
            patch(monkeypatch, driver, arrays, *names)
            instance = suite()
            if suite is TestMatmul:
                instance.driver = driver
            try:
                getattr(instance, test)()
            except AssertionError:
                continue
            alive.append(test)
    return alive


@pytest.mark.parametrize("plant", PLANTED)
def test_planted_bugs_are_caught(plant: str) -> None:
    """Only tests of shapes, types and errors (or of zeros) may pass with wrong values."""
    blind = {"test_exceptions", "test_shapes", "test_result_types", "test_empty_out"}
    assert set(survivors(TestMatmul, TestMatmul.names, PLANTED[plant])) <= blind
    zeros = {"test_all", "test_vecself"} if plant == "all_zeros" else set()
    consistent = {  # these compare the product with itself
        "test_accelerate_framework_sgemv_fix",
        "test_dot_3args",
        "test_dot_3args_errors",
        "test_dot_array_order",
    }
    assert set(survivors(arrays.TestDot, TestDot.names, PLANTED[plant])) <= zeros | consistent
    assert set(survivors(arrays.TestInner, TestInner.names, PLANTED[plant])) <= zeros
