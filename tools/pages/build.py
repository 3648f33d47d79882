"""The generated parts of the documents: the ladder page, and the tables between markers."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from gemmule.core.registry import LADDERS, ladder
from gemmule.core.rung import BACKENDS
from gemmule.storage import evidence
from gemmule_lab.report import ladder_table
from pages import (
    cpu_pages,
    cpu_speed,
    cuda_pages,
    dtype_tables,
    interfaces,
    ladder_chart,
    note_tables,
    reliability,
    speed_table,
    support_table,
)
from pages.markdown import update_markers

LADDER_SIZE = 4096


def status() -> str:
    """Return the README's table: how many rungs each ladder has, and how many are proved."""
    proved = {(record.folder, record.rung) for record in evidence.read()}
    lines = [
        "| ladder | CPU rungs | CUDA rungs | of them with a GPU proof on record |",
        "|---|---:|---:|---:|",
    ]
    for op in LADDERS:
        cpu, cuda = (ladder(op, backend) for backend in BACKENDS)
        on_record = sum((rung.folder, rung.name) in proved for rung in cuda)
        lines.append(f"| {op} | {len(cpu)} | {len(cuda)} | {on_record} |")
    return "\n".join(lines)


def ladders() -> str:
    """Return the tables of all ladders."""
    parts = []
    for op in LADDERS:
        for backend in BACKENDS:
            machine = ladder_table.REFERENCE_GPU if backend == "cuda" else None
            rows = ladder_table.rows(op, backend, LADDER_SIZE, machine, here=False)
            if rows:
                name = "CUDA" if backend == "cuda" else "CPU"
                parts.append(f"## {op} on {name}\n\n{ladder_table.markdown(rows)}\n")
    return "\n".join(parts)


def reference(root: Path) -> dict[str, dict[str, str]]:
    """Return the tables of the pages of reference."""
    types = {"results": dtype_tables.results(), "longest": dtype_tables.longest()}
    types["epilogues"] = note_tables.epilogues(root)
    return {
        "api.md": {"interface": interfaces.table()},
        "dtypes.md": {"support": support_table.support(), **types},
    }


def update(root: Path) -> list[Path]:
    """Rewrite the generated parts below `root`; return the files that changed."""
    changed = []
    page = root / "docs" / "ladder.md"
    if update_markers(page, {"ladders": ladders()}):
        changed.append(page)
    for name, tables in reference(root).items():
        path = root / "docs" / name
        if path.is_file() and update_markers(path, tables):
            changed.append(path)
    for path, tables in cpu_pages.tables(root).items():
        if update_markers(root / path, tables):
            changed.append(root / path)
    changed += [*cpu_pages.pictures(root), *cuda_pages.update(root)]
    changed += ladder_chart.update(root)
    changed += reliability.update(root)
    changed += note_tables.update(root)
    readme = root / "README.md"
    tables = {
        "status": status(),
        "support": support_table.support(),
        "cpu": cpu_speed.processors(root),
        "speed": speed_table.speed(root),
        "quantised": speed_table.quantised(root),
    }
    if update_markers(readme, tables):
        changed.append(readme)
    return changed


def stale(root: Path) -> list[Path]:
    """Return the files whose generated parts are not what `update` would write."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copyfile(root / "README.md", copy / "README.md")
        for name in ("docs", "evidence"):
            if (root / name).is_dir():
                shutil.copytree(root / name, copy / name)
        return [root / path.relative_to(copy) for path in update(copy)]
