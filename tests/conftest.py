"""What every test process does first."""

import gc

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
