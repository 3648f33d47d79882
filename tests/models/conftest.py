"""Tests with whole models of transformers; they need what `make test-models` installs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # as in a plain script, of which `fresh` is one

for _name in ("torch", "transformers", "accelerate", "peft", "fastapi", "httpx"):
    pytest.importorskip(_name, reason="installed by `make test-models`")

import transformers  # noqa: E402

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
