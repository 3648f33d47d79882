"""Memory that nobody wrote is seen by every test of this folder."""

from collections.abc import Iterator

import pytest

from unwritten import shown


@pytest.fixture(autouse=True)
def unwritten() -> Iterator[None]:
    """Give arrays that are not zeros by chance."""
    with shown():
        yield
