"""The experiments of the five documents that this project starts from, redone and judged.

``seeds/seed_<number>.py`` is one study: its grid, and one verdict function for each thing that the
document claims; ``published/<number>.json`` holds the figures that it printed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmule_lab.studies.grid import Study


def load(seed: str) -> Study:
    """Return the study of a document: ``"000"`` to ``"004"``."""
    module = importlib.import_module(f"gemmule_lab.studies.seeds.seed_{seed}")
    study: Study = module.STUDY
    return study
