"""What a tuned entry depends on: every source of its rung, at any depth, and nothing else."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import redigest
from gemmule.core import rung as rung_module
from gemmule.core.registry import all_rungs
from gemmule.core.rung import RUNGS_FOLDER, CudaRung, Rung
from gemmule.storage import models, sources
from gemmule.storage import tuned as tuned_store

PACKAGE = RUNGS_FOLDER.parent


def named(folder: str, name: str, backend: str) -> Rung:
    found = all_rungs(backend)
    return next(r for r in found if (r.folder, r.name) == (folder, name))


STREAMED = named("matvec", "streamed_rows", "cuda")


@pytest.fixture
def tree(tmp_path: Path, limit: Callable[..., None]) -> Iterator[Path]:
    """A copy of the sources, which rungs take for their own."""
    for room in ("rungs", "backends", "core"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE / room, tmp_path / room, ignore=ignored)
    limit(rung_module, RUNGS_FOLDER=tmp_path / "rungs")
    sources.forget_digests()
    yield tmp_path
    sources.forget_digests()


def edited_digest(rung: Rung, path: Path, remark: str = "\n// edited\n") -> str:
    """Return the rung's digest while `path` has a line more, and put the file back."""
    before = path.read_bytes()
    path.write_bytes(before + remark.encode())
    sources.forget_digests()
    found = sources.rung_digest(rung)
    path.write_bytes(before)
    sources.forget_digests()
    return found


@pytest.mark.parametrize(
    ("rung", "file"),
    [
        (STREAMED, "rungs/matvec/cuda/streamed_rows.py"),
        (STREAMED, "rungs/matvec/cuda/streamed_rows.cu"),
        (STREAMED, "rungs/_cuda/row_stream.cuh"),
        (STREAMED, "rungs/_cuda/ptx.cuh"),  # by way of row_stream.cuh
        (STREAMED, "rungs/_cuda/args.cuh"),
        (STREAMED, "rungs/_cuda/stream.py"),
        (STREAMED, "rungs/_cuda/geometry.py"),
        (named("matvec", "threads", "cpu"), "rungs/_cpu.py"),
        (named("matmul", "packed_threads", "cpu"), "rungs/matmul/cpu/_tile.py"),
        (named("quantized", "panels", "cpu"), "rungs/quantized/cpu/plain/kernels.py"),
        (named("quantized", "vector_panels", "cpu"), "backends/cpu/simd.py"),
        (named("quantized", "tile_registers", "cpu"), "backends/cpu/amx.py"),
    ],
    ids=lambda value: value.name if isinstance(value, Rung) else value,
)
def test_any_source_of_a_rung_makes_its_entries_stale(tree: Path, rung: Rung, file: str) -> None:
    original = sources.rung_digest(rung)
    assert edited_digest(rung, tree / file) != original
    assert sources.rung_digest(rung) == original


@pytest.mark.parametrize(
    "file",
    [
        "rungs/_cuda/column_stream.cuh",
        "rungs/_cuda/tiles.py",
        "rungs/matvec/cuda/warp_vector.cu",
        "rungs/_cpu.py",
        "backends/cuda/launch.py",
        "core/rung.py",
    ],
)
def test_unrelated_edits_leave_entries_alone(tree: Path, file: str) -> None:
    original = sources.rung_digest(STREAMED)
    assert edited_digest(STREAMED, tree / file) == original


def test_files_that_change_places_are_another_rung(tree: Path) -> None:
    """The digest tells which file holds which text: two headers that swap do not cancel out."""
    original = sources.rung_digest(STREAMED)
    pair = [tree / "rungs" / "_cuda" / name for name in ("row_stream.cuh", "args.cuh")]
    texts = [path.read_bytes() for path in pair]
    for path, text in zip(pair, reversed(texts), strict=True):
        path.write_bytes(text)
    sources.forget_digests()
    assert sources.rung_digest(STREAMED) != original


def imported(path: Path) -> set[Path]:
    """Return what Python itself says a file imports of the rungs and back ends."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            for length in (len(parts), len(parts) - 1):
                file = PACKAGE.parent.joinpath(*parts[:length]).with_suffix(".py")
                if file.is_file() and parts[1] in ("rungs", "backends"):
                    found.add(file)
                    break
    return found


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_every_import_is_followed(backend: str) -> None:
    """Read as text or parsed by Python, the files import the same; all includes are found."""
    for rung in all_rungs(backend):
        files = sources.sources(rung)
        for path in files:
            if path.suffix == ".py":
                assert imported(path) <= set(files), path
        if isinstance(rung, CudaRung):
            assert any(path.suffix == ".cuh" for path in files), rung.name


def test_a_shipped_entry_is_digested_again(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tree / "tuned"
    shutil.copytree(
        tuned_store.SHIPPED, shipped, ignore=shutil.ignore_patterns(models.SHIPPED.name)
    )
    before = {path.name: path.read_bytes() for path in shipped.iterdir()}
    assert redigest.update(shipped) == []
    header = tree / "rungs" / "_cuda" / "row_stream.cuh"
    original = header.read_bytes()
    header.write_bytes(original + b"// edited\n")
    sources.forget_digests()
    assert all(tuned_store.shipped_fault(path) for path in shipped.iterdir())
    assert {path.name for path in redigest.update(shipped)} == set(before)
    assert not any(tuned_store.shipped_fault(path) for path in shipped.iterdir())
    header.write_bytes(original)
    sources.forget_digests()
    redigest.update(shipped)
    assert {path.name: path.read_bytes() for path in shipped.iterdir()} == before
