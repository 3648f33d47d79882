"""The Python of the guides runs as it stands."""

from __future__ import annotations

import re

import pytest

from checkout import ROOT


def test_the_python_of_the_guides_runs() -> None:
    for module in ("torch", "scipy"):
        pytest.importorskip(module)
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides.md").read_text("utf-8"), re.S)
    assert blocks
    for number, block in enumerate(blocks):
        exec(compile(block, f"guides.md block {number}", "exec"), names)
