"""Every public name has a text with an example, and every example gives what it says."""

from __future__ import annotations

import doctest
import importlib
import inspect

import pytest

import gemmule
import gemmule.torch
from checkout import ROOT
from pages import interfaces

NAMES = [(module, name) for module, names in interfaces.MODULES.items() for name in names]
# A process group of several GPUs stands behind them; docs/distributed.md has their program.
WITHOUT = {"Exchange", "ShardedMatrix"}


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(one) for one in NAMES])
def test_a_name_explains_itself_and_its_example_runs(module: str, name: str, elsewhere) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    thing = getattr(importlib.import_module(module), name)
    text = inspect.getdoc(thing)
    assert text
    assert len(text.split()) >= 6
    globs = dict(vars(importlib.import_module(thing.__module__)))
    tests = doctest.DocTestFinder(exclude_empty=True).find(thing, name, globs=globs)
    examples = [example for test in tests for example in test.examples]
    assert examples or name in WITHOUT, f"{module}.{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in tests:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_every_public_name_is_on_the_page_of_the_interface() -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    public = [f"gemmule.{name}" for name in gemmule.__all__ if name != "__version__"]
    public += [f"gemmule.torch.{name}" for name in gemmule.torch._MODULES]
    assert not [name for name in public if f"| `{name}` |" not in page], "run `make docs`"
