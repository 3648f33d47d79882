"""The drawings of the ladders' pages: each public function draws one, named as what it shows."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

from pages.figures.drawing import Drawings


@functools.cache
def of_ladder(op: str) -> Drawings:
    """Return the drawings of a ladder by name, from ``<op>.py`` and ``<op>_*.py`` of this folder.

    A drawing that is called as a rung stands with that rung; others are for the words around.
    """
    found = {}
    for path in sorted(Path(__file__).parent.glob(f"{op}*.py")):
        module = importlib.import_module(f"{__name__}.{path.stem}")
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_"):
                found[name] = value
    return found
