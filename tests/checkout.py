"""Where this checkout's folders are, whichever file asks and whatever folder it runs in."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOURCE = ROOT / "src"
EVIDENCE = ROOT / "evidence"
