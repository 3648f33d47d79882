"""The experiments of the five documents that this project starts from, redone and judged.

``documents/document_<number>.py`` is one study: its grid and one rule for each thing that the
document claims; ``published/<number>.json`` holds the figures that it printed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmule_lab.studies.grid import Study


def load(number: str) -> Study:
    """Return the study of a document: ``"000"`` to ``"004"``."""
    module = importlib.import_module(f"gemmule_lab.studies.documents.document_{number}")
    study: Study = module.STUDY
    return study
