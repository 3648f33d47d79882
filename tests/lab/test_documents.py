"""Every element of the five documents is held by something: a test, a claim, a recorded row.

tests/data/documents.toml lists the elements in words of this project; here each name is looked up.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
import tomllib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from checkout import EVIDENCE, ROOT, TESTS
from gemmule.backends.cuda.streams import Event, PinnedBlock, Stream
from gemmule.core.registry import all_rungs
from gemmule.core.rung import CudaRung
from gemmule_lab import studies
from gemmule_lab.records import study as store
from late_driver import LateDriver, late

RECORDED = EVIDENCE / "nvidia-h200"
ELEMENTS = tomllib.loads((TESTS / "data" / "documents.toml").read_text("utf-8"))["element"]
KINDS = ("tests", "claims", "records", "rungs", "figures")
DOCUMENTS = ("000", "001", "002", "003", "004")

Element = dict[str, Any]


def _pinned(ordinal: int) -> PinnedBlock:
    return PinnedBlock(64, ordinal)


@functools.cache
def functions_of(name: str) -> dict[str, str]:
    """Return the test functions of a file of tests, and the file's text under ""."""
    paths = list(TESTS.rglob(f"test_{name}.py"))
    if not paths:
        return {}
    text = paths[0].read_text("utf-8")
    tree = ast.parse(text)
    found = {node.name: node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return {**found, "": text}


@functools.cache
def claims_of(number: str) -> frozenset[str]:
    return frozenset(claim.id for claim in studies.load(number).claims)


@functools.cache
def rows_of(number: str) -> Counter[tuple[str, str]]:
    """Return how many rows with a figure are on record, by experiment and implementation."""
    rows = store.read(RECORDED / f"study-{number}.jsonl", number)
    return Counter((row.experiment, row.name) for row in rows if row.measured)


@functools.cache
def rungs() -> frozenset[str]:
    return frozenset(f"{r.folder}/{r.name}" for b in ("cuda", "cpu") for r in all_rungs(b))


def there(kind: str, name: str) -> bool:
    """Tell whether what an element names is there."""
    if kind == "tests":
        matched = re.fullmatch(r"(\w+)::(test_\w+)(?:\[(.+)\])?", name)
        if matched is None:
            return False
        file, function, case = matched.groups()
        known = functions_of(file)
        return function in known and (case is None or f'"{case}"' in known[""])
    if kind == "claims":
        number, _, claim = name.partition("/")
        return number in DOCUMENTS and claim in claims_of(number)
    if kind == "records":
        number, experiment, implementation = name.split(" | ")
        return rows_of(number)[experiment, implementation] > 0
    if kind == "figures":
        return (ROOT / "docs" / "img" / name).is_file()
    return name in rungs()


def lacking(element: Element) -> list[str]:
    """Return what an element names and is not there, and that it names nothing that would fail."""
    named = [(kind, name) for kind in KINDS for name in element.get(kind, ())]
    found = [f"{kind}: {name}" for kind, name in named if not there(kind, name)]
    if not any(kind != "rungs" for kind, _ in named):
        found.append("names neither a test nor a record")
    return found + [f"unknown key {key}" for key in element.keys() - {"document", "what", *KINDS}]


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: f"{e['document']}: {e['what']}"[:60])
def test_an_element_is_held_by_what_it_names(element: Element) -> None:
    assert lacking(element) == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("tests", "seed_bugs::test_mutant_is_caught[no such mistake]"),
        ("tests", "seed_bugs::test_no_such_thing"),
        ("tests", "no_such_file::test_mutant_is_caught"),
        ("claims", "000/no-such-claim"),
        ("records", "000 | rows x columns | no such kernel"),
        ("records", "003 | no such experiment | torch"),
        ("rungs", "matvec/no_such_rung"),
        ("figures", "no-such-picture.svg"),
    ],
)
def test_a_name_of_nothing_is_told(kind: str, name: str) -> None:
    given = {"document": "000", "what": "", "tests": [], kind: [name]}
    assert lacking(given)[0] == f"{kind}: {name}"
    assert lacking({"document": "000", "what": ""}) == ["names neither a test nor a record"]


def test_no_claim_and_no_rung_of_the_documents_is_forgotten() -> None:
    named = {kind: {n for e in ELEMENTS for n in e.get(kind, ())} for kind in KINDS}
    theirs = {
        f"{number}/{claim.id}"
        for number in DOCUMENTS
        for claim in studies.load(number).claims
        if not claim.text.startswith("Not in the document")
    }
    assert theirs <= named["claims"]
    sources = {f"{r.folder}/{r.name}" for r in all_rungs("cuda") if r.source.startswith("seed 00")}
    assert sources <= named["rungs"]
    assert {number for e in ELEMENTS for number in e["document"].split(", ")} == {*DOCUMENTS, "all"}


def test_printed_parameters_can_be_chosen() -> None:
    """Document 003's two tables and 004's widths are presets, in what they print."""
    rung = {r.name: r for r in all_rungs("cuda") if isinstance(r, CudaRung)}
    sizes = [2**power for power in range(9, 15)]
    tables = {f"{device}_{size}" for device in ("p100", "rtx3090") for size in sizes}
    assert tables <= rung["two_step"].presets.keys()
    for name in ("block_multiply", "block_multiply_transposed", "transpose_then"):
        given = rung[name].presets.values()
        assert {one["width"] for one in given} == {8, 16, 32, 64, 128, 256}
        assert all(one["width"] <= one["height"] for one in given)


@pytest.mark.parametrize(
    ("kind", "end"),
    [(Event, "cuEventDestroy"), (Stream, "cuStreamDestroy"), (_pinned, "cuMemFreeHost")],
)
def test_events_and_streams_are_given_back(
    kind: Callable[[int], object], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is made for copies goes with whoever made it."""
    gone, freed = [], getattr(LateDriver, end)

    def counted(self: LateDriver, handle: int) -> Any:
        gone.append(handle)
        return freed(self, handle)

    monkeypatch.setattr(LateDriver, end, counted)
    with late():
        made = kind(0)
        assert not gone
        del made
        gc.collect()
        assert len(gone) == 1
