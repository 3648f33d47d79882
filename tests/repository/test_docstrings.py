"""The examples in docstrings give what they say: `tests/mutation.py` would not see them fail."""

from __future__ import annotations

import doctest
import importlib

import pytest

from checkout import ROOT

EXAMPLE = "    >>> "
NAMES = [
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
    for path in sorted((ROOT / "src").rglob("*.py"))
    if EXAMPLE in path.read_text(encoding="utf-8")
]

OF_TRANSFORMERS = ("gemmule.torch.checkpoints", "gemmule.torch.pretrained")


@pytest.mark.parametrize("name", NAMES)
def test_examples_in_docstrings_give_what_they_say(name: str) -> None:
    if name.startswith("gemmule.torch"):
        pytest.importorskip("torch")
    if name in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted, "no example is part of a docstring that is seen"
    assert not found.failed
