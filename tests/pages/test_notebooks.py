"""The notebooks run from top to bottom in seconds, and are kept without what they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkout import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path):
    return nbformat.reads(path.read_text("utf-8"), as_version=4)


@each
def test_a_notebook_runs(
    path: Path, elsewhere: Path, tree: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "GEMMULE_DEVICE"):
        monkeypatch.setenv(name, tree[name])
    notebook = read(path)
    client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3")
    client.execute(cwd=str(elsewhere))
    told = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert told
    assert not [one for one in told if one.output_type == "stream" and one.name == "stderr"]


@each
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [cell for cell in code if cell.outputs or cell.execution_count]
    assert notebook.cells[0].source.startswith("# ")
    assert path.stat().st_size < 20_000


def test_a_failing_cell_would_be_seen(elsewhere: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 == 2")])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="1 == 2"):
        nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
