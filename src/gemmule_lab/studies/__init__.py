"""The experiments of the five documents that this project starts from, redone and judged.

``documents/<number>.toml`` has what a document asks, printed and claims,
``documents/document_<number>.py`` its grid, its charts and the rules of single claims.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmule_lab.studies.grid import Study

NUMBERS = ("000", "001", "002", "003", "004")


def load(number: str) -> Study:
    """Return the study of a document: ``"000"`` to ``"004"``."""
    module = importlib.import_module(f"gemmule_lab.studies.documents.document_{number}")
    study: Study = module.STUDY
    return study
