"""pyright, which editors run, finds what mypy finds in a program of a user."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import typed_program
from checkout import ROOT

pytest.importorskip("pyright", reason="the extra pages brings pyright")


def test_pyright_knows_results_and_finds_words_that_mean_nothing(tmp_path: Path) -> None:
    typed_program.write(tmp_path)
    settings = {"typeCheckingMode": "strict", "stubPath": "stubs", "extraPaths": [f"{ROOT}/src"]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    run = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    found: dict[int, str] = {}
    for one in json.loads(done.stdout)["generalDiagnostics"]:
        assert Path(one["file"]).name == "program.py", one
        number = one["range"]["start"]["line"] + 1
        is_error = one["severity"] == "error"
        found[number] = "error" if is_error else found.get(number, one["message"])
    typed_program.check(found)
